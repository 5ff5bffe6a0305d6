# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-runtime==13.0.96", "nvidia-nvvm==13.0.88", "torch==2.13.0", "triton==3.7.1"]
# ///
"""deep-gemm: ranks that start with a cold cache compile every kernel once each, for the cache is looked into and written without a lock.

Four ranks want the same two kernels at once: from one cold cache, after rank 0 has filled it, and each from a cache of its own. Calls of nvcc are counted; no
GPU is needed: the release's deep_gemm.jit.build compiles for sm_90a. The sdist of 1.0.0 lacks the headers of its GEMMs, so two small kernels are built; and pip
cannot install it (unpack it and set PYTHONPATH, or nox -s pack25). Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import ctypes
import multiprocessing
import shlex
import tempfile
import time
from importlib import import_module, metadata
from pathlib import Path

RANKS, KERNELS = 4, 2


def release():
    """deep_gemm's compiler, and nvcc of its wheel."""
    try:
        FACTS["version"] = metadata.version("deep-gemm")
        nvcc = Path(metadata.distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13/bin/nvcc"))
    except metadata.PackageNotFoundError as error:
        print(f"No {error.name} here: nox -s pack25, or these wheels and PYTHONPATH=deep_gemm-1.0.0, the unpacked sdist.")
        finish("UNTESTABLE", "install")
    compiler = import_module("deep_gemm.jit.compiler")
    FACTS.update(file=compiler.__file__, evidence="codegen")
    return compiler, nvcc


def build(kernel):
    """Build kernel number ``kernel`` with the release's build(), which wants no headers for it, and see that it is that one."""
    code = f'__global__ void k(float* x) {{ x[0] += 1; }}\nextern "C" void launch{kernel}(float* x) {{ k<<<1, 1>>>(x); }}\n'
    ctypes.CDLL(f"{compiler.build('k', (), code).path}/kernel.so")[f"launch{kernel}"]


def noting(folder):
    """An nvcc that notes each call but those for its version; its path is part of a kernel's name in the cache."""
    Path(folder, "include/deep_gemm").mkdir(parents=True)
    wrapper, log = Path(folder, "nvcc"), shlex.quote(f"{folder}/compiled")
    real = shlex.join([str(nvcc), f"-L{nvcc.parent.parent / 'lib'}"])  # of the wheels, where nvcc does not look
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo nvcc >> {log} ;; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)


def rank(root, barrier, folder, kernels):
    """One rank: meet the others before each kernel, and build it."""
    os.environ.update(DG_NVCC_COMPILER=f"{folder}/nvcc", DG_CACHE_DIR=root)
    compiler.get_jit_include_dir = lambda: f"{folder}/include"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for kernel in range(kernels):
        barrier.wait(120)
        build(kernel)


def compiles(folder, roots, kernels=KERNELS, limit=240):
    """How often nvcc is called by ranks that start together, each with its cache root; and how ranks end that fail, or are killed after ``limit`` seconds."""
    Path(folder, "compiled").write_text("")
    forked = multiprocessing.get_context("fork")  # of a process that has imported what takes seconds
    barrier = forked.Barrier(len(roots))
    ranks = [forked.Process(target=rank, args=(root, barrier, folder, kernels)) for root in roots]
    for each in ranks:
        each.start()
    end = time.monotonic() + limit
    while sum(each.is_alive() for each in ranks) and time.monotonic() < end:  # whoever has ended is no zombie after it
        time.sleep(0.02)
    for each in ranks:
        each.kill()
        each.join()
    return Path(folder, "compiled").read_text().count("\n"), [f"exit {each.exitcode}" for each in ranks if each.exitcode]


def main():
    with tempfile.TemporaryDirectory() as folder:
        noting(folder)
        for role, name, roots, want in (
            ("control", "rank 0 alone", [f"{folder}/warm"], KERNELS),
            ("control", "then the others from its cache", [f"{folder}/warm"] * RANKS, 0),
            ("control", "a cold cache each", [f"{folder}/{n}" for n in range(RANKS)], RANKS * KERNELS),
            ("trigger", "one cold cache", [f"{folder}/cold"] * RANKS, KERNELS),
        ):
            count, failed = compiles(folder, roots)
            FACTS["metrics"][name] = count
            check("control", f"{name}: all ranks have their kernels{': ' + failed[0] if failed else ''}", not failed)
            check(role, f"{name}: {count} compiles of {KERNELS} kernels, {want} needed", count == want)
        check("signature", "more than are needed, and none more than once a rank", KERNELS < count <= RANKS * KERNELS)
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
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    compiler, nvcc = release()
    main()
