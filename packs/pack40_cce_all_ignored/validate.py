"""The deep check of a fix of pack40: batches with no, one, some and all labels, each option, and what is trained.

Runs after repro.py on the patched side. Where a batch has a label, loss and gradients are what the release itself gives in another process, bit for bit;
where it has none, the gradients are 0, and the loss is the release's.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch
from repro import FACTS, check, device, finish, release

SMALL, BLOCKS, BATCHES = (13, 24, 33), (150, 24, 70), (3, 4, 24, 33)  # of tokens, H and V: a block, more than one, batches of 4
OPTIONS = {"shift": True}, {"softcap": 5.0}, {"ignore_index": 7}, {"filter_eps": None}
FIRST = "the first of each row"  # has a label, which shift leaves out
#: Tokens, H and V; options; the reduction; how many tokens have a label; what is trained, of x and w.
CASES = [
    *((SMALL, {}, *case, "xw") for case in itertools.product(("mean", "sum", "none"), (0, 1, 5, 13))),
    *((SMALL, {}, "mean", many, trained) for many, trained in itertools.product((0, 5), "xw")),
    *((SMALL, given, "mean", many, "xw") for given, many in itertools.product(OPTIONS, (0, 1, 13))),
    (SMALL, {"ignore_index": 7}, "sum", 0, "xw"),
    *((BLOCKS, {}, *case, "xw") for case in (("mean", 0), ("mean", 1), ("mean", 150), ("sum", 150))),
    *((BATCHES, {}, *case, "xw") for case in (("mean", 0), ("mean", 1), ("mean", 12), ("none", 12))),
    *((shape, {"shift": True}, "mean", FIRST, "xw") for shape in (SMALL, BLOCKS, BATCHES)),
]


def run(case):
    """The loss, and the gradients of what is trained, of the loss times 2, on a CPU; the loss alone where the bug is. Whether a label counts."""
    (*tokens, H, V), given, reduction, many, trained = case
    torch.manual_seed(1)
    x, w, y = torch.randn(*tokens, H), torch.randn(V, H), torch.randint(8, V, tokens)
    left = torch.randperm(y.numel())[y.numel() if many == FIRST else many :]
    y.view(-1)[left] = given.get("ignore_index", -100)
    if many == FIRST:
        y[:], y[..., 0] = -100, 5
    x, w = (t.to(device, torch.float16).requires_grad_(n in trained) for n, t in (("x", x), ("w", w)))
    loss = release().linear_cross_entropy(x, w, y.to(device), reduction=reduction, impl="cce", **given)
    try:
        (2 * loss).sum().backward()
    except ZeroDivisionError:
        return [loss.detach().cpu()], False
    counts = (y[..., 1:] if "shift" in given else y).ne(given.get("ignore_index", -100)).any().item()
    return [t.cpu() for t in (loss.detach(), x.grad, w.grad) if t is not None], counts


def alike(got, want):
    """Bit for bit; each NaN is one."""
    for g, r in zip(got, want, strict=True):
        if g.dtype != r.dtype or g.shape != r.shape or not torch.equal(g.isnan(), r.isnan()):
            return False
        if not torch.equal(g[~g.isnan()].view(torch.uint8), r[~r.isnan()].view(torch.uint8)):
            return False
    return True


def main():
    release()
    kept, overlay = Path("released.pt").resolve(), str(Path(FACTS["file"]).parents[1])
    path = os.pathsep.join(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != overlay)
    command = [sys.executable, *sys.orig_argv[1:], "--released", str(kept)]  # in this lane
    other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    found = [run(case) for case in CASES]
    if other.wait():
        finish("CHANGED", "the release itself could not be run")
    file, released = torch.load(kept)
    check("control", "the release itself, in another process", Path(file).parents[1] != Path(overlay))
    for case, (got, counts), (want, _) in zip(CASES, found, released, strict=True):
        shape, given, reduction, many, trained = case
        said = f"{shape}, {given or 'no option'}, {reduction}, {many} with a label, trained {trained}"
        if counts:
            check("control", f"{said}: the release's, bit for bit", alike(got, want))
            continue
        role = "trigger" if reduction == "mean" else "control"
        check(role, f"{said}: the release's loss, or 0", alike(got[:1], want[:1]) or not got[0].any().item())
        check(role, f"{said}: gradients of 0", len(got) > 1 and not any(g.any().item() for g in got[1:]))
    finish()


if __name__ == "__main__":
    if "--released" in sys.argv:
        found = [run(case) for case in CASES]
        torch.save((FACTS["file"], found), sys.argv[-1])
    else:
        main()
