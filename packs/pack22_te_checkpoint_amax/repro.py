# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: te.checkpoint updates the amax histories of DelayedScaling again at each recomputation: outliers are forgotten early (#3213).

A step updates all histories and scales twice: the forward's when its autocast ends, the backward's in its first module. A recomputation leaves an autocast
and has a first module too, and does both again: with amax_history_len=16 an outlier is remembered for 8 steps, or 3. The CUDA kernel that updates by default
leaves a history alone whose newest amax is 0, as it is then; the update in Python, for a recipe whose amax_compute_algo or scaling_factor_compute_algo is a
function, does not, and neither helps where one te.checkpoint is in another. The release's own Linear, autocast, recipe and te.checkpoint run; in the lane
te-cpu without the kernel. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import warnings
from importlib.metadata import distribution

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
SIZE, ROWS, BLOCKS, LENGTH = 32, 64, 4, 16
OUTLIER, LARGEST = {"fwd": 1000.0, "bwd": 1e6}, {"fwd": 448, "bwd": 57344}  # the largest of e4m3, and of e5m2
largest = lambda amaxes: amaxes.amax(dim=0)  # noqa: E731, what "max" does, as a function


def release():
    """transformer_engine.pytorch, its recipes, its FP8GlobalStateManager; and whether histories are updated by the CUDA kernel."""
    warnings.filterwarnings("ignore")
    found = distribution("transformer-engine")
    FACTS["version"] = found.version
    if found.version < "2":
        print("This release has other modules for FP8: transformer-engine 2 and newer are looked at.")
        finish("UNTESTABLE", "no-api")
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except (OSError, AssertionError, RuntimeError, StopIteration) as error:
        if "transformer_engine_torch" in sys.modules:
            raise
        print(f"No compiled transformer-engine ({str(error).splitlines()[0][:60]}): nox -s pack22 runs it without.")
        finish("UNTESTABLE", "no-device")
    state = next(m for name in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{name}")))
    kernel = hasattr(sys.modules["transformer_engine_torch"], "__file__")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if kernel else "source"
    FACTS.update(evidence=gpu, file=state.__file__)
    return te, importlib.import_module("transformer_engine.common.recipe"), state.FP8GlobalStateManager, kernel


def blocks(count=BLOCKS):
    torch.manual_seed(0)
    manager.reset()
    return torch.nn.ModuleList([te.Linear(SIZE, SIZE, device="cuda", params_dtype=torch.bfloat16) for _ in range(count)])


def data(outlier=None):
    """Input and gradient of the output, both [ROWS, SIZE] bf16; one number of ``outlier``, "fwd" or "bwd", is large."""
    pair = {way: torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16) for way in OUTLIER}
    if outlier:
        pair[outlier][0, 0] = OUTLIER[outlier]
    return pair.values()


def forward(parts, x, checkpointed=(), how="reentrant"):
    """``how``: reentrant, "not reentrant", or nested, a checkpoint in a checkpoint."""
    for i, part in enumerate(parts):
        if i not in checkpointed:
            x = part(x)
        elif how == "nested":
            x = te.checkpoint(lambda x, part=part: te.checkpoint(part, x), x)
        else:
            x = te.checkpoint(part, x, use_reentrant=how == "reentrant")
    return x


def step(parts, recipe, x, gradient, *how):
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = forward(parts, x.detach().requires_grad_(), *how)
    parts[0].weight.grad = None
    y.backward(gradient)
    return parts[0].weight.grad


def history(role, way, algorithm, checkpointed=(), how="reentrant", length=LENGTH):
    """For how many steps after an outlier in the input ("fwd") or the output's gradient ("bwd") the scale stays that of the outlier."""
    parts, steps = blocks(), 0
    recipe = recipes.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
    for outlier in (None, way):
        step(parts, recipe, *data(outlier), checkpointed, how)
    state = parts[0 if way == "fwd" else -1].fp8_meta[f"scaling_{way}"]
    scale = state.scale[0].item()
    while state.scale[0].item() == scale and steps <= length:
        step(parts, recipe, *data(), checkpointed, how)
        steps += 1
    where = f"{how} over {', '.join(map(str, checkpointed))} of {BLOCKS} blocks" if checkpointed else "no checkpoint"
    name = f"{way}, {algorithm if isinstance(algorithm, str) else 'function'} of {length}, {where}"
    FACTS["metrics"].setdefault("remembered", {})[name] = steps
    check(role, f"{name}: remembered for {steps} steps{' or more' * (steps > length)}", steps == length)
    if steps != length:
        check("signature", "the scale was the outlier's", abs(scale * OUTLIER[way] / LARGEST[way] - 1) < 0.01)


def recomputed(how, runs):
    """A checkpointed block runs as often as it has to, and a reentrant checkpoint's first time without gradients: ``runs``."""
    parts, ran = blocks(1), []
    parts[0].register_forward_pre_hook(lambda *_: ran.append(torch.is_grad_enabled()))
    step(parts, recipes.DelayedScaling(), *data(), (0,), how)
    check("control", f"{how}: the block runs {len(ran)} times in a step, of {len(runs)}", ran == runs)


def main():
    every = tuple(range(BLOCKS))
    for how, runs in (("reentrant", [False, True]), ("not reentrant", [True, True]), ("nested", [False, False, True])):
        recomputed(how, runs)
    for way in OUTLIER:
        history("control", way, largest)
        for how in ((0,), "reentrant"), ((1,), "reentrant"), (every, "reentrant"), ((1,), "not reentrant"), ((0,), "nested"):
            history("trigger", way, largest, *how)
            if kernel:
                history("trigger" if "nested" in how else "control", way, "max", *how)
    history("trigger", "fwd", largest, (0,), length=1024)  # the length by default
    pair = list(data())
    same = torch.equal(*(step(blocks(), recipes.DelayedScaling(), *pair, which) for which in ((), every)))
    check("control", "the gradient of a first step is bitwise the same with and without checkpointing", same)
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and error <= limit
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {
        role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ("control", "trigger", "signature")
    }
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


sys.excepthook = unexpected
# --- end of report/1 ---

if __name__ == "__main__":
    parser.parse_args()
    te, recipes, manager, kernel = release()
    main()
