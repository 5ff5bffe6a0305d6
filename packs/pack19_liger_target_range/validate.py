"""The deep check of a fix of pack19: which labels are refused and which are not, wherever they stand; and results of right labels bit for bit as released.

Runs after repro.py on the patched side. No case here reaches a kernel with a wrong label, unless the fix lets it.
"""

import importlib.util
import inspect
import itertools
from importlib.metadata import distribution

import torch
from repro import applied, check, device, finish, release

BT, H, V = 12, 16, 50  # 3 chunks of 4 rows: V / H, rounded up, is 4
HALF = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no scalars in bf16


def as_released(function):
    """The release's own class, from the file that the patched one hides."""
    file = distribution("liger-kernel").locate_file(function.__module__.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(found := importlib.util.module_from_spec(spec))
    return getattr(found, function.__name__)


def results(function, tensors, y, grad=True, **given):
    """Loss and gradients, or the error that was raised."""
    x, w, *bias = (t.detach().clone().requires_grad_(grad) for t in tensors)
    names = dict.fromkeys(("weight", "linear"), w) | ({"bias": bias[0]} if bias else {})
    try:
        with torch.set_grad_enabled(grad):
            loss = applied(function, _input=x, target=y, **names, **given)
            if grad:
                loss.sum().backward()
    except Exception as raised:
        return raised
    return [t for t in (loss, x.grad, w.grad, *(b.grad for b in bias)) if t is not None]


def same(got, want):
    if isinstance(got, Exception) or isinstance(want, Exception):
        return type(got) is type(want) and str(got) == str(want)
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def main():
    function = release()
    takes = inspect.signature(function.forward).parameters
    released = as_released(function)
    torch.manual_seed(1)
    tensors = [t.to(device) for t in (torch.randn(BT, H), torch.randn(V, H) / 4, torch.randn(V))]
    if "bias" not in takes:
        tensors.pop()
    inside = torch.randint(0, V, (BT,)).to(device)
    inside[0], inside[-1] = 0, V - 1
    reductions = ["mean", "sum", "none"] if "reduction" in takes else ["mean"]

    for reduction, grad, dtype in itertools.product(reductions, (True, False), (torch.float32, HALF)):
        given = {"reduction": reduction} if "reduction" in takes else {}
        cast, name = [t.to(dtype) for t in tensors], f"{reduction}, {str(dtype)[6:]}, {'grad' if grad else 'no_grad'}"
        for ignored, labels in {
            "none": inside,
            "-100": inside.where(torch.arange(BT).to(device) % 3 > 0, -100),
            "V": inside.where(torch.arange(BT).to(device) % 3 > 0, V),
            "-1": inside.where(torch.arange(BT).to(device) % 3 > 0, -1),
            "7": inside.where(torch.arange(BT).to(device) % 3 > 0, 7),
            "all": torch.full_like(inside, -100),
        }.items():
            ignore = {"none": -100, "all": -100, "V": V}.get(ignored) or int(ignored)
            got, want = (results(f, cast, labels, grad, ignore_index=ignore, **given) for f in (function, released))
            check("control", f"{name}, {ignored} ignored: as released", same(got, want))
        for (place, row), (label, ignore) in itertools.product(
            {"first row": 0, "within a chunk": 5, "last row of a chunk": 7, "last row": BT - 1}.items(),
            ((V, -100), (V + 1, -100), (2**40, -100), (-1, -100), (-100, -1), (-(2**40), -100), (V, 0), (-1, V)),
        ):
            labels = inside.clone()
            labels[labels == ignore] = 1
            labels[row] = label
            before = [t.clone() for t in cast]
            got = results(function, cast, labels, grad, ignore_index=ignore, **given)
            refused = isinstance(got, IndexError | ValueError | AssertionError)
            kept = all(map(torch.equal, before, cast))
            check("trigger", f"{name}: a label of {label}, {place}, {ignore} ignored: refused", refused and kept)
    if not isinstance(results(released, tensors, inside.int(), ignore_index=-100), Exception):  # int32 is taken
        got = results(function, tensors, inside.int(), ignore_index=-100)
        check("control", "int32 labels", same(got, results(released, tensors, inside.int(), ignore_index=-100)))
    finish()


if __name__ == "__main__":
    main()
