# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: te.checkpoint updates the amax histories of DelayedScaling again at each recomputation: outliers are forgotten early (#3213).

A step updates all histories and scales twice: the forward's when its autocast ends, the backward's in its first module. A recomputation does both again: with
amax_history_len=16 an outlier is remembered for 8 steps, or 3. The CUDA kernel that updates by default leaves a history alone whose newest amax is 0, as it is then; the
update in Python, for an algorithm that is a function, does not, and neither helps in nested checkpoints. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

from functools import partial
from importlib import import_module, metadata

import torch

SIZE, ROWS, OUTLIER, LARGEST = 32, 64, {"fwd": 1000.0, "bwd": 1e6}, {"fwd": 448, "bwd": 57344}  # LARGEST of e4m3, and of e5m2
largest = lambda amaxes: amaxes.amax(dim=0)  # noqa: E731, what "max" does, as a function


def release():
    """transformer_engine.pytorch, its recipes, its FP8GlobalStateManager; and whether histories are updated by the CUDA kernel."""
    if int(FACTS.setdefault("version", metadata.version("transformer-engine")).split(".")[0]) < 2:
        finish("UNTESTABLE", "no-api")
    try:
        te = import_module("transformer_engine.pytorch")
    except (OSError, AssertionError, RuntimeError, StopIteration) as error:
        if "transformer_engine_torch" in sys.modules:
            raise
        print(f"No compiled transformer-engine ({type(error).__name__}): nox -s pack22 runs it without.")
        finish("UNTESTABLE", "no-device")
    state = next(m for n in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{n}")))
    if not torch.cuda.is_available() or not state.FP8GlobalStateManager.is_fp8_available()[0]:
        print("This needs a GPU with FP8 (from compute capability 8.9 on): nox -s pack22 runs it without.")
        finish("UNTESTABLE", "no-device")
    kernel = hasattr(sys.modules["transformer_engine_torch"], "__file__")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if kernel else "source"
    FACTS.update(evidence=gpu, file=state.__file__)
    return te, import_module("transformer_engine.common.recipe"), state.FP8GlobalStateManager, kernel


def blocks(count=4):
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
    """``how``: reentrant, "not reentrant", nested, a checkpoint in a checkpoint, or three deep."""
    for i, part in enumerate(parts):
        for _ in range((i in checkpointed) * {"nested": 2, "three deep": 3}.get(how, 1)):
            part = partial(te.checkpoint, part, use_reentrant=how != "not reentrant")
        x = part(x)
    return x


def history(role, way, *how, algorithm=largest, length=16):
    """For how many steps after an outlier in the input ("fwd") or the output's gradient ("bwd") the scale stays that of the outlier."""
    (parts, scales, ran), want = (blocks(), [], []), 1 + bool(how) + ("nested" in how)
    parts[how[0][0] if how else 0].register_forward_pre_hook(lambda *_: ran.append(1))
    recipe = recipes.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
    for outlier in (None, way, *[None] * length):
        x, gradient = data(outlier)
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = forward(parts, x.requires_grad_(), *how)
        y.backward(gradient)
        scales.append(parts[0 if way == "fwd" else -1].fp8_meta[f"scaling_{way}"].scale[0].item())
    steps = [scale == scales[1] for scale in (*scales[1:], None)].index(False)
    where = f"{how[1]} over {', '.join(map(str, how[0]))} of {len(parts)} blocks" if how else "no checkpoint"
    name = f"{way}, {'function' if algorithm is largest else algorithm} of {length}, {where}"
    FACTS["metrics"].setdefault("remembered", {})[name] = steps
    check("control", f"{name}: a block runs {len(ran)} times, of {want * len(scales)}", len(ran) == want * len(scales))
    right, more = abs(scales[1] * OUTLIER[way] / LARGEST[way] - 1) < 0.01, " or more" * (steps > length)
    check(role, f"{name}: remembered for {steps} steps{more}, scale {scales[1]:.3g}", right and steps == length)
    if not right or steps != length:
        check("signature", "the scale was the outlier's, and is not for long enough", right and steps < length)


def main():
    for way in OUTLIER:
        history("control", way)
        for how in ((0,), "reentrant"), ((1,), "reentrant"), (range(4), "reentrant"), ((1,), "not reentrant"), ((0,), "nested"):
            for algorithm in (largest, "max")[: 1 + kernel]:
                history("trigger" if algorithm is largest or "nested" in how else "control", way, *how, algorithm=algorithm)
    history("trigger", "fwd", (0,), "reentrant", length=1024)  # the length by default
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
    te, recipes, manager, kernel = release()
    main()
