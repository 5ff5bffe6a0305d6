# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "einops", "mamba-ssm==2.3.2.post1", "ml-dtypes", "numpy>=1.26,<3", "packaging", "psutil", "setuptools", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "triton==3.7.1", "z3-solver==4.15.4.0"]
# tool.uv.override-dependencies = ["tilelang==0.1.15", "apache-tvm-ffi==0.1.12"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""tilelang: releases that cannot compile the kernels of Mamba-3 MIMO, as mamba-ssm 2.3.2.post1 ships them.

They are lowered for sm_90a as the package calls them; nothing is run, no GPU is needed. Seconds and peak memory of each are kept.
https://github.com/state-spaces/mamba/issues/986. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import importlib.util
import inspect
import re
import subprocess
import time
from importlib.metadata import version
from resource import RUSAGE_SELF, getrusage

N, P, R, CHUNK = 128, 64, 4, 16  # d_state, headdim, mimo_rank (the defaults of Mamba-3), chunk_size (64 / mimo_rank)
KERNELS = {"product": 128, "mamba_mimo_fwd": 128, "mamba_mimo_bwd_fwd": 128, "mamba_mimo_bwd_bwd": 256}  # their threads
is_known = re.compile("no available layout found|ReduceOp cannot lower a layout").search


def release():
    try:
        import tilelang
    except Exception as error:  # some releases stop at a library that is not there, with errors of many kinds
        print(f"{type(error).__name__}: {error}")
        finish("UNTESTABLE", "import")
    FACTS.update(file=tilelang.__file__, version=version("tilelang"), evidence="codegen")
    FACTS["metrics"]["pins"] = {name: version(name) for name in ("mamba-ssm", "apache-tvm-ffi", "triton", "torch")}
    return tilelang


def product(T):
    """A plain GEMM, A @ A^T, which every release compiles."""

    @T.prim_func
    def main(A: T.Tensor((64, 64), "bfloat16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, transpose_B=True, clear_accum=True)
            T.copy(c, C)

    return main, {}


def shipped(T, kernel):
    """A kernel of mamba-ssm with Z and D, and the passes that it asks for; its __init__.py, which loads CUDA code, is left out."""
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    built = getattr(importlib.import_module(f"mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_{kernel.split('_')[2]}"), kernel)
    if not hasattr(built, "get_tir"):  # tilelang.jit has it from 0.1.7 on
        finish("UNTESTABLE", "no-api")
    given = {"threads": KERNELS[kernel], "chunk_size": CHUNK, "rotary_dim_divisor": 4, "dtype": "bfloat16", "num_stages": 0}
    passes = {getattr(key, "value", key): value for key, value in built.pass_configs.items()}
    return built.get_tir(*(T.dynamic(letter) for letter in "BSHG"), N, P, R, True, True, True, **given), passes


def lower(kernel):
    tilelang = release()
    function, passes = product(tilelang.language) if kernel == "product" else shipped(tilelang.language, kernel)
    tvm, takes, start = tilelang.tvm, inspect.signature(tilelang.lower).parameters, time.perf_counter()
    given = {name: False for name in ("enable_host_codegen", "enable_device_compile") if name in takes}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        assert "__global__" in tilelang.lower(function, target=target, **given).kernel_source, "no kernel came out"
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "peak_mib": getrusage(RUSAGE_SELF).ru_maxrss // 1024}))


def outcome(kernel):
    """Seconds and peak MiB of lowering a kernel in a process of its own, or {"error": what was said}."""
    done = subprocess.run([sys.executable, __file__, kernel], capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(done.stderr[-1500:])
    if done.returncode == -9 or "\nUNTESTABLE: " in done.stdout:  # what is missing at import is not the compiler's doing
        finish("UNTESTABLE", [*done.stdout.split("\nUNTESTABLE: ")[1:], "oom"][0].strip())
    return {"error": [f"exit {done.returncode}", *re.findall(".*(?:Error|Check failed).*", done.stderr)][-1][:300]}


def main():
    release()
    for kernel in KERNELS:
        found = FACTS["metrics"][kernel] = outcome(kernel)
        print(f"          {found}")
        check("control" if kernel == "product" else "trigger", f"{kernel} is lowered", "error" not in found)
    errors = [found["error"] for found in FACTS["metrics"].values() if "error" in found]
    check(
        "signature", "what is not lowered has a layout that TileLang cannot find", bool(errors) and all(map(is_known, errors))
    )
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
    lower(sys.argv[1]) if {*sys.argv[1:]} & {*KERNELS} else main()
