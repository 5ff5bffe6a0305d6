"""The deep check of a fix of pack19: which labels are refused and which are not, wherever they stand; and results of right labels bit for bit as released.

Runs after repro.py on the patched side. No case here reaches a kernel with a wrong label, unless the fix lets it.
"""

import contextlib
import importlib.util
import inspect
import itertools
from importlib.metadata import distribution

import torch
from repro import applied, check, device, finish, release
from torch.utils._python_dispatch import TorchDispatchMode

BT, H, V = 12, 16, 50  # 3 chunks of 4 rows: V / H, rounded up, is 4
HALF = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no scalars in bf16
OPTIONS = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-3,
    "softcap": 5.0,
    "return_z_loss": True,
    "ce_weight": torch.linspace(0.5, 2, V),
}
#: Which of x, w and bias are trained, and whether gradients are on.
TRAINED = {"all": (1, 1, 1, 1), "x": (1, 0, 0, 1), "w": (0, 1, 0, 1), "none": (0, 0, 0, 1), "all, under no_grad": (1, 1, 1, 0)}


class Large(TorchDispatchMode):
    """Counts tensors that are made of more than a chunk's logits, views not among them."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        self.count += isinstance(made, torch.Tensor) and not op.is_view and made.numel() > 4 * V
        return made


def as_released(function):
    """The release's own class, from the file that the patched one hides."""
    file = distribution("liger-kernel").locate_file(function.__module__.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(found := importlib.util.module_from_spec(spec))
    return getattr(found, function.__name__)


def results(function, tensors, y, trained="all", autocast=False, **given):
    """Loss, gradients of the loss with random weights, and how many large tensors were made; or the error that was raised."""
    *wanted, grad = TRAINED[trained]
    x, w, *bias = (t.detach().clone().requires_grad_(bool(on)) for t, on in zip(tensors, wanted, strict=False))
    names = dict.fromkeys(("weight", "linear"), w) | ({"bias": bias[0]} if bias else {})
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    labels, cast = y.clone(), torch.autocast(device, HALF) if autocast else contextlib.nullcontext()
    if not y.is_contiguous():
        labels = torch.stack([y, y], 1)[:, 0]
    try:
        with torch.set_grad_enabled(bool(grad)), cast, Large() as large:
            loss = applied(function, _input=x, target=labels, **names, **given)
            if loss.requires_grad:
                (loss * torch.linspace(-1, 2, loss.numel()).to(loss).view(loss.shape)).sum().backward()
    except Exception as raised:
        return raised if torch.equal(labels, y) else None
    finally:
        torch.set_grad_enabled(True)
    found = [loss, labels, torch.tensor(large.count), *(t.grad for t in (x, w, *bias))]
    return [torch.tensor(-1.0) if t is None else t.detach() for t in found]


def same(got, want):
    if isinstance(got, Exception) or isinstance(want, Exception):
        return type(got) is type(want) and str(got) == str(want)
    return got is not None and len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


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
    third = torch.arange(BT).to(device) % 3 > 0
    reductions = ["mean", "sum", "none"] if "reduction" in takes else [""]
    options = (
        {"no option": {}}
        | {name: {name: value} for name, value in OPTIONS.items() if name in takes}
        | {"autocast": {"autocast": True}}
    )

    def control(name, labels, tensors=tensors, **given):
        got, want = (results(f, tensors, labels, **given) for f in (function, released))
        check("control", f"{name}: as released", same(got, want))

    for reduction, trained in itertools.product(reductions, TRAINED):
        given = {"reduction": reduction} if reduction else {}
        name = f"{reduction}, trained: {trained}".lstrip(", ")
        control(f"{name}, {str(HALF)[6:]}", inside, [t.to(HALF) for t in tensors], trained=trained, **given)
        for what, more in options.items() if trained in ("all", "w") else ():
            control(f"{name}, {what}", inside, trained=trained, **given, **more)
        for ignored in (-100, V, -1, 7) if trained == "all" else (-100,):
            control(f"{name}, {ignored} ignored", inside.where(third, ignored), trained=trained, ignore_index=ignored, **given)
        for (place, row), (label, ignore), dtype in itertools.product(
            {"first row": 0, "within a chunk": 5, "last row of a chunk": 7, "last row": BT - 1}.items(),
            ((V, -100), (V + 1, -100), (2**40, -100), (-1, -100), (-100, -1), (-(2**40), -100), (V, 0), (-1, V)),
            (torch.int64, torch.int32),
        ):
            if abs(label) > 2**31 and dtype is torch.int32:
                continue
            labels = inside.clone()
            labels[labels == ignore] = 1
            labels[row] = label
            got = results(function, tensors, labels.to(dtype), trained=trained, ignore_index=ignore, **given)
            refused = isinstance(got, IndexError | ValueError | AssertionError)
            check("trigger", f"{name}: a label of {label}, {str(dtype)[6:]}, {place}, {ignore} ignored: refused", refused)
    wrong = inside.clone()
    wrong[5] = V
    half = [t.to(HALF) for t in tensors]
    column = torch.stack([wrong, wrong], 1)[:, 0]
    for (what, more), reduction in itertools.product(options.items(), reductions):
        given = {"reduction": reduction} if reduction else {}
        got = results(function, tensors, wrong, ignore_index=-100, **given, **more)
        refused = isinstance(got, IndexError | ValueError | AssertionError)
        check("trigger", f"{reduction}, {what}: a label of V is refused", refused)
        for how, other, labels in (
            ((str(HALF)[6:], half, wrong), ("labels that are a column", tensors, column)) if not more else ()
        ):
            got = results(function, other, labels, ignore_index=-100, **given)
            refused = isinstance(got, IndexError | ValueError | AssertionError)
            check("trigger", f"{reduction}, {how}: a label of V is refused", refused)
    control("labels that are all ignored", torch.full_like(inside, -100), ignore_index=-100)
    control("labels that are a column", torch.stack([inside, inside], 1)[:, 0], ignore_index=-100)
    wide = [tensors[0], torch.randn(300, H).to(device) / 4]
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        control(f"labels of {str(dtype)[6:]}, and V of 300", inside.to(dtype), wide, ignore_index=-100)
        if dtype is not torch.uint8 and not isinstance(results(released, wide, inside.to(dtype), ignore_index=-100), Exception):
            got = results(function, wide, inside.to(dtype).masked_fill(inside == V - 1, -5), ignore_index=-100)
            refused = isinstance(got, IndexError | ValueError | AssertionError)
            check("trigger", f"a label of -5 in {str(dtype)[6:]}, and V of 300: refused", refused)
    # More labels than fp16 has numbers; without gradients, of which Triton's interpreter makes 70,000 rows.
    large = [t.to(HALF) for t in (tensors[0][:2], torch.randn(70_000, H).to(device) / 4)]
    control(f"{str(HALF)[6:]}, and V of 70,000", torch.tensor([3, 69_999]).to(device), large, trained="none", ignore_index=-100)
    finish()


if __name__ == "__main__":
    main()
