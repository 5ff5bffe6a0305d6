# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: te.checkpoint around FP8 with DelayedScaling raises a KeyError, or never updates the scale.

Scales, outputs and gradients of a te.Linear should be those without te.checkpoint, however it is used: with FP8 switched on around it (2.1.0 leaves the scale
at 1), with FP8 switched on inside the checkpointed function (a KeyError up to 2.18, #3284, and a scale that stays 1 since), and in eval mode (a KeyError up
to 2.19, #3394). The release's own Linear, autocast, recipe and te.checkpoint run; in the lane te-cpu quantization and GEMM are torch's.
Exits with 10 (BUG_REPRODUCED: any of them), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import warnings
from importlib.metadata import distribution

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
SIZE, ROWS, STEPS = 32, 64, 3


def release():
    """transformer_engine.pytorch, its recipes and its FP8GlobalStateManager."""
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
        print(f"No compiled transformer-engine ({str(error).splitlines()[0][:60]}): nox -s pack23 runs it without.")
        finish("UNTESTABLE", "no-device")
    state = next(m for name in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{name}")))
    kernel = hasattr(sys.modules["transformer_engine_torch"], "__file__")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if kernel else "source"
    FACTS.update(evidence=gpu, file=state.__file__)
    return te, importlib.import_module("transformer_engine.common.recipe"), state.FP8GlobalStateManager


def trained(checkpointed, inside=False, training=True, **how):
    """Scale of the input, and after each of three steps the output, and gradients of input and weight; or what is raised."""
    torch.manual_seed(0)
    manager.reset()
    block = te.Linear(SIZE, SIZE, device="cuda", params_dtype=torch.bfloat16).train(training)
    recipe, found = recipes.DelayedScaling(amax_history_len=16), []

    def forward(x):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return block(x)

    try:
        for _ in range(STEPS):
            x = (1000 * torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16)).requires_grad_()  # e4m3 ends at 448
            block.zero_grad()
            if not checkpointed:
                y = forward(x)
            elif inside:
                y = te.checkpoint(forward, x, **how)
            else:
                with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                    y = te.checkpoint(block, x, **how)
            y.backward(torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16))
            found += [y.detach(), x.grad, block.weight.grad.clone()]
    except Exception as error:  # what it raises is the finding
        return f"{type(error).__name__}: {error}"
    return block.fp8_meta["scaling_fwd"].scale[0].item(), found


def main():
    plain, still = trained(False), trained(False, training=False)
    check("control", "without te.checkpoint the scale is updated in training", not isinstance(plain, str) and plain[0] != 1)
    check("control", "without te.checkpoint eval mode has gradients", not isinstance(still, str))
    outer = {"FP8 around it": {}, "FP8 inside": {"inside": True}, "eval mode": {"training": False}}
    for name, options in outer.items():
        for how in ({}, {"use_reentrant": False}):
            got, want = trained(True, **options, **how), still if "training" in options else plain
            if isinstance(got, str):
                why = got
            else:
                errors = [
                    ((g.float() - w.float()).norm() / w.float().norm()).item() for g, w in zip(got[1], want[1], strict=True)
                ]
                why = (
                    f"scale {got[0]:.3g}, not {want[0]:.3g}; off by {max(errors):.2g}"
                    if got[0] != want[0] or max(errors)
                    else ""
                )
            case = f"{name}{', use_reentrant=False' if how else ''}"
            FACTS["metrics"][case] = why or "right"
            check("trigger", f"{case}: bitwise as without te.checkpoint{why and f' ({why})'}", not why)
            if why:
                check(
                    "signature",
                    "a KeyError of the recomputation, or a scale of 1",
                    "pos_fwd_recompute'" in why or why.startswith("scale 1,"),
                )
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
    te, recipes, manager = release()
    main()
