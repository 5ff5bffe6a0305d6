# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0"]
# ///
"""torch: where all labels are ignored, the chunked linear_cross_entropy has gradients of NaN, and cross_entropy of 0.

The mean divides by the number of labels that count, 0. Both losses are NaN then. cross_entropy leaves ignored tokens out of the backward, so that a training
step on such a batch changes nothing; the chunked form, options=LinearCrossEntropyOptions(...), computes gradients in the forward from weights
that are NaN, and a step makes NaN of all of w [V, H]. Without options the function is linear and cross_entropy, its documentation says.
Runs on a CPU or GPU. No report was found. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse

import torch
import torch.nn.functional as F

LIMIT = 1e-5  # relative, in fp32
device = "cuda" if torch.cuda.is_available() else "cpu"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(16, 32, 70), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")
parser.add_argument("--chunk", type=int, default=5, help="tokens a chunk")


def release(tokens):
    """The function in its chunked form; what was run, and on what, goes into the report."""
    FACTS.update(file=torch.__file__, version=torch.__version__.partition("+")[0])
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "device:cpu"
    if not hasattr(F, "linear_cross_entropy"):
        finish("UNTESTABLE", "no-api")
    chunked = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=tokens)
    return lambda x, w, y, b, **given: F.linear_cross_entropy(x, w, y, linear_bias=b, options=chunked, **given)


def eager(x, w, y, b, **given):
    """The definition."""
    return F.cross_entropy(x @ w.t() + b, y, **given)


def run(function, tensors, y, **given):
    """The loss, and the gradients of x [BT, H], w [V, H] and b [V]."""
    x, w, b = (t.detach().requires_grad_() for t in tensors)
    loss = function(x, w, y, b, **given)
    loss.sum().backward()
    return [t.detach().double() for t in (loss, x.grad, w.grad, b.grad)]


def main(options):
    function, (BT, H, V) = release(options.chunk), options.shape
    torch.manual_seed(0)
    tensors = [t.to(device) for t in (torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V))]
    y = torch.randint(0, V, (BT,)).to(device)
    none, one = torch.full_like(y, -100), torch.where(torch.arange(BT, device=device) == BT // 2, y, -100)
    for reduction in ("mean", "sum", "none"):
        for many, labels in (("all", y), ("one", one), ("no", none)):
            got = run(function, tensors, labels, reduction=reduction)
            want = run(eager, [t.double() for t in tensors], labels, reduction=reduction)
            said = f"{reduction}, {many} token(s) with a label"
            if many != "no":
                far = torch.stack([(g - r).norm() / r.norm() for g, r in zip(got, want, strict=True)]).max().item()
                check("control", f"{said}: loss and gradients", error=far, limit=LIMIT)
                continue
            check("control", f"{said}: cross_entropy's gradients are 0", not any(r.any().item() for r in want[1:]))
            # A mean of nothing is NaN; 0 is as good.
            check("control", f"{said}: a loss of 0 or NaN", not torch.nan_to_num(got[0]).any().item())
            role = "trigger" if reduction == "mean" else "control"
            check(role, f"{said}: gradients of 0", not any(g.any().item() for g in got[1:]))
            if role == "trigger":
                check("signature", f"{said}: each gradient is NaN everywhere", all(g.isnan().all().item() for g in got[1:]))
                w = tensors[1].clone().requires_grad_()
                function(tensors[0], w, labels, tensors[2], reduction=reduction).backward()
                torch.optim.SGD([w], lr=0.1).step()
                check("trigger", f"{said}: w is the same after a step of SGD", torch.equal(w, tensors[1]))
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
