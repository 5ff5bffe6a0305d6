# /// script
# requires-python = ">=3.10"
# dependencies = ["liger-kernel==0.7.0", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""liger-kernel: the backward of fused linear cross entropy with reduction="none" ignores the per-token gradient.

LigerFusedLinearCrossEntropyFunction.apply(..., reduction="none") returns a correct loss [BT]. Its backward multiplies the gradients
saved in the forward by grad_output[0], read as if it were a scalar, so any per-token weight (a loss mask, document weights) gives
silently wrong gradients for the input x [BT, H] and for the lm_head w [V, H].
https://github.com/linkedin/Liger-Kernel/issues/968, fixed by https://github.com/linkedin/Liger-Kernel/pull/1298
Runs on a GPU, or without one on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import os
from importlib.metadata import version

import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(2, 8, 32, 200), type=lambda text: tuple(map(int, text.split(","))), metavar="B,S,H,V")
parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])


def liger(x, w, y, b=None, **given):
    """The release's own loss: autograd.Function.apply takes no keywords, and their order differs between releases."""
    function = release().LigerFusedLinearCrossEntropyFunction
    given = {"_input": x, "weight": w, "target": y, "bias": b, **given}
    order = list(inspect.signature(function.forward).parameters.values())[1:]
    out = function.apply(*(given.get(p.name, p.default) for p in order))
    return out[0] if isinstance(out, tuple) else out


def eager(x, w, y, b=None, *, lse_square_scale=0.0, ignore_index=-100, **given):
    """The definition: logits in full; z-loss is lse_square_scale * logsumexp(logits)^2 on valid tokens."""
    logits = x @ w.t() + (0 if b is None else b)
    loss = F.cross_entropy(logits, y, ignore_index=ignore_index, **given)
    return loss + lse_square_scale * logits.logsumexp(-1) ** 2 * (y != ignore_index) if lse_square_scale else loss


def run(function, tensors, y, scale=1.0, **given):
    """The loss, and dx, dw (and db) for the gradient ``scale`` of the loss; a number is expanded, with stride 0, as sum() does."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    loss = function(*leaves[:2], y, *leaves[2:], **given)
    loss.backward(torch.as_tensor(scale, dtype=loss.dtype, device=device).expand_as(loss))
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def error(got, want):
    """The largest relative L2 error ||got - want|| / ||want||; NaN where one is."""
    return torch.stack([(g.double() - r).norm() / r.norm() for g, r in zip(got, want, strict=True)]).max().item()


def release():
    """The module under test; what was run, and on what, goes into the report."""
    from liger_kernel.ops import fused_linear_cross_entropy as flce

    FACTS.update(file=flce.__file__, version=version(os.environ.get("REPRODUCER_DIST", "liger-kernel")))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return flce


def main(options):
    if "reduction" not in inspect.signature(release().LigerFusedLinearCrossEntropyFunction.forward).parameters:
        finish("UNTESTABLE", "no-api")
    (B, S, H, V), (dtype, limit) = options.shape, {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 1e-1)}[options.dtype]
    torch.manual_seed(0)
    x, w, b = (t.to(device, dtype) for t in (torch.randn(B * S, H), torch.randn(V, H) / H**0.5, torch.randn(V)))
    y = torch.randint(0, V, (B * S,))
    y[5::10] = -100  # about 10% ignored, but not token 0
    weight = torch.cat([torch.tensor([2.0]), torch.randn(B * S - 1)])  # the first is what the wrong backward applies to all
    y, weight, mask = y.to(device), weight.to(device), torch.arange(B * S, device=device) % 2.0
    if liger(x.clone().requires_grad_(), w, y, reduction="none").dim() == 0:
        finish("CHANGED", "scalar")  # one number, not a loss for each token

    def compare(role, name, scale=1.0, tensors=(x, w), y=y, **given):
        got, want = run(liger, tensors, y, scale, **given), run(eager, [t.double() for t in tensors], y, scale, **given)
        check(role, name, error=error(got, want), limit=limit)
        return got[1:], want[1:]

    compare("control", "mean", 3.0, reduction="mean")
    _, plain = compare("control", "none, summed: a gradient of stride 0", reduction="none")
    wrong, _ = compare("trigger", "none x a weight of either sign for each token", weight, reduction="none")
    masked, want = compare("trigger", "none x a 0/1 loss mask without token 0", mask, reduction="none")
    options = {"label_smoothing": 0.1, "lse_square_scale": 1e-3, "reduction": "none", "ignore_index": int(y[1])}
    compare("trigger", "none x weights: bias, smoothing, z-loss, ignore_index", weight, (x, w, b), y.clamp(min=0), **options)
    check("signature", "gradients are grad_output[0] x unweighted ones", error(wrong, [weight[0] * t for t in plain]) <= limit)
    check("signature", "token 0 masked: all gradients are zero", not any(g.any() for g in masked))
    folded = run(liger, (x, w), torch.where(mask.bool(), y, -100), reduction="sum")[1:]
    check("control", "workaround: 0/1 mask folded into the labels, sum", error=error(folded, want), limit=limit)
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    main(parser.parse_args())
