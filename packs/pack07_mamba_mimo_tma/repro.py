# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops", "mamba-ssm==2.3.2.post1", "numpy>=1.26,<3", "setuptools", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1", "z3-solver==4.15.4.0"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: the backward kernels of Mamba-3 MIMO keep rank-3 tiles in shared memory, which TileLang cannot load by TMA.

mamba_mimo_bwd_fwd and mamba_mimo_bwd_bwd load q and k through a [chunk, R, N] view and qk_dot into [chunk, R, R], with TMA
lowering switched off. Switched on, TileLang does not compile them. Lowered here for sm_90a: no GPU is needed.
Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import inspect
import logging
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

KERNELS = {"mamba_mimo_bwd_fwd": 128, "mamba_mimo_bwd_bwd": 256}  # and their threads, as the host calls them
N, P, R, CHUNK = 128, 64, 4, 16
#: What TileLang says of a tile that it cannot load by TMA: up to 0.1.8, and from 0.1.9 on.
SAID = r"InputDim\(\) == 2|Cannot detect TMA layout|CanProveEqual\(input_shape_product"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--lower", nargs=3, metavar=("KERNEL", "TMA", "STAGES"), help=argparse.SUPPRESS)


def release():
    """The module under test. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    if importlib.util.find_spec("mamba_ssm.ops.tilelang") is None:
        finish("UNTESTABLE", "no-api")
    import tilelang

    logging.disable(logging.WARNING)
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd

    FACTS.update(file=mamba3_mimo_bwd.__file__, version=version("mamba-ssm"), evidence="codegen")
    FACTS["metrics"]["tilelang"] = tilelang.__version__
    return mamba3_mimo_bwd


def lower(kernel, tma, stages):
    """One kernel in bf16, for sm_90a, with TileLang's passes for TMA and warp specialisation on or off: what is in its source."""
    import tilelang
    import tilelang.language as T
    from tilelang import tvm

    jit, keys = tilelang.jit, tilelang.PassConfigKey
    passes = {keys.TL_DISABLE_TMA_LOWER: not tma, keys.TL_DISABLE_WARP_SPECIALIZED: not tma, keys.TL_ENABLE_FAST_MATH: True}
    tilelang.jit = lambda **given: jit(**{**given, "pass_configs": passes})
    built = getattr(release(), kernel)
    sizes = [T.dynamic(letter) for letter in "BSHG"]
    function = built.get_tir(*sizes, N, P, R, True, True, True, CHUNK, 4, "bfloat16", KERNELS[kernel], stages)
    given = {"enable_host_codegen": False, "enable_device_compile": False}
    given = {key: value for key, value in given.items() if key in inspect.signature(tilelang.lower).parameters}
    config = {getattr(key, "value", key): value for key, value in passes.items()}
    with tvm.transform.PassContext(opt_level=3, config=config), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        artifact = tilelang.lower(function, target=target, **given)
    functions = artifact.device_mod.functions.values()
    shared = [int(f.attrs["dyn_shared_memory_buf"]) for f in functions if "dyn_shared_memory_buf" in f.attrs]
    counts = {word: len(re.findall(rf"\btl::{word}\w*[<(]", artifact.kernel_source)) for word in ("tma_load", "tma_store")}
    return {**counts, "wgmma": artifact.kernel_source.count("wgmma"), "shared_bytes": sum(shared)}


def lowered(kernel, tma, stages, **given):
    """`lower` in a process of its own, so that a crash of the compiler ends no more than that; or {"error": what it said}."""
    done = subprocess.run([sys.executable, __file__, "--lower", kernel, tma, stages], capture_output=True, text=True, **given)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if re.search(r"Error|Check failed", line)]
    return {"error": (said or [f"exit {done.returncode}"])[-1][-300:]}


def main():
    release()
    stages = (
        "0" if FACTS["metrics"]["tilelang"] == "0.1.8" else "2"
    )  # newer ones load nothing by TMA without stages, in any rank
    jobs = {
        f"{kernel}, TMA {tma}": (kernel, tma, stages if tma == "on" else "0") for kernel in KERNELS for tma in ("on", "off")
    }
    with ThreadPoolExecutor(2) as pool:
        found = FACTS["metrics"]["lowered"] = dict(zip(jobs, pool.map(lambda job: lowered(*job), jobs.values()), strict=True))
    print("\n".join(f"{name}: {what}" for name, what in found.items()))
    kernels = [kernel for kernel in KERNELS if "error" not in found[f"{kernel}, TMA off"]]
    check("control", "the first kernel compiles with TMA off, and loads nothing by it", next(iter(KERNELS)) in kernels)
    for kernel in kernels:  # TileLang 0.1.13 - 0.1.15 do not compile the second at all: that is another bug
        check("trigger", f"{kernel}, TMA on: it compiles, with TMA loads", found[f"{kernel}, TMA on"].get("tma_load", 0) > 0)
    broken = [found[f"{kernel}, TMA on"] for kernel in kernels if not found[f"{kernel}, TMA on"].get("tma_load")]
    said = all(re.search(SAID, what.get("error", "")) for what in broken)
    check("signature", "TileLang says that it cannot load such a tile", bool(broken) and said)
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and error <= limit
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {
        role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ("control", "trigger", "signature")
    }
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
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


sys.excepthook = unexpected
# --- end of report/1 ---

if __name__ == "__main__":
    options = parser.parse_args()
    if options.lower:
        kernel, tma, stages = options.lower
        print(json.dumps(lower(kernel, tma == "on", int(stages))))
    else:
        main()
