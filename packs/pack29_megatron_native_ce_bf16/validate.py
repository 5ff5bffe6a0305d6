"""The deep check of a fix of pack29: the release's gradient but for its rounding, for bf16 logits the release's bit for bit.

Runs after repro.py on the patched side: labels at the ends of the vocabulary, gradients of every sign, and what the
backward makes in memory.
"""

import importlib
import sys
from pathlib import Path

import torch
from repro import FACTS, check, definition, error, finish, inputs, outcome, release
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def as_released():
    """The release's own function with all that it imports: what hides it on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = file.split("/megatron/core/")[0]
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(overlay).resolve()]
    name = "megatron.core.fusions.fused_cross_entropy"
    parent, patched = importlib.import_module("megatron.core.fusions"), sys.modules.pop(name)
    paths, parent.__path__ = parent.__path__, [p for p in parent.__path__ if not p.startswith(overlay)]
    parent.__path__ = [*parent.__path__, *(str(Path(entry, "megatron/core/fusions")) for entry in sys.path)]
    own, _ = release()
    assert FACTS["file"] != file
    parent.__path__, sys.modules[name], FACTS["file"] = paths, patched, file
    sys.path.insert(0, overlay)
    return own


class Bytes(TorchDispatchMode):
    """Bytes of what the operations give."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.made += out.nbytes if isinstance(out, torch.Tensor) else 0
        return out


def made_by_backward(function, logits, labels, gradient):
    loss = function((logits.clone().requires_grad_()) + 0, labels)
    with Bytes() as counted:
        loss.backward(gradient)
    return counted.made


def main():
    (fixed, _), released = release(), as_released()
    for name, dtype in DTYPES.items():
        logits, labels, gradient = inputs(dtype, 16, 3, 1001)
        labels[0], labels[1] = 0, 1000
        cases = {
            "ends of the vocabulary": (logits, labels, gradient),
            "gradients of both signs": (logits, labels, torch.randn_like(gradient)),
            "a gradient of zeros": (logits, labels, torch.zeros_like(gradient)),
            "expanded gradient": (logits, labels, torch.ones(1, 1, device=logits.device).expand_as(gradient)),
            "one token": (logits[:1, :1], labels[:1, :1], gradient[:1, :1]),
        }
        for what, given in cases.items():
            (loss, got), (same, want) = (outcome(function, *given) for function in (fixed, released))
            check("trigger", f"{name}, {what}: the release's losses, bit for bit", torch.equal(loss, same))
            rounded = torch.equal(got.bfloat16(), want.bfloat16()) if dtype == torch.float32 else None
            if dtype == torch.bfloat16:
                check("trigger", f"{name}, {what}: the release's gradient, bit for bit", torch.equal(got, want))
            elif rounded is not None:
                check("trigger", f"{name}, {what}: rounded to bf16 it is the release's, bit for bit", rounded)
            if given[0].numel() and given[2].any():
                right = outcome(definition, given[0].double(), *given[1:])[1]
                least = max(error(right.to(dtype), right), 1e-6)
                check("trigger", f"{name}, {what}: as near fp64 as {name} can be", error(got, right) <= 1.5 * least)
            check(
                "trigger",
                f"{name}, {what}: the gradient has the logits' dtype and shape",
                (got.dtype, got.shape) == (dtype, given[0].shape),
            )
        if dtype != torch.float32:
            was, now = (made_by_backward(function, logits, labels, gradient) for function in (released, fixed))
            check("trigger", f"{name}: the backward makes {now:,} bytes, {was:,} as released", now <= was)
    logits, labels, gradient = inputs(torch.float32, 16, 3, 1001)
    right = outcome(definition, logits.double(), labels, gradient)[1]
    off = error(outcome(released, logits, labels, gradient)[1], right)
    check(
        "control", f"as released the gradient of fp32 logits is {off:.1e} off: what is compared with is the release", off > 1e-4
    )
    finish()


if __name__ == "__main__":
    main()
