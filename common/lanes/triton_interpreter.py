"""Lane ``triton-interpreter``: the release's own Triton kernels on Triton's CPU interpreter. Evidence: ``interpreter``.

What it replaces, none of which a pack measures:

* the compiler and the GPU, by Triton's interpreter (``TRITON_INTERPRET=1``): kernels run block by block in NumPy, host code
  on CPU tensors;
* the interpreter's handling of float arguments, which stay Python floats there and so lack the methods of a scalar
  (``.to``, ``.cast``) that they have in a compiled kernel: they become fp32 scalars, as the compiler makes them;
* ``torch.hip``, a module that no torch has and that liger-kernel 0.5.4 asks when there is no CUDA: it answers "not
  available".
"""

import os


def prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import types

    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: object) -> object:
        if isinstance(argument, float):
            return tl.core.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    if not hasattr(torch, "hip"):
        torch.hip = types.SimpleNamespace(is_available=lambda: False)
