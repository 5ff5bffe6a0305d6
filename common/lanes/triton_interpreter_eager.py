"""Lane ``triton-interpreter-eager``: like ``triton-interpreter-math``, without ``torch.compile``. Evidence: ``interpreter``.

What it replaces beyond that lane, none of which a pack measures:

* what ``torch.compile`` makes of a release's PyTorch functions, C++ on a CPU and other kernels on a GPU, by the functions
  themselves (``TORCHDYNAMO_DISABLE=1``): compiling them takes longer than all else in a run.
"""

import os
import runpy
from pathlib import Path


def prepare() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    runpy.run_path(str(Path(__file__).with_name("triton_interpreter_math.py")))["prepare"]()
