"""The deep check of a fix of pack20: right against fp64 however far apart the scores are, and else what the release gives.

Runs after repro.py on the patched side: the loss over the indexer's top k, coefficients, bf16, two tensor-parallel ranks, masked keys; each
where the release is right, and but for masked keys where it is not. Other scales of the attention, fp16, more tokens, and the function of the loss by
itself; that no tensor is kept from step to step, no number is waited for, and no setting of torch is changed.
"""

import contextlib
import gc
import importlib
import math
import sys
import types
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from repro import FACTS, NAMES, alone, check, definition, device, errors, finish, inputs, loss_of, outcome, release
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPE = 96, 2, 8, 5, 16, 16  # S, B, heads, H, d, D
SCALES = 2.0**-16, 5.0, 2.0**16  # that a loss is multiplied by, as loss scalers and coefficients do
MANY = 2112, 1, 2, 2, 16, 16
STEPS = 8
COSTS = {"operators": 1.25, "numbers that are read": 1, "bytes at most": 1.1, "bytes until the backward": 1}  # of the release's
TAKEN = "cpu", "numpy", "tolist"  # which take numbers without an operator where there is no GPU
LIMIT, BF16, FP16 = 1e-4, (1e-4, 3e-3, 3e-3, 3e-3), (1e-4, 4e-4, 4e-4, 4e-4)  # the loss is fp32, gradients are not


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


def compare(role, name, found, limits=(LIMIT,) * 4):
    """One check for each of loss, dq, dweights and dk."""
    for what, error, limit in zip(NAMES, found, limits, strict=True):
        check(role, f"{name}: {what}", error=error, limit=limit)


def off(got, want):
    """Relative differences."""
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True)]


def against(fixed, released, given, change=lambda loss: loss, **options):
    """Relative differences of the fixed outcome from the release's."""
    got, want = (
        outcome(lambda *leaves, dsa=dsa: change(loss_of(dsa, *leaves, **options)[0]), given) for dsa in (fixed, released)
    )
    return off(got, want)


def exact(fixed, given, factor=1.0, sparse=False, **options):
    """Relative errors of ``factor`` times the fixed loss against fp64, the coefficient in ``options``."""
    got = outcome(lambda *leaves: factor * loss_of(fixed, *leaves, sparse=sparse, **options)[0], given)
    factor *= options.get("coefficient", 1.0)
    want = outcome(lambda *leaves: factor * definition(*leaves, sparse=sparse), given, torch.float64)
    return off(got, want)


def alone_and_in_turns(fixed, first, second, **options):
    """Whether a loss has the gradients that it has alone where another goes forward in between, twice, and its inputs stay as they were."""
    before, own = (
        [t.detach().clone() for t in first],
        [outcome(lambda *t: loss_of(fixed, *t, **options)[0], given)[1:] for given in (first, second)],
    )
    losses = [loss_of(fixed, *given, **options)[0] for given in (first, second)]
    for loss, given, want in zip((*losses, losses[0]), (first, second, first), (*own, own[0]), strict=True):
        got = torch.autograd.grad(loss, given[:3], retain_graph=True)
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            return False
    return all(torch.equal(a, b) for a, b in zip(before, first, strict=True))


class Costs(TorchDispatchMode):
    """Counts operators, the numbers that are read from tensors, for each of which a GPU is waited for, and the bytes of the tensors that are made."""

    def __init__(self):
        super().__init__()
        self.operators, self.reads, self.made, self.peak = 0, 0, {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        self.operators += 1
        self.reads += name in ("_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select")
        if name.startswith(("index", "_index")) and isinstance(args[1], (list, tuple)):  # a mask is made into indices
            self.reads += any(t is not None and t.dtype is torch.bool for t in args[1])
        found = op(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.made[each.untyped_storage()._cdata] = (
                    StorageWeakRef(each.untyped_storage()),
                    each.untyped_storage().nbytes(),
                )
        self.peak = max(self.peak, self.bytes())
        return found

    def bytes(self):
        """Of those that are still there."""
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        return sum(size for _, size in self.made.values())


def costs(dsa, given, sparse):
    """Operators of a loss and its gradients, numbers that they read, bytes that they have at most, and bytes until the backward."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
    taken = [mock.patch.object(torch.Tensor, name, autospec=True, side_effect=getattr(torch.Tensor, name)) for name in TAKEN]
    with contextlib.ExitStack() as stack, Costs() as mode:
        calls = [stack.enter_context(each) for each in taken]
        loss = loss_of(dsa, *leaves, sparse=sparse)[0]
        kept = mode.bytes()
        torch.autograd.grad(loss, leaves[:3])
    return mode.operators, mode.reads + sum(each.call_count for each in calls), mode.peak, kept


def after(dsa, given, sparse):
    """How many tensors more there are after STEPS steps, each a token shorter. A few may come and go: autograd's threads drop theirs when they get to it."""
    counts = []
    for length in range(SHAPE[0] - STEPS - 1, SHAPE[0]):  # none that was seen before
        shorter = [*(t[:length] for t in given[:5]), given[5][:length, :length]]
        outcome(lambda *leaves: loss_of(dsa, *leaves, sparse=sparse)[0], shorter)
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    return counts[-1] - counts[0]


def settings():
    """What other code has set, and a loss must not."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), torch.get_default_dtype()
    return *flags, torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_rng_state().tolist()


def sets(dsa, given, sparse):
    """Whether a loss and its gradients leave settings as they are, which are not those that torch has at first."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    before = settings()
    outcome(lambda *leaves: loss_of(dsa, *leaves, sparse=sparse)[0], given)
    same = settings() == before
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    return same


class Reduces:
    """A stand-in for torch.distributed.all_reduce: ``add`` changes the tensor in place, at once, or when it is waited for."""

    def __init__(self, add, group):
        self.add, self.group = add, group

    def __call__(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        assert group is self.group and op == torch.distributed.ReduceOp.SUM
        self.add(tensor)
        if async_op:
            late = tensor.clone()
            tensor.fill_(float("nan"))  # until then
            return types.SimpleNamespace(wait=lambda: tensor.copy_(late))


def itself(dsa, scale, sparse, q, weights, k, query, key, mask):
    """compute_dsa_indexer_loss of scores that have a gradient, with another ``scale`` of the attention."""
    scores = (torch.einsum("sbhd,tbd->bhst", q, k).relu() * weights.permute(1, 2, 0)[..., None]).sum(1) + mask
    picked = scores.topk(8, -1)[1]
    return dsa.compute_dsa_indexer_loss(scores, picked, query, key, scale, 1.0, sparse, alone)


def scaled(dsa, scale, sparse, q, weights, k, query, key, mask):
    """The loss by the entry that loss_of calls, with another ``scale`` of the attention."""
    if entry := getattr(dsa, "FusedDSAIndexerLoss", None):
        return entry.apply(q, weights, k, query, key, scale, 8, 1.0, mask, sparse, alone)[1]
    return itself(dsa, scale, sparse, q, weights, k, query, key, mask)


def padded(q, weights, k, query, key, mask, seen):
    """The release's loss where ``mask`` hides more keys from the indexer than ``seen`` from the target: log(1e-10) each. What ``seen`` leaves out counts in neither."""
    scores = (torch.einsum("sbhd,tbd->bhst", q, k).relu() * weights.permute(1, 2, 0)[..., None]).sum(1) + mask + seen
    log_index = scores.log_softmax(-1).masked_fill(scores.isinf(), math.log(1e-10))
    target = torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5 + seen[:, None]
    target = target.softmax(-1).mean(1)
    return (target.xlogy(target) - target * log_index).sum() / (q.shape[0] * q.shape[1])


def hidden(fixed, given, causal, sparse):
    """Relative errors against fp64 where keys are masked for the indexer alone. The gradients of the fused loss know the causal mask alone."""
    picked = loss_of(fixed, *given, sparse=sparse)[1]
    seen = causal.double().expand_as(given[5])
    if sparse:
        seen = seen + torch.full_like(seen, float("-inf")).scatter_(-1, picked, 0)
    want = outcome(partial(padded, seen=seen), given, torch.float64)
    if hasattr(fixed, "FusedDSAIndexerLoss"):
        want[1:] = outcome(partial(padded, seen=seen), [*given[:5], causal], torch.float64)[1:]
    got = outcome(lambda *leaves: loss_of(fixed, *leaves, sparse=sparse)[0], given)
    return off(got, want)


def other_rank(query, key, mask):
    """What adds the target of the other rank's heads, over the keys that this rank's has."""
    softmax = (torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5 + mask).softmax(-1).detach()

    def add(tensor):
        chosen = softmax * (tensor > 0)[:, None]
        tensor += (chosen / chosen.sum(-1, keepdim=True)).sum(1)

    return add


def main():
    fixed, released = release(), as_released()
    for gain in (1, 4, 16, 64, 512):
        given = inputs(*SHAPE, gain)
        compare("trigger", f"scores times {gain}, against fp64", errors(fixed, given))
        compare("trigger", f"scores times {gain}, top 8 alone, against fp64", errors(fixed, given, sparse=True))
    S, B = SHAPE[:2]
    pair, others = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2)), torch.rand(S, S, device=device).tril()

    def add(tensor):
        """In place, as torch.distributed does: what it is given has to be what is used."""
        tensor += others * (tensor > 0)  # both ranks have the same keys

    near, far = inputs(*SHAPE, 1), inputs(*SHAPE, 16)  # where the release is right, and where it is wrong
    whole = outcome(definition, far, torch.float64)
    for sparse, name in ((False, ""), (True, ", top 8 alone")):
        compare("control", f"the release against fp64{name}", errors(released, near, sparse=sparse))
        for coefficient in (-0.3, 1e-3):
            found = against(fixed, released, near, coefficient=coefficient, sparse=sparse)
            compare("trigger", f"as the release, coefficient {coefficient}{name}", found)
        for factor in SCALES:
            found = against(fixed, released, near, change=lambda loss, factor=factor: factor * loss, sparse=sparse)
            compare("trigger", f"as the release, the loss times {factor}{name}", found)
        nothing = outcome(lambda *leaves, sparse=sparse: loss_of(fixed, *leaves, coefficient=0.0, sparse=sparse)[0], near)
        check("trigger", f"coefficient 0: loss and gradients are 0{name}", not any(t.any() for t in nothing))
        found = against(fixed, released, inputs(*SHAPE, 1, torch.bfloat16), sparse=sparse)
        compare("trigger", f"as the release, bf16{name}", found, BF16)
        torch.distributed.all_reduce, own = Reduces(add, pair.tp), torch.distributed.all_reduce
        found = against(fixed, released, near, group=pair, sparse=sparse)
        torch.distributed.all_reduce = own
        compare("trigger", f"as the release, two tensor-parallel ranks{name}", found)
        compare("trigger", f"scores times 16, coefficient -0.3{name}", exact(fixed, far, sparse=sparse, coefficient=-0.3))
        for factor in SCALES:
            found = exact(fixed, far, factor, sparse=sparse)
            compare("trigger", f"scores times 16, the loss times {factor}{name}", found)
        turns = alone_and_in_turns(fixed, far, inputs(*SHAPE, 4), sparse=sparse)
        check("trigger", f"gradients are the same with another loss in between, and a second time{name}", turns)
        found = exact(fixed, inputs(*SHAPE, 16, torch.bfloat16), sparse=sparse)
        compare("trigger", f"scores times 16, bf16{name}", found, BF16)
        half = [*far[:3], far[3][:, :, 4:], far[4][:, :, 4:], far[5]]  # the other four heads of eight are the other rank's
        torch.distributed.all_reduce = Reduces(other_rank(far[3][:, :, :4], far[4][:, :, :4], far[5]), pair.tp)
        got = outcome(lambda *leaves, sparse=sparse: loss_of(fixed, *leaves, sparse=sparse, group=pair)[0], half)
        torch.distributed.all_reduce = own
        want = outcome(lambda *leaves, sparse=sparse: definition(*leaves, sparse=sparse), far, torch.float64)
        found = off(got, want)
        compare("trigger", f"scores times 16, heads on two tensor-parallel ranks{name}", found)
        for scale in (0.05, 1.0):
            wide = [*far[:3], far[3] * scale * far[3].shape[-1] ** 0.5, *far[4:]]  # by this, which definition() knows
            want = outcome(lambda *leaves, sparse=sparse: definition(*leaves, sparse=sparse), wide, torch.float64)
            for entry, what in ((scaled, ""), (itself, ", the function by itself")):
                got = outcome(partial(entry, fixed, scale, sparse), far)
                found = off(got, want)
                compare("trigger", f"scores times 16, the attention's times {scale}{what}{name}", found)
        for factor in (1.0, 2.0**16):
            found = exact(fixed, inputs(*SHAPE, 16, torch.float16), factor, sparse=sparse)
            compare("trigger", f"scores times 16, fp16, the loss times {factor}{name}", found, FP16)
        compare("trigger", f"scores times 16, {MANY[0]} tokens{name}", exact(fixed, inputs(*MANY, 16), sparse=sparse))
        few = 2 * S if hasattr(fixed, "FusedDSAIndexerLoss") else S  # 0.16 is given indices
        got = outcome(lambda *leaves, sparse=sparse, topk=few: loss_of(fixed, *leaves, sparse=sparse, topk=topk)[0], far)
        found = off(got, whole)
        compare("trigger", f"scores times 16, fewer tokens than the top k{name}", found)
        for (what, room), ours, own in zip(COSTS.items(), *(costs(dsa, far, sparse) for dsa in (fixed, released)), strict=True):
            check("trigger", f"{what}: {ours}, of {own} in the release{name}", ours <= room * own)
        check("trigger", f"what torch is set to stays{name}", sets(fixed, far, sparse))
        kept = after(fixed, far, sparse)
        check("trigger", f"{kept} tensors more are there after {STEPS} steps, fewer than one a step{name}", kept < STEPS)
        picked = [loss_of(dsa, *near, sparse=sparse)[1] for dsa in (fixed, released)]
        check("trigger", f"top-k indices are the release's{name}", torch.equal(*picked))
    # Padding: keys that are masked for the indexer, and that the target of 0.16 - 0.18 still counts.
    mask = near[5].expand(B, S, S).clone()
    mask[1, :, : S // 4].masked_fill_(torch.ones(S, S // 4, device=device).tril(-S // 4).bool(), float("-inf"))
    mask[1, -1, S // 4 + 4 :] = float("-inf")  # four keys are left, fewer than the top 8
    for sparse, name in ((False, ""), (True, ", top 8 alone")):
        compare("trigger", f"as the release, masked keys{name}", against(fixed, released, [*near[:5], mask], sparse=sparse))
        found = hidden(fixed, [*far[:5], mask], far[5], sparse)
        compare("trigger", f"scores times 16, masked keys{name}", found)
    finite = outcome(lambda *leaves: loss_of(fixed, *leaves)[0], [*inputs(*SHAPE, 64)[:5], mask])
    check("trigger", "masked keys, scores times 64: all is finite", all(t.isfinite().all() for t in finite))
    mask[0, 9] = float("-inf")
    given = [*near[:5], mask]
    for sparse, name in ((False, ""), (True, ", top 8 alone")):
        (got, want) = (
            outcome(lambda *leaves, dsa=dsa, sparse=sparse: loss_of(dsa, *leaves, sparse=sparse)[0], given)
            for dsa in (fixed, released)
        )
        same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in zip(got, want, strict=True))
        check("trigger", f"a row without any key: NaN where the release gives NaN{name}", same and got[0].isnan())
    FACTS["metrics"].pop("probabilities under 1e-10", None)
    finish()


if __name__ == "__main__":
    main()
