"""The deep check of a fix of pack12: loss, top-k indices and gradients are the release's, for every option, and right in fp64.

Runs after repro.py on the patched side, where heads fill more than one block and where they do not. Options that a release lacks are left out.
"""

import importlib
import inspect
import sys
import types
from pathlib import Path

import torch
from repro import FACTS, alone, check, definition, device, finish, inputs, loss_of, release
from torch.utils._python_dispatch import TorchDispatchMode

#: The options that 0.19 brought, in the order of its function.
MORE = dict.fromkeys(("varlen_starts", "varlen_ends", "key_positions", "query_valid_rows"))
MORE |= {"calculate_per_token_loss": False, "use_relu": True}
LIMIT = 1e-5  # sums over heads in another order
NAMES = ("loss", "dq", "dweights", "dk")
SMALL, LARGE = (48, 2, 8, 5, 16, 16), (512, 1, 72, 66, 16, 16)  # S, B, heads, H, d, D


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


def outcome(dsa, tensors, needs=(True,) * 3, scale=1.0, **given):
    """The loss, its gradients by q, weights and k (None where none is asked for), and the top-k indices; a second backward is like the first."""
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors[:3], needs, strict=True)]
    topk, sparse, group = given.pop("topk", 8), given.pop("sparse", False), given.pop("group", alone)
    more = [given.get(name, default) for name, default in MORE.items()] if given else []
    loss, picked = loss_of(dsa, *leaves, *tensors[3:], topk, sparse, group, *more)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    first, second = (torch.autograd.grad(loss, wanted, torch.full_like(loss, scale), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "a second backward gives other gradients"
    got = iter(first)
    return [loss.detach(), *(next(got) if leaf.requires_grad else None for leaf in leaves)], picked


def compare(name, fixed, released, tensors, limit=LIMIT, **given):
    """The fixed outcome against the release's."""
    (got, picked), (want, same) = (outcome(dsa, tensors, **given) for dsa in (fixed, released))
    for what, a, b in zip(NAMES, got, want, strict=True):
        if b is not None:
            error = ((a.double() - b.double()).norm() / b.double().norm()).item()
            check("trigger", f"{name}: {what} against the release's", error=error if a.dtype == b.dtype else None, limit=limit)
    check("trigger", f"{name}: top-k indices are the release's", torch.equal(picked, same))
    return got


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

    yield "two tensor-parallel ranks, sparse loss", given, {"group": pair, "all_reduce": all_reduce, "sparse": True}
    if every:
        yield "inputs of size 1", given, {"scale": -3.0}
        yield "sparse loss", given, {"sparse": True}
        yield "two tensor-parallel ranks", given, {"group": pair, "all_reduce": all_reduce}
        yield "bf16", inputs(*shape, dtype=torch.bfloat16), {"limit": 1e-3}
        yield "a key that all heads share", [*given[:4], given[4][:, :, :1].expand_as(given[4]), given[5]], {}
    if "varlen_starts" in options:
        starts = torch.where(torch.arange(S, device=device) < S // 3, 0, S // 3)
        packed = {"varlen_starts": starts, "varlen_ends": torch.arange(1, S + 1, device=device)}
        packed["key_positions"] = torch.randperm(S, device=device)
        valid = {"query_valid_rows": torch.arange(S, device=device) % 3 > 0}
        yield "packed, sparse, without ReLU", [*given[:5], None], packed | valid | {"sparse": True, "use_relu": False}
        if every:
            yield "without ReLU", given, {"use_relu": False}
            yield "packed", [*given[:5], None], packed
            yield "some rows count", given, valid
            yield "loss per token", given, valid | {"calculate_per_token_loss": True}
            yield "masks with biases", [*given[:5], torch.randn(B, S, S, device=device) + given[5]], {}


def main():
    fixed, released = release(), as_released()
    options = inspect.signature(getattr(fixed, "FusedDSAIndexerLoss", fixed.DSAttention).forward).parameters
    for where, shape in (("one block", SMALL), ("blocks of heads", LARGE)):
        given = inputs(*shape, size=0.3)
        got = compare(where, fixed, released, given)
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
        definition(*exact).backward()
        right = [definition(*exact).detach(), *(t.grad for t in exact[:3])]
        errors = {}
        for who, found in (("released", outcome(released, given)[0]), ("fixed", got)):
            errors[who] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]
        check("control", f"{where}: the release is right against fp64", max(errors["released"]) <= LIMIT)
        for what, error in zip(NAMES, errors["fixed"], strict=True):
            check("trigger", f"{where}: {what} against fp64", error=error, limit=LIMIT)
        for name, given, more in cases(options, shape, every=shape is SMALL):
            own, torch.distributed.all_reduce = torch.distributed.all_reduce, more.pop("all_reduce", None)
            compare(f"{where}, {name}", fixed, released, given, **more)
            torch.distributed.all_reduce = own
    if not hasattr(fixed, "FusedDSAIndexerLoss"):  # from 0.17 on all three are computed, asked for or not
        for needs in ((True, False, False), (False, True, False), (False, False, True)):
            compare(f"gradients {needs}", fixed, released, inputs(*SMALL), needs=needs)
    for rows, heads in ((1, 64), (512, 64)):
        (was, a), (now, b) = (without_loss(dsa, 1024, rows, heads) for dsa in (released, fixed))
        check("trigger", f"without the loss, {rows} query rows, {heads} heads: the same {len(was)} operations", was == now)
        check("trigger", f"without the loss, {rows} query rows, {heads} heads: the same scores, bit for bit", torch.equal(a, b))
    finish()


if __name__ == "__main__":
    main()
