# /// script
# requires-python = ">=3.10"
# dependencies = ["liger-kernel==0.8.5", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""liger-kernel: a second backward through cross entropy gives gradients that are scaled twice.

Both losses compute their gradients in the forward and keep them; the backward multiplies them by grad_output in place, in a Triton kernel that
autograd does not see. Where the loss is scaled and its graph is used again, by retain_graph=True or torch.autograd.grad, the second result is
off by that factor, in silence. No report was found. Right is the gradient, or a RuntimeError as torch raises where a saved tensor was changed.
Runs on a GPU, or without one on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import itertools
import os
from importlib.metadata import version

import torch
import torch.nn.functional as F

LIMIT = 1e-4
device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(16, 32, 200), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")
CASES = (0.5,), (1, 1), (1, 0.5), (0.5, 0.5), (0.5, 1), (0.5, "each by autograd.grad")  # factors of the loss


def release():
    """The two modules under test; what was run, and on what, goes into the report."""
    from liger_kernel.ops import cross_entropy, fused_linear_cross_entropy

    FACTS.update(file=fused_linear_cross_entropy.__file__, version=version("liger-kernel"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return cross_entropy, fused_linear_cross_entropy


def applied(function, **given):
    """autograd.Function.apply takes no keywords, and their order differs between releases."""
    known = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean", "return_z_loss": False}
    order = list(inspect.signature(function.forward).parameters.values())[1:]
    out = function.apply(*((known | given).get(p.name, None if p.default is p.empty else p.default) for p in order))
    return out[0] if isinstance(out, tuple) else out


def losses(y):
    """The release's mean losses of x [BT, H] and w [V, H] for labels y [BT], and by what the dx that they hand out is scaled later."""
    plain, fused = release()
    plain, fused = plain.LigerCrossEntropyFunction, fused.LigerFusedLinearCrossEntropyFunction
    yield plain.__name__, lambda x, w: applied(plain, _input=x @ w.t(), target=y), 1.0
    # It hands out the saved tensor itself.
    yield fused.__name__, lambda x, w: applied(fused, _input=x, weight=w, linear=w, target=y), 0.5


def backwards(loss, tensors, scales):
    """dx and dw that one graph gives; or the error."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = loss(*leaves)
    try:
        if scales == CASES[-1]:
            return [torch.autograd.grad(scales[0] * out, leaf, retain_graph=True)[0] for leaf in leaves]
        for scale in scales:
            (scale * out).backward(retain_graph=True)
    except RuntimeError as raised:  # torch's refusal; another error is no answer
        if "modified by an inplace operation" not in str(raised):
            raise
        return str(raised)
    return [leaf.grad for leaf in leaves]


def error(got, want):
    """The largest relative L2 error ||got - want|| / ||want||."""
    return torch.stack([(g.double() - r).norm() / r.norm() for g, r in zip(got, want, strict=True)]).max().item()  # or NaN


def main(BT, H, V):
    torch.manual_seed(0)
    tensors = [t.to(device) for t in (torch.randn(BT, H), torch.randn(V, H) / H**0.5)]
    y = torch.randint(0, V, (BT,)).to(device)
    for (name, loss, later), scales in itertools.product(losses(y), CASES):
        want = backwards(lambda x, w: F.cross_entropy(x @ w.t(), y), [t.double() for t in tensors], scales)
        got = backwards(loss, tensors, scales)
        said = f"{name}: backwards of the loss times {', '.join(map(str, scales))}"
        role = "control" if scales in CASES[:3] else "trigger"  # a factor of 1 changes nothing
        if isinstance(got, str):
            check(role, f"{said}: {got}", role == "trigger")
            continue
        check(role, said, error=error(got, want), limit=LIMIT)
        if role == "trigger":
            factors = [later, 0.5] if scales == CASES[-1] else [scales[0] * (1 + scales[1]) / sum(scales)] * 2
            as_known = error(got, [f * t for f, t in zip(factors, want, strict=True)]) <= LIMIT
            check("signature", f"{said}: what comes second is scaled by {scales[0]} once more", as_known)
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
    main(*parser.parse_args().shape)
