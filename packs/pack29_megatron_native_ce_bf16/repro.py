# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: the fused cross entropy ("native") rounds the gradient of fp32 and fp16 logits to bf16.

fused_vocab_parallel_cross_entropy computes the gradient in fp32 and ends with grad_input.to(torch.bfloat16), whatever the logits are. Autograd
casts that back, so nothing is said. The unfused cross entropy beside it gives the right one. Runs on a GPU, or in the pack's lane without one.
Exits with 10 (BUG_REPRODUCED: the gradient has 8 bits), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import warnings
from importlib import import_module, metadata, util
from pathlib import Path

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
S, B, V = 128, 4, 32000
device = "cuda" if torch.cuda.is_available() else "cpu"


def release():
    """The fused cross entropy and the unfused one, of a tensor-parallel group of one rank: functions of logits and labels."""
    warnings.filterwarnings("ignore")
    FACTS["version"], core = metadata.version("megatron-core"), util.find_spec("megatron.core")
    if core is None or not Path(core.origin).with_name("fusions").joinpath("fused_cross_entropy.py").exists():
        finish("UNTESTABLE", "no-api")
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        print("megatron-core asks for the current CUDA device, and torch sees none; nox -s pack29 answers in its place.")
        finish("UNTESTABLE", "no-device")
    names = "fusions.fused_cross_entropy", "tensor_parallel", "parallel_state"
    fusion, tensor_parallel, parallel_state = (import_module(f"megatron.core.{name}") for name in names)
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=fusion.__file__, evidence=gpu)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        sys.excepthook = unexpected  # torch's own, set there, would swallow the traceback
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    fused, more = fusion.fused_vocab_parallel_cross_entropy, []
    if "tp_group" in inspect.signature(fused).parameters:
        more = [torch.distributed.group.WORLD]
    return lambda *given: fused(*given, *more), tensor_parallel.vocab_parallel_cross_entropy


def inputs(dtype, S=S, B=B, V=V):
    """Logits [S, B, V], labels [S, B], and the gradient of the losses [S, B] fp32, of the size that loss scaling gives."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(S, B, V, device=device)).to(dtype)
    return logits, torch.randint(0, V, (S, B), device=device), 1024 * torch.rand(S, B, device=device)


def outcome(function, logits, labels, gradient):
    """The losses [S, B], and the gradient of the logits [S, B, V]."""
    leaf = logits.clone().requires_grad_()  # fp32 logits are changed in place
    loss = function(leaf + 0, labels)
    loss.backward(gradient.to(loss.dtype))
    return loss.detach(), leaf.grad


def definition(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def main():
    fused, unfused = release()
    for dtype, name in ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        given = inputs(dtype)
        right, gradient = outcome(definition, given[0].double(), *given[1:])
        least = error(gradient.to(dtype), gradient)  # of any gradient in this dtype
        check("control", f"{name}: the losses against fp64", error=error(outcome(fused, *given)[0], right), limit=1e-5)
        off, other = (error(outcome(function, *given)[1], gradient) for function in (fused, unfused))
        FACTS["metrics"][name] = {"fused": off, "unfused": other, "least": least}
        if dtype == torch.bfloat16:
            check("control", "bf16: the fused gradient is as near as bf16 can be", off <= 1.5 * least)
            continue
        check("control", f"{name}: the unfused gradient is as near as {name} can be", other <= max(1.5 * least, 1e-6))
        if dtype == torch.float16:  # 8 bits in place of 11: too near each other for a limit with a margin
            check("trigger", "fp16: the fused gradient is as near as fp16 can be", off <= 1.5 * least)
        else:
            check("trigger", "fp32: the fused gradient against fp64", error=off, limit=1e-5)
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
    parser.parse_args()
    main()
