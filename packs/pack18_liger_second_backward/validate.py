"""The deep check of a fix of pack18: any sequence of scales, all reductions, biases and dtypes; gradients that were handed out stay what they were.

Runs after repro.py on the patched side. A single backward has to stay what the release gives, bit for bit, and to take no more memory. A refusal by
autograd is as good as a right gradient, as in repro.py, but not of all.
"""

import importlib.util
import inspect
import itertools
from importlib.metadata import distribution

import torch
from repro import applied, check, device, error, finish, release
from torch.utils._python_dispatch import TorchDispatchMode

BT, H, V = 5, 8, 32
HALF = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no scalars in bf16
SCALES = (0.5, 0.5), (0.5, 1.0), (1.0, 0.5), (0.0, 2.0), (-3.0, 0.5, 1.0), (1.0, 1.0)


class Made(TorchDispatchMode):
    """Counts tensors that are made, views not among them."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += not op.is_view
        return op(*args, **(kwargs or {}))


def as_released(module):
    """The release's own module, from the file that the patched one hides."""
    file = distribution("liger-kernel").locate_file(module.__name__.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(found := importlib.util.module_from_spec(spec))
    return found


def graph(function, tensors, y, **given):
    """The loss, and the leaves that it is a function of."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if "_input" in inspect.signature(function.forward).parameters and "LigerCross" in function.__name__:
        return applied(function, _input=leaves[0] * 1, target=y, **given), leaves
    names = dict.fromkeys(("weight", "linear"), leaves[1]) | ({"bias": leaves[2]} if len(leaves) > 2 else {})
    return applied(function, _input=leaves[0], target=y, **names, **given), leaves


def judge(name, got, want, limit):
    refused = isinstance(got, str) and "inplace operation" in got
    check(
        "trigger", name + (": refused" if refused else ""), refused or (not isinstance(got, str) and error(got, want) <= limit)
    )


def after(loss, leaves, scales):
    """Gradients after a backward of the loss times each of ``scales``, or the error."""
    try:
        for scale in scales:
            (loss * scale).sum().backward(retain_graph=True)
    except RuntimeError as raised:
        return str(raised)
    return [leaf.grad for leaf in leaves]


def main():
    torch.manual_seed(1)
    logits, x, w, b = (t.to(device) for t in (torch.randn(BT, V), torch.randn(BT, H), torch.randn(V, H), torch.randn(V)))
    y = torch.randint(0, V, (BT,)).to(device)
    y[2] = -100
    ce, flce = release()
    for module, name, kinds in (
        (ce, "LigerCrossEntropyFunction", {"": (logits,)}),
        (flce, "LigerFusedLinearCrossEntropyFunction", {"": (x, w), " with bias": (x, w, b)}),
    ):
        fixed, released = getattr(module, name), getattr(as_released(module), name)
        takes = inspect.signature(released.forward).parameters
        check(
            "control",
            f"{name}: the release's is another one, with the same arguments",
            fixed is not released and list(inspect.signature(fixed.forward).parameters) == list(takes),
        )
        kinds = {kind: tensors for kind, tensors in kinds.items() if len(tensors) < 3 or "bias" in takes}
        reductions = [{"reduction": r} for r in ("mean", "sum", "none")] if "reduction" in takes else [{}]
        for (kind, tensors), given, dtype in itertools.product(kinds.items(), reductions, (torch.float32, HALF)):
            said, tensors = f"{name}{kind}, {given.get('reduction', 'mean')}, {dtype}", [t.to(dtype) for t in tensors]
            each = []
            for function in (released, fixed):
                loss, leaves = graph(function, tensors, y, **given)
                with Made() as made:
                    (loss * 0.3).sum().backward()
                each.append(([loss, *(leaf.grad for leaf in leaves)], made.count))
            (want, least), (got, count) = each
            check("control", f"{said}: one backward is the release's, bit for bit", all(map(torch.equal, want, got)))
            check("trigger", f"{said}: one backward makes {count} tensors, {least} as released", count <= least)
            # One backward of the loss itself, of stride 0 where it is a loss a token, is right in every release.
            loss, leaves = graph(released, tensors, y, **given)
            loss.sum().backward()
            unit, limit = [leaf.grad.double() for leaf in leaves], 1e-5 if dtype == torch.float32 else 2e-2
            for scales in SCALES:
                judge(
                    f"{said}: backwards of {scales}",
                    after(*graph(fixed, tensors, y, **given), scales),
                    [u * sum(scales) for u in unit],
                    limit,
                )
            for first in (1.0, 0.5):
                loss, leaves = graph(fixed, tensors, y, **given)
                handed = torch.autograd.grad((loss * first).sum(), leaves, retain_graph=True)
                refused = after(loss, leaves, (0.25,))
                judge(
                    f"{said}: what autograd.grad gave for {first} is the same later",
                    refused if isinstance(refused, str) else handed,
                    [u * first for u in unit],
                    limit,
                )
            # A torch before 2.5 does not say whether the graph is kept.
            asked = vars(torch._C._autograd).pop("_get_current_graph_task_keep_graph", None)
            judge(f"{said}: an older torch", after(*graph(fixed, tensors, y, **given), SCALES[0]), unit, limit)
            vars(torch._C._autograd)["_get_current_graph_task_keep_graph"] = asked
            plain = after(*graph(fixed, tensors, y, **given), (1.0, 1.0))
            check("trigger", f"{said}: the loss itself can be used twice", not isinstance(plain, str))
    finish()


if __name__ == "__main__":
    main()
