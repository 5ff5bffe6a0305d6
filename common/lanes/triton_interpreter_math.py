"""Lane ``triton-interpreter-math``: like ``triton-interpreter``, for kernels that call libdevice. Evidence: ``interpreter``.

What it replaces beyond that lane, none of which a pack measures:

* libdevice's ``tanh``, ``log1p``, ``exp``, ``log`` and ``rsqrt``, of which the interpreter makes None, by NumPy's functions.
"""

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any


def prepare() -> None:
    runpy.run_path(str(Path(__file__).with_name("triton_interpreter.py")))["prepare"]()
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def elementwise(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            values = np.asarray(function(x.handle.data), dtype=x.handle.data.dtype)
            return tl.core.tensor(interpreter.TensorHandle(values, x.handle.dtype), x.type)

        return call

    functions = {"tanh": np.tanh, "log1p": np.log1p, "exp": np.exp, "log": np.log, "rsqrt": lambda x: 1 / np.sqrt(x)}
    for place in ("libdevice", "cuda.libdevice"):
        module = importlib.import_module(f"triton.language.extra.{place}")
        for name, function in functions.items():
            setattr(module, name, elementwise(function))
