"""The deep check of a fix of pack20: right against fp64 however far apart the scores are, and else what the release gives.

Runs after repro.py on the patched side: the loss over the indexer's top k, coefficients, bf16, two tensor-parallel ranks, masked keys.
"""

import importlib
import sys
import types
from pathlib import Path

import torch
from repro import FACTS, NAMES, check, device, errors, finish, inputs, loss_of, outcome, release

SHAPE = 96, 2, 8, 5, 16, 16  # S, B, heads, H, d, D
LIMIT = 1e-4


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


def compare(role, name, found, limit=LIMIT):
    """One check for each of loss, dq, dweights and dk."""
    for what, error in zip(NAMES, found, strict=True):
        check(role, f"{name}: {what}", error=error, limit=limit)


def against(fixed, released, given, change=lambda loss: loss, **options):
    """Relative differences of the fixed outcome from the release's."""
    got, want = (outcome(lambda *leaves, dsa=dsa: change(loss_of(dsa, *leaves, **options)), given) for dsa in (fixed, released))
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True)]


def main():
    fixed, released = release(), as_released()
    for gain in (1, 4, 16, 64, 512):
        given = inputs(*SHAPE, gain)
        compare("trigger", f"scores times {gain}, against fp64", errors(fixed, given))
        compare("trigger", f"scores times {gain}, top 8 alone, against fp64", errors(fixed, given, sparse=True))
    near = inputs(*SHAPE, 1)  # where the release is right
    check("control", "the release is right on these inputs", max(errors(released, near)) <= LIMIT)
    check("control", "and over the top 8 alone", max(errors(released, near, sparse=True)) <= LIMIT)
    compare("trigger", "as the release, coefficient -0.3", against(fixed, released, near, coefficient=-0.3))
    compare("trigger", "as the release, the loss times 5", against(fixed, released, near, change=lambda loss: 5 * loss))
    compare("trigger", "as the release, bf16", against(fixed, released, inputs(*SHAPE, 1, torch.bfloat16)), limit=1e-2)
    S, B = SHAPE[:2]
    pair, others = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2)), torch.rand(S, S, device=device).tril()

    def all_reduce(tensor, group=None, **_):
        """It adds in place, as torch.distributed does: what it is given has to be what is used."""
        assert group is pair.tp
        tensor += others

    torch.distributed.all_reduce, own = all_reduce, torch.distributed.all_reduce
    compare("trigger", "as the release, two tensor-parallel ranks", against(fixed, released, near, group=pair))
    torch.distributed.all_reduce = own
    # Padding: keys that are masked for the indexer, and that the target of 0.16 - 0.18 still counts.
    mask = near[5].expand(B, S, S).clone()
    mask[1, :, : S // 4].masked_fill_(torch.ones(S, S // 4, device=device).tril(-S // 4).bool(), float("-inf"))
    compare("trigger", "as the release, masked keys", against(fixed, released, [*near[:5], mask]))
    finite = outcome(lambda *leaves: loss_of(fixed, *leaves), [*inputs(*SHAPE, 64)[:5], mask])
    check("trigger", "masked keys, scores times 64: all is finite", all(t.isfinite().all() for t in finite))
    FACTS["metrics"].pop("probabilities under 1e-10", None)
    finish()


if __name__ == "__main__":
    main()
