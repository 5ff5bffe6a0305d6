# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.18.0", "triton==3.7.1"]
# ///
"""transformer-engine: te.checkpoint around FP8 with delayed scaling raises a KeyError, or never updates the scale.

Three ways to use it: FP8 switched on inside the checkpointed function (#3284, no KeyError from 2.19 on, but a scale that stays 1), modules in eval mode (#3394,
right in 2.20), and plain training, where 2.1.0 leaves the scale at 1. The release's own Linear, autocast, recipe and te.checkpoint run; on a CPU
the lane te-cpu supplies FP8 arithmetic. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
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
parser.parse_args()
SIZE, ROWS, STEPS = 32, 64, 3
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


def trained(checkpointed, *, inside=False, training=True):
    """Gradients and scale after three steps of one Linear, or what they raise."""
    torch.manual_seed(0)
    manager.reset()
    block = te.Linear(SIZE, SIZE, device="cuda", params_dtype=torch.bfloat16).train(training)
    recipe = te_recipe.DelayedScaling(amax_history_len=16)

    def forward(x):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return block(x)

    try:
        for _ in range(STEPS):
            x = torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16).requires_grad_()
            block.zero_grad()
            if not checkpointed:
                y = forward(x)
            elif inside:
                y = te.checkpoint(forward, x)
            else:
                with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                    y = te.checkpoint(block, x)
            y.float().square().sum().backward()
    except Exception as error:  # what it raises is the finding
        return f"{type(error).__name__}: {error}"
    return block.fp8_meta["scaling_fwd"].scale[0].item(), x.grad, block.weight.grad


def off(got, want):
    """Why two results are not the same, or an empty string."""
    if isinstance(got, str):
        return got
    if got[0] != want[0]:
        return f"scale {got[0]:.4g}, not {want[0]:.4g}"
    errors = [((g.float() - w.float()).norm() / w.float().norm()).item() for g, w in zip(got[1:], want[1:], strict=True)]
    return f"gradients off by {max(errors):.2g}" if max(errors) else ""


warnings.filterwarnings("ignore")
release = distribution("transformer-engine")
facts["version"] = release.version
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
        f"Without transformer-engine's compiled libraries ({str(error).splitlines()[0][:80]}): nox -s pack23 runs it in the lane te-cpu."
    )
    finish("UNTESTABLE", "no-device")
te_recipe = importlib.import_module("transformer_engine.common.recipe")
states = next(m for name in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{name}")))
manager = states.FP8GlobalStateManager
facts["file"] = states.__file__
compiled = hasattr(sys.modules["transformer_engine_torch"], "__file__")
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if compiled else "source"
print(f"transformer-engine {release.version}, torch {torch.__version__}, {facts['evidence']}")
plain, still = trained(False), trained(False, training=False)
state("control", "without checkpointing the scale is updated in training", not isinstance(plain, str) and plain[0] != 1)
state("control", "without checkpointing eval mode has gradients", not isinstance(still, str))
for name, got, want in (
    ("training", trained(True), plain),
    ("FP8 switched on inside the checkpointed function", trained(True, inside=True), plain),
    ("eval mode", trained(True, training=False), still),
):
    metrics[name] = why = off(got, want)
    if name == "training":
        state("trigger", f"{name}: not as without checkpointing" + (f" ({why})" if why else ""), why)
    else:
        state("trigger", f"{name}: {why or 'as without checkpointing'}", "Error" in why)
bad = [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]]
if bad:
    finish("CHANGED", bad[0])
if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger"):
    finish("REPRODUCED")
if any(metrics.values()):
    finish("CHANGED", "scale")
finish("ABSENT")
