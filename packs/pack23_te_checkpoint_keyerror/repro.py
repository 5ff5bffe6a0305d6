# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: te.checkpoint around FP8 with DelayedScaling raises a KeyError, or never updates the scale.

Scales, outputs and gradients of a te.Linear should be those without te.checkpoint, however it is used: with FP8 switched on around it (2.1.0 leaves the scale at 1), with
FP8 switched on inside the checkpointed function (a KeyError up to 2.18, #3284, and a scale that stays 1 since), and in eval mode (a KeyError up to 2.19, #3394). The
release's own code runs; in the lane te-cpu quantization and GEMM are torch's. Exits with 10 (BUG_REPRODUCED: any of them), 0 (BUG_ABSENT) or 125 (neither).
"""

from importlib import import_module, metadata

import torch

SIZE, ROWS, STEPS, bf16 = 32, 64, 3, {"device": "cuda", "dtype": torch.bfloat16}


def release():
    """transformer_engine.pytorch, its recipes and its FP8GlobalStateManager."""
    if int(FACTS.setdefault("version", metadata.version("transformer-engine")).split(".")[0]) < 2:
        finish("UNTESTABLE", "no-api")
    try:
        te = import_module("transformer_engine.pytorch")
    except (OSError, AssertionError, RuntimeError, StopIteration) as error:
        if "transformer_engine_torch" in sys.modules:
            raise
        print(f"No compiled transformer-engine ({type(error).__name__}): nox -s pack23 runs it without.")
        finish("UNTESTABLE", "no-device")
    state = next(m for name in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{name}")))
    if not torch.cuda.is_available() or not state.FP8GlobalStateManager.is_fp8_available()[0]:
        print("This needs a GPU with FP8 (from compute capability 8.9 on): nox -s pack23 runs it without.")
        finish("UNTESTABLE", "no-device")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    FACTS.update(
        evidence=gpu if hasattr(sys.modules["transformer_engine_torch"], "__file__") else "source", file=state.__file__
    )
    return te, import_module("transformer_engine.common.recipe"), state.FP8GlobalStateManager


def trained(checkpointed, inside=False, training=True, microbatches=1, **how):
    """Scale of the input, and after each of three steps the outputs, and gradients of inputs and weight; or what is raised."""
    torch.manual_seed(0)
    manager.reset()
    block = te.Linear(SIZE, SIZE, device="cuda", params_dtype=torch.bfloat16).train(training)
    recipe, found, ran = recipes.DelayedScaling(amax_history_len=16), [], []
    block.register_forward_pre_hook(lambda *_: ran.append(1))

    def forward(x):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return te.checkpoint(block, x, **how) if checkpointed and not inside else block(x)

    try:
        for _ in range(STEPS):
            xs = [1000 * torch.randn(ROWS, SIZE, **bf16) for _ in range(microbatches)]  # e4m3 ends at 448
            ys = [te.checkpoint(forward, x.requires_grad_(), **how) if inside else forward(x.requires_grad_()) for x in xs]
            for y in ys:
                y.backward(torch.randn(ROWS, SIZE, **bf16))
            found += [*(y.detach() for y in ys), *(x.grad for x in xs), block.weight.grad.clone()]
            block.zero_grad()
    except Exception as error:  # what it raises is the finding
        return f"{type(error).__name__}: {error}"
    times, name = STEPS * microbatches * (1 + checkpointed), f"{'' if checkpointed else 'not '}checkpointed"
    check("control", f"{name}, the block runs {len(ran)} times, of {times}", len(ran) == times)
    scale = (kept := block.fp8_meta["scaling_fwd"].scale[0]).item()
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        block(5 * xs[0])
    check("control", f"{name}, an evaluation changes no scale", kept.item() == scale)
    return scale, found


def wrong(got, want):
    """What is not bitwise as without te.checkpoint: the error that is raised, or the scale and how far results are off."""
    if isinstance(got, str) or (got[0] == want[0] and all(map(torch.equal, got[1], want[1]))):
        return got if isinstance(got, str) else ""
    off = torch.stack([(g.float() - w.float()).norm() / w.float().norm() for g, w in zip(got[1], want[1], strict=True)]).max()
    return f"scale {got[0]:.3g}, not {want[0]:.3g}; off by {off:.2g}"


def main():
    plain, still, two = trained(False), trained(False, training=False), trained(False, microbatches=2)
    check("control", "without te.checkpoint scales change in training", str not in map(type, (plain, still)) and plain[0] != 1)
    for name, want, options in (
        ("FP8 around it", plain, {}),
        ("FP8 inside", plain, {"inside": True}),
        ("FP8 inside, two microbatches", two, {"inside": True, "microbatches": 2}),
        ("eval mode", still, {"training": False}),
    ):
        for case, how in ((name, {}), (f"{name}, use_reentrant=False", {"use_reentrant": False})):
            FACTS["metrics"][case] = (why := wrong(trained(True, **options, **how), want)) or "right"
            check("trigger", f"{case}: bitwise as without te.checkpoint{why and f' ({why})'}", not why)
            if why:
                check("signature", "a KeyError, or a scale of 1", "pos_fwd_recompute'" in why or why.startswith("scale 1,"))
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
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


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    te, recipes, manager = release()
    main()
