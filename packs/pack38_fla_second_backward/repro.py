# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "fla-core==0.6.0", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""fla-core: a second backward through its fused losses gives gradients that are scaled twice.

They compute their gradients in the forward and keep them; the backward multiplies them by grad_output in place, in a Triton kernel that autograd
does not see. Where the loss is scaled and its graph is used again, by retain_graph=True or torch.autograd.grad, the second result is off by that
factor, in silence. No report was found. Right is the gradient, or a RuntimeError as torch raises where a saved tensor was changed.
Runs on a GPU, or without one on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import contextlib
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
    """The two functions under test; what was run, and on what, goes into the report."""
    import fla.modules  # noqa: F401
    import triton

    if device == "cpu":  # what releases before 0.6.0 ask for beyond Triton's interpreter
        torch.cpu.device = contextlib.nullcontext
        triton.runtime.autotuner.Autotuner.do_bench = property(lambda self: lambda *_, **__: [0.0] * 3)
        for name, module in itertools.product(("exp", "exp2", "log", "log2"), list(sys.modules.values())):
            if module.__name__.startswith("fla.") and getattr(module, name, None) is getattr(triton.language, name):
                setattr(module, name, lambda x, name=name: getattr(triton.language, name)(x))
    linear, kl = (sys.modules[f"fla.modules.{name}"] for name in ("fused_linear_cross_entropy", "fused_kl_div"))
    FACTS.update(file=sys.modules[linear.fused_linear_cross_entropy_loss.__module__].__file__, version=version("fla-core"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return linear.fused_linear_cross_entropy_loss, kl.fused_kl_div_loss


def losses(y, *teacher):
    """The release's mean loss of x [BT, H] and w [V, H], and its definition: for labels y [BT], and against the teacher's own x and w."""
    linear, kl = release()

    def divergence(x, w):
        student, other = (F.log_softmax(a @ b.t(), -1) for a, b in ((x, w), (t.to(x.dtype) for t in teacher)))
        return F.kl_div(student, other, log_target=True, reduction="batchmean")

    yield linear.__name__, lambda x, w: linear(x, y, w), lambda x, w: F.cross_entropy(x @ w.t(), y)
    yield kl.__name__, lambda x, w: kl(x, teacher[0], w, teacher[1]), divergence


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
    x, w, *teacher = [(torch.randn(n, H) / H**p).to(device) for n, p in ((BT, 0), (V, 0.5)) * 2]
    y = torch.randint(0, V, (BT,)).to(device)
    for (name, loss, definition), scales in itertools.product(losses(y, *teacher), CASES):
        want, got = backwards(definition, [x.double(), w.double()], scales), backwards(loss, [x, w], scales)
        said = f"{name}: backwards of the loss times {', '.join(map(str, scales))}"
        role = "control" if scales in CASES[:3] else "trigger"  # a factor of 1 changes nothing
        if isinstance(got, str):
            check(role, f"{said}: {got}", role == "trigger")
            continue
        check(role, said, error=error(got, want), limit=LIMIT)
        if role == "trigger":  # the dx that was returned is the saved tensor itself, so that it changes, too
            factor = 0.5 if scales == CASES[-1] else scales[0] * (1 + scales[1]) / sum(scales)
            check("signature", f"{said}: scaled by 0.5 once more", error(got, [factor * t for t in want]) <= LIMIT)
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
