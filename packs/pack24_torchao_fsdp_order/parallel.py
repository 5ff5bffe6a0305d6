"""FP8 with tensor parallelism: two layers over two ranks, by the release's own styles, beside the same layers in one rank. No verdict.

Errors are ‖a − b‖ / ‖b‖ of the output [ROWS, SIZE] and the gradient of the input, the larger of the ranks': of two ranks against one, and of FP8 in one against
fp32. Beside them what two ranks give whose amax is not reduced, so that each has scales of its own.
"""

import importlib
from unittest import mock

import repro
import torch
import torch.distributed as dist
from models import converted
from repro import FACTS, ROWS, SIZE, check, finish
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module


def two(outlier):
    """Two layers; one weight of the last rank's shard of each is ``outlier`` times as large."""
    torch.manual_seed(0)
    with torch.device(repro.device):
        model = torch.nn.Sequential(torch.nn.Linear(SIZE, 4 * SIZE, bias=False), torch.nn.Linear(4 * SIZE, SIZE, bias=False))
    for layer in model:
        layer.weight.data[-1, -1] *= outlier
    return model


def step(model, x):
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.square().sum().backward()
    return y.detach(), leaf.grad


def off(found, right):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]


def own_amax(x, *_):
    """Stands in for the release's tensor_to_amax: of this rank's part alone."""
    if not isinstance(x, DTensor):
        return x.abs().max()
    return DTensor.from_local(x.to_local().abs().max(), x.device_mesh, [Replicate()] * x.device_mesh.ndim)


def cases():
    styles = importlib.import_module("torchao.float8.float8_tensor_parallel")
    mesh = dist.device_mesh.init_device_mesh(repro.device, (dist.get_world_size(),))
    torch.manual_seed(1)
    x = torch.randn(ROWS, SIZE, device=repro.device)
    x[-1, -1] *= 100  # in the last rank's tokens
    fp8 = styles.Float8ColwiseParallel, styles.Float8RowwiseParallel, styles.PrepareFloat8ModuleInput
    for outlier in (1, 100):
        right, alone = step(two(outlier), x), step(converted(two(outlier), gather=False), x)
        fp32 = ColwiseParallel, RowwiseParallel, PrepareModuleInput
        for way, (column, row, given) in (("fp32", fp32), ("FP8", fp8), ("FP8, own scales", fp8)):
            for tokens in ("all tokens in each rank", "half of the tokens in each rank"):
                model, own = two(outlier) if way == "fp32" else converted(two(outlier), gather=False), slice(None)
                plan = {"0": column(), "1": row()}
                if "half" in tokens:
                    own = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
                    plan = {"": given(input_layouts=Shard(0), desired_input_layouts=Replicate())}
                    plan |= {"0": column(), "1": row(output_layouts=Shard(0))}
                name = f"{way}, {tokens}, weights with an outlier of {outlier}"
                amax = mock.patch("torchao.float8.float8_utils.tensor_to_amax", own_amax) if "own" in way else mock.MagicMock()
                try:
                    model = parallelize_module(model, mesh, plan)
                    with CommDebugMode() as comms, amax:
                        found = step(model, x[own])
                except Exception as error:  # what it raises is the finding
                    yield name, {"raises": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160]}
                    continue
                of_one = off(found, [t[own] for t in (right if way == "fp32" else alone)])
                counts = {str(op).split(".")[-1]: n for op, n in comms.get_comm_counts().items()}
                yield name, {"against one rank": of_one, "one rank, against fp32": off(alone, right), **counts}


def main():
    ranks = repro.in_ranks(cases)
    for name, rows in ranks.items():
        raised = [row.get("raises") for row in rows]
        if any(raised):
            check("control", f"{name}: both ranks raise the same", len(set(raised)) == 1)
            FACTS["metrics"][name] = rows[0]
        else:
            each = [row.pop("against one rank") for row in rows]
            FACTS["metrics"][name] = {"against one rank": list(map(max, zip(*each, strict=True))), **rows[0]}
        print(f"{name}: {FACTS['metrics'][name]}", flush=True)
        if name.startswith("fp32"):
            check("control", f"{name}: two ranks give what one gives", max(FACTS["metrics"][name]["against one rank"]) < 1e-5)
            check("control", f"{name}: FP8 is seen in one rank", min(rows[0]["one rank, against fp32"]) > 0.005)
    finish("MEASURED")


if __name__ == "__main__":
    repro.release()
    main()
