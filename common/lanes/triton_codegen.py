"""Lane ``triton-codegen``: kernels compiled for a GPU that is not there. Evidence: ``codegen``.

It replaces nothing: Triton compiles for a target that is named, and needs a GPU only to run. What runs is the compiler alone.
"""

import os


def prepare() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
