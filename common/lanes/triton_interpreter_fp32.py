"""Lane ``triton-interpreter-fp32``: like ``triton-interpreter``, for kernels in bf16 with PTX in them. Evidence: ``interpreter``.

What it replaces beyond that lane, none of which a pack measures:

* bf16, which the interpreter keeps as raw bits and cannot compute with, by fp32: ``torch.bfloat16`` names ``torch.float32``, so
  that what the release allocates or casts to bf16 is fp32. Rounding to bf16 is not seen, and errors against an fp64 reference
  are those of the algorithm;
* the PTX approximations of cos, sin and tanh, by NumPy's functions;
* ``Tensor.is_cuda``, which launch code asserts: it is true of CPU tensors.
"""

import os
import runpy
from pathlib import Path
from typing import Any


def prepare() -> None:
    runpy.run_path(str(Path(__file__).with_name("triton_interpreter.py")))["prepare"]()
    assert os.environ["TRITON_INTERPRET"] == "1"
    import types

    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    torch.bfloat16 = torch.float32
    torch.Tensor.is_cuda = property(lambda self: True)
    functions = {"cos.approx.f32": np.cos, "sin.approx.f32": np.sin, "tanh.approx.f32": np.tanh}

    def inline_asm(self: object, asm: str, constraints: object, values: list[Any], *rest: object) -> object:
        handle = interpreter.TensorHandle(functions[asm.split()[0]](values[0].data), tl.float32)
        return types.SimpleNamespace(get_result=lambda i: handle)

    interpreter.InterpreterBuilder.create_inline_asm = inline_asm
