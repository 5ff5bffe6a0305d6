# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "packaging", "torch==2.13.0", "transformer-engine==2.7.0", "triton==3.7.1"]
# ///
"""transformer-engine: parallel_cross_entropy is wrong for weighted tokens, ignored labels, bf16, and for logits or labels that are slices or transposed.

Six bugs: gradients of unreduced losses were divided by the tokens (right in 2.5) and multiplied by grad_output[0] (#2139, 2.8), which was then read as contiguous
where its stride is 0 (#2402, 2.11); a mean was divided by ignored tokens too (#2476, 2.12); a probability was rounded to bf16 before the label's 1 was taken from it
(#3193, 2.18); transposed logits were read and written out of bounds (#2746, 2.14), and slices as labels[:, 1:] are read in wrong places (right in 2.19).
The release's function and Triton kernels run, without a GPU interpreted. Exits with 10 (BUG_REPRODUCED: any of them), 0 (BUG_ABSENT) or 125 (neither).
"""

from importlib import import_module, metadata, util

import torch

B, S, V, IGNORED, LIMIT, LAYOUTS = 3, 8, 50257, 4, 1e-5, ("logits transposed", "logits[:, :-1]", "labels[:, 1:]")
device = "cuda" if torch.cuda.is_available() else "cpu"
off = lambda got, want: ((got - want).norm() / want.norm()).item()  # noqa: E731


def release():
    """CrossEntropyFunction, without the packages around it: they load a compiled extension that it does not use."""
    FACTS["version"], found = metadata.version("transformer-engine"), util.find_spec("transformer_engine")
    os.environ["TRITON_INTERPRET"] = str(int(device == "cpu"))
    for name in ("", ".pytorch", ".pytorch.triton", ".common", ".common.triton", ".pytorch.jit"):
        module = sys.modules[f"transformer_engine{name}"] = type(sys)(f"transformer_engine{name}")
        module.__path__ = [root + name.replace(".", "/") for root in (found.submodule_search_locations if found else ())]
    if not util.find_spec("transformer_engine.pytorch.triton.cross_entropy"):
        print("This release has no cross entropy of its own.")
        finish("UNTESTABLE", "no-api")
    module.no_torch_dynamo = lambda *_, **__: lambda function: function  # all that is taken of jit: nothing is compiled here
    function = import_module("transformer_engine.pytorch.cross_entropy").CrossEntropyFunction
    FACTS["file"] = sys.modules[function.__module__].triton_cross_entropy.__file__
    FACTS["evidence"] = "interpreter" if device == "cpu" else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    return function


def inputs(ignored=0, confident=False, sizes=(B, S, V), dtype=torch.float32):
    """Logits [B, S, V] and labels [B, S]; ``confident`` ones give each label a probability near 1."""
    torch.manual_seed(0)
    logits, labels = torch.randn(sizes), torch.randint(0, sizes[2], sizes[:2])
    logits.scatter_add_(2, labels[..., None], torch.full((*sizes[:2], 1), 20.0 * confident))
    labels.view(-1)[torch.arange(ignored) * labels.numel() // max(ignored, 1)] = -100
    return logits.to(device, dtype), labels.to(device)


def outcome(function, logits, labels, given, mean=False, layout="", smoothing=0.0, ignore=-100):
    """Loss, gradient, torch's own of both in fp64, how many numbers are written out of bounds, and the loss of rows and labels read as if contiguous."""
    exact, (b, s, v) = logits.double().requires_grad_(), logits.shape
    how = {"reduction": "mean" if mean else "none", "label_smoothing": smoothing, "ignore_index": ignore}
    right = torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), **how)
    right.backward(given.double().reshape(right.shape))
    room = torch.zeros((b + 1) * logits.numel(), device=device, dtype=logits.dtype)  # what is not of the logits has to stay 0
    step, rows = 1 + ("::2" in layout), s + ("logits[:, :-1]" in layout)
    mine = room.as_strided((b, s, v), (v, b * v, 1) if "logits transposed" in layout else (step * rows * v, step * v, step))
    labels = torch.cat([labels[:, -1:], labels], 1)[:, 1:] if "labels[:, 1:]" in layout else labels
    mine.copy_(logits).requires_grad_()
    flat = room.as_strided((b * s, v), (mine.stride(-2), 1)).double(), labels.as_strided((b * s,), (1,))
    misread = torch.nn.functional.cross_entropy(*flat, reduction="none")
    loss = function.apply(mine, labels, smoothing, mean, None, *[ignore] * (ignore != -100))
    loss.backward(given.reshape(loss.shape))  # a mean is of shape [1] from 2.12 on
    outside = (room.count_nonzero() - mine.count_nonzero()).item()
    return loss.detach().double().reshape(right.shape), mine.grad.double(), right.detach(), exact.grad, outside, misread


def main():
    names, two = (function := release()).forward.__code__.co_varnames, torch.tensor(2.0, device=device)
    for name, given, options in (
        ("mean, its gradient 1", torch.ones((), device=device), {"mean": True}),
        ("each token, all weights 1", torch.ones(B, S, device=device), {}),
        ("each token, weighted", torch.linspace(0.1, 1.9, B * S, device=device).view(B, S), {}),
        ("each token, gradient of stride 0", torch.tensor([1.0, *[math.nan] * B * S], device=device)[:1].expand(B, S), {}),
        *[(f"mean, {IGNORED} of {B * S} labels ignored", two, {"mean": True})] * ("ignore_idx" in names),  # from 2.4.0
        *((f"each token, {layout}", torch.ones(B, S, device=device), {"layout": layout}) for layout in LAYOUTS),
    ):
        loss, grad, right, want, outside, misread = outcome(function, *inputs(IGNORED * ("ignored" in name)), given, **options)
        role, error = "control" if name.startswith("mean, its") else "trigger", off(grad, want)
        check(role, f"{name}: loss", error=off(loss, right), limit=LIMIT)
        check(role, f"{name}: gradient", error=error, limit=LIMIT)
        check(role, f"{name}: {outside} numbers written out of bounds", not outside)
        if "layout" in options and (outside or not (off(loss, right) <= LIMIT and error <= LIMIT)):
            check("signature", f"{name}: read as if contiguous", error=off(loss, misread), limit=LIMIT)
        elif role == "trigger" and not error <= LIMIT:  # NaN from behind the one number, or each token's by a factor of its own
            ratio = (grad / want).flatten(0, 1).nanmedian(1).values.nan_to_num().view(B, S, 1)
            behind = "stride 0" in name and not grad.isfinite().all()
            check("signature", f"{name}: NaN from behind it, or a factor a token", behind or off(grad, want * ratio) < LIMIT)
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no scalars in bf16
    _, grad, _, want, *_ = outcome(function, *(given := inputs(confident=True, dtype=half)), two, mean=True)
    rounded, at = off(want.to(half).double(), want), (2, given[1][..., None])
    check("trigger", f"{half}, labels of probability near 1: gradient, in roundings", error=off(grad, want) / rounded, limit=2)
    if not off(grad, want) <= 2 * rounded:
        others = off(grad.scatter(*at, want.gather(*at)), want) / rounded
        check("signature", f"{half}: all but the label's number, in roundings", error=others, limit=2)
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
    main()
