# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "packaging", "torch==2.13.0", "transformer-engine==2.7.0", "triton==3.7.1"]
# ///
"""transformer-engine: parallel_cross_entropy gives wrong gradients for weighted tokens, and for logits, gradients and labels of other layouts.

Five bugs of one function: gradients of unreduced losses were divided by the tokens (right in 2.5), and multiplied by grad_output[0] (#2139, right in
2.8), which was then read as if it were contiguous where its stride is 0 (#2402, right in 2.11); a mean divided by all tokens, ignored ones too
(#2476, right in 2.12); and rows of logits were taken to be stride(-2) apart, so that transposed logits were read and written out of bounds.

The release's own autograd function and Triton kernels run, on a GPU, or without one on Triton's interpreter. Of the package around them, which needs a
compiled extension, nothing is imported. Exits 10 (BUG_REPRODUCED: any of them), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
B, S, V, IGNORED, LIMIT = 3, 8, 200, 4, 1e-5
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "comparisons": [], "metrics": {"errors": {}}}
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def compare(role, name, got, want):
    error = ((got.double() - want).norm() / want.norm()).item()
    error = error if error < float("inf") else None  # JSON has no inf and no nan
    facts["comparisons"].append({"role": role, "name": name, "error": error, "limit": LIMIT})
    metrics["errors"][name] = error
    print(f"{role:<8} {name:<84} {error if error is None else format(error, '.1e')}")
    return error


def function_of():
    """CrossEntropyFunction, without the packages around it: they load a compiled extension that it does not use."""
    root = Path(importlib.util.find_spec("transformer_engine").origin).parent
    for name in ("", ".pytorch", ".pytorch.triton", ".common", ".common.triton"):
        module = types.ModuleType(f"transformer_engine{name}")
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module
    jit = sys.modules["transformer_engine.pytorch.jit"] = types.ModuleType("transformer_engine.pytorch.jit")
    jit.no_torch_dynamo = lambda *_, **__: lambda function: function  # all that is taken from it: nothing is compiled here
    return importlib.import_module("transformer_engine.pytorch.cross_entropy").CrossEntropyFunction


def case(role, name, *, mean=False, ignored=0, weights=None, transposed=False):
    """Loss and gradient of the logits [B, S, V] in fp32 against torch in fp64."""
    torch.manual_seed(0)
    logits = torch.randn(B, S, V, device=device)
    labels = torch.randint(0, V, (B, S), device=device)
    if ignored:
        labels.view(-1)[:: B * S // ignored] = -100
    exact = logits.double().requires_grad_()
    right = F.cross_entropy(exact.view(-1, V), labels.view(-1), reduction="mean" if mean else "none", ignore_index=-100)
    given = torch.ones((), device=device) if mean else torch.ones(B, S, device=device)
    if weights == "random":
        given = torch.rand(B, S, device=device)
    elif weights == "expanded":  # as sum() makes it; what lies behind the one number must not matter
        given = torch.tensor([1.0] + [float("nan")] * B * S, device=device)[:1].expand(B, S)
    right.backward(given.double().reshape(right.shape))
    # Room behind the logits for what is written out of bounds; it has to stay as it is.
    room = torch.zeros((B + 1) * B * S * V, device=device)
    mine = room[: B * S * V]
    mine = mine.view(S, B, V).transpose(0, 1) if transposed else mine.view(B, S, V)
    mine.copy_(logits)
    mine.requires_grad_()
    loss = function.apply(mine, labels, 0.0, mean, None)
    loss.backward(given.reshape(loss.shape))  # a mean is of shape [1] from 2.12 on
    compare(role, f"{name}: loss", loss.detach().reshape(right.shape), right.detach())
    compare(role, f"{name}: gradient", mine.grad, exact.grad)
    if transposed:
        outside = room[B * S * V :].count_nonzero().item()
        facts["comparisons"].append({"role": role, "name": f"{name}: written out of bounds", "holds": outside > 0})
        print(f"{role:<8} {name + ': numbers written out of bounds':<84} {outside}")
    if role == "control":
        metrics["writes into the logits"] = not torch.equal(mine.detach(), logits)
        metrics["shape of a mean"] = list(loss.shape)


release = distribution("transformer-engine")
facts["version"] = release.version
if not Path(release.locate_file("transformer_engine/pytorch/triton/cross_entropy.py")).exists():
    print("This release has no parallel_cross_entropy.")
    finish("UNTESTABLE", "no-api")
function = function_of()
facts["file"] = sys.modules[function.__module__].triton_cross_entropy.__file__
print(f"transformer-engine {release.version}, torch {torch.__version__}, {facts['evidence']}, B={B} S={S} V={V}")
case("control", "mean, no label ignored", mean=True)
case("trigger", "each token, all weights 1")
case("trigger", "each token, weighted", weights="random")
case("trigger", "each token, gradient of stride 0", weights="expanded")
if "ignore_idx" in inspect.signature(function.forward).parameters:  # not up to 2.3.0
    case("trigger", f"each token, {IGNORED} of {B * S} labels ignored", ignored=IGNORED)
    case("trigger", f"mean, {IGNORED} of {B * S} labels ignored", mean=True, ignored=IGNORED)
case("trigger", "each token, logits transposed", transposed=True)


def wrong(comparison):
    return comparison.get("holds") or comparison.get("error", 0) is None or comparison.get("error", 0) > LIMIT


bad = [c["name"] for c in facts["comparisons"] if c["role"] == "control" and wrong(c)]
if bad:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["role"] == "trigger" and wrong(c) for c in facts["comparisons"]) else "ABSENT")
