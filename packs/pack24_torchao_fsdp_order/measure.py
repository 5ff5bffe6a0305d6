"""Other orders of converting, sharding, loading and compiling: bytes gathered, all-reduces and the error of the output; loud or silent."""

import repro
import torch
from repro import FACTS, finish, layers, sharded
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode


def counted(model, right, before=lambda model: None):
    """As repro.step, with the all-reduces of ``before`` and the step."""
    with CommDebugMode() as comms:
        before(model)
        found = repro.step(model, right)
    counts = {str(op).split(".")[-1]: n for op, n in comms.get_comm_counts().items()}
    return {"all_reduce": sum(n for op, n in counts.items() if "all_reduce" in op or "allreduce" in op), **found}


def stepped(model, precompute):
    """An optimizer's step that makes the weights larger, after scales were precomputed; the layers in fp32 that should give the same."""
    right = layers()
    precompute(model)
    for parts in (model, right):
        optimizer = torch.optim.SGD(parts.parameters(), lr=1.0)
        for p in parts.parameters():
            p.grad = -7 * p.detach()
        optimizer.step()
        optimizer.zero_grad()
    return right


def cases():
    precompute = repro.ao.precompute_float8_dynamic_scale_for_fsdp
    yield "convert, fully_shard", counted(sharded(layers()), layers())
    yield "convert, fully_shard, precompute", counted(sharded(layers()), layers(), precompute)
    yield "convert without FP8 all-gather, fully_shard", counted(sharded(layers(), fp8=False), layers())
    late = layers()
    for part in (*late, late):
        fully_shard(part)
    try:
        repro.ao.convert_to_float8_training(late, config=repro.ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True))
        yield "fully_shard, convert", repro.step(late, layers())
    except Exception as error:  # what it raises is the finding
        yield "fully_shard, convert", {"raises": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]}
    model = sharded(layers())
    right = stepped(model, precompute)
    yield "precompute, optimizer.step()", repro.step(model, right)
    model = sharded(layers())
    right = stepped(model, precompute)
    precompute(model)
    yield "precompute, optimizer.step(), precompute", repro.step(model, right)
    compiled = layers()
    compiled[0].compile(backend="eager")
    repro.ao.convert_to_float8_training(compiled, config=repro.ao.Float8LinearConfig())
    yield "compile, convert", {"compiled": compiled[0]._compiled_call_impl is not None}


def main():
    FACTS["metrics"] = repro.in_ranks(cases)
    for name, row in FACTS["metrics"].items():
        print(
            f"{name}: " + ", ".join(f"{key} {value:.2g}" if key == "error" else f"{key} {value}" for key, value in row.items())
        )
    finish("MEASURED")


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.release()
    main()
