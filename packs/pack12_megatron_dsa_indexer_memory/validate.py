"""The deep check of a fix of pack12: loss, top-k indices and gradients are the release's, and right in fp64; peaks of other options.

Runs after repro.py on the patched side, where heads fill more than one block and where they do not. Options that a release lacks are left out.
"""

import importlib
import inspect
import sys
import types
from pathlib import Path

import torch
from repro import FACTS, causal, check, definition, device, finish, inputs, loss_of, peaks, release
from repro import LIMIT as MOST
from torch.utils._python_dispatch import TorchDispatchMode

#: The options that 0.19 brought, in the order of its function.
MORE = dict.fromkeys(("varlen_starts", "varlen_ends", "key_positions", "query_valid_rows"))
MORE |= {"calculate_per_token_loss": False, "use_relu": True}
LIMIT = 1e-5  # sums over heads in another order
NAMES = ("loss", "dq", "dweights", "dk")
SMALL, LARGE = (48, 2, 8, 5, 16, 16), (512, 2, 40, 34, 16, 16)  # S, B, heads, H, d, D: one block of heads, and more than one


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


def outcome(dsa, tensors, needs=(True,) * 3, gradient=1.0, **options):
    """The loss, its gradients by q, weights and k (None where none is asked for), and the top-k indices; twice backward is the same."""
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors[:3], needs, strict=True)]
    if {*MORE} & {*options}:
        options["more"] = [options.pop(name, default) for name, default in MORE.items()]
    loss, picked = loss_of(dsa, *leaves, *tensors[3:], **options)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    first = torch.autograd.grad(loss, wanted, torch.full_like(loss, gradient), retain_graph=True)
    if len(tensors[0]) < 100:
        second = torch.autograd.grad(loss, wanted, torch.full_like(loss, gradient))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "a second backward gives other gradients"
    got = iter(first)
    return [loss.detach(), *(next(got) if leaf.requires_grad else None for leaf in leaves)], picked


def distances(dsa, tensors):
    """‖g − r‖ / ‖r‖ of the loss and its gradients from the definition in fp64."""
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    loss = definition(*exact)
    right = [loss.detach(), *torch.autograd.grad(loss, exact[:3])]
    return [((a - b).norm() / b.norm()).item() for a, b in zip(outcome(dsa, tensors)[0], right, strict=True)]


def compare(name, fixed, released, tensors, limit=LIMIT, **options):
    """The fixed outcome against the release's."""
    (got, picked), (want, same) = (outcome(dsa, tensors, **options) for dsa in (fixed, released))
    for what, a, b in zip(NAMES, got, want, strict=True):
        if b is not None:
            error = ((a.double() - b.double()).norm() / b.double().norm()).item()
            check("trigger", f"{name}: {what} against the release's", error=error if a.dtype == b.dtype else None, limit=limit)
    check("trigger", f"{name}: top-k indices are the release's", torch.equal(picked, same))


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", ()), str(function)]
        return function(*args, **(kwargs or {}))


def without_loss(dsa, S, rows, heads):
    """The operations and the result of the path without a loss, for some query rows of ``heads`` indexer heads."""
    q, weights, k, *_ = inputs(S, 1, 1, heads, 16, 16)
    mask = torch.zeros(1, rows, S, device=device)
    with torch.no_grad(), Operations() as counted:
        if hasattr(dsa, "fused_qk_topk_naive"):
            found = dsa.fused_qk_topk_naive(q[:rows], k, weights[:rows], 8, mask)[0]
        else:
            found = dsa.DSAIndexer._compute_index_scores(None, q[:rows], weights[:rows], k)
    return counted.seen, found


def cases(options, shape, every):
    """What to compare: names, tensors and options; all that the release knows, or the ones that touch each line once."""
    (S, B, *_), given = shape, inputs(*shape)
    pair = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2))
    others = torch.rand(S, S, device=device).tril()  # the other rank's part of the target

    def all_reduce(tensor, group=None, **_):
        """What it is given has to be what is used: it adds in place, as torch.distributed does."""
        assert group is pair.tp
        tensor += others

    ranks = {"group": pair, "all_reduce": all_reduce}
    yield "two ranks, sparse, another scale and coefficient", given, ranks | {"sparse": True, "scale": 0.4, "coefficient": 0.3}
    yield "bf16", inputs(*shape, dtype=torch.bfloat16), {"limit": 1e-3}
    if every:
        yield "inputs of size 1", given, {"gradient": -3.0}
        yield "sparse loss", given, {"sparse": True, "topk": 5}
        yield "two tensor-parallel ranks", given, ranks
        yield "a key that all heads share", [*given[:4], given[4][:, :, :1].expand_as(given[4])], {}
        yield "a causal mask", given, {"mask": causal(S)}
        yield "not contiguous", [t.transpose(0, 1).contiguous().transpose(0, 1) for t in given], {}
    if "varlen_starts" in options:
        rows = torch.arange(S, device=device)
        packed = {"varlen_starts": torch.where(rows < S // 3, 0, S // 3), "varlen_ends": torch.where(rows < S - 5, rows + 1, 0)}
        valid = {"query_valid_rows": rows % 3 > 0}
        order = {"key_positions": torch.randperm(S, device=device)}
        yield (
            "packed, rows without keys, sparse, without ReLU",
            given,
            packed | valid | order | {"sparse": True, "use_relu": False},
        )
        half = [t[: S // 2] if i in (0, 1, 3) else t for i, t in enumerate(given)]
        yield "half of the rows", half, {"varlen_starts": 0 * rows[: S // 2], "varlen_ends": 2 * rows[: S // 2] + 1}
        if every:
            yield "without ReLU", given, {"mask": causal(S), "use_relu": False}
            yield "packed, rows without keys", given, packed
            yield "packed, keys in another order", given, packed | order
            yield "some rows count", given, valid | {"mask": causal(S)}
            yield "loss per token", given, valid | {"mask": causal(S), "calculate_per_token_loss": True}
            biased = torch.randn(B, S, S, device=device) + causal(S)
            biased[0, 7] = float("-inf")
            yield "masks with biases, a row without keys", given, {"mask": biased}


def main():
    fixed, released = release(), as_released()
    options = inspect.signature(getattr(fixed, "FusedDSAIndexerLoss", fixed.DSAttention).forward).parameters
    for where, shape in (("one block", SMALL), ("blocks of heads", LARGE)):
        given = inputs(*shape, size=0.3)
        compare(where, fixed, released, given)
        check("control", f"{where}: the release is right against fp64", all(d <= LIMIT for d in distances(released, given)))
        for what, error in zip(NAMES, distances(fixed, given), strict=True):
            check("trigger", f"{where}: {what} against fp64", error=error, limit=LIMIT)
        half = inputs(*shape, dtype=torch.bfloat16, size=0.3)
        for what, own, its in zip(NAMES, distances(fixed, half), distances(released, half), strict=True):
            check("trigger", f"{where}, bf16: {what} is as near to fp64 as the release's", own <= 1.1 * its + LIMIT)
        for name, given, asked in cases(options, shape, every=shape is SMALL):
            own, torch.distributed.all_reduce = torch.distributed.all_reduce, asked.pop("all_reduce", None)
            compare(f"{where}, {name}", fixed, released, given, **asked)
            torch.distributed.all_reduce = own
    if not hasattr(fixed, "FusedDSAIndexerLoss"):  # from 0.17 on all three are computed, asked for or not
        for needs in ((True, False, False), (False, True, False), (False, False, True)):
            compare(f"gradients {needs}", fixed, released, inputs(*SMALL), needs=needs)
    for name, asked in (
        ("a mask", {"mask": causal}),
        ("sparse", {"sparse": True}),
        ("a mask, sparse", {"mask": causal, "sparse": True}),
    ):
        for step, gib in zip(("forward", "backward"), peaks(fixed, **asked), strict=True):
            FACTS["metrics"][f"{name}: {step} peak GiB"] = gib
            check("trigger", f"{name}: {step} peak of {gib:.2f} GiB, {MOST} at most", gib <= MOST)
    for rows, heads in ((1, 64), (512, 64)):
        (was, a), (now, b) = (without_loss(dsa, 1024, rows, heads) for dsa in (released, fixed))
        check("trigger", f"without the loss, {rows} query rows, {heads} heads: the same {len(was)} operations", was == now)
        check("trigger", f"without the loss, {rows} query rows, {heads} heads: the same scores, bit for bit", torch.equal(a, b))
    finish()


if __name__ == "__main__":
    main()
