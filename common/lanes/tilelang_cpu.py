"""Lane ``tilelang-cpu``: TileLang kernels compiled by TileLang's own C backend and run on the CPU. Evidence: ``interpreter``.

Each block of a kernel's grid runs after the other, as serial C; the rest of the host code, and Triton kernels beside it, run as in
``triton-interpreter-fp32``. What it replaces beyond that lane, none of which a pack measures:

* the target: ``tilelang.jit`` compiles for ``c``. Layout inference, pipelining, warp specialisation and TMA are passes for GPUs,
  and take no part; ``T.gemm`` is the three loops of TileLang's CPU backend;
* shared memory and fragments, by arrays local to the block, and ``T.Parallel`` over them by nested loops;
* hints to a GPU's compiler (layout annotations, register limits), by nothing;
* ``device="cuda"`` in calls that make tensors, by the CPU;
* tracing: TileLang traces a kernel anew whenever it is asked for; here once for each set of arguments;
* a tensor that is left out (None), where a size of the grid could be read from it alone: by one of NaN, of the size that
  another tensor's shape gives (``NS + 1``), which has to stay NaN. TileLang's C wrapper would take that size as 0, and run no block.

bf16 is fp32 here, so rounding to it is not seen, nor is a race between threads.
"""

import ctypes
import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def prepare() -> None:
    for entry in sys.path:  # TileLang looks for z3's library beside itself; here they may be in different folders.
        for library in Path(entry or ".").glob("z3/lib/libz3.so*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            os.environ["LD_LIBRARY_PATH"] = str(library.parent)  # for processes that the script starts
    import tilelang
    import tilelang.language as T
    import torch

    # After TileLang, which must see torch.bfloat16 as it is.
    runpy.run_path(str(Path(__file__).with_name("triton_interpreter_fp32.py")))["prepare"]()
    jit = tilelang.jit

    def on_cpu(function: Any = None, *, out_idx: Any = None, **gpu_only: Any) -> Any:
        if function is None:
            return lambda function: on_cpu(function, out_idx=out_idx)
        build = jit(function, out_idx=out_idx, target="c", execution_backend="cython")
        made: dict[str, Any] = {}

        @functools.wraps(function)
        def once(*args: Any, **kwargs: Any) -> Any:
            key = repr((args, kwargs))
            if key not in made:
                made[key] = build(*args, **kwargs)
            return made[key]

        return once

    tilelang.jit = on_cpu
    from tilelang.jit.adapter.cython.adapter import CythonKernelAdapter

    convert = CythonKernelAdapter._convert_torch_func

    def with_sizes(adapter: Any) -> Any:
        call, function = convert(adapter), adapter.prim_func
        shapes = [list(function.buffer_map[p].shape) if p in function.buffer_map else [] for p in function.params]

        def complete(*given: Any, **named: Any) -> Any:
            whole = _complete(shapes, given)
            found = call(*whole, **named)
            if any(
                tensor is None and other is not None and not other.isnan().all()
                for tensor, other in zip(given, whole, strict=True)
            ):
                raise RuntimeError("lane tilelang-cpu: the kernel writes to a tensor that was left out")
            return found

        return complete

    CythonKernelAdapter._convert_torch_func = with_sizes
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


def _complete(shapes: list[list[Any]], given: tuple[Any, ...]) -> list[Any]:
    """A kernel's arguments; of those that are None, the ones that alone have a size as it is are tensors of that size, of NaN."""
    import torch

    def kind(dim: Any) -> str:
        return type(dim).__name__

    sizes: dict[str, int] = {}
    summed: dict[str, int] = {}
    for dims, tensor in zip(shapes, given, strict=True):
        for dim, size in zip(dims, tensor.shape if isinstance(tensor, torch.Tensor) else (), strict=False):
            if kind(dim) == "Var":
                sizes[str(dim)] = size
            elif kind(dim) == "Add" and kind(dim.a) == "Var" and kind(dim.b) == "IntImm":
                summed[str(dim.a)] = size - int(dim.b)
    if odd := [name for name in sizes.keys() & summed.keys() if sizes[name] != summed[name]]:
        raise RuntimeError(f"lane tilelang-cpu: tensors do not agree on {odd[0]}")
    whole = list(given)
    for place, (dims, tensor) in enumerate(zip(shapes, given, strict=True)):
        unknown = [str(dim) for dim in dims if kind(dim) == "Var" and str(dim) not in sizes]
        if tensor is not None or not unknown:
            continue
        if not set(unknown) <= set(summed):
            raise RuntimeError(f"lane tilelang-cpu: no tensor says how large {unknown[0]} is")
        shape = [int(dim) if kind(dim) == "IntImm" else {**summed, **sizes}[str(dim)] for dim in dims]
        whole[place] = torch.full(shape, float("nan"))
    return whole
