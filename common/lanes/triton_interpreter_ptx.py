"""Lane ``triton-interpreter-ptx``: like ``triton-interpreter-fp32``, but bf16 stays bf16. Evidence: ``interpreter``.

For kernels with PTX in them that load and store bf16, and compute in fp32: rounding to bf16 is seen. The interpreter keeps bf16
as raw bits, so a kernel that computes in it gives nonsense here: a pack in this lane runs none. What it replaces besides:

* the interpreter's conversion of fp32 to bf16, which cuts off, by PyTorch's, which rounds to the nearest as a GPU does, unless the kernel
  asks for another. Whether something is rounded does not rest on it; how far off the result is does.
"""

import runpy
from pathlib import Path
from typing import Any


def prepare() -> None:
    import torch

    bfloat16 = torch.bfloat16
    runpy.run_path(str(Path(__file__).with_name("triton_interpreter_fp32.py")))["prepare"]()
    torch.bfloat16 = bfloat16

    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, towards_zero = interpreter._convert_float, interpreter._ir.ROUNDING_MODE.RTZ

    def nearest(values: Any, of: object, to: object, mode: object) -> Any:
        if of != tl.float32 or to != tl.bfloat16 or mode == towards_zero:
            return convert(values, of, to, mode)
        return torch.from_numpy(np.ascontiguousarray(values)).to(bfloat16).view(torch.uint16).numpy()

    interpreter._convert_float = nearest
