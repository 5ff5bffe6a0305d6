"""The deep check of a fix of pack39: right for each option and size, and where one block of columns was right nothing changes.

Runs after repro.py on the patched side. An error counts in those of torch's own gradient in the same dtype, with logits in full.
"""

import contextlib
import importlib.util
import itertools
from importlib.metadata import distribution

import torch
import torch.nn.functional as F
from repro import DTYPES, LIMIT, cce, check, device, error, finish

SIZES = (13, 24, 70), (150, 80, 600), (16, 24, 16000), (150, 80, 16000)
OPTIONS = (
    {"reduction": "sum"},
    {"reduction": "mean"},
    {"reduction": "none"},
    {"reduction": "sum", "shift": True},
    {"reduction": "none", "ignore_index": 1},
    {"reduction": "sum", "softcap": 5.0},
)
if device == "cuda":  # where each size and kind of call is compiled anew, which takes seconds, and memory
    SIZES = SIZES[1:]


def eager(x, w, y, shift=False, softcap=None, **options):
    """The definition; with ``shift`` a token's label is the next one's."""
    x, y = (x[:-1], y[1:]) if shift else (x, y)
    logits = x @ w.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), y, **options)


def outcome(loss, x, w, y, trained, given, **options):
    """The loss, and the gradients of those of x and w that are trained; ``given`` [BT] is a loss for each token's gradient."""
    leaves = {name: t.detach().requires_grad_(name in trained) for name, t in (("x", x), ("w", w))}
    value = loss(*leaves.values(), y, **options)
    value.backward(given.to(value.dtype) if value.dim() else given[0].to(value.dtype))
    return {"loss": value.detach(), **{name: leaves[name].grad for name in trained}}


def options(dtype):
    for (BT, H, V), each, trained in itertools.product(SIZES, OPTIONS, ("xw", "x", "w")):
        if (V > 1000 or device == "cuda") and trained != "xw" and (trained == "w" or each != OPTIONS[0]):
            continue
        if V > 1000 and BT > 16 and each != OPTIONS[0]:
            continue
        V = -(-V // 256) * 256 if "softcap" in each else V  # with other ones a softcap is wrong: pack37
        x, w = torch.randn(BT, H).to(device, dtype), (torch.randn(V, H) / H**0.5).to(device, dtype)
        y, given = torch.randint(0, V, (BT,)).to(device), 30 * torch.randn(BT, device=device)
        y[3::5] = each.get("ignore_index", -100)
        want = outcome(eager, x.double(), w.double(), y, trained, given, **each)
        torchs = outcome(eager, x, w, y, trained, given, **each)
        got = outcome(cce, x, w, y, trained, given, **each)
        said = f"{str(dtype)[6:]} {(BT, H, V)}, {each}, trained {trained}"
        check("control", f"{said}: loss", error=error(got["loss"].double(), want["loss"]), limit=2e-3)
        for name in trained:
            g, t, r = got[name], torchs[name], want[name]
            right = g is not None and (g.dtype, g.shape, g.stride()) == (dtype, t.shape, t.stride())
            check("control", f"{said}: gradient of {name} has its dtype, shape and strides", right)
            many = LIMIT if name == "x" else 8
            close = right and error(g.double(), r) <= many * max(error(t.double(), r), 2e-4)
            role = "trigger" if name == "x" and V > 1000 else "control"
            check(role, f"{said}: the error of the gradient of {name} is at most {many} times torch's", close)


@contextlib.contextmanager
def as_released():
    """With the release's own kernel of the backward, from the file that the patched one hides."""
    from cut_cross_entropy import cce

    file = distribution("cut-cross-entropy").locate_file("cut_cross_entropy/cce_backward.py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    fixed, cce.cce_backward_kernel = cce.cce_backward_kernel, module.cce_backward_kernel
    try:
        yield
    finally:
        cce.cce_backward_kernel = fixed


def kernels(dtype):
    """The kernel itself: one block of columns is added once, so the gradients stay the release's, bit for bit; w's does anyway.

    On Triton's interpreter: on a GPU another kernel is compiled, whose products may round otherwise.
    """
    for size in ((13, 24, 32), (13, 160, 32), (13, 24, 700)):
        BT, H, V = size
        x, w = torch.randn(BT, H).to(device, dtype), (torch.randn(V, H) / H**0.5).to(device, dtype)
        y = torch.randint(0, V, (BT,)).to(device)
        found = []
        for kernel in (contextlib.nullcontext(), as_released()):
            with kernel:
                found.append(outcome(cce, x, w, y, "xw", torch.ones(BT, device=device), reduction="sum"))
        for name in "xw" if V == 32 else "w":
            alike = torch.equal(found[0][name], found[1][name])
            check("control", f"{str(dtype)[6:]} {size}: the gradient of {name} is the release's, bit for bit", alike)


def filtered(dtype):
    """With the default filter, which leaves small gradients out: no worse than the release."""
    from cut_cross_entropy import linear_cross_entropy

    x, w = torch.randn(16, 24).to(device, dtype), (3 * torch.randn(2000, 24) / 24**0.5).to(device, dtype)
    y = torch.randint(0, 2000, (16,)).to(device)
    want = outcome(eager, x.double(), w.double(), y, "xw", torch.ones(16, device=device), reduction="sum")
    far = []
    for kernel in (contextlib.nullcontext(), as_released()):
        with kernel:
            got = outcome(linear_cross_entropy, x, w, y, "xw", torch.ones(16, device=device), reduction="sum")
        far.append([error(got[name].double(), want[name]) for name in "xw"])
    check(
        "control",
        f"{str(dtype)[6:]}: with the default filter no worse than the release",
        all(f <= 1.05 * r for f, r in zip(*far, strict=True)),
    )


def main():
    torch.manual_seed(1)
    for dtype in DTYPES:
        options(dtype)
        filtered(dtype)
        if device == "cpu":
            kernels(dtype)
    finish()


if __name__ == "__main__":
    main()
