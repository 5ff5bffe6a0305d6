# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "numpy>=1.26", "onnx", "onnxscript", "packaging", "pydantic", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1"]
# ///
"""transformer-engine: te.checkpoint(use_reentrant=False) fails in the backward of a te.Linear in FP8 whose input needs no gradient.

Such is the input of a first layer: data, or the output of an embedding that is frozen. The first forward stores the weight in FP8 a second time, transposed, and the
recomputation does not, so that a saved tensor is looked for which is not there: IndexError: list index out of range. No report was found. The release's own code
runs; in the lane te-cpu quantization and GEMM are torch's. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
from importlib import import_module, metadata

import torch

ROWS, STEPS = 32, 3
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", type=int, default=64, metavar="N", help="features of the layers (default 64)")


def release():
    """transformer_engine.pytorch, its recipes and its FP8GlobalStateManager."""
    if int(FACTS.setdefault("version", metadata.version("transformer-engine")).split(".")[0]) < 2:
        finish("UNTESTABLE", "no-api")
    try:
        te = import_module("transformer_engine.pytorch")
    except (OSError, AssertionError, RuntimeError, StopIteration) as error:
        if "transformer_engine_torch" in sys.modules:
            raise
        print(f"No compiled transformer-engine ({type(error).__name__}: {error}): nox -s pack46 runs it without.")
        finish("UNTESTABLE", "no-device")
    state = next(m for name in ("quantization", "fp8") if (m := sys.modules.get(f"transformer_engine.pytorch.{name}")))
    if not torch.cuda.is_available() or not state.FP8GlobalStateManager.is_fp8_available()[0]:
        print("This needs a GPU with FP8 (from compute capability 8.9 on): nox -s pack46 runs it without.")
        finish("UNTESTABLE", "no-device")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    evidence = gpu if hasattr(sys.modules["transformer_engine_torch"], "__file__") else "source"
    FACTS.update(evidence=evidence, file=sys.modules["transformer_engine.pytorch.module.linear"].__file__)
    return te, import_module("transformer_engine.common.recipe"), state.FP8GlobalStateManager


def trained(size, checkpointed, fp8=True, wanted=False, layers=1, bias=True):
    """Outputs, and gradients of parameters and of inputs where they are ``wanted``, of each step; or the error that is raised."""
    torch.manual_seed(0)
    manager.reset()
    made = [te.Linear(size, size, bias=bias, device="cuda", params_dtype=torch.bfloat16) for _ in range(layers)]
    block, found, ran, recipe = torch.nn.Sequential(*made), [], [], recipes.DelayedScaling(amax_history_len=4)
    made[0].register_forward_pre_hook(lambda *_: ran.append(1))
    for _ in range(STEPS):
        x, gradient = torch.randn(2, ROWS, size, device="cuda", dtype=torch.bfloat16)
        x = x.clone().requires_grad_(wanted)
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            y = te.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        try:
            y.backward(gradient)
        except Exception as error:  # what it raises is the finding
            return error
        found += [y.detach(), *(p.grad.clone() for p in block.parameters()), *([x.grad] if wanted else [])]
        block.zero_grad()
    return found if len(ran) == STEPS * (1 + checkpointed) else RuntimeError(f"the block runs {len(ran)} times")


def main(size):
    for name, role, how in (
        ("FP8, an input that needs a gradient", "control", {"wanted": True}),
        ("no FP8", "control", {"fp8": False}),
        ("FP8", "trigger", {}),
        ("FP8, no bias", "trigger", {"bias": False}),
        ("FP8, two layers", "trigger", {"layers": 2}),
    ):
        want, got = trained(size, False, **how), trained(size, True, **how)
        check("control", f"{name}: is trained without te.checkpoint", isinstance(want, list) and all(t.any() for t in want))
        raised = f"{type(got).__name__}: {got}" if isinstance(got, Exception) else ""
        same = not raised and all(map(torch.equal, got, want))
        check(
            role, f"{name}: outputs and gradients are bitwise those without te.checkpoint{f' ({raised})' * bool(raised)}", same
        )
        FACTS["metrics"][name] = raised or ("right" if same else "wrong")
        if not same and role == "trigger":
            where = traceback.extract_tb(got.__traceback__)[-1].name if raised else ""
            check("signature", "the IndexError of a saved tensor", isinstance(got, IndexError) and where == "unpack_hook")
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
    main(parser.parse_args().size)
