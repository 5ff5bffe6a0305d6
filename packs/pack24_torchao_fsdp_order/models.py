"""What validate.py, measure.py and parallel.py make and step: layers, converted, sharded, and their checkpoint."""

import repro
import torch
import torch.distributed as dist
from repro import LAYERS, ROWS, SIZE, gathered
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def layers(device=repro.device, bias=False):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias, device) for _ in range(LAYERS)))


def converted(model, gather=True, **more):
    config = repro.ao.Float8LinearConfig(enable_fsdp_float8_all_gather=gather, **more)
    return repro.ao.convert_to_float8_training(model, config=config)


def sharded(model, **how):
    for part in (*model, model):
        fully_shard(part, **how).set_custom_all_gather(repro.Gather())
    return model


def checkpoint(model):
    """Its state dict as a checkpoint is read: sharded, of plain tensors."""
    mesh = dist.device_mesh.init_device_mesh(repro.device, (dist.get_world_size(),))
    return {name: distribute_tensor(w.detach().clone(), mesh, [Shard(0)]) for name, w in model.state_dict().items()}


def step(model, alone):
    """Bytes gathered in a forward and a backward, and whether the output [ROWS, SIZE] is bitwise that of ``alone``, which is not sharded."""
    torch.manual_seed(2 + dist.get_rank())
    x, gathered[:] = torch.randn(ROWS, SIZE, device=repro.device), ()
    (y := model(x)).square().mean().backward()
    return {"bytes": sum(gathered), "same": torch.equal(y, alone(x))}
