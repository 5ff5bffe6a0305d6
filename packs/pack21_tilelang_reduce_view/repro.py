# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "ml-dtypes", "numpy", "psutil", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "z3-solver==4.15.4.0"]
# ///
"""tilelang: a sum over a view of a GEMM's accumulator cannot be lowered, as Mamba-3's MIMO backward has it.

T.reduce_sum(T.view(acc, [C, R * N]), out, dim=1), where acc is the [C * R, N] fragment that T.gemm writes: "ReduceOp cannot lower a
layout where a source index depends on a thread-owned reduce segment". First in 0.1.13; https://github.com/tile-ai/tilelang/pull/2647 touches the code that raises.

Compiles for sm_90a and runs nothing, so it needs no GPU. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import re
import subprocess
from importlib.metadata import version

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--lower", metavar="FORM", help=argparse.SUPPRESS)
C, R, N, K = 16, 4, 64, 64  # chunk, MIMO rank, channels of q and k, of which as many are multiplied


def release():
    try:
        import tilelang
    except Exception as error:  # some releases stop at a library that is not there, with errors of many kinds
        print(f"{type(error).__name__}: {error}")
        finish("UNTESTABLE", "import")
    FACTS.update(file=tilelang.__file__, version=version("tilelang"), evidence="codegen")
    return tilelang


def kernel(T, form):
    """Sums of (A @ B^T) in fp32, A [C * R, K], B [N, K] bf16: per row into [C * R], or per R rows into [C]."""

    @T.prim_func
    def main(
        A: T.Tensor((C * R, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        Rows: T.Tensor((C * R,), "float32"),
        Out: T.Tensor((C,), "float32"),
    ):
        with T.Kernel(1, threads=256) as _:
            a = T.alloc_shared((C * R, K), "bfloat16")
            b = T.alloc_shared((N, K), "bfloat16")
            acc = T.alloc_fragment((C * R, N), "float32")
            rows = T.alloc_fragment((C * R,), "float32")
            rows_shared = T.alloc_shared((C * R,), "float32")
            out = T.alloc_fragment((C,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(acc)
            T.gemm(a, b, acc, transpose_B=True)
            if form == "view":
                T.reduce_sum(T.view(acc, [C, R * N]), out, dim=1)
                T.copy(out, Out)
            else:
                T.reduce_sum(acc, rows, dim=1)
                T.copy(rows, Rows)
            if form == "two steps":
                T.copy(rows, rows_shared)
                for i in T.Parallel(C):
                    out[i] = 0.0
                    for r in T.serial(R):
                        out[i] += rows_shared[i * R + r]
                T.copy(out, Out)

    return main


def lower(form):
    tilelang = release()
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        tilelang.lower(kernel(tilelang.language, form), target=target)


def outcome(form):
    """What becomes of it, in a process of its own: a crash ends no more than that, and older releases lower only once."""
    done = subprocess.run([sys.executable, __file__, "--lower", form], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if re.search(r"Error|Check failed", line)]
    return "ok" if done.returncode == 0 else f"exit {done.returncode}: {(said or [''])[-1][:300]}"


def main():
    print(f"tilelang {version('tilelang')}" if release() else "")
    found = FACTS["metrics"]["forms"] = {form: outcome(form) for form in ("rows", "view", "two steps")}
    print("\n".join(f"{form}: {what}" for form, what in found.items()))
    check("control", "a sum over the accumulator's own rows compiles", found["rows"] == "ok")
    check("trigger", "a sum over a view of it, R rows at once, compiles", found["view"] == "ok")
    check("control", "the same sum in two steps, through shared memory, compiles", found["two steps"] == "ok")
    check("signature", "ReduceOp cannot lower the layout", "ReduceOp cannot lower a layout" in found["view"])
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
