# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops", "mamba-ssm==2.3.2.post1", "numpy>=1.26,<3", "setuptools", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1", "z3-solver==4.15.4.0"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: the backward kernels of Mamba-3 MIMO do not compile when TileLang may load their tiles by TMA.

mamba_mimo_bwd_fwd and mamba_mimo_bwd_bwd load q and k through a [chunk, R, N] view, and are built with TMA lowering and warp
specialisation off. With both on, tilelang 0.1.8, which the release asks for, cannot lay out such a tile.
Lowered here for sm_90a; nothing is run, and no GPU is needed. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import inspect
import logging
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

P, R, CHUNK = 64, 4, 16  # headdim, mimo_rank and chunk_size of Mamba-3
KERNELS = {"mamba_mimo_bwd_fwd": 128, "mamba_mimo_bwd_bwd": 256}  # threads, as the host calls each
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--state", type=int, default=128, metavar="N", help="d_state (default 128, which Mamba-3 has)")
parser.add_argument("--lower", nargs=2, help=argparse.SUPPRESS)


def release():
    """The module under test. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    if importlib.util.find_spec("mamba_ssm.ops.tilelang") is None:
        finish("UNTESTABLE", "no-api")
    logging.disable(logging.WARNING)  # TileLang says of every kernel that it is compiled, or was
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd

    FACTS.update(file=mamba3_mimo_bwd.__file__, version=version("mamba-ssm"), evidence="codegen")
    FACTS["metrics"]["tilelang"] = version("tilelang")
    return mamba3_mimo_bwd


def lower(kernel, tma, N):
    """One kernel in bf16 for sm_90a, TMA "on" or "off": the tensors that it loads by TMA, and what else its text and tiles show."""
    import tilelang
    import tilelang.language as T
    from tilelang import tvm

    jit, keys, off = tilelang.jit, tilelang.PassConfigKey, tma == "off"
    passes = {keys.TL_DISABLE_TMA_LOWER: off, keys.TL_DISABLE_WARP_SPECIALIZED: off, keys.TL_ENABLE_FAST_MATH: True}
    tilelang.jit = lambda **given: jit(**{**given, "pass_configs": passes})
    asked = {"chunk_size": CHUNK, "dtype": "bfloat16", "threads": KERNELS[kernel], "num_stages": 0}  # as the host calls it
    function = getattr(release(), kernel).get_tir(*map(T.dynamic, "BSHG"), N, P, R, True, True, True, **asked)
    takes = inspect.signature(tilelang.lower).parameters
    given = {name: False for name in ("enable_host_codegen", "enable_device_compile") if name in takes}
    config = {getattr(key, "value", key): value for key, value in passes.items()}
    with tvm.transform.PassContext(opt_level=3, config=config), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        artifact = tilelang.lower(function, target=target, **given)
    functions, text = artifact.device_mod.functions.values(), artifact.kernel_source
    shared = sum(int(f.attrs["dyn_shared_memory_buf"]) for f in functions if "dyn_shared_memory_buf" in f.attrs)
    counts = {"stores": text.count("tl::tma_store("), "wgmma": text.count("wgmma"), "shared_bytes": shared}
    return {"loads": re.findall(r"\btl::tma_load\w*(?:<[^>]*>)?\((\w+?)_desc", text), **counts}


def outcome(kernel, tma, N):
    """`lower` in a process of its own, so that a crash of the compiler ends no more than that; or {"error": what it said}."""
    done = subprocess.run([sys.executable, __file__, "--state", str(N), "--lower", kernel, tma], capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if re.search(r"Error|Check failed", line)]
    return {"error": (said or [f"exit {done.returncode}"])[-1][-300:], "loads": []}


def main(N):
    release()
    first, second = KERNELS
    jobs = (second, "on"), (first, "on"), (first, "off")  # the second with TMA off takes as long again, and shows no more
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda job: outcome(*job, N), jobs)
        found = {f"{kernel}, TMA {tma}": what for (kernel, tma), what in zip(jobs, done, strict=True)}
    FACTS["metrics"]["lowered"] = found
    for name, what in found.items():
        print(f"{name}: {what}")
    off, said = found[f"{first}, TMA off"], []
    check("control", f"{first}, TMA off: is lowered, and loads nothing by TMA", "error" not in off and not off["loads"])
    for kernel in KERNELS:
        on = found[f"{kernel}, TMA on"]
        check("trigger", f"{kernel}, TMA on: is lowered, and loads q and k by TMA", {"Q", "K"} <= set(on["loads"]))
        fits = 0 < on.get("shared_bytes", 0) <= 232_448  # bytes that a block can have on sm_90
        check("trigger", f"{kernel}, TMA on: shared memory that a block can have", fits)
        said += [on["error"]] if "error" in on else [] if {"Q", "K"} <= set(on["loads"]) and fits else ["something else"]
    known = bool(said) and all(re.search(r"InputDim\(\) == 2|Cannot detect TMA layout", what) for what in said)
    check("signature", "TileLang says that it cannot lay out such a tile", known)
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
    print(json.dumps(lower(*options.lower, options.state))) if options.lower else main(options.state)
