# /// script
# requires-python = ">=3.10"
# dependencies = ["liger-kernel==0.7.0", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""liger-kernel: the backward of fused linear cross entropy with reduction="none" ignores the per-token gradient.

LigerFusedLinearCrossEntropyFunction.apply(..., reduction="none") returns a right loss [BT]. Its backward multiplies the
gradients saved in the forward by grad_output[0], read as if it were a scalar, so any per-token weight (a loss mask, document
weights) gives silently wrong gradients for the input x [BT, H] and for the lm_head w [V, H].
https://github.com/linkedin/Liger-Kernel/issues/968, cured by https://github.com/linkedin/Liger-Kernel/pull/1298

Runs on a GPU, or without one on Triton's interpreter. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import hashlib
import inspect
import itertools
import json
import math
import os
import sys
import traceback
from importlib.metadata import version

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default="2,8,32,200", metavar="B,S,H,V")
parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
parser.add_argument("--sweep", action="store_true", help="also 48 combinations of options and ignored tokens")
parser.add_argument("--measure", action="store_true", help="also time and peak memory of eager, mean and none (needs a GPU)")
options = parser.parse_args()
try:
    B, S, H, V = (int(n) for n in options.shape.split(","))
except ValueError:
    parser.error(f"--shape must be four whole numbers B,S,H,V, not {options.shape!r}")
if options.measure and not torch.cuda.is_available():
    parser.error("--measure needs a GPU")

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
limit = {"fp32": 1e-5, "bf16": 1e-1}[options.dtype]  # relative, at least 10 x what a right release shows
evidence = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
metrics = {"shape": [B, S, H, V], "dtype": options.dtype}
facts = {"reproducer": 1, "evidence": evidence, "comparisons": [], "metrics": metrics}


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def compare(role, name, got, want):
    """Largest relative error ||got - want|| / ||want|| over the gradients; a result that is not finite is None."""
    errors = [((g.double() - r).norm() / r.norm()).item() for g, r in zip(got, want, strict=True)]
    error = max(errors) if all(map(math.isfinite, errors)) else None
    facts["comparisons"].append({"role": role, "name": name, "error": error, "limit": limit})
    shown = "  ".join(f"{n} {e:.2e}" for n, e in zip(("dx", "dw", "db"), errors, strict=False))
    right = error is not None and error <= limit
    word = ("exact" if right else "not exact") if "workaround" in name else "ok" if right else "WRONG"
    print(f"{role:<10} {name:<52} {shown}  {word}")


def state(role, name, holds):
    facts["comparisons"].append({"role": role, "name": name, "holds": holds})
    print(f"{role:<10} {name:<52} {holds}")


try:
    from liger_kernel.ops import fused_linear_cross_entropy as flce
except Exception:
    traceback.print_exc()
    finish("UNTESTABLE", "import")
flce_function = flce.LigerFusedLinearCrossEntropyFunction
release = version(os.environ.get("REPRODUCER_DIST", "liger-kernel"))  # or liger-kernel-nightly
facts.update(file=flce.__file__, version=release)
print(f"liger-kernel {release}, torch {torch.__version__}, triton {version('triton')}, {evidence}")
parameters = list(inspect.signature(flce_function.forward).parameters.values())[1:]
if "reduction" not in [p.name for p in parameters]:
    finish("UNTESTABLE", "no-api")


def liger(x, w, y, b=None, **given):
    """The release's own loss: autograd.Function.apply takes no keywords, and their order differs between releases."""
    given = {"_input": x, "weight": w, "target": y, "bias": b, **given}
    out = flce_function.apply(*(given.get(p.name, p.default) for p in parameters))
    return out[0] if isinstance(out, tuple) else out


def eager(x, w, y, b=None, *, reduction, label_smoothing=0.0, lse_square_scale=0.0, ce_weight=None):
    """The definition: logits in full; z-loss is lse_square_scale * logsumexp(logits)^2 on valid tokens."""
    logits = x @ w.t() + (0 if b is None else b)
    ce_weight = None if ce_weight is None else ce_weight.to(logits.dtype)
    loss = F.cross_entropy(logits, y, reduction=reduction, label_smoothing=label_smoothing, weight=ce_weight)
    return loss + lse_square_scale * logits.logsumexp(-1) ** 2 * (y != -100) if lse_square_scale else loss


def gradients(function, tensors, y, scale, **given):
    """dx, dw (and db) of (scale * loss).sum()."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    x, w, *b = leaves
    (function(x, w, y, *b, **given) * scale).sum().backward()
    return [leaf.grad for leaf in leaves]


def main():
    torch.manual_seed(0)
    x, w, b = torch.randn(B * S, H), torch.randn(V, H) / H**0.5, torch.randn(V)
    y = torch.randint(0, V, (B * S,))
    y[5::10] = -100  # about 10% ignored, but not token 0
    weight = torch.rand(B * S)
    weight[0] = 2.0  # what the wrong backward applies to every token
    mask = (torch.rand(B * S) < 0.5).float()
    mask[0] = 0.0
    x, w, b, mask = (t.to(device, dtype) for t in (x, w, b, mask))
    y, weight = y.to(device), weight.to(device)
    valid = y != -100
    wide = [t.double() for t in (x, w)]
    if liger(x.clone().requires_grad_(), w, y, reduction="none").dim() == 0:
        print('reduction="none" returns one scalar, not a loss a token')
        finish("CHANGED", "scalar")

    mean = gradients(liger, (x, w), y, 1.0, reduction="mean")
    total = gradients(liger, (x, w), y, 1.0, reduction="sum")
    true_sum = gradients(eager, wide, y, 1.0, reduction="sum")
    compare("control", "mean", mean, gradients(eager, wide, y, 1.0, reduction="mean"))
    compare("control", "none, summed", gradients(liger, (x, w), y, 1.0, reduction="none"), true_sum)
    weighted = gradients(liger, (x, w), y, weight, reduction="none")
    true_weighted = gradients(eager, wide, y, weight, reduction="none")
    compare("trigger", "none x a weight for each token", weighted, true_weighted)
    masked = gradients(liger, (x, w), y, mask, reduction="none")
    true_masked = gradients(eager, wide, y, mask, reduction="none")
    compare("trigger", "none x a 0/1 loss mask without token 0", masked, true_masked)
    rest = {"reduction": "none", "label_smoothing": 0.1, "lse_square_scale": 1e-3}
    true_rest = gradients(eager, [*wide, b.double()], y, weight, **rest)
    compare(
        "trigger",
        "none x weights, with bias, label smoothing, z-loss",
        gradients(liger, (x, w, b), y, weight, **rest),
        true_rest,
    )
    if options.sweep:
        sweep(x, w, b, y, weight)

    scaled = [weight[0].double() * t.double() for t in true_sum]
    same = all(((g.double() - r).norm() / r.norm()).item() <= limit for g, r in zip(weighted, scaled, strict=True))
    state("signature", "gradients are grad_output[0] x the unweighted ones", same)
    state("signature", "token 0 masked: all gradients are exactly zero", not any(g.any().item() for g in masked))
    compare("control", "workaround: mean x n_valid, for the mask y != -100", [g * valid.sum() for g in mean], true_sum)
    folded = gradients(liger, (x, w), torch.where(mask.bool(), y, -100), 1.0, reduction="sum")
    compare("control", "workaround: 0/1 mask folded into the labels, sum", folded, true_masked)
    approximate = [g * (mask.bool() & valid).sum() for g in mean]
    compare("note", "workaround: mean x n_valid, for another mask", approximate, true_masked)

    # A fix must leave these as they are, byte for byte.
    metrics.update(mean_sha256=sha256(mean), sum_sha256=sha256(total))
    for name, g, r in zip(("max_abs_dx", "max_abs_dw"), weighted, true_weighted, strict=True):
        metrics[name] = (g - r).abs().max().item()
    if options.measure:
        del mean, total, true_sum, weighted, true_weighted, masked, true_masked, scaled, folded, wide
        measure(x, w, y, weight)
    wrong = any(c["role"] == "trigger" and (c["error"] is None or c["error"] > limit) for c in facts["comparisons"])
    alike = all(c["holds"] for c in facts["comparisons"] if c["role"] == "signature")
    if wrong and not alike:
        finish("CHANGED", "wrong-otherwise")
    finish("REPRODUCED" if wrong else "ABSENT")


def sweep(x, w, b, y, weight):
    """Every combination of bias, label smoothing, z-loss, class weights and which tokens are ignored."""
    classes = torch.rand(V, device=device) + 0.5
    first = torch.where(torch.arange(B * S, device=device) == 0, -100, y)
    grid = itertools.product((0, 1), (0.0, 0.1), (0.0, 1e-3), (None, classes), (y.clamp(min=0), y, first))
    for bias, smoothing, z, ce, labels in grid:
        tensors = (x, w, b) if bias else (x, w)
        given = {"label_smoothing": smoothing, "lse_square_scale": z, "ce_weight": ce}
        want = gradients(eager, [t.double() for t in tensors], labels, weight, reduction="none", **given)
        ignored = "none" if labels.min() >= 0 else "some" if labels[0] >= 0 else "some, token 0"
        name = f"b {bias} smoothing {smoothing} z {z} ce_weight {int(ce is not None)} ignored {ignored}"
        compare("trigger", name, gradients(liger, tensors, labels, weight, reduction="none", **given), want)
        for reduction in ("mean", "sum"):
            grads = gradients(liger, tensors, labels, 0.5, reduction=reduction, **given)
            metrics[f"{reduction}_sha256 {name}"] = sha256(grads)


def sha256(tensors):
    return hashlib.sha256(b"".join(t.cpu().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def measure(x, w, y, weight):
    """Median ms of forward+backward over 10 runs, and peak MiB above the inputs of forward and of the whole."""
    x, w = x.requires_grad_(), w.requires_grad_()
    for name, function, reduction, scale in (
        ("eager mean", eager, "mean", 1.0),
        ("mean", liger, "mean", 1.0),
        ("none", liger, "none", weight),
    ):
        times, start, stop = [], torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(13):
            x.grad = w.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start.record()
            loss = (function(x, w, y, reduction=reduction) * scale).sum()
            forward = torch.cuda.max_memory_allocated() - before
            loss.backward()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
            peak = torch.cuda.max_memory_allocated() - before
            del loss
        ms, forward, peak = sorted(times[3:])[5], forward / 2**20, peak / 2**20
        metrics[name.replace(" ", "_")] = {"ms": ms, "forward_peak_mib": forward, "peak_mib": peak}
        print(f"measure    {name:<52} {ms:.2f} ms  peak: forward {forward:.1f} MiB, whole {peak:.1f} MiB")


try:
    main()
except Exception as error:
    traceback.print_exc()
    finish("CHANGED", type(error).__name__)
