# /// script
# requires-python = ">=3.10"
# dependencies = ["liger-kernel==0.8.5", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""liger-kernel: fused linear cross entropy gives the lm_head no gradient where its input needs none.

LigerFusedLinearCrossEntropyFunction computes gradients in the forward, and asks the input alone whether any are needed. With a frozen
model and a trained lm_head [V, H] (linear probing, LoRA on the head) the loss requires a gradient, backward() runs, and weight.grad and
bias.grad stay None: the optimizer passes over the head in silence. No report was found.
Runs on a GPU, or without one on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import os
from importlib.metadata import version

import torch
import torch.nn.functional as F

LIMIT = 1e-4
device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(16, 32, 200), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")


def release():
    """The module under test; what was run, and on what, goes into the report."""
    from liger_kernel.ops import fused_linear_cross_entropy as flce

    FACTS.update(file=flce.__file__, version=version("liger-kernel"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return flce


def liger(x, w, y, b=None, **given):
    """The release's own loss: autograd.Function.apply takes no keywords, and their order differs between releases."""
    function = release().LigerFusedLinearCrossEntropyFunction
    given = {"_input": x, "weight": w, "linear": w, "target": y, "bias": b, "ignore_index": -100, **given}
    order = list(inspect.signature(function.forward).parameters.values())[1:]
    out = function.apply(*(given.get(p.name, p.default) for p in order))
    return out[0] if isinstance(out, tuple) else out


def eager(x, w, y, b=None, **given):
    """The definition: logits in full."""
    return F.cross_entropy(x @ w.t() + (0 if b is None else b), y, **given)


def run(function, tensors, needs, y, scale=1.0, **given):
    """The loss, and the gradients of those of x, w and b that need one; None where there is none."""
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=False)]
    loss = function(*leaves[:2], y, *leaves[2:], **given)
    loss.backward(torch.as_tensor(scale, dtype=loss.dtype, device=device))
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def error(got, want):
    """The largest relative L2 error ||got - want|| / ||want||; None where a gradient is missing."""
    if any(g is None for g in got):
        return None
    return torch.stack([(g.double() - r).norm() / r.norm() for g, r in zip(got, want, strict=True)]).max().item()  # or NaN


def main(options):
    takes = inspect.signature(release().LigerFusedLinearCrossEntropyFunction.forward).parameters
    BT, H, V = options.shape
    torch.manual_seed(0)
    x, w, b = (t.to(device) for t in (torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V)))
    y = torch.randint(0, V, (BT,))
    y[5::10] = -100
    y = y.to(device)
    for given in [{"reduction": "mean"}, {"reduction": "sum"}] if "reduction" in takes else [{}]:
        for trained in ("x w", "x", "w", *("x w b", "x b", "w b", "b") * ("bias" in takes)):
            tensors, needs = (x, w, b)[: 2 + ("b" in trained)], [name in trained for name in "xwb"]
            want, said = run(eager, [t.double() for t in tensors], needs, y, 3.0, **given), ""
            try:
                got = run(liger, tensors, needs, y, 3.0, **given)
            except AttributeError as raised:  # with a bias, 0.6.4 - 0.7.0 (#1157)
                got, said = [None], f": {raised}"
            name = f"{given.get('reduction', 'mean')}, trained: {trained}{said}"
            check("control" if needs[0] else "trigger", name, error=error(got, want), limit=LIMIT)
            if not needs[0]:
                lost = got[1:] == [None] * (len(want) - 1) and error(got[:1], want[:1]) <= LIMIT
                how = "the error of #1157" if said else "a right loss, and no gradient"
                check("signature", f"{name}: {how}", said.endswith("no attribute 'detach'") if said else lost)
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
