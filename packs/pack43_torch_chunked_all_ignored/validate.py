"""The deep check of a fix of pack43: where a label counts, all is what the release itself gives in another process, bit for bit.

Runs after repro.py on the patched side: sizes, dtypes, chunks, ways to accumulate, options, what is trained, gradients of the loss, second backwards.
Where no label counts gradients are 0, and the loss is cross_entropy's. The chunked operators have to be what runs.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from repro import FACTS, check, device, eager, finish, release
from torch.utils._python_dispatch import TorchDispatchMode


def refused(policy):
    """Why the release does not take an acc_policy; empty where it does."""
    try:
        torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
    except ValueError as error:
        return str(error)
    return ""


SHAPES = (16, 32, 70), (65, 24, 300), (1, 8, 5), (300, 16, 50), (0, 8, 5)  # BT, H, V
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
CHUNKS = 1, 5, 64, 7
#: Those that the release takes.
POLICIES = [name for name in ("accurate", "balanced", "compact", "auto") if not refused(name)]
#: What is trained, of x, w and b; options of the function; how it is called otherwise.
CALLS = (
    *(("xwb"[: i + 1], {}, {}) for i in range(3)),
    *((trained, {}, {}) for trained in ("w", "b", "xb", "")),
    ("xw", {}, {"bias": False}),
    ("xwb", {}, {"one token": True}),
    ("xw", {}, {"layout": "by columns"}),
    ("xwb", {}, {"layout": "an inf"}),
    *(("xwb", {"weight": kind}, {}) for kind in ("ramp", "small", "huge", "cancels", "zeros")),
    *(("xwb", {"ignore_index": index}, {}) for index in (2, 10**6)),
    ("xwb", {"weight": "ramp", "ignore_index": 2}, {}),
    *((trained, {}, {"twice": True, "keep": keep}) for trained in ("xwb", "x", "w") for keep in (True, False)),
    *(("xwb", {}, {"chunked": {"acc_policy": policy, "acc_dtype": torch.float32}}) for policy in POLICIES),
    ("xwb", {}, {"chunked": {}}),  # as most people call it
)
#: More tokens than fp16 counts.
MANY = (70000, 4, 5), torch.float16, 8192


class Operators(TorchDispatchMode):
    """Whether a chunked operator was called, and how often the host waited for a number."""

    chunked, waits = False, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.chunked |= "linear_cross_entropy_batch_chunked" in str(op)
        return op(*args, **(kwargs or {}))

    def watched(self):
        """``bool(tensor)`` and ``tensor.item()`` are counted; on a GPU each waits for all that was launched."""

        def counted(method):
            def call(*given):
                self.waits += 1
                return method(*given)

            return call

        return mock.patch.multiple(
            torch.Tensor, **{n: counted(getattr(torch.Tensor, n)) for n in ("__bool__", "__int__", "__float__", "item")}
        )


def weights(kind, V):
    w = torch.linspace(0.5, 2, V)
    return {"ramp": w, "small": w / 1000, "huge": w * 1e38, "cancels": torch.where(torch.arange(V) % 2 == 0, 1.0, -1.0)}.get(
        kind, torch.zeros(V)
    )


def run(shape, dtype, chunk, policy, reduction, trained, options, how, many):
    """The loss and the gradients, or an error's text, and the host's waits; whether chunks were used; cross_entropy's loss.

    The same numbers wherever it is called. ``many`` tokens have a label that counts.
    """
    BT, H, V = shape
    torch.manual_seed(BT * V + many)
    x, w, b = torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V)
    y, given = torch.randint(3, V, (BT,)), torch.randn(BT)
    y[torch.randperm(BT)[many:]] = options.get("ignore_index", -100)
    if how.get("layout") == "an inf" and many:  # in a token that counts: else cross_entropy's gradients are NaN, too
        x[y.argmax(), 0] = float("inf")
    if how.get("layout") == "by columns":
        x = x.t().contiguous().t()
    if how.get("one token") and BT:
        x, y, given = x[y.argmax()], y[y.argmax()], given[0]
    options = {**options, "weight": weights(options["weight"], V).to(device, dtype)} if "weight" in options else options
    x, w, b = (t.to(device, dtype).requires_grad_(n in trained) for t, n in zip((x, w, b), "xwb", strict=True))
    y, given, bias = y.to(device), given.to(device), b if how.get("bias", True) else None
    chunked = how.get("chunked", {"batch_chunk_size": chunk, "acc_policy": policy})
    chunked = torch.nn.LinearCrossEntropyOptions(
        **{"batch_chunk_size": chunk, **chunked} if chunked else {}, allow_retain_graph=how.get("keep", False)
    )
    want = None if many else eager(x.detach(), w.detach(), y, 0 if bias is None else b.detach(), reduction=reduction, **options)
    with Operators() as used, used.watched():
        try:
            loss = F.linear_cross_entropy(x, w, y, linear_bias=bias, options=chunked, reduction=reduction, **options)
            for left in reversed(range(1 + how.get("twice", False)) if trained else ()):
                loss.backward((given if loss.dim() else given.flatten()[:1].sum()).to(loss.dtype), retain_graph=left > 0)
        except (RuntimeError, ValueError) as raised:
            return [str(raised).splitlines()[0], used.waits], used.chunked, want
    return [loss.detach(), *(t.grad for t in (x, w, b) if t.requires_grad), used.waits], used.chunked, want


def cases():
    for (i, shape), (j, dtype), (k, reduction) in itertools.product(
        enumerate(SHAPES), enumerate(DTYPES), enumerate(("mean", "sum", "none"))
    ):
        policy, calls = POLICIES[(i + j + k) % len(POLICIES)], CALLS[:1] + CALLS[1 + (i + j + k) % 3 :: 3] if i else CALLS
        for call, many in itertools.product(calls, dict.fromkeys((0, min(1, shape[0]), shape[0]))):
            yield shape, dtype, CHUNKS[(i + j + k) % 4], policy, reduction, *call, many
    for policy, many in itertools.product(POLICIES, (0, MANY[0][0])):
        yield *MANY, policy, "mean", "xwb", {}, {"chunked": {"acc_policy": policy, "acc_dtype": torch.float32}}, many


def alike(got, want):
    """Bit for bit; each NaN is one."""

    def same(g, r):
        if not isinstance(g, torch.Tensor) or not isinstance(r, torch.Tensor):
            return g == r if g is None or isinstance(g, (str, int)) else False
        if g.dtype != r.dtype or g.shape != r.shape or not torch.equal(g.isnan(), r.isnan()):
            return False
        return torch.equal(g[~g.isnan()].view(torch.uint8), r[~r.isnan()].view(torch.uint8))

    return len(got) == len(want) and all(map(same, got, want))


def main():
    release(tokens=1)  # what is run goes into the report
    kept, overlay = Path("released.pt").resolve(), str(Path(FACTS["file"]).parents[1])
    path = os.pathsep.join(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != overlay)
    command = [sys.executable, __file__, "--released", str(kept)]
    other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    found = [run(*case) for case in cases()]
    if other.wait():
        finish("CHANGED", "the release itself could not be run")
    file, released = torch.load(kept)
    check("control", "the release itself, in another process", Path(file).parents[1] != Path(overlay))
    judged = {}  # what holds of which cases: "" where it does, else the case
    for case, (got, chunked, loss), want in zip(cases(), found, released, strict=True):
        shape, dtype, chunk, policy, reduction, trained, options, how, many = case
        said = f"{many} labels, trained {trained or 'nothing'}, {options or 'plain'}, {how or 'as usual'}"
        refused_too = isinstance(want[0], str)
        holds = {"waits": got[-1] <= want[-1]}
        if not refused_too:
            holds["chunks"] = chunked
        if many or refused_too:
            holds["as released"] = alike(got[:-1], want[:-1])
        else:
            zero = not isinstance(got[0], str) and not any(g.any().item() for g in got[1:-1])
            holds["nothing counts"] = zero and alike(got[:1], [loss])
        for name, ok in holds.items():
            judged.setdefault((shape, dtype, chunk, policy, reduction, name), []).append("" if ok else said)
    for (shape, dtype, chunk, policy, reduction, name), cases_of in judged.items():
        role, odd = "trigger" if reduction == "mean" and name == "nothing counts" else "control", list(filter(None, cases_of))
        check(
            role,
            f"{str(dtype)[6:]} {shape}, {chunk} {policy}, {reduction}: {name}, {len(cases_of)} runs {odd[:3] or ''}",
            not odd,
        )
    finish()


if __name__ == "__main__":
    if "--released" in sys.argv:
        found = [run(*case)[0] for case in cases()]
        # Of a batch in which nothing counts its loss and its waits: the rest is the bug.
        torch.save(
            (
                torch.__file__,
                [all_of if case[-1] else [all_of[0], all_of[-1]] for case, all_of in zip(cases(), found, strict=True)],
            ),
            sys.argv[-1],
        )
    else:
        main()
