"""What the forgetting costs; with --others what else goes wrong in te.checkpoint with delayed scaling; with --graphs what runs under CUDA graphs."""

import argparse

import repro
import torch
from repro import FACTS, ROWS, SIZE, finish

EVERY, STEPS, BLOCKS = 12, 40, 4


def saturated(checkpointed):
    """Inputs of the first block beyond FP8's range over steps with an outlier every 12, and the worst error of its weight's gradient against fp64."""
    parts, beyond, worst = repro.blocks(), 0, 0.0
    recipe = repro.recipes.DelayedScaling(amax_history_len=16, amax_compute_algo=repro.largest)
    exact = [part.weight.detach().double() for part in parts]
    for i in range(STEPS):
        x, _ = repro.data("fwd" if i % EVERY == 0 else None)
        late = i > EVERY  # the first outlier is new to any history
        scale = parts[0].fp8_meta["scaling_fwd"].scale[0] if late else 0.0
        beyond += int((x.float().abs() * scale > torch.finfo(torch.float8_e4m3fn).max).sum())
        ones = torch.ones(ROWS, SIZE, device="cuda", dtype=torch.bfloat16)
        parts.zero_grad()
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = repro.forward(parts, x.detach().requires_grad_(), checkpointed)
        y.backward(ones)
        got, upstream = parts[0].weight.grad, ones.double()
        for weight in reversed(exact[1:]):
            upstream = upstream @ weight
        want = upstream.t() @ x.double()
        worst = max(worst, ((got.double() - want).norm() / want.norm()).item() if late else 0.0)
    return {"saturated": beyond, "gradient": worst}


def step_of(case, parts, recipe, i, checkpointed):
    """One step of a use that te.checkpoint does not expect; the gradient of the first weight."""

    def run(x):
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return repro.forward(parts, x, checkpointed)

    def x():
        return next(iter(repro.data("fwd" if i % 6 == 0 else None))).requires_grad_()

    ones = torch.ones(ROWS, SIZE, device="cuda", dtype=torch.bfloat16)
    if case == "a step whose loss is dropped" and i == 3:
        run(x())
    outputs = [run(x()) for _ in range(1 + (case == "two microbatches, one backward"))]
    if case == "an evaluation before the backward":
        with torch.no_grad(), repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            repro.forward(parts, x())
    torch.autograd.backward(outputs, [ones] * len(outputs))
    gradient = parts[0].weight.grad.double()
    parts.zero_grad()
    return gradient


def others(case, steps=14):
    """The worst error of the first weight's gradient against the same without checkpoints."""
    found = []
    for checkpointed in ((), tuple(range(BLOCKS))):
        parts, recipe = repro.blocks(), repro.recipes.DelayedScaling(amax_history_len=4)
        found.append([step_of(case, parts, recipe, i, checkpointed) for i in range(steps)])
    return {"gradient": max(((got - want).norm() / want.norm()).item() for want, got in zip(*found, strict=True))}


def kernels(how, size=1024, rows=512, microbatches=4):
    """Kernels and launches of one step: four blocks, four microbatches, each with an autocast and a backward of its own, weights cast once.

    ``how`` is eager, one capture of all blocks, or a capture of each.
    """
    te, recipe = repro.te, repro.recipes.DelayedScaling(amax_history_len=16)
    blocks = torch.nn.ModuleList(
        [te.Linear(size, size, bias=False, device="cuda", params_dtype=torch.bfloat16) for _ in range(BLOCKS)]
    )
    whole = torch.nn.Sequential()
    xs = [torch.randn(rows, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(microbatches)]

    def each(parts, x, **first):
        for part in parts:
            x = part(x, **first)
        return x

    whole.forward = lambda x, **first: each(blocks, x, **first)
    whole.blocks = blocks
    graphed = {"fp8_enabled": True, "fp8_recipe": recipe, "fp8_weight_caching": True}
    if how == "one capture":
        parts = [te.make_graphed_callables(whole, (xs[0].detach().requires_grad_(),), **graphed)]
    elif how == "a capture of each":
        samples = tuple((xs[0].detach().clone().requires_grad_(),) for _ in blocks)
        parts = te.make_graphed_callables(tuple(blocks), samples, **graphed)
    else:
        parts = blocks

    def step():
        for i, x in enumerate(xs):
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = each(parts, x, is_first_microbatch=i == 0)
            y.float().sum().backward()
        torch.cuda.synchronize()

    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    ran = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    calls = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    return {
        "on the GPU": len(ran),
        "copies": sum(name.startswith("Memcpy") for name in ran),
        "casts and transposes": sum("cast_transpose" in name for name in ran),
        "amax and scale updates": sum("amax_and_scale_update" in name for name in ran),
        "launches": sum("LaunchKernel" in name for name in calls),
        "launches of graphs": sum(name == "cudaGraphLaunch" for name in calls),
    }


def main(options):
    if options.others:
        cases = (
            "one step after the other",
            "two microbatches, one backward",
            "a step whose loss is dropped",
            "an evaluation before the backward",
        )
        rows = {case: others(case) for case in cases}
    elif options.graphs:
        if not repro.kernel:
            print("--graphs needs a GPU.")
            finish("UNTESTABLE", "no-device")
        rows = {how: kernels(how) for how in ("eager", "one capture", "a capture of each")}
    else:
        rows = {f"{len(which)} of {BLOCKS} blocks checkpointed": saturated(which) for which in ((), (0,))}
    FACTS["metrics"] = rows
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{what} {n:.3g}" for what, n in row.items()))
    finish("MEASURED")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", action="store_true", help="what runs in a step under CUDA graphs")
    parser.add_argument("--others", action="store_true", help="other uses that go wrong")
    options = parser.parse_args()
    repro.te, repro.recipes, repro.manager, repro.kernel = repro.release()
    main(options)
