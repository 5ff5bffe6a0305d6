# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: a recomputation in te.checkpoint rolls the amax history of DelayedScaling once more, if the update is Python's, or checkpoints nest.

A recipe with amax_history_len=16 remembers an outlier for 16 steps. Each checkpointed block's recomputation leaves an autocast of its own, which updates the
history and scale of all modules again. The CUDA kernel that does so by default leaves a history alone whose newest amax is 0, as it is then; the update in Python,
for an amax_compute_algo or scaling_factor_compute_algo that is a function, does not: 8 steps are remembered, or 3. And where one te.checkpoint is in another, the
inner recomputation records an amax, so that both roll.

The release's own Linear, autocast, recipe and te.checkpoint run. On a CPU the lane te-cpu supplies FP8 arithmetic, and the kernel is not run: what is measured
there is the update in Python. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import json
import os
import sys
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--length", type=int, default=16, help="amax_history_len (default: 16)")
parser.add_argument("--graphs", action="store_true", help="also kernels and launches with CUDA graphs (needs a GPU)")
options = parser.parse_args()
SIZE, ROWS, BLOCKS, OUTLIER = 32, 64, 4, 1000.0
FUNCTIONS = {
    "function": lambda history: history.amax(dim=0),
    "newest function": lambda history: history[0].clone(),
}  # as max and most_recent
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "comparisons": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds):
    facts["comparisons"].append({"role": role, "name": name, "holds": bool(holds)})
    print(f"{role:<8} {name:<112} {bool(holds)}", flush=True)


def blocks_of(count):
    torch.manual_seed(0)
    manager.reset()
    return torch.nn.ModuleList([te.Linear(SIZE, SIZE, device=device, params_dtype=torch.bfloat16) for _ in range(count)])


def step(blocks, x, recipe, checkpointed, how):
    """One forward and backward, of which the first ``checkpointed`` blocks are recomputed; returns the gradient of the first weight."""
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        h = x.detach().requires_grad_()
        for i, block in enumerate(blocks):
            if i >= checkpointed:
                h = block(h)
            elif how == "nested":
                h = te.checkpoint(lambda h, block=block: te.checkpoint(block, h), h)
            else:
                h = te.checkpoint(block, h, use_reentrant=how == "reentrant")
    blocks[0].weight.grad = None
    h.float().sum().backward()
    return blocks[0].weight.grad.float().clone()


def recipe_of(length, algorithm):
    return te_recipe.DelayedScaling(amax_history_len=length, amax_compute_algo=FUNCTIONS.get(algorithm, algorithm))


def remembered(checkpointed, length, algorithm, how="reentrant"):
    """Steps after one with an outlier in which the first block's scale is still that of the outlier; None if it is never updated."""
    blocks, recipe, steps = blocks_of(BLOCKS), recipe_of(length, algorithm), 0
    x = torch.randn(ROWS, SIZE, device=device, dtype=torch.bfloat16)
    outlier = x.clone()
    outlier[0, 0] = OUTLIER
    step(blocks, x, recipe, checkpointed, how)
    step(blocks, outlier, recipe, checkpointed, how)
    if blocks[0].fp8_meta["scaling_fwd"].scale[0].item() == 1:
        return None
    while blocks[0].fp8_meta["scaling_fwd"].scale[0].item() < 1 and steps <= length + 1:  # 448 / 1000 with the outlier
        step(blocks, x, recipe, checkpointed, how)
        steps += 1
    return steps


def stored(how, steps=6):
    """Scales kept for recomputations that are never made, after some steps."""
    blocks, recipe = blocks_of(1), recipe_of(16, "function")
    for _ in range(steps):
        step(blocks, torch.randn(ROWS, SIZE, device=device, dtype=torch.bfloat16), recipe, 1, how)
    kept = getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer
    return sum(map(len, kept))


def saturated(checkpointed, length=16, every=12, steps=40):
    """Numbers beyond FP8's range at the first block over steps with an outlier every 12, and the worst error of its weight's gradient."""
    blocks, recipe, beyond, worst = blocks_of(BLOCKS), recipe_of(length, "function"), 0, 0.0
    exact = [block.weight.detach().double() for block in blocks]
    for i in range(steps):
        x = torch.randn(ROWS, SIZE, device=device, dtype=torch.bfloat16)
        if i % every == 0:
            x[0, 0] = OUTLIER
        if i > every:  # the first outlier is new to any history
            scale = blocks[0].fp8_meta["scaling_fwd"].scale[0]
            beyond += int((x.float().abs() * scale > torch.finfo(torch.float8_e4m3fn).max).sum())
        got = step(blocks, x, recipe, checkpointed, "reentrant")
        upstream = torch.ones(ROWS, SIZE, device=device, dtype=torch.float64)
        for weight in reversed(exact[1:]):
            upstream = upstream @ weight
        want = upstream.t() @ x.double()
        if i > every:
            worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
    return {"saturated": beyond, "gradient": worst}


def kernels(how, size=1024, rows=512, microbatches=4):
    """Kernels and launches of one step: four blocks, four microbatches, each with an autocast and a backward of its own, weights cast once.

    ``how`` is eager, one capture of all blocks, or a capture of each.
    """
    blocks = torch.nn.ModuleList(
        [te.Linear(size, size, bias=False, device=device, params_dtype=torch.bfloat16) for _ in range(BLOCKS)]
    )
    recipe, whole = te_recipe.DelayedScaling(amax_history_len=16), torch.nn.Sequential()
    xs = [torch.randn(rows, size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(microbatches)]

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
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
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


warnings.filterwarnings("ignore")
release = distribution("transformer-engine")
facts["version"] = release.version
device = "cuda"
if not Path(release.locate_file("transformer_engine/pytorch/tensor/float8_tensor.py")).exists() or release.version.startswith(
    "1."
):
    print("This release has other modules for FP8: transformer-engine 2 and newer are looked at.")
    finish("UNTESTABLE", "no-api")
try:
    te = importlib.import_module("transformer_engine.pytorch")
except (OSError, AssertionError, RuntimeError, StopIteration) as error:
    if "transformer_engine_torch" in sys.modules:
        raise
    print(
        f"Without transformer-engine's compiled libraries ({str(error).splitlines()[0][:80]}): nox -s pack22 runs it in the lane te-cpu."
    )
    finish("UNTESTABLE", "no-device")
te_recipe = importlib.import_module("transformer_engine.common.recipe")
states = next(m for name in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{name}")))
manager = states.FP8GlobalStateManager
facts["file"] = states.__file__
on_gpu = (
    torch.version.cuda is not None
    and "transformer_engine_torch" in sys.modules
    and hasattr(sys.modules["transformer_engine_torch"], "__file__")
)
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "source"
print(f"transformer-engine {release.version}, torch {torch.__version__}, {facts['evidence']}, {BLOCKS} blocks")
L = options.length
metrics["remembered"] = counts = {}


def history(role, checkpointed, algorithm, how="reentrant"):
    """Note how long an outlier is remembered; the trigger is that it is not what the recipe says."""
    steps = remembered(checkpointed, L, algorithm, how)
    counts[f"{checkpointed} {algorithm} {how}" if checkpointed else f"0 {algorithm}"] = steps
    want = 1 if "recent" in algorithm or "newest" in algorithm else L
    what = f"{checkpointed} of {BLOCKS} blocks checkpointed, {how}" if checkpointed else "no block checkpointed"
    if role == "note":
        print(f"         {algorithm}, {what}: remembered for {steps} steps")
    else:
        ends = f", not {want}" if role == "trigger" else ""
        state(role, f"{algorithm}, {what}: remembered for {steps} steps{ends}", (steps != want) == (role == "trigger"))
    return steps


history("control", 0, "function")
history("control", 0, "newest function")
if history("trigger", 1, "function") is None:
    finish("CHANGED", "scale")  # pack23's bug, 2.1.0
history("trigger", 1, "function", "not reentrant")
history("trigger", BLOCKS, "function")
history("trigger", 1, "newest function")
seen = any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger")
# Up to 2.3 nested checkpoints are another matter, for nothing is stored in them.
history("trigger" if seen or patched else "note", 1, "function", "nested")
if on_gpu:  # the update is a kernel
    history("control", 0, "max")
    history("control", 1, "max")
    history("control", BLOCKS, "max", "not reentrant")
    history("control", 1, "most_recent")
    history("trigger", 1, "max", "nested")
metrics["stored after 6 steps"] = {how: stored(how) for how in ("reentrant", "nested")}
print(f"         one block, scales stored for recomputations after 6 steps: {metrics['stored after 6 steps']}")
if L == 16:
    metrics["outlier every 12 steps"] = {count: saturated(count) for count in (0, 1)}
    for count, role in ((0, "control"), (1, "trigger")):
        found = metrics["outlier every 12 steps"][count]
        what = f"{count} checkpointed, outlier every 12 steps: {found['saturated']} saturated, gradient off by {found['gradient']:.2g}"
        state(role, what, bool(found["saturated"]) == bool(count))
if options.graphs and not on_gpu:
    parser.error("--graphs needs a GPU")
if options.graphs:
    metrics["kernels of a step"] = {how: kernels(how) for how in ("eager", "one capture", "a capture of each")}
    for how, row in metrics["kernels of a step"].items():
        print(f"         {how}: " + ", ".join(f"{n} {what}" for what, n in row.items()))
fresh = [
    step(
        blocks_of(BLOCKS),
        torch.full((ROWS, SIZE), 0.5, device=device, dtype=torch.bfloat16),
        te_recipe.DelayedScaling(),
        n,
        "reentrant",
    )
    for n in (0, BLOCKS)
]
state("control", "the gradient of a first step is bitwise the same with and without checkpointing", torch.equal(*fresh))
bad = [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]]
if bad:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
