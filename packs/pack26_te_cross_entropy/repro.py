# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "packaging", "torch==2.13.0", "transformer-engine==2.7.0", "triton==3.7.1"]
# ///
"""transformer-engine: parallel_cross_entropy is wrong for weighted tokens, ignored labels, bf16, and for logits or labels that are slices or transposed.

Six bugs of one function. Gradients of unreduced losses were divided by the tokens (right in 2.5), and multiplied by grad_output[0] (#2139, right in
2.8), which was then read as if it were contiguous where its stride is 0 (#2402, 2.11); a mean was divided by ignored tokens too (#2476, 2.12); a probability
was rounded to bf16 before the label's 1 was taken from it (#3193, 2.18); and rows were looked for where contiguous logits and labels have them: transposed
logits were read and written out of bounds (#2746, 2.14), slices as labels[:, 1:] are read in wrong places (right in 2.19).
The release's own autograd function and Triton kernels run, on a GPU, or without one on Triton's interpreter; the packages around them, which need a
compiled extension, are not imported. Exits with 10 (BUG_REPRODUCED: any of them), 0 (BUG_ABSENT) or 125 (neither).
"""

import importlib
import importlib.util
import inspect
import types
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.nn.functional as F

B, S, V, IGNORED, LIMIT = 3, 8, 50257, 4, 1e-5
LAYOUTS = "logits transposed", "logits[:, :-1]", "labels[:, 1:]"
device = "cuda" if torch.cuda.is_available() else "cpu"


def release():
    """CrossEntropyFunction, without the packages around it: they load a compiled extension that it does not use."""
    found = distribution("transformer-engine")
    FACTS["version"] = found.version
    if not found.locate_file("transformer_engine/pytorch/triton/cross_entropy.py").exists():
        print("This release has no parallel_cross_entropy.")
        finish("UNTESTABLE", "no-api")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    root = Path(importlib.util.find_spec("transformer_engine").origin).parent
    for name in ("", ".pytorch", ".pytorch.triton", ".common", ".common.triton"):
        module = types.ModuleType(f"transformer_engine{name}")
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module
    jit = sys.modules["transformer_engine.pytorch.jit"] = types.ModuleType("transformer_engine.pytorch.jit")
    jit.no_torch_dynamo = lambda *_, **__: lambda function: function  # all that is taken from it: nothing is compiled here
    function = importlib.import_module("transformer_engine.pytorch.cross_entropy").CrossEntropyFunction
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    FACTS.update(file=sys.modules[function.__module__].triton_cross_entropy.__file__, evidence=gpu)
    return function


def inputs(ignored=0, confident=False, sizes=(B, S, V), dtype=torch.float32):
    """Logits [B, S, V] and labels [B, S]; ``confident`` ones give each label a probability near 1."""
    torch.manual_seed(0)
    logits, labels = torch.randn(sizes), torch.randint(0, sizes[2], sizes[:2])
    logits.scatter_add_(2, labels[..., None], torch.full((*sizes[:2], 1), 20.0 * confident))
    if ignored:
        labels.view(-1)[:: labels.numel() // ignored] = -100
    return logits.to(device, dtype), labels.to(device)


def outcome(function, logits, labels, given, mean=False, layout="", smoothing=0.0, ignore=-100):
    """Loss, gradient, torch's own of both in fp64, and how many numbers are written out of bounds. ``given``: gradient of the loss."""
    exact = logits.double().requires_grad_()
    how = {"reduction": "mean" if mean else "none", "label_smoothing": smoothing, "ignore_index": ignore}
    right = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), **how)
    right.backward(given.double().reshape(right.shape))
    # Room around the logits for what is written out of bounds; it has to stay 0.
    b, s, v = logits.shape
    room = torch.zeros((b + 1) * logits.numel(), device=device, dtype=logits.dtype)
    mine = room[: logits.numel()].view(b, s, v)
    if "transposed" in layout:
        mine = room[: logits.numel()].view(s, b, v).transpose(0, 1)
    elif "logits[:, :-1]" in layout:
        mine = room[: b * (s + 1) * v].view(b, s + 1, v)[:, :-1]
    if "labels[:, 1:]" in layout:
        labels = torch.cat([labels[:, -1:], labels], 1)[:, 1:]
    mine.copy_(logits).requires_grad_()
    loss = function.apply(mine, labels, smoothing, mean, None, *[ignore] * (ignore != -100))
    loss.backward(given.reshape(loss.shape))  # a mean is of shape [1] from 2.12 on
    outside = (room.count_nonzero() - mine.count_nonzero()).item()
    return loss.detach().double().reshape(right.shape), mine.grad.double(), right.detach(), exact.grad, outside


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def main():
    function, ones, expanded = release(), torch.ones(B, S, device=device), torch.full((B * S + 1,), float("nan"), device=device)
    weights = torch.linspace(0.1, 1.9, B * S, device=device).view(B, S)
    expanded[0] = 1.0  # as sum() makes its gradient, of stride 0; what lies behind the one number must not matter
    for name, given, options in (
        ("mean, its gradient 2", torch.tensor(2.0, device=device), {"mean": True}),
        ("each token, all weights 1", ones, {}),
        ("each token, weighted", weights, {}),
        ("each token, gradient of stride 0", expanded[:1].expand(B, S), {}),
        (f"mean, {IGNORED} of {B * S} labels ignored", torch.tensor(2.0, device=device), {"mean": True}),
        (f"each token, {IGNORED} of {B * S} labels ignored", ones, {}),
        *((f"each token, {layout}", ones, {"layout": layout}) for layout in LAYOUTS),
    ):
        if "ignored" in name and "ignore_idx" not in inspect.signature(function.forward).parameters:
            continue  # not up to 2.3.0
        loss, grad, right, want, outside = outcome(function, *inputs(IGNORED * ("ignored" in name)), given, **options)
        role, error = "control" if name.startswith("mean, its") else "trigger", off(grad, want)
        check(role, f"{name}: loss", error=off(loss, right), limit=LIMIT)
        check(role, f"{name}: gradient", error=error, limit=LIMIT)
        if "layout" in options:
            check(role, f"{name}: {outside} numbers written out of bounds", not outside)
        elif role == "trigger" and not error <= LIMIT:
            # By what its gradients are wrong: NaN from behind the one number, or each token's by a factor of its own.
            ratio = (grad / want).flatten(0, 1).nanmedian(1).values.nan_to_num().view(B, S, 1)
            check(
                "signature", f"{name}: NaN, or a factor a token", not grad.isfinite().all() or off(grad, want * ratio) < LIMIT
            )
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no scalars in bf16
    _, grad, _, want, _ = outcome(function, *inputs(confident=True, dtype=half), ones)
    times = off(grad, want) / off(want.to(half).double(), want)
    check("trigger", f"{half}, labels of probability near 1: gradient, in roundings", error=times, limit=2)
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
    main()
