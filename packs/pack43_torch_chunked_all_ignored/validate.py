"""The deep check of a fix of pack43: where a label counts, all is what the release itself gives in another process, bit for bit.

Runs after repro.py on the patched side: sizes, dtypes, chunks, ways to accumulate, options, what is trained, gradients of the loss, second backwards.
Where no label counts gradients are 0, and the loss is cross_entropy's. The chunked operators have to be what runs.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from repro import FACTS, check, device, eager, finish, release
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = (16, 32, 70), (65, 24, 300), (1, 8, 5), (300, 16, 50)  # BT, H, V
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
CHUNKS = (1, "accurate"), (5, "balanced"), (64, "compact"), (7, "auto")
#: What is trained, of x, w and b, and how the function is called; "bias" and "x" are the script's own words.
CALLS = (
    *(("xwb"[: i + 1], {}) for i in range(3)),
    *((trained, {}) for trained in ("w", "b", "xb", "")),
    ("xw", {"bias": None}),
    ("xw", {"x": "by columns"}),
    ("xwb", {"x": "inf"}),
    *(("xwb", {"weight": kind}) for kind in ("ramp", "small", "huge", "cancels", "zeros")),
    *(("xwb", {"ignore_index": index}) for index in (2, 10**6)),
    *((trained, {"backwards": True, "allow_retain_graph": kept}) for trained in ("xwb", "x", "w") for kept in (True, False)),
)


class Operators(TorchDispatchMode):
    """Whether a chunked operator was called."""

    chunked = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.chunked |= "linear_cross_entropy_batch_chunked" in str(op)
        return op(*args, **(kwargs or {}))


def weights(kind, V):
    w = torch.linspace(0.5, 2, V)
    return {"ramp": w, "small": w / 1000, "huge": w * 1e38, "cancels": torch.where(torch.arange(V) % 2 == 0, 1.0, -1.0)}.get(
        kind, torch.zeros(V)
    )


def run(shape, dtype, chunk, policy, reduction, trained, options, many):
    """The loss, the gradients and whether chunks were used, or an error's text; the same numbers wherever it is called."""
    (BT, H, V), options = shape, dict(options)
    torch.manual_seed(BT * V + many)
    x, w, b = torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V)
    y, given = torch.randint(3, V, (BT,)), torch.randn(BT)
    y[torch.randperm(BT)[many:]] = options.get("ignore_index", -100)
    layout, bias = options.pop("x", ""), options.pop("bias", b)
    x[torch.nonzero(y >= 3)[:1, 0] if layout == "inf" else slice(0), 0] = float("inf")
    x = x.t().contiguous().t() if layout == "by columns" else x
    more = {name: options.pop(name) for name in ("backwards", "allow_retain_graph") if name in options}
    options |= {"weight": weights(options["weight"], V).to(device, dtype)} if "weight" in options else {}
    x, w, b = (t.to(device, dtype).requires_grad_(n in trained) for t, n in zip((x, w, b), "xwb", strict=True))
    chunked = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=chunk, acc_policy=policy, allow_retain_graph=more.get("allow_retain_graph", False)
    )
    y, given = y.to(device), given.to(device)
    with Operators() as used:
        loss = F.linear_cross_entropy(
            x, w, y, linear_bias=None if bias is None else b, options=chunked, reduction=reduction, **options
        )
    if not many:
        more["want"] = eager(x.detach(), w.detach(), y, 0 if bias is None else b.detach(), reduction=reduction, **options)
    try:
        for left in reversed(range(1 + more.get("backwards", False)) if trained else ()):
            loss.backward((given if loss.dim() else given[0]).to(loss.dtype), retain_graph=left > 0)
    except RuntimeError as raised:
        return [str(raised).splitlines()[0]], used.chunked, more.get("want")
    return [loss.detach(), *(t.grad for t in (x, w, b) if t.requires_grad)], used.chunked, more.get("want")


def cases():
    for (i, shape), (j, dtype), (k, reduction) in itertools.product(
        enumerate(SHAPES), enumerate(DTYPES), enumerate(("mean", "sum", "none"))
    ):
        for call, many in itertools.product(CALLS, (0, 1, shape[0])):
            yield shape, dtype, *CHUNKS[(i + j + k) % 4], reduction, *call, many


def alike(got, want):
    def same(g, r):
        if not isinstance(g, torch.Tensor) or not isinstance(r, torch.Tensor):
            return g == r if g is None or isinstance(g, str) else False
        return g.dtype == r.dtype and torch.equal(g.isnan(), r.isnan()) and torch.equal(g.nan_to_num(), r.nan_to_num())

    return len(got) == len(want) and all(map(same, got, want))


def main():
    release(tokens=1)  # what is run goes into the report
    kept, overlay = Path("released.pt").resolve(), str(Path(FACTS["file"]).parents[1])
    path = os.pathsep.join(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != overlay)
    subprocess.run([sys.executable, __file__, "--released", str(kept)], env={**os.environ, "PYTHONPATH": path}, check=True)
    file, released = torch.load(kept)
    check("control", "the release itself, in another process", file != FACTS["file"] and bool(overlay not in file))
    groups = {}
    for case, want in zip(cases(), released, strict=True):
        shape, dtype, chunk, policy, reduction, trained, options, many = case
        got, chunked, loss = run(*case)
        said = f"{many} labels, trained {trained or 'nothing'}, {options or 'plain'}"
        odd = groups.setdefault(
            (shape, dtype, chunk, policy, reduction), {"chunks": [], "as released": [], "nothing counts": []}
        )
        odd["chunks"] += [] if chunked else [said]
        if many:
            odd["as released"] += [] if alike(got, want) else [said]
        elif not (isinstance(got[0], str) and alike(got, want)):  # a second backward that the release refuses
            zero = not any(isinstance(g, str) or g.any().item() for g in got[1:])
            odd["nothing counts"] += [] if zero and alike(got[:1], [loss]) else [said]
    for (shape, dtype, chunk, policy, reduction), odd in groups.items():
        for name, those in odd.items():
            role = "trigger" if reduction == "mean" and name == "nothing counts" else "control"
            check(role, f"{str(dtype)[6:]} {shape}, {chunk} {policy}, {reduction}: {name} {those[:3] or ''}", not those)
    finish()


if __name__ == "__main__":
    if "--released" in sys.argv:
        torch.save((torch.__file__, [run(*case)[0] if case[-1] else run(*case)[0][:1] for case in cases()]), sys.argv[-1])
    else:
        main()
