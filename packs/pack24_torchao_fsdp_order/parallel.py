"""FP8 with tensor parallelism: two layers over two ranks, by the release's own styles, beside the same layers in one rank. No verdict.

Errors are ‖a − b‖ / ‖b‖ of the output [ROWS, SIZE] and the gradient of the input: of two ranks against one, and of FP8 in one against fp32. Where a scale is of
the whole tensor the first is rounding alone; with a scale of each rank's own shard it is not, for one shard has an outlier.
"""

import importlib

import repro
import torch
import torch.distributed as dist
from repro import FACTS, ROWS, SIZE, check, converted, finish
from torch.distributed.tensor import Replicate, Shard
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


def cases():
    styles = importlib.import_module("torchao.float8.float8_tensor_parallel")
    mesh = dist.device_mesh.init_device_mesh(repro.device, (dist.get_world_size(),))
    torch.manual_seed(1)
    x = torch.randn(ROWS, SIZE, device=repro.device)
    x[-1, -1] *= 100  # in the last rank's tokens
    fp8 = styles.Float8ColwiseParallel, styles.Float8RowwiseParallel, styles.PrepareFloat8ModuleInput
    for outlier in (1, 100):
        right, alone = step(two(outlier), x), step(converted(two(outlier), fp8=False), x)
        for way, (column, row, given) in (
            ("fp32", (ColwiseParallel, RowwiseParallel, PrepareModuleInput)),
            ("FP8", fp8),
        ):
            for tokens in ("all tokens in each rank", "half of the tokens in each rank"):
                model, own = two(outlier) if way == "fp32" else converted(two(outlier), fp8=False), slice(None)
                plan = {"0": column(), "1": row()}
                if "half" in tokens:
                    own = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
                    plan = {"": given(input_layouts=Shard(0), desired_input_layouts=Replicate())}
                    plan |= {"0": column(), "1": row(output_layouts=Shard(0))}
                name = f"{way}, {tokens}, an outlier of {outlier}"
                try:
                    model = parallelize_module(model, mesh, plan)
                    with CommDebugMode() as comms:
                        found = step(model, x[own])
                except Exception as error:  # what it raises is the finding
                    yield name, {"raises": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160]}
                    continue
                of_one = off(found, [t[own] for t in (right if way == "fp32" else alone)])
                counts = {str(op).split(".")[-1]: n for op, n in comms.get_comm_counts().items()}
                yield name, {"against one rank": of_one, "one rank, against fp32": off(alone, right), **counts}


def main():
    FACTS["metrics"] = {name: rows[0] for name, rows in repro.in_ranks(cases).items()}
    for name, row in FACTS["metrics"].items():
        print(f"{name}: {row}", flush=True)
        if name.startswith("fp32, all"):
            check("control", f"{name}: two ranks give what one gives", max(row["against one rank"]) < 1e-5)
            check("control", f"{name}: FP8 is seen in one rank", min(row["one rank, against fp32"]) > 0.005)
    finish("MEASURED")


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.release()
    main()
