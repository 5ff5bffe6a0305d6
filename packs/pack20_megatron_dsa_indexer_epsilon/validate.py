"""The deep check of a fix of pack20: right against fp64 however far apart the scores are, and else what the release gives.

Runs after repro.py on the patched side: the loss over the indexer's top k, coefficients, bf16, two tensor-parallel ranks, masked keys; each
where the release is right, and but for masked keys where it is not.
"""

import importlib
import sys
import types
from pathlib import Path

import torch
from repro import FACTS, NAMES, check, definition, device, errors, finish, inputs, loss_of, outcome, release

SHAPE = 96, 2, 8, 5, 16, 16  # S, B, heads, H, d, D
LIMIT, BF16 = 1e-4, (1e-4, 3e-3, 3e-3, 3e-3)  # the loss is fp32, gradients are bf16


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


def against(fixed, released, given, change=lambda loss: loss, **options):
    """Relative differences of the fixed outcome from the release's."""
    got, want = (
        outcome(lambda *leaves, dsa=dsa: change(loss_of(dsa, *leaves, **options)[0]), given) for dsa in (fixed, released)
    )
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True)]


def exact(fixed, given, factor=1.0, sparse=False, **options):
    """Relative errors of ``factor`` times the fixed loss against fp64, which is that of one rank, and the coefficient in ``options``."""
    got = outcome(lambda *leaves: factor * loss_of(fixed, *leaves, sparse=sparse, **options)[0], given)
    factor *= options.get("coefficient", 1.0)
    want = outcome(lambda *leaves: factor * definition(*leaves, sparse=sparse), given, torch.float64)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


def main():
    fixed, released = release(), as_released()
    for gain in (1, 4, 16, 64, 512):
        given = inputs(*SHAPE, gain)
        compare("trigger", f"scores times {gain}, against fp64", errors(fixed, given))
        compare("trigger", f"scores times {gain}, top 8 alone, against fp64", errors(fixed, given, sparse=True))
    S, B = SHAPE[:2]
    pair, others = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2)), torch.rand(S, S, device=device).tril()

    def all_reduce(tensor, group=None, **_):
        """It adds in place, as torch.distributed does: what it is given has to be what is used."""
        assert group is pair.tp
        tensor += others * (tensor > 0)  # both ranks have the same keys

    near = inputs(*SHAPE, 1)  # where the release is right
    for sparse, name in ((False, ""), (True, ", top 8 alone")):
        compare("control", f"the release against fp64{name}", errors(released, near, sparse=sparse))
        for coefficient in (-0.3, 1e-3):
            found = against(fixed, released, near, coefficient=coefficient, sparse=sparse)
            compare("trigger", f"as the release, coefficient {coefficient}{name}", found)
        found = against(fixed, released, near, change=lambda loss: 5 * loss, sparse=sparse)
        compare("trigger", f"as the release, the loss times 5{name}", found)
        found = against(fixed, released, inputs(*SHAPE, 1, torch.bfloat16), sparse=sparse)
        compare("trigger", f"as the release, bf16{name}", found, BF16)
        torch.distributed.all_reduce, own = all_reduce, torch.distributed.all_reduce
        found = against(fixed, released, near, group=pair, sparse=sparse)
        torch.distributed.all_reduce = own
        compare("trigger", f"as the release, two tensor-parallel ranks{name}", found)
        far = inputs(*SHAPE, 16)  # where it is wrong
        compare("trigger", f"scores times 16, coefficient -0.3{name}", exact(fixed, far, sparse=sparse, coefficient=-0.3))
        compare("trigger", f"scores times 16, the loss times 5{name}", exact(fixed, far, 5.0, sparse=sparse))
        found = exact(fixed, inputs(*SHAPE, 16, torch.bfloat16), sparse=sparse)
        compare("trigger", f"scores times 16, bf16{name}", found, BF16)
        torch.distributed.all_reduce = lambda tensor, **_: tensor.mul_(2)  # the other rank has the same heads
        found = exact(fixed, far, sparse=sparse, group=pair)
        torch.distributed.all_reduce = own
        compare("trigger", f"scores times 16, two tensor-parallel ranks with the same heads{name}", found)
        picked = [loss_of(dsa, *near, sparse=sparse)[1] for dsa in (fixed, released)]
        check("trigger", f"top-k indices are the release's{name}", torch.equal(*picked))
    # Padding: keys that are masked for the indexer, and that the target of 0.16 - 0.18 still counts.
    mask = near[5].expand(B, S, S).clone()
    mask[1, :, : S // 4].masked_fill_(torch.ones(S, S // 4, device=device).tril(-S // 4).bool(), float("-inf"))
    mask[1, -1, S // 4 + 4 :] = float("-inf")  # four keys are left, fewer than the top 8
    for sparse, name in ((False, ""), (True, ", top 8 alone")):
        compare("trigger", f"as the release, masked keys{name}", against(fixed, released, [*near[:5], mask], sparse=sparse))
    finite = outcome(lambda *leaves: loss_of(fixed, *leaves)[0], [*inputs(*SHAPE, 64)[:5], mask])
    check("trigger", "masked keys, scores times 64: all is finite", all(t.isfinite().all() for t in finite))
    mask[0, 9] = float("-inf")
    given = [*near[:5], mask]
    (got, want) = (outcome(lambda *leaves, dsa=dsa: loss_of(dsa, *leaves)[0], given) for dsa in (fixed, released))
    same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in zip(got, want, strict=True))
    check("trigger", "a row without any key: NaN where the release gives NaN", same and got[0].isnan())
    FACTS["metrics"].pop("probabilities under 1e-10", None)
    finish()


if __name__ == "__main__":
    main()
