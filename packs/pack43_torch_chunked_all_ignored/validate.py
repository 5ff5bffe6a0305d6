"""The deep check of a fix of pack43: sizes of chunks, ways to accumulate, dtypes, options; where a label counts nothing changes, bit for bit.

Runs after repro.py on the patched side. The release's own code comes from the file that the patched one hides.
"""

import importlib.util
import itertools
import sys
from importlib.metadata import distribution

import torch
import torch.nn.functional as F
from repro import check, device, eager, finish, release

SHAPES = (16, 32, 70), (65, 24, 300), (1, 8, 4)  # BT, H, V
CHUNKS = (1, "accurate"), (5, "balanced"), (64, "compact"), (7, "auto")
ACCUMULATOR = "_linear_cross_entropy_batch_chunked_accumulator"  # which the operators of each reduction call


def modules():
    """The module that is imported, and the one that it hides, whose operators get another name to be registered by."""
    from torch.nn.modules import linear_cross_entropy as fixed

    file = distribution("torch").locate_file("torch/nn/modules/linear_cross_entropy.py")
    released = importlib.util.module_from_spec(importlib.util.spec_from_loader("as_released", loader=None))
    sys.modules["as_released"] = released  # where its dataclasses are looked for
    text = file.read_text(encoding="utf-8").replace("torch_nn::", "as_released::")
    exec(compile(text, str(file), "exec"), vars(released))
    return fixed, released


def run(chunked, tensors, y, trained, **options):
    """The loss, and the gradients of those of x, w and b that are trained, of half of it."""
    x, w, b = (t.detach().requires_grad_(n in trained) for t, n in zip(tensors, "xwb", strict=True))
    loss = F.linear_cross_entropy(x, w, y, linear_bias=b, options=chunked, **options)
    if trained:
        loss.backward(torch.full_like(loss, 0.5))
    return [loss.detach(), *(t.grad for t in (x, w, b) if t.requires_grad)]


def alike(got, want):
    return all(torch.equal(g.nan_to_num(7), r.nan_to_num(7)) and g.dtype == r.dtype for g, r in zip(got, want, strict=True))


def main():
    release(tokens=1)  # what is run goes into the report
    fixed, released = modules()
    ours, theirs = getattr(fixed, ACCUMULATOR), getattr(released, ACCUMULATOR)
    check("control", "the release's accumulator is another one", ours.__code__ != theirs.__code__)
    torch.manual_seed(1)
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.float16)):
        BT, H, V = shape
        tensors = [t.to(device, dtype) for t in (torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V))]
        weight = torch.linspace(0.5, 2, V, device=device, dtype=dtype)
        calls = [(trained, {}) for trained in ("xwb", "xw", "x", "w", "b", "")]
        calls += [("xwb", {"weight": weight}), ("xwb", {"ignore_index": 2})]
        for (chunk, policy), reduction in itertools.product(CHUNKS, ("mean", "sum", "none")):
            chunked = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, acc_policy=policy)
            odd = {"the release's, bit for bit": [], "gradients of 0": [], "cross_entropy's loss": []}
            for (trained, options), many in itertools.product(calls, (0, 1, BT)):
                y = torch.randint(3, V, (BT,), device=device)
                y[torch.randperm(BT, device=device)[many:]] = options.get("ignore_index", -100)
                said = f"{many} labels, trained {trained or 'nothing'}{''.join(f', {name}' for name in options)}"
                got = run(chunked, tensors, y, trained, reduction=reduction, **options)
                if many:
                    setattr(fixed, ACCUMULATOR, theirs)
                    want = run(chunked, tensors, y, trained, reduction=reduction, **options)
                    setattr(fixed, ACCUMULATOR, ours)
                    odd["the release's, bit for bit"] += [] if alike(got, want) else [said]
                    continue
                odd["gradients of 0"] += [said] if any(g.any().item() for g in got[1:]) else []
                same = eager(*tensors[:2], y, tensors[2], reduction=reduction, **options)
                odd["cross_entropy's loss"] += [] if alike(got[:1], [same]) else [said]
            for name, those in odd.items():
                role = "trigger" if reduction == "mean" and name == "gradients of 0" else "control"
                check(role, f"{str(dtype)[6:]} {shape}, {chunk} {policy}, {reduction}: {name} {those or ''}", not those)
    empty, none = (torch.randn(0, 32), torch.randn(70, 32), torch.randn(70)), torch.zeros(0, dtype=torch.long)
    got = run(torch.nn.LinearCrossEntropyOptions(batch_chunk_size=5), empty, none, "xwb", reduction="mean")
    check("control", "no tokens: a loss of NaN", got[0].isnan().item())
    check("control", "no tokens: gradients of 0", not any(g.any().item() for g in got[1:]))
    finish()


if __name__ == "__main__":
    main()
