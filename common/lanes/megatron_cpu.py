"""Lane ``megatron-cpu``: megatron-core's own Python builds and runs its modules on CPU tensors. Evidence: ``source``.

What it replaces, none of which a pack measures:

* ``torch.cuda.current_device``: it answers ``cpu``, on which the modules then put their parameters;
* ``torch.cuda.manual_seed`` and ``torch.cuda.get_rng_state``, by the CPU's generator;
* ``megatron.core.tensor_parallel.random._get_cuda_rng_state`` and ``_set_cuda_rng_state``, likewise: they are behind the seeds
  of tensor-parallel regions.

Ranks talk through gloo, which the scripts ask for themselves.
"""

import os
from typing import Any


def prepare() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # without a GPU, compiling small functions for the CPU takes minutes
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *device: torch.get_rng_state()

    def state(*args: Any, **kwargs: Any) -> Any:
        return torch.get_rng_state()

    def set_state(new: Any, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new)

    try:
        from megatron.core.tensor_parallel import random
    except ImportError:
        return  # of a release without it, or one that does not import here: the script meets that itself
    random._get_cuda_rng_state = state
    random._set_cuda_rng_state = set_state
