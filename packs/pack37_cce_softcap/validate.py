"""The deep check of a fix of pack37: right for each vocabulary, softcap and option, and where all was right nothing changes.

Runs after repro.py on the patched side. The kernel is asked directly, too: its log-sum-exp [B] and its average logits [V], which order the
backward, with rows chosen (valids) and without.
"""

import importlib.util
from importlib.metadata import distribution

import torch
import torch.nn.functional as F
from repro import BLOCK, check, device, finish, release

SIZES = (1, 2, 33, 64, 70, 127, 128, 129, 255, 257, 300)


def kernel(released=False):
    """The forward's kernel: of the file that is imported, or of the one that a fix hides."""
    from cut_cross_entropy import cce_lse_forward as module

    if released:
        file = distribution("cut-cross-entropy").locate_file("cut_cross_entropy/cce_lse_forward.py")
        spec = importlib.util.spec_from_file_location("as_released", file)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.cce_lse_forward_kernel


def tensors(BT, H, V, shift):
    """x [BT, H], w [V, H] and labels [BT]; logits are ``shift`` + N(0, 1), so that a strong negative one can be asked for."""
    x, w = torch.randn(BT, H), torch.randn(V, H) / H**0.5
    x[:, 0], w[:, 0] = 1, shift
    return x.half().to(device), w.half().to(device), torch.randint(0, V, (BT,)).to(device)


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def main():
    torch.manual_seed(1)
    ours, theirs = kernel(), kernel(released=True)
    for softcap in (None, 0.5, 1.0, 5.0, 30.0):
        worst = average = 0.0
        for V in SIZES:
            for shift in (0.0, -40.0):
                x, w, _ = tensors(13, 24, V, shift)
                for valids in (None, torch.tensor([1, 4, 11], device=device)):
                    lse, mean = ours(x, w, valids, softcap=softcap, return_logit_avg=True)
                    rows = x if valids is None else x[valids]
                    logits = capped(rows.double() @ w.double().t(), softcap)
                    worst = max(worst, (lse.double() - torch.logsumexp(logits, 1)).abs().max().item())
                    average = max(average, (mean.double() - logits.mean(0)).abs().max().item())
        check(
            "control" if softcap is None else "trigger",
            f"log-sum-exp, softcap {softcap}, {len(SIZES)} vocabularies of 1 to {max(SIZES)}",
            error=worst,
            limit=1e-4,
        )
        check("control", f"average logits within 1e-3, softcap {softcap}", average <= 1e-3)

    for V, softcap in ((70, None), (300, None), (BLOCK, 1.0), (BLOCK, None)):
        x, w, _ = tensors(13, 24, V, 0.0)
        far = (ours(x, w, softcap=softcap) - theirs(x, w, softcap=softcap)).abs().max().item()
        check("control", f"log-sum-exp as released where that is right: V={V}, softcap {softcap}", error=far, limit=1e-6)

    function = release().linear_cross_entropy
    for V in (2, 70, 300):
        for options in ({"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "mean", "shift": True}):
            for softcap in (1.0, 30.0):
                x, w, y = tensors(13, 24, V, -40.0 if softcap == 30.0 else 0.0)
                y[3::5] = -100
                results = []
                for loss in (function, eager):
                    leaves = [t.detach().to(x.dtype if loss is function else torch.float64).requires_grad_() for t in (x, w)]
                    value = loss(*leaves, y, softcap=softcap, **options)
                    value.backward()
                    results.append([value.detach().double(), *(leaf.grad.double() for leaf in leaves)])
                # Near -softcap the cap is flat, and gradients are too small for fp16: the loss alone says what is right.
                for of, g, r in zip(("loss", "x", "w"), *results, strict=True):
                    if of == "loss" or softcap == 1.0:
                        far, limit = ((g - r).norm() / r.norm()).item(), 1e-3 if of == "loss" else 2e-3
                        check("control", f"{of} within {limit}: V={V}, softcap {softcap}, {options}", far <= limit)
    finish()


def eager(x, w, y, softcap, reduction, shift=False):
    """The definition; with ``shift`` a token's label is the next one's."""
    x, y = (x[:-1], y[1:]) if shift else (x, y)
    return F.cross_entropy(capped(x @ w.t(), softcap), y, reduction=reduction)


if __name__ == "__main__":
    main()
