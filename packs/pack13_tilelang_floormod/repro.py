# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.11", "cloudpickle", "ml-dtypes", "numpy", "psutil", "tilelang==0.1.11", "torch==2.13.0", "tqdm", "z3-solver==4.15.4.0"]
# ///
"""tilelang: LayoutInference divides by zero on fragments of some widths that are no power of two.

Broadcasting a row over a [64, 24] fragment is enough. LayoutInference inverts the layout of the row's replication and asks for a
FloorMod whose divisor has become 0: "Divide by zero", at compile time. 32 columns compile, and so do 17.
https://github.com/tile-ai/tilelang/issues/2394, cured by https://github.com/tile-ai/tilelang/pull/2469

Compiles for sm_90a and runs nothing, so it needs no GPU. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import subprocess
from importlib.metadata import version

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--lower", metavar="COLUMNS", type=int, help=argparse.SUPPRESS)
ROWS, WRONG, RIGHT = 64, (24, 40, 96), (32, 17)


def release():
    try:
        import tilelang
    except Exception as error:  # some releases stop at a library that is not there, with errors of many kinds
        print(f"{type(error).__name__}: {error}")
        finish("UNTESTABLE", "import")
    FACTS.update(file=tilelang.__file__, version=version("tilelang"), evidence="codegen")
    return tilelang


def broadcast(T, columns):
    """X[i, j] = 2 D[j] for D [columns], X [64, columns], fp32, in fragments."""

    @T.prim_func
    def main(D: T.Tensor((columns,), "float32"), X: T.Tensor((ROWS, columns), "float32")):
        with T.Kernel(1, threads=128) as _:
            d = T.alloc_fragment((columns,), "float32")
            x = T.alloc_fragment((ROWS, columns), "float32")
            T.copy(D, d)
            for i, j in T.Parallel(ROWS, columns):
                x[i, j] = d[j] * 2.0
            T.copy(x, X)

    return main


def lower(columns):
    tilelang = release()
    import tilelang.language as T
    from tilelang import tvm

    given = {"enable_host_codegen": False, "enable_device_compile": False}
    given = {name: value for name, value in given.items() if name in inspect.signature(tilelang.lower).parameters}
    with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        tilelang.lower(broadcast(T, columns), target=target, **given)


def outcome(columns):
    """What becomes of it, in a process of its own: a crash ends no more than that, and older releases lower only once."""
    done = subprocess.run([sys.executable, __file__, "--lower", str(columns)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("{")]
    where = "in LayoutInference: " if "LayoutInference" in done.stderr else ""
    return "ok" if done.returncode == 0 else f"exit {done.returncode}: {where}{(said or [''])[-1][-200:]}"


def main():
    print(f"tilelang {version('tilelang')}" if release() else "")
    found = FACTS["metrics"]["columns"] = {columns: outcome(columns) for columns in (*RIGHT, *WRONG)}
    for columns, what in found.items():
        print(f"{columns} columns: {what}")
        role = "control" if columns in RIGHT else "trigger"
        check(role, f"[{ROWS}, {columns}] compiles", what == "ok")
    broken = [found[columns] for columns in WRONG if found[columns] != "ok"]
    said = all("LayoutInference" in what and "Divide by zero" in what for what in broken)
    check("signature", "LayoutInference divides by zero wherever it does not compile", broken and said)
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    options = parser.parse_args()
    lower(options.lower) if options.lower else main()
