"""The deep check of pack24's fix: checkpoints in bf16, wrapped, partial, loaded before sharding; frozen weights, biases, training after it, four ranks in a 2 x 2 mesh.

Runs after repro.py on the patched side.
"""

import repro
import torch
import torch.distributed as dist
from repro import FP8, FULL, LAYERS, LOOSE, SIZE, check, finish, layers, sharded, step
from torch.distributed.fsdp import fully_shard


def trained(model, steps=3):
    """Outputs of ``model`` over steps of Adam, with scales precomputed after each, as torchao's documentation has it."""
    optimizer, outputs = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False), []
    torch.manual_seed(9 + dist.get_rank())
    for _ in range(steps):
        outputs.append(model(torch.randn(repro.ROWS, SIZE, device=repro.device)))
        outputs[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        repro.ao.precompute_float8_dynamic_scale_for_fsdp(model)
    return outputs


def again(model, weights, assign):
    model.load_state_dict(
        {name: weight.detach().clone() for name, weight in weights.items()}, assign=assign
    )  # which shares memory
    return model


def loaded(weights, assign, device=None, **how):
    model = sharded(layers(device=device or "meta"), **how)
    if not assign and not device:
        model.to_empty(device=repro.device)
    return again(model, weights, assign)


def cases():
    precompute = repro.ao.precompute_float8_dynamic_scale_for_fsdp
    right, weights = repro.checkpoint()
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    yield "a checkpoint in bf16", step(loaded(half, True).float(), right)
    yield "a checkpoint of wrapped weights", step(loaded(loaded(weights, False).state_dict(), True), right)
    yield "loaded twice", step(again(loaded(weights, True), weights, True), right)
    yield "no FP8 all-gather", step(loaded(weights, True, fp8=False), right)
    for assign in (False, True):
        model = loaded(weights, True)
        precompute(model)
        model.load_state_dict({name: weight / 16 for name, weight in weights.items()}, assign=assign)
        yield f"precomputed, smaller weights loaded, assign={assign}", step(model, layers(seed=1))
        model = sharded(layers())
        precompute(model)
        first = {"0.weight": weights["0.weight"]}
        model.load_state_dict(first, strict=False, assign=assign)
        mixed = layers()
        mixed[0].weight.data.copy_(right[0].weight)
        yield f"precomputed, the first layer loaded, assign={assign}", step(model, mixed)
    frozen = sharded(layers(device="meta")).requires_grad_(False)
    frozen.load_state_dict(weights, assign=True)
    yield "frozen", {"ok": not any(p.requires_grad for p in frozen.parameters())}
    copied, assigned = (trained(loaded(weights, assign)) for assign in (False, True))
    yield (
        "training after assign=True is bitwise that after a copy",
        {"ok": all(map(torch.equal, copied, assigned)) and all(y.isfinite().all().item() for y in copied)},
    )
    early = layers(device="meta")
    repro.ao.convert_to_float8_training(early, config=repro.ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    early.load_state_dict(right.state_dict(), assign=True)
    for part in (*early, early):
        fully_shard(part)
    for part in early:
        part.set_custom_all_gather(repro.Gather())
    yield "loaded before it is sharded", step(early, right)
    same = loaded(weights, True).state_dict()
    yield (
        "the weights are the checkpoint's",
        {"ok": all(torch.equal(same[n].full_tensor(), w.full_tensor()) for n, w in weights.items())},
    )


def four():
    right, weights = repro.checkpoint()
    yield "four ranks", step(loaded(weights, True), right)
    mesh = dist.device_mesh.init_device_mesh(repro.device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(layers(device="meta"), mesh=mesh)
    placed = [dist.tensor.Replicate(), dist.tensor.Shard(0)]
    model.load_state_dict(
        {n: dist.tensor.distribute_tensor(w.detach(), mesh, placed) for n, w in right.state_dict().items()}, assign=True
    )
    yield "four ranks, 2 x 2", step(model, right)


def main():
    gpus = torch.cuda.device_count()
    found = repro.in_ranks(cases) | (repro.in_ranks(four, 4) if repro.device == "cpu" or gpus > 3 else {})
    for name, row in found.items():
        want = FULL if name == "no FP8 all-gather" else FP8
        if "ok" in row:
            check("trigger", name, row["ok"])
            continue
        check("trigger", f"{name}: gathers {row['bytes']} bytes, of {want}", row["bytes"] == want)
        check("trigger", f"{name}: output off from fp32 by {row['error']:.2g}, at most {LOOSE}", row["error"] < LOOSE)
    check("control", f"{LAYERS} layers", len(layers()) == LAYERS)
    finish()


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.release()
    main()
