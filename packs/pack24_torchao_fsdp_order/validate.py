"""The deep check of pack24's fix: checkpoints in bf16, wrapped, partial, loaded before sharding; frozen weights, biases, mixed precision, four ranks.

Runs after repro.py on the patched side. A load has to stay one: assigned tensors are the checkpoint's own, errors are raised, and
precomputed scales are used.
"""

import copy
import gc
import pickle
import weakref

import repro
import torch
import torch.distributed as dist
from models import checkpoint, converted, layers, sharded, step
from repro import FP8, FULL, SIZE, check, finish
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def trained(model, steps=3):
    """Outputs of ``model`` over steps of Adam, with scales precomputed after each, as torchao's documentation has it; and all-reduces of the last step."""
    optimizer, outputs = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False), []
    torch.manual_seed(9 + dist.get_rank())
    for _ in range(steps):
        with CommDebugMode() as comms:
            outputs.append(model(torch.randn(repro.ROWS, SIZE, device=repro.device)))
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            repro.ao.precompute_float8_dynamic_scale_for_fsdp(model)
    counts = {str(op): n for op, n in comms.get_comm_counts().items()}
    return outputs, sum(n for op, n in counts.items() if "all_reduce" in op or "allreduce" in op)


def loaded(weights, assign=True, start=None, fp8=True, **how):
    model = sharded(converted(start or layers("meta"), fp8), **how)
    if not assign:
        model.to_empty(device=repro.device)
    model.load_state_dict(weights, assign=assign)
    return model


def early(frozen=0):
    """Sharded after the load; the first ``frozen`` layers train nothing."""
    model = converted(layers("meta"))
    model[:frozen].requires_grad_(False)
    model.load_state_dict(layers().state_dict(), assign=True)
    return sharded(model)


def plain_of(parameter):
    """The tensor that holds the numbers: of a DTensor its local one, of a wrapper the one inside."""
    local = getattr(parameter, "_local_tensor", parameter)
    return getattr(local, "_tensor", local)


def refuses(weights):
    try:
        loaded(weights)
    except RuntimeError as error:
        return "Error(s) in loading state_dict" in str(error)
    return False


def cases():
    alone = converted(layers())
    options, whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), layers().state_dict()
    set_model_state_dict(model := sharded(converted(layers("meta"))), {} if dist.get_rank() else whole, options=options)
    yield "set_model_state_dict", step(model, alone)
    half = {name: weight.bfloat16() for name, weight in checkpoint(layers()).items()}
    model, alone_half = loaded(half), converted(layers().bfloat16())
    kinds = {p.dtype for p in model.parameters()} | {plain_of(p).dtype for p in model.parameters()}
    yield "a checkpoint in bf16 stays in bf16", {"ok": kinds == {torch.bfloat16}}
    yield "a checkpoint in bf16 in fp32", step(model.float(), converted(alone_half.float()))
    yield "a checkpoint of wrapped weights", step(loaded(loaded(checkpoint(layers()), False).state_dict()), alone)
    model = loaded(checkpoint(layers()))
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "loaded twice", step(model, alone)
    model = sharded(converted(layers()))
    step(model, alone)
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "loaded after a step", step(model, alone)
    yield "no FP8 all-gather", step(loaded(checkpoint(layers()), fp8=False), alone)
    mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    copied, assigned = (step(loaded(checkpoint(layers()), assign, **mixed), alone)["bytes"] for assign in (False, True))
    outputs = [trained(loaded(checkpoint(layers()), assign, **mixed))[0] for assign in (False, True)]
    yield "mixed precision, as copied", {"ok": copied == assigned == FP8 and all(map(torch.equal, *outputs))}
    first = {"0.weight": checkpoint(layers())["0.weight"]}
    model = sharded(converted(layers()))
    yield (
        "a missing weight, strict=False",
        {"ok": len(model.load_state_dict(first, strict=False, assign=True).missing_keys) == 3},
    )
    yield "the first layer alone", step(model, alone)
    model, parts = sharded(converted(layers())), checkpoint(layers())
    before = list(model.parameters())
    model.load_state_dict(first, strict=False, assign=True)
    kept = [one is other for one, other in zip(before, model.parameters(), strict=True)]
    yield "a weight that the checkpoint lacks stays the parameter that it was", {"ok": all(kept[1:])}
    for name, model, weights in (
        ("whole", converted(layers()), layers().state_dict()),
        ("sharded", sharded(converted(layers())), parts),
    ):
        before = list(model.parameters())
        model.load_state_dict(weights)
        kept = [one is other for one, other in zip(before, model.parameters(), strict=True)]
        yield f"a copy into {name} weights leaves the parameters that an optimizer has", {"ok": all(kept)}
    yield "a missing weight is refused", {"ok": refuses(first)}
    yield (
        "a weight of another shape is refused",
        {"ok": refuses({**checkpoint(layers()), **checkpoint(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)))})},
    )
    yield "a bias that there is not is refused", {"ok": refuses({**checkpoint(layers()), "0.bias": torch.zeros(SIZE)})}
    frozen = sharded(converted(layers("meta"))).requires_grad_(False)
    frozen.load_state_dict(checkpoint(layers()), assign=True)
    yield "frozen", {"ok": not any(p.requires_grad for p in frozen.parameters())}
    counts = []
    for assign in (False, True):
        model = sharded(converted(layers("meta")))
        model = model if assign else model.to_empty(device=repro.device)
        model[0].requires_grad_(False)
        model.load_state_dict(checkpoint(layers()), assign=assign)
        counts.append(step(model, alone))
    yield (
        "the first layer frozen, as copied",
        {"ok": counts[0] == counts[1] and counts[0]["same"] and counts[0]["bytes"] < FULL / 2},
    )
    model = sharded(converted(layers("meta"), emulate=True))
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "emulated", step(model, converted(layers(), emulate=True))
    if "target_dtype" in repro.ao.CastConfig.__dataclass_fields__:  # from 0.6
        cast = {"cast_config_weight": repro.ao.CastConfig(target_dtype=torch.float8_e5m2)}
        cast["cast_config_weight_for_grad_input"] = cast["cast_config_weight"]
        model = sharded(converted(layers("meta"), emulate=True, **cast))
        model.load_state_dict(checkpoint(layers()), assign=True)
        yield "weights in e5m2", step(model, converted(layers(), emulate=True, **cast))
    model, weights = sharded(converted(layers("meta"))), checkpoint(layers())
    for i, part in enumerate(model):
        part.load_state_dict({"weight": weights[f"{i}.weight"]}, assign=True)
    yield "loaded layer by layer", step(model, alone)
    model = sharded(converted(layers("meta"))).eval()
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "loaded in eval(), then trained", step(model.train(), alone)
    biased = layers(bias=True)
    model = loaded(checkpoint(biased), start=layers("meta", True))
    found = model.state_dict()
    yield "biases", {"ok": all(torch.equal(found[n].full_tensor(), w) for n, w in biased.state_dict().items())}
    yield "with biases", step(model, converted(biased)) | {"want": FP8 + 2 * repro.LAYERS * SIZE * 4}
    larger = {name: 8 * weight for name, weight in layers().state_dict().items()}
    alone_larger = converted(layers())
    alone_larger.load_state_dict(larger)
    model = sharded(converted(layers()))
    repro.ao.precompute_float8_dynamic_scale_for_fsdp(model)
    model.load_state_dict({name: 8 * weight for name, weight in checkpoint(layers()).items()}, assign=True)
    yield "scales precomputed before the load are those of other weights", step(model, alone_larger)
    given = {name: torch.nn.Parameter(weight) for name, weight in checkpoint(layers()).items()}
    model = sharded(converted(layers("meta")))
    with CommDebugMode() as comms:
        model.load_state_dict(given, assign=True)
    yield "the load makes no collectives", {"ok": not comms.get_total_counts()}
    kinds = {type(weight._local_tensor) for weight in given.values()}
    yield "a checkpoint of parameters is left as it is", {"ok": kinds == {torch.Tensor}}
    with torch.no_grad():
        for parameter in model.parameters():
            plain_of(parameter).mul_(8)
    yield "weights that change after the load", step(model, alone_larger)
    (copied, some), (assigned, more) = (trained(loaded(checkpoint(layers()), assign)) for assign in (False, True))
    same = all(map(torch.equal, copied, assigned)) and all(y.isfinite().all().item() for y in copied)
    yield "training after assign=True is bitwise that after a copy", {"ok": same}
    yield "training after assign=True: one all-reduce for all scales", {"ok": some == more == 1}
    model = sharded(copy.deepcopy(converted(layers("meta"))))
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "a deep copy, loaded", step(model, alone)
    model = sharded(pickle.loads(pickle.dumps(converted(layers()))))
    model.load_state_dict(checkpoint(layers()), assign=True)
    yield "pickled, loaded", step(model, alone)
    model = converted(layers())
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    sharded(model).load_state_dict(checkpoint(layers()), assign=True)
    gc.collect()
    yield "whole weights from before are given up", {"ok": not any(each() is not None for each in before)}
    model = sharded(converted(layers()))
    step(model, alone)
    before = [weakref.ref(plain_of(parameter)) for parameter in model.parameters()]
    model.load_state_dict(checkpoint(layers()), assign=True)
    step(model, alone)
    gc.collect()
    yield "shards from before are given up", {"ok": not any(each() is not None for each in before)}
    part = converted(layers())[0]
    part._load_from_state_dict(
        {"weight": 8 * part.weight.detach()},
        "",
        local_metadata={},
        strict=True,
        missing_keys=[],
        unexpected_keys=[],
        error_msgs=[],
    )
    yield "arguments by name, as nn.Module takes them", {"ok": torch.equal(plain_of(part.weight), 8 * layers()[0].weight)}
    yield "loaded before it is sharded", step(early(), alone)
    part, trains = step(early(1), alone), [p.requires_grad for p in early(1).parameters()]
    yield (
        "the first layer frozen, loaded before it is sharded",
        {"ok": part == counts[0] and trains == [False, True, True, True]},
    )
    yield "frozen, loaded before it is sharded", {"ok": not any(p.requires_grad for p in early(repro.LAYERS).parameters())}
    given = checkpoint(layers())
    own = loaded(given).state_dict()
    yield (
        "the weights are the checkpoint's",
        {"ok": all(torch.equal(own[n].full_tensor(), w.full_tensor()) for n, w in given.items())},
    )
    yield "and share its memory", {"ok": all(plain_of(own[n]).data_ptr() == plain_of(w).data_ptr() for n, w in given.items())}
    yield "which stay plain", {"ok": all(type(w._local_tensor) is torch.Tensor for w in given.values())}


def four():
    alone = converted(layers())
    yield "four ranks", step(loaded(checkpoint(layers())), alone)
    mesh = dist.device_mesh.init_device_mesh(repro.device, (2, 2), mesh_dim_names=("replicate", "shard"))
    placed = [dist.tensor.Replicate(), dist.tensor.Shard(0)]
    weights = {n: dist.tensor.distribute_tensor(w.detach(), mesh, placed) for n, w in layers().state_dict().items()}
    yield "four ranks, 2 x 2", step(loaded(weights, mesh=mesh), alone)

    mesh = dist.device_mesh.init_device_mesh(repro.device, (2, 2), mesh_dim_names=("data", "tensor"))
    for style in (ColwiseParallel, RowwiseParallel):
        made = []
        for device in (repro.device, "meta"):
            model = converted(layers(device), emulate=True)
            for part in model:
                parallelize_module(part, mesh["tensor"], style())
            made.append(sharded(model, mesh=mesh["data"]))
        want, model = made
        placed = {name: weight.placements for name, weight in want.state_dict().items()}
        weights = {n: dist.tensor.distribute_tensor(w.detach(), mesh, placed[n]) for n, w in layers().state_dict().items()}
        model.load_state_dict(weights, assign=True)
        found = model.state_dict()
        same = all(
            found[n].placements == placed[n] and torch.equal(found[n].full_tensor(), w.full_tensor())
            for n, w in weights.items()
        )
        kinds = {type(weight._local_tensor) for weight in found.values()}
        kept = kinds == {type(weight._local_tensor) for weight in want.state_dict().values()}
        yield f"four ranks, 2 x 2, {style.__name__}: weights are placed and wrapped as before the load", {"ok": same and kept}


def main():
    if repro.device == "cuda" and torch.cuda.device_count() < 4:
        print("Four ranks were not tried: there are fewer GPUs.")
    found = repro.in_ranks(cases) | (repro.in_ranks(four, 4) if repro.device == "cpu" or torch.cuda.device_count() > 3 else {})
    for name, rows in found.items():
        want = rows[0].get("want", FULL if name == "no FP8 all-gather" else FP8)
        if "ok" in rows[0]:
            check("trigger", name, all(row["ok"] for row in rows))
            continue
        check(
            "trigger",
            f"{name}: ranks gather {[row['bytes'] for row in rows]} bytes, of {want}",
            all(row["bytes"] == want for row in rows),
        )
        check("trigger", f"{name}: outputs are bitwise those without sharding", all(row["same"] for row in rows))
    check("control", "what is not FP8 takes more bytes", FULL > FP8)
    finish()


if __name__ == "__main__":
    repro.release()
    main()
