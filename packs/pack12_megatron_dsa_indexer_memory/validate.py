"""The deep check of a fix of pack12: loss, top-k indices and gradients are the release's, and right in fp64; peaks of other options.

Runs after repro.py on the patched side, where heads fill more than one block and where they do not. Options that a release lacks are left out.
"""

import ctypes
import importlib
import inspect
import math
import sys
import types
from pathlib import Path

import repro
import torch
from repro import FACTS, causal, check, definition, device, finish, inputs, loss_of, peaks, release
from repro import LIMIT as MOST
from repro import S as MOST_ROWS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

#: The options that 0.19 brought, in the order of its function.
MORE = dict.fromkeys(("varlen_starts", "varlen_ends", "key_positions", "query_valid_rows"))
MORE |= {"calculate_per_token_loss": False, "use_relu": True}
LIMIT = 1e-5  # sums over heads in another order
NAMES, AGAIN = ("loss", "dq", "dweights", "dk"), []  # whether a second backward gave what the first had
# S, B, heads, H, d, D: all heads in one of the fix's blocks, two blocks, and five of attention heads and three of the indexer's
SMALL, LARGE, MANY = (48, 2, 8, 5, 16, 16), (512, 2, 33, 33, 8, 8), (2048, 1, 17, 9, 4, 4)


def as_released():
    """The release's own module with all that it imports: what hides it on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = file.split("/megatron/core/")[0]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(overlay).resolve()]
    importlib.invalidate_caches()
    own = release()
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(hidden)
    FACTS["file"] = file
    return own


def outcome(dsa, tensors, needs=(True,) * 3, gradient=1.0, again=None, **options):
    """The loss, its gradients by q, weights and k (None where none is asked for), and the top-k indices; ``again`` it notes whether they come again."""
    again = len(tensors[0]) < 100 if again is None else again
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors[:3], needs, strict=True)]
    if {*MORE} & {*options}:
        options["more"] = [options.pop(name, default) for name, default in MORE.items()]
    loss, picked = loss_of(dsa, *leaves, *tensors[3:], **options)
    if again:  # another loss of the same shape goes forward before this one goes backward
        loss_of(dsa, *(leaf.detach().flip(0).requires_grad_(leaf.requires_grad) for leaf in leaves), *tensors[3:], **options)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    first = torch.autograd.grad(loss, wanted, torch.full_like(loss, gradient), retain_graph=True)
    if again:
        second = torch.autograd.grad(loss, wanted, torch.full_like(loss, gradient))
        AGAIN.append(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    got = iter(first)
    return [loss.detach(), *(next(got) if leaf.requires_grad else None for leaf in leaves)], picked


def exact(tensors):
    """Loss and gradients by the definition in fp64."""
    leaves = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    loss = definition(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves[:3])]


def distance(a, b):
    """‖a − b‖ / ‖b‖."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def compare(name, fixed, released, tensors, **options):
    """The fixed outcome against the release's; what is bf16 may be rounded otherwise. Returns both."""
    before = [t.detach().clone() for t in tensors]
    got, picked = outcome(fixed, tensors, **options)
    untouched = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, tensors, strict=True))
    check("trigger", f"{name}: what it is given is as it was", untouched)
    want, same = outcome(released, tensors, **options)
    for what, a, b in zip(NAMES, got, want, strict=True):
        if b is not None:
            limit = LIMIT if b.dtype == torch.float32 else 1e-3
            check(
                "trigger",
                f"{name}: {what} against the release's",
                error=distance(a, b) if a.dtype == b.dtype else None,
                limit=limit,
            )
    check("trigger", f"{name}: top-k indices are the release's", torch.equal(picked, same))
    return got, want


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", ()), str(function)]
        return function(*args, **(kwargs or {}))


def without_loss(dsa, S, B, rows, heads, gradients=False, **more):
    """The operations and the result of the path without a loss, for some query rows of ``heads`` indexer heads, with autograd on or off."""
    q, weights, k, *_ = inputs(S, B, 1, heads, 16, 16)
    mask = None if "varlen_starts" in more else torch.zeros(B, rows, S, device=device)
    with torch.set_grad_enabled(gradients), Operations() as counted:
        if hasattr(dsa, "fused_qk_topk_naive"):
            found = dsa.fused_qk_topk_naive(q[:rows], k, weights[:rows], 8, mask, **more)[0]
        else:
            found = dsa.DSAIndexer._compute_index_scores(None, q[:rows], weights[:rows], k)
    return counted.seen, found


def twice(dsa, tensors):
    """Gradients of the gradients' squares by q, weights and k."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
    first = torch.autograd.grad(loss_of(dsa, *leaves, *tensors[3:])[0], leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def cases(options, shape):
    """What to compare: names, tensors and options that the release knows."""
    (S, B, *_), given = shape, inputs(*shape)
    pair = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2))
    others = torch.rand(S, S, device=device).tril()  # the other rank's part of the target

    def all_reduce(tensor, group=None, **_):
        """What it is given has to be what is used: it adds in place, as torch.distributed does."""
        assert group is pair.tp
        tensor += others

    padded = [t.detach().clone() for t in given]
    for tensor in padded[:3]:
        tensor[S // 3 : S // 2] = 0
    padded[3:] = 30 * padded[3], 3 * padded[4][:, :, :1].expand_as(padded[4])
    half = inputs(*shape, dtype=torch.bfloat16)
    ranks = {"group": pair, "all_reduce": all_reduce}
    yield "two ranks, sparse, another scale and coefficient", given, ranks | {"sparse": True, "scale": 0.4, "coefficient": 0.3}
    yield "bf16, weights in fp32, the loss times 2^16", [half[0], given[1], *half[2:]], {"gradient": 2.0**16}
    yield (
        "rows of zeros, large attention logits, a key that all heads share, the loss times 2^-16",
        padded,
        {"gradient": 2.0**-16},
    )
    if shape is SMALL:
        yield "sparse loss", given, {"sparse": True, "topk": 5}
        yield "a causal mask", given, {"mask": causal(S)}
        yield "inputs of size 1", given, {"gradient": -3.0}
        yield "sparse loss times 2^16", given, {"sparse": True, "gradient": 2.0**16}
        yield "two tensor-parallel ranks", given, dict(ranks)
        yield "not contiguous", [t.transpose(0, 1).contiguous().transpose(0, 1) for t in given], {}
        yield "one head of each", inputs(S, 3, 1, 1, 16, 16), {}
    if "varlen_starts" not in options:
        biased = torch.randn(B, S, S, device=device) + causal(S)
        yield "masks with biases, sparse", given, {"mask": biased, "sparse": True}
        if shape is SMALL:
            yield "masks with biases", given, {"mask": biased}
            yield "one mask with biases for all", given, {"mask": biased[0]}
    else:
        rows = torch.arange(S, device=device)
        packed = {"varlen_starts": torch.where(rows < S // 3, 0, S // 3), "varlen_ends": torch.where(rows < S - 5, rows + 1, 0)}
        valid = {"query_valid_rows": rows % 3 > 0}
        order = {"key_positions": torch.randperm(S, device=device)}
        every = packed | valid | order | {"sparse": True, "use_relu": False}
        yield "packed, rows without keys, sparse, without ReLU", given, every
        unread = [*given[:4], torch.where(rows[:, None, None, None] < S - 1, given[4], math.nan)]
        hidden = causal(S).masked_fill(rows == S - 1, float("-inf"))
        biased = torch.randn(B, S, S, device=device) + causal(S)
        biased[:, 7] = float("-inf")
        every = {"mask": biased + hidden, "sparse": True}
        yield "masks with biases, a row without a key, sparse, a masked key is not a number", unread, every
        first = [t[: S - 5] if i in (0, 1, 3) else t for i, t in enumerate(given)]
        yield "fewer rows than keys", first, {"varlen_starts": 0 * rows[: S - 5], "varlen_ends": rows[: S - 5] + 6}
        if shape is SMALL:
            reach = {"varlen_starts": 0 * rows, "varlen_ends": (rows + 1).clamp(max=S - 1)}
            yield "a key out of reach is not a number", unread, reach
            yield "without ReLU", given, {"mask": causal(S), "use_relu": False}
            yield "packed, rows without keys", given, packed
            yield "a masked key is not a number, sparse", unread, {"mask": hidden, "sparse": True}
            yield "masks with biases, a row without a key", given, {"mask": biased}
            yield "one mask with biases for all", given, {"mask": biased[0]}
            yield "no mask and no bounds, some rows count", given, valid
            yield "packed, keys in another order", given, packed | order
            yield "some rows count", given, valid | {"mask": causal(S)}
            yield "loss per token", given, valid | {"mask": causal(S), "calculate_per_token_loss": True}


def kept(dsa):
    """GiB that are alive after the forward and were not before it, at repro.py's shape, counted under fake tensors."""
    with FakeTensorMode(), MemTracker() as tracker:
        given = inputs(repro.S, repro.B, repro.HEADS, repro.H, repro.D_ATTENTION, repro.D, dtype=torch.bfloat16)
        alive = lambda: next(iter(tracker.get_tracker_snapshot("current").values()))["Total"] / repro.GIB  # noqa: E731
        before, loss = alive(), loss_of(dsa, *given)[0]
        return alive() - before if loss.requires_grad else float("nan")


def main():
    if device == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # What is freed is kept: new pages for each large tensor take longer than what is done with them. M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30), libc.mallopt(-1, 2**31 - 1)
    fixed, released = release(), as_released()
    options = inspect.signature(getattr(fixed, "FusedDSAIndexerLoss", fixed.DSAttention).forward).parameters
    for where, shape in (("one block", SMALL), ("blocks of heads", LARGE)):
        half = inputs(*shape, dtype=torch.bfloat16, size=0.3)
        right, given = exact(half), [t.detach().float().requires_grad_(t.requires_grad) for t in half]
        got, want = compare(where, fixed, released, given, again=True)
        check(
            "control",
            f"{where}: the release is right against fp64",
            all(distance(a, b) <= LIMIT for a, b in zip(want, right, strict=True)),
        )
        for what, a, b in zip(NAMES, got, right, strict=True):
            check("trigger", f"{where}: {what} against fp64", error=distance(a, b), limit=LIMIT)
        got, want = compare(f"{where}, bf16", fixed, released, half)
        for what, a, b, c in zip(NAMES, got, want, right, strict=True):
            check(
                "trigger",
                f"{where}, bf16: {what} is as near to fp64 as the release's",
                distance(a, c) <= 1.1 * distance(b, c) + LIMIT,
            )
        for name, given, asked in cases(options, shape):
            own, torch.distributed.all_reduce = torch.distributed.all_reduce, asked.pop("all_reduce", None)
            compare(f"{where}, {name}", fixed, released, given, **asked)
            torch.distributed.all_reduce = own
    for sparse in (False, True):
        nothing = outcome(fixed, inputs(*LARGE, size=0.3), coefficient=0.0, sparse=sparse)[0]
        check("trigger", f"coefficient 0: loss and gradients are 0{', sparse' * sparse}", not any(t.any() for t in nothing))
    compare("many blocks, B=1, bf16", fixed, released, inputs(*MANY, dtype=torch.bfloat16, size=0.3))
    for what, a, b in zip(NAMES[1:], *(twice(dsa, inputs(*SMALL, size=0.3)) for dsa in (fixed, released)), strict=True):
        check("trigger", f"{what} of the gradients", error=distance(a, b), limit=1e-4)
    if not hasattr(fixed, "FusedDSAIndexerLoss"):  # from 0.17 on all three are computed, asked for or not
        for needs in ((True, False, False), (False, True, False), (False, False, True)):
            compare(f"gradients {needs}", fixed, released, inputs(*SMALL), needs=needs)
    no_relu = (None, None, False, False)
    bounds = lambda: (0 * torch.arange(MOST_ROWS, device=device), torch.arange(MOST_ROWS, device=device) + 1)  # noqa: E731
    others = {"sparse": lambda: {"sparse": True}}
    if "use_relu" in options:  # and masks, which repro.py gives where a release knows no bounds
        others |= {
            "a mask": lambda: {"mask": causal(MOST_ROWS)},
            "a mask, sparse, without ReLU": lambda: {"mask": causal(MOST_ROWS), "sparse": True, "more": (None, None, *no_relu)},
            "without ReLU": lambda: {"more": (*bounds(), *no_relu)},
        }
    for name, asked in others.items():
        for step, gib in zip(("forward", "backward"), peaks(fixed, asked), strict=True):
            FACTS["metrics"][f"{name}: {step} peak GiB"] = gib
            check("trigger", f"{name}: {step} peak of {gib:.2f} GiB, {MOST} at most", gib <= MOST)
    if device == "cpu":
        alive, most = kept(fixed), kept(released)
        check("trigger", f"{alive:.3f} GiB alive from forward to backward, {most:.3f} as released", alive <= most)
        repro.S, repro.B, repro.HEADS, repro.H = (
            32768,
            1,
            32,
            16,
        )  # a block is one head here: more would take longer, and no more memory
        for step, gib in zip(("forward", "backward"), peaks(fixed), strict=True):
            FACTS["metrics"][f"S=32768 B=1: {step} peak GiB"] = gib
            check("trigger", f"S=32768 B=1: {step} peak of {gib:.1f} GiB, eleven tensors [B, S, S] at most", gib <= 44)
    rows, plain = torch.arange(512, device=device), [(1, 1, {}), (1, 512, {}), (2, 512, {})]
    if "use_relu" in options:
        plain += [
            (2, 512, {"use_relu": False}),
            (2, 512, {"use_relu": False, "gradients": True}),
            (2, 512, {"varlen_starts": 0 * rows, "varlen_ends": rows + 1}),
        ]
    if hasattr(fixed, "FusedDSAIndexerLoss"):
        plain += [(2, 512, {"gradients": True})]
    for B, count, more in plain:
        (was, a), (now, b) = (without_loss(dsa, 1024, B, count, 64, **more) for dsa in (released, fixed))
        where = f"without the loss, B={B}, {count} query rows, 64 heads{''.join(f', {name}' for name in more)}"
        check("trigger", f"{where}: the same {len(was)} operations", was == now)
        check("trigger", f"{where}: the same scores, bit for bit", torch.equal(a, b))
    check("trigger", f"a second backward gives the same gradients, {len(AGAIN)} times", bool(AGAIN) and all(AGAIN))
    finish()


if __name__ == "__main__":
    main()
