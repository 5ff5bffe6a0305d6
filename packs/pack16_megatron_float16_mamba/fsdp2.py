"""Whether a MambaMixer in a Float16Module can be sharded by torch's FSDP2, as megatron-core's --use-torch-fsdp2 does. No verdict.

FSDP2 wants one dtype in each group that it shards; the check is made when the first forward begins, and that is how far this goes.
"""

import importlib

import torch
from repro import FACTS, config_of, device, finish, layers, release
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    module, mamba_mixer, mamba3 = release()
    config = config_of(torch.bfloat16)
    wrapped = module.Float16Module(config, layers(mamba_mixer, mamba3, config)["MambaMixer"])
    mesh = init_device_mesh(device, (1,))
    linear = importlib.import_module("megatron.core.tensor_parallel").ColumnParallelLinear
    for part in wrapped.module.modules():
        if isinstance(part, linear):  # of the classes that megatron-core shards by themselves, the one in a mixer
            fully_shard(part, mesh=mesh)
    fully_shard(wrapped.module, mesh=mesh)
    said = None
    try:
        wrapped.module._get_fsdp_state()._lazy_init()
    except AssertionError as error:
        said = str(error)
    FACTS["metrics"] = {"refused": int(said is not None), "said": said}
    print(f"FSDP2: {said or 'takes it'}")
    finish("MEASURED")


if __name__ == "__main__":
    main()
