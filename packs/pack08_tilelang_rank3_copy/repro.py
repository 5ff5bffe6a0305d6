# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "ml-dtypes", "numpy", "psutil", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "z3-solver==4.15.4.0"]
# ///
"""tilelang: a pipelined copy into shared memory of rank 3 or 4 does not compile for Hopper, while the same copy in rank 2 does.

T.copy(Q[...], q) with q [16, 4, 64] in shared memory, then T.gemm(T.reshape(q, [64, 64]), ...): "stride % 8 == 0" in 0.1.6.post2, "Cannot detect TMA layout" in
0.1.7 and 0.1.8, "T.tma_copy() cannot fall back to normal copy" in 0.1.10 and 0.1.11 (https://github.com/tile-ai/tilelang/pull/746, /pull/1798). Compiled for sm_90a; nothing
is run, no GPU is needed. That it compiles does not make it right: see pack30. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import re
import subprocess
from importlib.metadata import version

# A tile of 16 tokens, 4 ranks and 64 channels in shared memory; what the global tensor is seen as when it is filled; multiplied in 2-D.
FLAT, RANK3, RANK4 = (64, 64), (16, 4, 64), (4, 4, 4, 64)
FORMS = {"2-D": (FLAT, FLAT), "3-D": (RANK3, RANK3), "4-D": (RANK4, RANK4), "2-D, filled as 3-D": (FLAT, RANK3)}
QK_DOT = {"qk_dot, 2-D": (16, 16), "qk_dot, 3-D": (16, 4, 4)}  # not multiplied: Mamba-3's qk_dot_shared


def release():
    try:
        import tilelang
    except Exception as error:  # some releases stop at a library that is not there, with errors of many kinds
        print(f"{type(error).__name__}: {error}")
        finish("UNTESTABLE", "import")
    FACTS.update(file=tilelang.__file__, version=version("tilelang"), evidence="codegen")
    return tilelang


def product(T, tile, given):
    """The sum of Q_tile @ K_tile^T over four tiles of 64 rows and 64 columns, bf16, into Out [64, 64] fp32."""
    shape, zeros = (given[0] * 4, *given[1:]), (0,) * (len(given) - 1)
    seen = lambda buffer, shape: buffer if shape == tile else T.reshape(buffer, shape)  # noqa: E731

    @T.prim_func
    def main(Q: T.Tensor(shape, "bfloat16"), K: T.Tensor(shape, "bfloat16"), Out: T.Tensor(FLAT, "float32")):
        with T.Kernel(1, threads=128) as _:
            q = T.alloc_shared(tile, "bfloat16")
            k = T.alloc_shared(tile, "bfloat16")
            acc = T.alloc_fragment(FLAT, "float32")
            T.clear(acc)
            for i in T.Pipelined(4, num_stages=2):
                T.copy(Q[(i * given[0], *zeros)], seen(q, given))
                T.copy(K[(i * given[0], *zeros)], seen(k, given))
                T.gemm(seen(q, FLAT), seen(k, FLAT), acc, transpose_B=True)
            T.copy(acc, Out)

    return main


def sums(T, tile):
    """Out [64] fp32: the sums over each of 64 tokens' 16 numbers, bf16, which lie as ``tile`` says."""
    at = (lambda x, c, j: x[c, j]) if len(tile) == 2 else (lambda x, c, j: x[c, j // 4, j % 4])

    @T.prim_func
    def main(X: T.Tensor((64, *tile[1:]), "bfloat16"), Out: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared(tile, "bfloat16")
            out = T.alloc_fragment((16,), "float32")
            for i in T.Pipelined(4, num_stages=2):
                T.copy(X[(i * 16, *[0] * (len(tile) - 1))], x)
                for c in T.Parallel(16):
                    out[c] = 0.0
                    for j in T.serial(16):
                        out[c] += at(x, c, j)
                T.copy(out, Out[i * 16])

    return main


def lower(form):
    tilelang = release()
    func = product(tilelang.language, *FORMS[form]) if form in FORMS else sums(tilelang.language, QK_DOT[form])
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        print(f"ok, {tilelang.lower(func, target=target).kernel_source.count('tma_load(')} TMA loads")


def outcome(form):
    """What becomes of it, in a process of its own: a crash ends no more than that, and older releases lower only once."""
    done = subprocess.run([sys.executable, __file__, form], capture_output=True, text=True)
    said = re.findall(".*(?:Error|Check failed).*", done.stderr)
    return done.stdout.splitlines()[-1] if done.returncode == 0 else (said or [f"exit {done.returncode}"])[-1][:300]


def main():
    release()
    found = FACTS["metrics"]["forms"] = {form: outcome(form) for form in (*FORMS, *QK_DOT)}
    for form, what in found.items():
        check("control" if form in ("2-D", "qk_dot, 2-D") else "trigger", f"{form} compiles: {what}", what.startswith("ok"))
    broken = [what for what in found.values() if not what.startswith("ok")]
    known = bool(broken) and all(re.search(r"InputDim\(\) == 2|stride % 8 == 0|fall back to normal copy", e) for e in broken)
    check("signature", "what does not compile stops at the rank of a TMA copy", known)
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
    lower(sys.argv[1]) if {*sys.argv[1:]} & {*FORMS, *QK_DOT} else main()
