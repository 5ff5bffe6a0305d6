# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-runtime==13.0.96", "nvidia-nvvm==13.0.88", "torch==2.13.0", "triton==3.7.1"]
# ///
"""deep-gemm: ranks that start with a cold cache compile every kernel once each, for the cache is looked into and written without a lock.

Four ranks want the same two kernels at the same time: with a cold cache of all, after rank 0 has filled it, each with a cache of its own, and with one that is
read-only. What is counted is how often nvcc, or Triton's ptxas, is called, with no GPU: deep_gemm.jit.build and triton.compile build for sm_90a and sm_90.

The sdist of deep-gemm 1.0.0 lacks the headers of its GEMMs, so two small kernels are built by the release's own build(); it cannot be installed by pip either
(unpack it and set PYTHONPATH, or nox -s pack25). Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.parse_args()
RANKS, KERNELS = 4, 2
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "evidence": "codegen", "comparisons": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds):
    facts["comparisons"].append({"role": role, "name": name, "holds": bool(holds)})
    print(f"{role:<8} {name:<96} {bool(holds)}", flush=True)


def deep_gemm(kernel, folder):
    """Build a kernel with the release's build(), which finds no headers of its own and wants none."""
    import deep_gemm.jit.compiler as compiler

    compiler.get_jit_include_dir = lambda: f"{folder}/include"
    code = f'__global__ void k(float* x) {{ x[0] *= {kernel + 2}; }}\nextern "C" void launch(float* x) {{ k<<<1, 1>>>(x); }}\n'
    compiler.build(f"k{kernel}", (), code)


def triton(kernel, folder):
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    CUDABackend = backends["nvidia"].compiler

    if not hasattr(triton, "counted"):
        make = CUDABackend.make_cubin

        def counting(*given):
            with Path(folder, "compiled").open("a") as log:
                log.write("ptxas\n")
            return make(*given)

        CUDABackend.make_cubin, triton.counted = counting, True
    source = ASTSource(fn=kernels(triton)[kernel], signature={"x": "*fp32"}, constexprs={})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def kernels(triton):
    global tl  # Triton 3.3 finds no other names in kernels
    tl = triton.language

    @triton.jit
    def double(x):
        tl.store(x, tl.load(x) * 2)

    @triton.jit
    def triple(x):
        tl.store(x, tl.load(x) * 3)

    return double, triple


def read_only(root):
    """For this process: by a mount of its own, for root, whom modes do not stop; else by its modes."""
    if os.geteuid():
        for place, _, _ in os.walk(root):
            Path(place).chmod(0o555)
        return
    libc, at = ctypes.CDLL(None, use_errno=True), root.encode()
    private, bind, again = 0x44000, 0x1000, 0x1021  # MS_REC | MS_PRIVATE; MS_BIND; MS_BIND | MS_REMOUNT | MS_RDONLY
    mounts = (b"none", b"/", None, private, None), (at, at, None, bind, None), (at, at, None, again, None)
    if libc.unshare(0x20000) or any(libc.mount(*mount) for mount in mounts):  # CLONE_NEWNS
        raise OSError(f"no mount of its own here: {os.strerror(ctypes.get_errno())}")


def rank(compiler, root, barrier, folder, own, locked):
    """One rank: meet the others before each kernel, build it, and say what went wrong."""
    os.environ.update(DG_NVCC_COMPILER=f"{folder}/nvcc", DG_CACHE_DIR=root, TRITON_CACHE_DIR=root)
    os.environ["NVCC_APPEND_FLAGS"] = f"-L{nvcc.parent.parent / 'lib'}"  # of the wheels, where nvcc does not look
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        if locked:
            read_only(root)
        for kernel in range(KERNELS):
            barrier.wait(60)
            compiler(kernel, folder)
    except Exception as error:  # what it raises is the finding
        Path(own, f"failed.{os.getpid()}").write_text(f"{type(error).__name__}: {str(error)[:120]}")


def compiles(compiler, folder, roots, locked=False):
    """How often the compiler is called by ranks that start together, each with its cache root; and what the first that failed says."""
    with tempfile.TemporaryDirectory() as own:
        log = Path(folder, "compiled")
        log.write_text("")
        barrier = forked.Barrier(len(roots))
        ranks = [forked.Process(target=rank, args=(compiler, root, barrier, folder, own, locked)) for root in roots]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        failed = [path.read_text() for path in Path(own).glob("failed.*")]
        return {"compiles": len(log.read_text().split()), **({"failed": len(failed), "says": failed[0]} if failed else {})}


package = importlib.util.find_spec("deep_gemm")
if package is None:
    print("deep-gemm is not here, and its sdist cannot be installed: PYTHONPATH=deep_gemm-1.0.0, unpacked, or nox -s pack25.")
    finish("UNTESTABLE", "install")
try:
    facts["version"] = distribution("deep-gemm").version
except PackageNotFoundError:  # the sdist as it was unpacked
    about = Path(package.origin).parents[1].joinpath("PKG-INFO").read_text()
    facts["version"] = re.search(r"^Version: (.+)$", about, re.MULTILINE)[1]
found = [Path(place, "cu13/bin/nvcc") for place in importlib.util.find_spec("nvidia").submodule_search_locations]
nvcc = next((path for path in found if path.exists()), None)
if nvcc is None:
    sys.exit("There is no nvcc: pip install nvidia-cuda-nvcc==13.0.88")
version = distribution("triton").version
print(f"deep-gemm {facts['version']}, Triton {version}, {RANKS} ranks, {KERNELS} kernels, {os.cpu_count()} cores")
forked = multiprocessing.get_context("fork")  # of a process that has imported what takes seconds
for compiler, name in ((deep_gemm, "deep_gemm"), (triton, "triton")):
    importlib.import_module("deep_gemm.jit.compiler" if compiler is deep_gemm else "triton.compiler")
    with tempfile.TemporaryDirectory() as place:
        Path(place, "include/deep_gemm").mkdir(parents=True)
        wrapper = Path(
            place, "nvcc"
        )  # notes each call but those for the version; its path is part of a kernel's name in the cache
        call = f'case "$*" in *--version*) ;; *) echo nvcc >> {shlex.quote(place)}/compiled ;; esac'
        wrapper.write_text(f'#!/bin/sh\n{call}\nexec {shlex.quote(str(nvcc))} "$@"\n')
        wrapper.chmod(0o755)
        cold, warm, empty = f"{place}/cold", f"{place}/warm", f"{place}/empty"
        Path(empty).mkdir()
        rows = metrics[name] = {
            "one cold cache": compiles(compiler, place, [cold] * RANKS),
            "rank 0 before the others": compiles(compiler, place, [warm]),
            "then the others": compiles(compiler, place, [warm] * RANKS),
            "a cold cache each": compiles(compiler, place, [f"{place}/{n}" for n in range(RANKS)]),
            "one warm cache, read-only": compiles(compiler, place, [warm] * RANKS, locked=True),
            "one cold cache, read-only": compiles(compiler, place, [empty] * RANKS, locked=True),
        }
    for case, row in rows.items():
        print(f"         {name}, {case}: {row}")
    state(
        "control",
        f"{name}: rank 0 alone compiles each kernel once",
        rows["rank 0 before the others"] == {"compiles": KERNELS},
    )
    state("control", f"{name}: after it the others compile nothing", rows["then the others"] == {"compiles": 0})
    state("control", f"{name}: with a cache each, all compile all", rows["a cold cache each"] == {"compiles": RANKS * KERNELS})
facts["file"] = sys.modules["deep_gemm.jit.compiler"].__file__
rows = metrics["deep_gemm"]["one cold cache"]
state("trigger", f"deep_gemm: one cold cache, {rows['compiles']} compiles of {KERNELS} kernels", rows["compiles"] > KERNELS)
bad = [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]]
if bad:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
