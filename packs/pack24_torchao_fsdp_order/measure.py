"""Other orders of converting, sharding, loading, updating and compiling: bytes gathered, all-reduces and the error of the output; loud or silent."""

import repro
import torch
import torch.distributed as dist
from models import checkpoint, converted, layers, sharded
from repro import FACTS, ROWS, SIZE, finish, gathered
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode


def measured(model, right, before=lambda model: None):
    """Bytes gathered in a forward and a backward, all-reduces of these and of ``before``, and the output's relative error against ``right`` in fp32."""
    torch.manual_seed(2 + dist.get_rank())
    x, gathered[:] = torch.randn(ROWS, SIZE, device=repro.device), ()
    with CommDebugMode() as comms:
        before(model)
        y = model(x)
        y.square().mean().backward()
    counts = {str(op).split(".")[-1]: n for op, n in comms.get_comm_counts().items()}
    want = right(x)
    reduced = sum(n for op, n in counts.items() if "all_reduce" in op or "allreduce" in op)
    return {"bytes": sum(gathered), "all_reduce": reduced, "error": ((y - want).norm() / want.norm()).item()}


def grown(factor):
    """Layers in fp32 whose weights are ``factor`` times those of ``layers()``."""
    model = layers()
    for part in model:
        part.weight.data.mul_(factor)
    return model


def stepped(precompute, after=lambda model: None):
    """A converted model whose scales were precomputed, after an optimizer's step that makes each weight eight times as large."""
    model = sharded(converted(layers()))
    precompute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for p in model.parameters():
        p.grad = -7 * p.detach()
    optimizer.step()
    optimizer.zero_grad()
    after(model)
    return model


def cases():
    precompute = repro.ao.precompute_float8_dynamic_scale_for_fsdp
    yield "convert, fully_shard", measured(sharded(converted(layers())), layers())
    yield "convert, fully_shard, precompute", measured(sharded(converted(layers())), layers(), precompute)
    yield "convert without FP8 all-gather, fully_shard", measured(sharded(converted(layers(), gather=False)), layers())
    model = sharded(converted(layers("meta")))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if dist.get_rank() else layers().state_dict(), options=options)
    yield "from meta, set_model_state_dict", measured(model, layers())
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    yield "bf16 parameters: convert, fully_shard", measured(sharded(converted(layers()), **half), layers())
    model = sharded(converted(layers("meta")), **half)
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "bf16 parameters: load with assign=True", measured(model, layers())
    late = layers()
    for part in (*late, late):
        fully_shard(part)
    try:
        yield "fully_shard, convert", measured(converted(late), layers())
    except Exception as error:  # what it raises is the finding
        yield "fully_shard, convert", {"raises": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]}
    yield "precompute, optimizer.step()", measured(stepped(precompute), grown(8))
    yield "precompute, optimizer.step(), precompute", measured(stepped(precompute, precompute), grown(8))
    for factor in (1.1, 2, 8):
        model = sharded(converted(layers()))
        precompute(model)
        model.load_state_dict(checkpoint(grown(factor)))
        yield f"precompute, load weights {factor} times as large", measured(model, grown(factor))
    model = sharded(converted(layers()))
    try:
        measured(model, layers())
        model.load_state_dict(checkpoint(layers()), assign=True)
        yield "load with assign=True after a step", measured(model, layers())
    except Exception as error:  # what it raises is the finding
        yield "load with assign=True after a step", {"raises": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]}
    compiled = layers()
    compiled[0].compile(backend="eager")
    repro.ao.convert_to_float8_training(compiled, config=repro.ao.Float8LinearConfig())
    yield "compile, convert", {"compiled": compiled[0]._compiled_call_impl is not None}


def main():
    FACTS["metrics"] = {name: rows[0] for name, rows in repro.in_ranks(cases).items()}
    for name, row in FACTS["metrics"].items():
        print(
            f"{name}: " + ", ".join(f"{key} {value:.2g}" if key == "error" else f"{key} {value}" for key, value in row.items())
        )
    finish("MEASURED")


if __name__ == "__main__":
    repro.release()
    main()
