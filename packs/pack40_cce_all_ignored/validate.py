"""The deep check of a fix of pack40: batches with no, one, some and all labels, each option, and what is trained.

Runs after repro.py on the patched side. Where a batch has a label, loss and gradients stay the release's, bit for bit.
"""

import importlib.util
import itertools
import math
from importlib.metadata import distribution

import torch
from repro import check, device, finish, release

OPTIONS = {
    "as they are": {},
    "shift": {"shift": True},
    "softcap": {"softcap": 5.0},
    "ignore_index": {"ignore_index": 7},
    "no filter": {"filter_eps": None},
}


def as_released():
    """The release's own autograd function, from the file that the patched one hides."""
    file = distribution("cut-cross-entropy").locate_file("cut_cross_entropy/cce.py")
    spec = importlib.util.spec_from_file_location("cut_cross_entropy.as_released", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.cce_linear_cross_entropy


def run(function, tensors, y, trained, **given):
    """The loss, and the gradients of what is trained, of the loss times 2; NaN for them where the bug is."""
    x, w = (t.detach().requires_grad_(n in trained) for t, n in zip(tensors, "xw", strict=True))
    loss = function(x, w, y, **given)
    try:
        (2 * loss).sum().backward()
    except ZeroDivisionError:
        return [loss.detach(), torch.full((1,), math.nan)]
    return [loss.detach(), *(t.grad for t in (x, w) if t.requires_grad)]


def main():
    from cut_cross_entropy.cce import cce_linear_cross_entropy as fixed

    released = as_released()
    torch.manual_seed(1)
    for (BT, H, V), dims in (((13, 24, 33), 1), ((150, 24, 70), 1), ((12, 24, 33), 2)):
        x, w = torch.randn(BT, H).to(device, torch.float16), torch.randn(V, H).to(device, torch.float16)
        options = OPTIONS if BT == 13 else {"as they are": {}}
        for (name, given), reduction, many in itertools.product(options.items(), ("mean", "sum", "none"), (0, 1, 5, BT)):
            y = torch.randint(8, V, (BT,), device=device)
            y[torch.randperm(BT, device=device)[many:]] = given.get("ignore_index", -100)
            rows, labels = (x.reshape(3, -1, H), y.reshape(3, -1)) if dims == 2 else (x, y)
            if name not in ("as they are", "ignore_index") and reduction == "none":
                continue
            for trained in ("xw", "x", "w") if name == "as they are" and BT == 13 else ("xw",):
                said = f"{(BT, H, V)}, {dims} dims, {name}, {reduction}, {many} with a label, trained {trained}"
                got = run(fixed, (rows, w), labels, trained, reduction=reduction, **given)
                if (labels[..., 1:] if "shift" in given else labels).ne(given.get("ignore_index", -100)).any():
                    want = run(released, (rows, w), labels, trained, reduction=reduction, **given)
                    check("control", f"{said}: the release's, bit for bit", all(map(torch.equal, got, want)))
                    continue
                role = "trigger" if reduction == "mean" else "control"
                check(role, f"{said}: a loss of 0 or NaN", not torch.nan_to_num(got[0]).any().item())
                check(role, f"{said}: gradients of 0", not any(g.any().item() for g in got[1:]))
        # The first label of each row is none where labels are shifted: nothing counts then.
        rows, labels = (x.reshape(3, -1, H), torch.full((3, BT // 3), -100)) if dims == 2 else (x, torch.full((BT,), -100))
        labels[..., 0] = 5
        got = run(fixed, (rows, w), labels.to(device), "xw", reduction="mean", shift=True)
        check(
            "trigger",
            f"{(BT, H, V)}, {dims} dims: gradients of 0 where shift leaves no label",
            not any(g.any() for g in got[1:]),
        )
    check("control", "the function that is called is the fixed one", release().cce.cce_linear_cross_entropy is fixed)
    finish()


if __name__ == "__main__":
    main()
