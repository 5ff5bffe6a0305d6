"""The deep check of a fix of pack37: right for each size, softcap and option, and where all was right nothing changes.

Runs after repro.py on the patched side. The kernel is asked directly, too: its log-sum-exp [B] and its average logits [V], which order the
backward, with rows chosen (valids) and without.
"""

import importlib.util
import inspect
from importlib.metadata import distribution

import torch
import torch.nn.functional as F
from repro import BLOCK, check, device, finish, release

VOCABULARIES = (1, 2, 33, 64, 70, 127, 128, 129, 255, 257, 300)
# Blocks are at most 256 tokens, 256 columns and 32 to 64 channels: one, and more, of each.
SIZES = [(13, 24, V) for V in VOCABULARIES] + [
    (13, 32, 70),
    (13, 64, 70),
    (13, 160, 70),
    (300, 24, 70),
    (600, 80, 129),
    (13, 24, 2600),
]
WHOLE = (13, 24, 2), (13, 80, 70), (300, 33, 300)  # of the loss and its gradients
if device == "cuda":  # where each size and kind of call is compiled anew, which takes seconds, and memory
    SIZES, WHOLE = [(13, 24, 1), (13, 64, 70), (600, 80, 129), (13, 24, 2600)], WHOLE[1:2]
DTYPES = [torch.float16, torch.bfloat16] if device == "cuda" else [torch.float16]  # the interpreter has no bf16
LIMITS = {torch.float16: (1e-3, 2e-3), torch.bfloat16: (8e-3, 2e-2)}  # relative, of the loss and of gradients


def kernel(released=False):
    """The forward's kernel: of the file that is imported, or of the one that a fix hides."""
    from cut_cross_entropy import cce_lse_forward as module

    if released:
        file = distribution("cut-cross-entropy").locate_file("cut_cross_entropy/cce_lse_forward.py")
        spec = importlib.util.spec_from_file_location("as_released", file)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.cce_lse_forward_kernel


def tensors(BT, H, V, shift, dtype=torch.float16):
    """x [BT, H], w [V, H] and labels [BT]; logits are ``shift`` + N(0, 1), so that a strong negative one can be asked for."""
    x, w = torch.randn(BT, H), torch.randn(V, H) / H**0.5
    x[:, 0], w[:, 0] = 1, shift
    return x.to(device, dtype), w.to(device, dtype), torch.randint(0, V, (BT,)).to(device)


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def kernels():
    ours, theirs = kernel(), kernel(released=True)
    for softcap in (None, 0.5, 1.0, 5.0, 30.0):
        worst = average = 0.0
        for size in SIZES:
            for shift in (0.0, -40.0):
                x, w, _ = tensors(*size, shift)
                for valids in (None, torch.tensor([1, 4, 11], device=device)):
                    lse, mean = ours(x, w, valids, softcap=softcap, return_logit_avg=True)
                    rows = x if valids is None else x[valids]
                    logits = capped(rows.double() @ w.double().t(), softcap)
                    worst = max(worst, (lse.double() - torch.logsumexp(logits, 1)).abs().max().item())
                    average = max(average, (mean.double() - logits.mean(0)).abs().max().item())
        role = "control" if softcap is None else "trigger"
        check(role, f"log-sum-exp, softcap {softcap}, {len(SIZES)} sizes", error=worst, limit=2e-4)
        check("control", f"average logits within 1e-3, softcap {softcap}", average <= 1e-3)
    for size, softcap in (((13, 24, 70), None), ((300, 80, 300), None), ((13, 24, BLOCK), 1.0), ((13, 24, BLOCK), None)):
        x, w, _ = tensors(*size, 0.0)
        far = (ours(x, w, softcap=softcap) - theirs(x, w, softcap=softcap)).abs().max().item()
        check("control", f"log-sum-exp as released where that is right: {size}, softcap {softcap}", error=far, limit=1e-6)


def eager(x, w, y, softcap, shift=False, **options):
    """The definition; with ``shift`` a token's label is the next one's."""
    x, y = (x[:-1], y[1:]) if shift else (x, y)
    return F.cross_entropy(capped(x @ w.t(), softcap), y, **options)


def outcome(loss, x, w, y, trained, given, **options):
    """The loss, and the gradients of those of x and w that are trained, where the loss itself has the gradient ``given``."""
    leaves = {name: t.detach().requires_grad_(name in trained) for name, t in (("x", x), ("w", w))}
    value = loss(*leaves.values(), y, **options)
    value.backward(given.to(value.dtype) if value.dim() else given[0].to(value.dtype))
    return {"loss": value.detach(), **{name: leaves[name].grad for name in trained}}


OPTIONS = (
    {"reduction": "mean"},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"reduction": "mean", "shift": True},
    {"reduction": "mean", "ignore_index": 1},
    {"reduction": "none", "ignore_index": 1},
)


def losses():
    function = release().linear_cross_entropy
    whole = {"filter_eps": None} if "filter_eps" in inspect.signature(function).parameters else {}

    def ours(x, w, y, **options):
        return function(x, w, y, impl="cce", **whole, **options)

    for dtype in DTYPES:
        for number, options in enumerate(OPTIONS):
            for softcap in (None, 1.0, 5.0, 30.0):
                for size in WHOLE:
                    # Near -softcap the cap is flat, and gradients are too small for fp16: there the loss alone says what is right.
                    for shift, trained in ((0.0, "xw"), (0.0, "xw"[number % 2]), (-40.0, "")):
                        if device == "cuda" and number > 1 and len(trained) == 1:
                            continue
                        x, w, y = tensors(*size, shift, dtype)
                        y[3::5] = options.get("ignore_index", -100)
                        given = 30 * torch.randn(len(x), device=device)  # so that gradients are not too small for fp16
                        if not trained:
                            with torch.no_grad():
                                got = {"loss": ours(x, w, y, softcap=softcap, **options)}
                            want = {"loss": eager(x.double(), w.double(), y, softcap, **options)}
                        else:
                            got = outcome(ours, x, w, y, trained, given, softcap=softcap, **options)
                            want = outcome(eager, x.double(), w.double(), y, trained, given, softcap=softcap, **options)
                        for of, right in want.items():
                            mine, limit = got[of], LIMITS[dtype][of != "loss"]
                            far = ((mine.double() - right).norm() / right.norm()).item() if mine is not None else None
                            words = f"{of} within {limit}: {str(dtype)[6:]} {size}, softcap {softcap}, {options}"
                            check(
                                "control",
                                f"{words}, trained {trained or 'nothing'}, logits around {shift}",
                                far is not None and far <= limit,
                            )


def main():
    torch.manual_seed(1)
    kernels()
    losses()
    finish()


if __name__ == "__main__":
    main()
