"""What `nox -s hunt` varies of a linear cross entropy, and whether one case is right. The first value of each option is the plainest."""

import math

import torch
import torch.nn.functional as F
from repro import device
from repro import dtype as plainest

HALF = "bfloat16" if device == "cuda" else "float16"  # the interpreter has no bf16; fp16 underflows at the sizes of a GPU
SPACE = {
    "BT": [16, 1, 3, 65],
    "H": [32, 7, 64],
    "V": [70, 64, 2, 129, 1000],
    "dtype": ["float32", HALF] if plainest == torch.float32 else [HALF, "float32"],
    "reduction": ["mean", "sum", "none"],
    "gradient": ["1", "0.5", "each token's own", "stride 0"],
    "trained": ["x w", "x", "w", "x w b", "x b", "w b", "b"],
    "labels": ["in range", "a third ignored", "all but one ignored", "all ignored"],
    "ignore_index": [-100, 1],
    "layout": ["rows", "x by columns", "w by columns", "x is a slice"],
    "softcap": [None, 4.0, 30.0],
    "label_smoothing": [0.0, 0.1],
    "backward": ["once", "twice"],
    "autocast": [False, True],
}
if device == "cuda":  # sizes that the interpreter has no time for
    for name, value in {"BT": 2048, "H": 1024, "V": 32000}.items():
        SPACE[name].append(value)
#: Finds that a pack shows already: the package, how they end (a regular expression), and all options that such a find may have,
#: with the values that it needs; None for any.
KNOWN = [
    {
        "pack": "pack09",
        "package": "liger-kernel",
        "how": "the gradient of . is off|of another shape",
        "options": {"reduction": ["none"], "gradient": None},
    },
    {
        "pack": "pack17",
        "package": "liger-kernel",
        "how": "the gradient of . is missing",
        "options": {"trained": ["w", "w b", "b"]},
    },
    {
        "pack": "pack18",
        "package": "liger-kernel",
        "how": "the gradient of . is off",
        "options": {"backward": ["twice"], "gradient": None, "reduction": None},
    },
    {
        "pack": "pack38",
        "package": "fla-core",
        "how": "the gradient of . is off",
        "options": {"backward": ["twice"], "gradient": None, "reduction": None, "trained": None},
    },
    {
        "pack": "pack39",
        "package": "cut-cross-entropy",
        "how": "the gradient of x is off",
        "options": {"V": [32000], "dtype": None},
    },
    {
        "pack": "pack40",
        "package": "cut-cross-entropy",
        "how": "raises ZeroDivisionError",
        "options": {"labels": ["all ignored"]},
    },
    {  # the one label of the batch is the one to ignore
        "pack": "pack40",
        "package": "cut-cross-entropy",
        "how": "raises ZeroDivisionError",
        "options": {"ignore_index": [1], "BT": None, "V": None, "labels": None},
    },
    {
        "pack": "pack43",
        "package": "torch",
        "how": "the gradient of . is not 0",
        "options": {"labels": ["all ignored"], "trained": None},
    },
    {"pack": "pack29", "package": "megatron-core", "how": "the gradient of . is off", "options": {"dtype": ["float32"]}},
    {
        "pack": "pack37",
        "package": "cut-cross-entropy",
        "how": "the loss is off",
        "options": {"softcap": [4.0, 30.0], "V": None},
    },
]
# --- case ---
LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


def eager(x, w, y, b=None, *, softcap=None, **given):
    """The definition: logits in full, in fp32 or fp64. In fp16 torch 2.13.0 itself overflows: label smoothing sums a row's losses in it."""
    x, w = (t if t.dtype == torch.float64 else t.float() for t in (x, w))
    logits = x @ w.t() + (0 if b is None else b)
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), y, **given)


def run(function, tensors, y, trained, given, backward, options):
    """The loss, and the gradients of those of x, w and b that are trained; of the second of two backwards over one graph."""
    leaves = {name: t.detach().requires_grad_(name in trained) for name, t in tensors.items()}
    loss = function(leaves["x"], leaves["w"], y, *([leaves["b"]] if "b" in leaves else []), **options)
    if (loss.dim() == 1) != (options["reduction"] == "none"):
        return {"loss": None}
    if len(given) == 1:
        given = given.reshape(()).expand(loss.shape)
    for left in reversed(range(1 + (backward == "twice"))):
        for leaf in leaves.values():
            leaf.grad = None
        loss.backward(given.to(loss.dtype), retain_graph=left > 0)
    return {"loss": loss.detach(), **{f"gradient of {name}": leaves[name].grad for name in trained}}


def arranged(x, w, layout):
    if layout == "x is a slice":
        return torch.cat([x, x], 1)[:, : x.shape[1]], w
    return [t.t().contiguous().t() if layout == f"{name} by columns" else t for t, name in ((x, "x"), (w, "w"))]


def case(
    function, *, BT, H, V, dtype, reduction, gradient, trained, labels, ignore_index, layout, backward, autocast, **options
):
    """{"ok", "how", "error"}: ok is None where the function refuses or does not take what is asked."""
    if reduction != "none" and gradient in ("each token's own", "stride 0"):
        return {"ok": None, "how": "one loss has one gradient", "error": None}
    if getattr(function, "takes", "") == "logits" and BT % 2:
        return {"ok": None, "how": "its logits are those of two sequences", "error": None}
    torch.manual_seed(0)
    x, w, b = torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V)
    y, own = torch.randint(0, V, (BT,)), torch.randn(BT)
    every = {"in range": 0, "a third ignored": 3, "all but one ignored": 1, "all ignored": 1}[labels]
    kept = y[0].clone()
    if every:
        y[(1 if every == 3 else 0) :: every] = ignore_index
    if labels == "all but one ignored":
        y[0] = kept if kept != ignore_index else 0
    x, w, b, y, own = (t.to(device) for t in (x, w, b, y, own))
    x, w = arranged(x.to(getattr(torch, dtype)), w.to(getattr(torch, dtype)), layout)
    given = {"1": [1.0], "0.5": [0.5], "stride 0": [0.5]}.get(gradient)
    given = own if given is None and reduction == "none" else torch.tensor(given or [1.0], device=device)
    if gradient == "1" and reduction == "none":
        given = torch.ones(BT, device=device)
    options = {name: value for name, value in options.items() if value}
    options |= {"reduction": reduction, **({"ignore_index": ignore_index} if ignore_index != -100 else {})}
    tensors = {"x": x, "w": w, **({"b": b.to(x.dtype)} if "b" in trained else {})}
    before = {name: t.clone() for name, t in tensors.items()}
    half = torch.bfloat16 if device == "cuda" else torch.float16
    rounded = half if autocast else x.dtype
    want = run(eager, {name: t.double() for name, t in tensors.items()}, y, trained.split(), given, "once", options)
    try:
        with torch.autocast(device, half, enabled=autocast):
            got = run(function, tensors, y, trained.split(), given, backward, options)
    except NotImplementedError as raised:
        return {"ok": None, "how": str(raised), "error": None}
    except Exception as raised:
        # A second backward may be refused; what Triton's interpreter cannot run says nothing of a GPU.
        refused = (backward == "twice" and type(raised) is RuntimeError) or "InterpreterError" in type(raised).__name__
        words = (str(raised).splitlines() or [""])[0][:80]
        return {"ok": None if refused else False, "how": f"raises {type(raised).__name__}: {words}", "error": None}
    if changed := [name for name, t in tensors.items() if not torch.equal(t, before[name])]:
        return {"ok": False, "how": f"{changed[0]} is changed", "error": None}
    for name, right in want.items():
        mine = got.get(name)
        if mine is None:
            return {"ok": False, "how": f"the {name} is missing, or of another shape", "error": None}
        if not right.isfinite().all():  # torch's mean of no token is NaN; 0 is as good
            if mine.nan_to_num(0, 1, 1).any():
                return {"ok": False, "how": f"the {name} is neither NaN nor 0", "error": None}
            continue
        if not right.any():
            if mine.any():  # NaN is not 0
                return {"ok": False, "how": f"the {name} is not 0", "error": None}
            continue
        error = ((mine.double() - right).norm() / right.norm()).item()
        # Where a number is too small for its dtype, rounding alone costs more.
        least = ((right.to(rounded).double() - right).norm() / right.norm()).item()
        if not error <= max(LIMITS[str(rounded)[6:]], 4 * least):
            return {"ok": False, "how": f"the {name} is off", "error": error if math.isfinite(error) else None}
    return {"ok": True, "how": "", "error": None}
