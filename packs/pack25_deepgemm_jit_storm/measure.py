"""The same counts for Triton's ptxas; and where the release puts its cache, and what DG_JIT_USE_NVRTC does."""

import argparse
import os
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import repro
from repro import FACTS, KERNELS, RANKS, finish


def triton(kernel):
    """Compile a kernel for sm_90 with Triton, which has its cache in TRITON_CACHE_DIR; ptxas is counted where it is called."""
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    os.environ["TRITON_CACHE_DIR"], folder = os.environ["DG_CACHE_DIR"], Path(os.environ["DG_NVCC_COMPILER"]).parent
    cuda = backends["nvidia"].compiler
    if not hasattr(triton, "counted"):
        make = cuda.make_cubin

        def counting(*given):
            with Path(folder, "compiled").open("a") as log:
                log.write("ptxas\n")
            return make(*given)

        cuda.make_cubin, triton.counted = counting, True
    triton.compile(
        ASTSource(fn=kernels(triton)[kernel], signature={"x": "*fp32"}, constexprs={}), target=GPUTarget("cuda", 90, 32)
    )
    Path(folder, "kernel.so").write_text("compiled")
    return type("Built", (), {"path": folder})


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


def calls(folder, roots, kernels=KERNELS):
    """How often a compiler is called, in ranks of which none may fail."""
    count, failed = repro.compiles(folder, roots, kernels)
    if failed:
        finish("CHANGED", failed[0])
    return count


def main():
    rows = FACTS["metrics"]
    original = repro.build
    for name, build in (("nvcc", original), ("ptxas", triton)):
        with tempfile.TemporaryDirectory() as folder:
            repro.noting(folder)
            repro.build = build
            warm = f"{folder}/warm"
            rows[name] = {
                "rank 0 alone": calls(folder, [warm]),
                "then the others": calls(folder, [warm] * RANKS),
                "a cold cache each": calls(folder, [f"{folder}/{n}" for n in range(RANKS)]),
                "one cold cache": calls(folder, [f"{folder}/cold"] * RANKS),
            }
    with tempfile.TemporaryDirectory() as folder:
        repro.noting(folder)

        def at_home(kernel):
            del os.environ["DG_CACHE_DIR"]
            os.environ.update(HOME=f"{folder}/home", DG_JIT_USE_NVRTC="1")
            return original(kernel)

        repro.build = at_home
        count = calls(folder, [folder], 1)
        root = next(Path(folder, "home").rglob("kernel.so"), None)
        rows["no DG_CACHE_DIR"] = {
            "calls of nvcc with DG_JIT_USE_NVRTC=1": count,
            "in ~/.deep_gemm/cache": int(root is not None and root.is_relative_to(Path(folder, "home/.deep_gemm/cache"))),
        }
    print(f"Triton {distribution('triton').version}, {RANKS} ranks, {KERNELS} kernels")
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{what} {n}" for what, n in row.items()))
    finish("MEASURED")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    repro.compiler, repro.nvcc = repro.release()
    main()
