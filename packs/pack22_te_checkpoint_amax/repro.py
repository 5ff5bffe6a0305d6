# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: every recomputation in te.checkpoint rolls the amax history of DelayedScaling once more.

A recipe with amax_history_len=16 remembers an outlier for 16 steps. Each checkpointed block's recomputation leaves an autocast of its own, which updates the
history and scale of all modules again: with one such block 8 steps are remembered, with four 3. An outlier that comes every 12 steps then saturates.

The release's own Linear, autocast, recipe and te.checkpoint run. On a CPU the lane te-cpu supplies FP8 arithmetic; what is measured, the history, is kept by the
release's Python. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
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
options = parser.parse_args()
SIZE, ROWS, BLOCKS, OUTLIER = 32, 64, 4, 1000.0
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


def remembered(checkpointed, length, algorithm="max", how="reentrant", count=BLOCKS):
    """Steps after one with an outlier in which the first block's scale is still that of the outlier; None if it is never updated."""
    blocks, recipe, steps = blocks_of(count), te_recipe.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm), 0
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


def saturated(checkpointed, length=16, every=12, steps=40):
    """Numbers beyond FP8's range at the first block over steps with an outlier every 12, and the worst error of its weight's gradient."""
    blocks, recipe, beyond, worst = (
        blocks_of(BLOCKS),
        te_recipe.DelayedScaling(amax_history_len=length, amax_compute_algo="max"),
        0,
        0.0,
    )
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
without = remembered(0, L)
state("control", f"no block checkpointed: an outlier is remembered for {without} steps, amax_history_len={L}", without == L)
recent = remembered(0, L, "most_recent")
state("control", f"no block checkpointed: algorithm most_recent remembers {recent} step", recent == 1)
metrics["remembered"] = {"0": without, "0 most_recent": recent}
for count, algorithm, how in (
    (1, "max", "reentrant"),
    (1, "max", "not reentrant"),
    (4, "max", "reentrant"),
    (1, "most_recent", "reentrant"),
):
    steps = remembered(count, L, algorithm, how)
    metrics["remembered"][f"{count} {algorithm} {how}"] = steps
    want = L if algorithm == "max" else 1
    state(
        "trigger",
        f"{count} of {BLOCKS} blocks checkpointed, {how}, {algorithm}: remembered for {steps} steps, not {want}",
        steps != want,
    )
if metrics["remembered"]["1 max reentrant"] is None:
    finish("CHANGED", "scale")  # pack23's bug, 2.1.0
seen = any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger")
metrics["remembered"]["1 max nested"] = steps = remembered(1, L, how="nested")
name = f"1 of {BLOCKS} blocks checkpointed, and once more around that: remembered for {steps} steps"
if seen or patched:
    state("trigger", f"{name}, not {L}", steps != L)
else:
    print(f"         {name}")
if L == 16:
    metrics["outlier every 12 steps"] = {count: saturated(count) for count in (0, 1)}
    for count, role in ((0, "control"), (1, "trigger")):
        found = metrics["outlier every 12 steps"][count]
        what = f"{count} checkpointed, outlier every 12 steps: {found['saturated']} saturated, gradient off by {found['gradient']:.2g}"
        state(role, what, bool(found["saturated"]) == bool(count))
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
