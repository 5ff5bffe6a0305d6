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
facts = {"reproducer": 1, "evidence": evidence, "comparisons": [], "metrics": {"shape": [B, S, H, V], "dtype": options.dtype}}


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
    print(f"{role:<10} {name:<58} {shown}  {'ok' if error is not None and error <= limit else 'WRONG'}")


def state(role, name, holds):
    facts["comparisons"].append({"role": role, "name": name, "holds": holds})
    print(f"{role:<10} {name:<58} {holds}")


try:
    from liger_kernel.ops import fused_linear_cross_entropy as flce
except Exception:
    traceback.print_exc()
    finish("UNTESTABLE", "import")
flce_function = flce.LigerFusedLinearCrossEntropyFunction
facts.update(file=flce.__file__, version=version("liger-kernel"))
print(f"liger-kernel {version('liger-kernel')}, torch {torch.__version__}, triton {version('triton')}, {evidence}, B,S,H,V={B},{S},{H},{V} {dtype}")
parameters = list(inspect.signature(flce_function.forward).parameters.values())[1:]
if "reduction" not in [p.name for p in parameters]:
    finish("UNTESTABLE", "no-api")


def liger(x, w, y, b=None, **given):
    """The release's own loss: autograd.Function.apply takes no keywords, and their order differs between releases."""
    given = {"_input": x, "weight": w, "target": y, "bias": b, **given}
    out = flce_function.apply(*(given.get(p.name, p.default) for p in parameters))
    return out[0] if isinstance(out, tuple) else out


def eager(x, w, y, b=None, *, reduction, label_smoothing=0.0, lse_square_scale=0.0):
    """The definition: logits in full; z-loss is lse_square_scale * logsumexp(logits)^2 on valid tokens."""
    logits = x @ w.t() + (0 if b is None else b)
    loss = F.cross_entropy(logits, y, reduction=reduction, label_smoothing=label_smoothing)
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
    y[torch.rand(B * S) < 0.1] = -100  # about 10% ignored, but not token 0
    y[0] = 1
    weight = torch.rand(B * S)
    weight[0] = 2.0  # what the wrong backward applies to every token
    mask = (torch.rand(B * S) < 0.5).float()
    mask[0] = 0.0
    x, w, b, y, weight, mask = (t.to(device, dtype) if t is not y and t is not weight else t.to(device) for t in (x, w, b, y, weight, mask))
    valid = y != -100
    wide = [t.double() for t in (x, w)]
    if liger(x.clone().requires_grad_(), w, y, reduction="none").dim() == 0:
        print('reduction="none" returns one scalar, not a loss a token')
        finish("CHANGED", "scalar")

    mean = gradients(liger, (x, w), y, 1.0, reduction="mean")
    total = gradients(liger, (x, w), y, 1.0, reduction="sum")
    true_sum = gradients(eager, wide, y, 1.0, reduction="sum")
    compare("control", "mean", mean, gradients(eager, wide, y, 1.0, reduction="mean"))
    compare("control", "none, then .sum()", gradients(liger, (x, w), y, 1.0, reduction="none"), true_sum)
    weighted = gradients(liger, (x, w), y, weight, reduction="none")
    true_weighted = gradients(eager, wide, y, weight, reduction="none")
    compare("trigger", "none, times a weight a token", weighted, true_weighted)
    masked = gradients(liger, (x, w), y, mask, reduction="none")
    true_masked = gradients(eager, wide, y, mask, reduction="none")
    compare("trigger", "none, times a 0/1 loss mask that drops token 0", masked, true_masked)
    rest = {"reduction": "none", "label_smoothing": 0.1, "lse_square_scale": 1e-3}
    if {p.name for p in parameters} >= set(rest):
        got = gradients(liger, (x, w, b), y, weight, **rest)
        compare("trigger", "the same with bias, label smoothing and z-loss", got, gradients(eager, [*wide, b.double()], y, weight, **rest))

    scaled = [weight[0].double() * t.double() for t in true_sum]
    same = all(((g.double() - r).norm() / r.norm()).item() <= limit for g, r in zip(weighted, scaled, strict=True))
    state("signature", "gradients are grad_output[0] x the unweighted ones", same)
    state("signature", "token 0 masked: all gradients are exactly zero", not any(g.any().item() for g in masked))
    compare("control", "workaround: mean x n_valid, mask == (y != -100): exact", [g * valid.sum() for g in mean], true_sum)
    folded = gradients(liger, (x, w), torch.where(mask.bool(), y, -100), 1.0, reduction="sum")
    compare("control", "workaround: 0/1 mask folded into the labels, sum: exact", folded, true_masked)
    compare("note", "workaround: mean x n_valid under another mask: not exact", [g * (mask.bool() & valid).sum() for g in mean], true_masked)

    for name, grads in (("mean", mean), ("sum", total)):  # a fix must leave these as they are, byte for byte
        facts["metrics"][f"{name}_sha256"] = hashlib.sha256(b"".join(g.cpu().view(torch.uint8).numpy().tobytes() for g in grads)).hexdigest()
    facts["metrics"]["max_abs_dx"], facts["metrics"]["max_abs_dw"] = ((g - r).abs().max().item() for g, r in zip(weighted, true_weighted, strict=True))
    if options.measure:
        del mean, total, true_sum, weighted, true_weighted, masked, true_masked, scaled, folded, wide
        measure(x, w, y, weight)
    wrong = any(c["role"] == "trigger" and (c["error"] is None or c["error"] > limit) for c in facts["comparisons"])
    finish("REPRODUCED" if wrong else "ABSENT")


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
        result = {"ms": sorted(times[3:])[5], "forward_peak_mib": forward / 2**20, "peak_mib": peak / 2**20}
        facts["metrics"][name.replace(" ", "_")] = result
        print(f"measure    {name:<58} {result['ms']:.2f} ms  forward {result['forward_peak_mib']:.1f} MiB  whole {result['peak_mib']:.1f} MiB")


try:
    main()
except Exception as error:
    traceback.print_exc()
    finish("CHANGED", type(error).__name__)
