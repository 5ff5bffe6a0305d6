# /// script
# requires-python = ">=3.10"
# dependencies = ["cut-cross-entropy==25.1.1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# ///
"""cut-cross-entropy: the backward of a mean over no tokens raises a ZeroDivisionError.

Where each label of a batch is ignored, as in one that holds prompts alone, torch's mean is NaN and its gradients are 0; cut-cross-entropy's loss is NaN, too, and its
backward divides 1 by the number of tokens that count, in Python. The sum takes such a batch. Reported as unslothai/unsloth#1417 and apple/ml-cross-entropy#49.
Runs on a GPU; without one its lane runs it on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import os
from importlib.metadata import version

import torch
import torch.nn.functional as F

LIMIT = 2e-3  # relative, of fp16
device = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # with libdevice's functions, which Triton's own interpreter lacks
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(16, 32, 70), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")


def release():
    """The module under test; what was run, and on what, goes into the report."""
    import cut_cross_entropy as module

    FACTS.update(file=module.__file__, version=version("cut-cross-entropy"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return module


def eager(x, w, y, **given):
    """The definition, with logits in full."""
    return F.cross_entropy(x @ w.t(), y, **given)


def run(function, x, w, y, **given):
    """The loss, and the gradients of x [BT, H] and w [V, H]; or the error of the backward."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    loss = function(x, w, y, **given)
    try:
        (8 * loss).sum().backward()
    except ZeroDivisionError as raised:
        return f"ZeroDivisionError: {raised}"
    return [t.detach().double() for t in (loss, x.grad, w.grad)]


def main(options):
    if device == "cpu" and not interpreted:
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack40 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    BT, H, V = options.shape
    torch.manual_seed(0)
    x, w = torch.randn(BT, H).to(device, torch.float16), (torch.randn(V, H) / H**0.5).to(device, torch.float16)
    y = torch.randint(0, V, (BT,)).to(device)
    none, one = torch.full_like(y, -100), torch.where(torch.arange(BT, device=device) == BT // 2, y, -100)
    for reduction, (many, labels) in [(r, each) for r in ("sum", "mean") for each in (("all", y), ("one", one), ("no", none))]:
        role = "trigger" if (reduction, many) == ("mean", "no") else "control"
        got = run(release().linear_cross_entropy, x, w, labels, reduction=reduction, impl="cce")
        want = run(eager, x.double(), w.double(), labels, reduction=reduction)
        said = f"{reduction}, {many} token(s) with a label"
        if isinstance(got, str):
            check(role, f"{said}: the backward ends", False)
        elif many == "no":
            # Torch's mean of nothing is NaN; 0 is as good. Nothing depends on x and w: their gradients are 0.
            check(role, f"{said}: the backward ends", True)
            check(role, f"{said}: a loss of 0 or NaN", not torch.nan_to_num(got[0]).any().item())
            check(role, f"{said}: gradients of 0", not got[1].any().item() and not got[2].any().item())
        else:
            far = [((g - r).norm() / r.norm()).item() for g, r in zip(got, want, strict=True)]
            check(role, f"{said}: loss and gradients within {LIMIT}", all(each <= LIMIT for each in far))
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
