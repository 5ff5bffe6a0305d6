"""Lane ``tilelang-cpu``: TileLang kernels compiled by TileLang's own C backend and run on the CPU. Evidence: ``interpreter``.

Each block of a kernel's grid runs after the other, as serial C; the rest of the host code, and Triton kernels beside it, run as in
``triton-interpreter-fp32``. What it replaces beyond that lane, none of which a pack measures:

* the target: ``tilelang.jit`` compiles for ``c``. Layout inference, pipelining, warp specialisation and TMA are passes for GPUs,
  and take no part; ``T.gemm`` is the three loops of TileLang's CPU backend;
* shared memory and fragments, by arrays local to the block, and ``T.Parallel`` over them by nested loops;
* hints to a GPU's compiler (layout annotations, register limits), by nothing;
* ``device="cuda"`` in calls that make tensors, by the CPU.

bf16 is fp32 here, so rounding to it is not seen.
"""

import ctypes
import runpy
import sys
from pathlib import Path
from typing import Any


def prepare() -> None:
    for entry in sys.path:  # TileLang looks for z3's library beside itself; here they may be in different folders.
        for library in Path(entry or ".").glob("z3/lib/libz3.so*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import tilelang
    import tilelang.language as T
    import torch

    # After TileLang, which must see torch.bfloat16 as it is.
    runpy.run_path(str(Path(__file__).with_name("triton_interpreter_fp32.py")))["prepare"]()
    jit = tilelang.jit

    def on_cpu(function: Any = None, *, out_idx: Any = None, **gpu_only: Any) -> Any:
        return jit(function, out_idx=out_idx, target="c", execution_backend="cython")

    tilelang.jit = on_cpu
    T.alloc_shared = T.alloc_fragment = lambda shape, dtype="float32", *scope, **kwargs: T.alloc_local(shape, dtype)
    T.Parallel = lambda *extents, **kwargs: T.grid(*extents) if len(extents) > 1 else T.serial(*extents)
    T.annotate_layout = T.no_set_max_nreg = lambda *args, **kwargs: None

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    OnCpu().__enter__()
