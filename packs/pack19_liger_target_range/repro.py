# /// script
# requires-python = ">=3.10"
# dependencies = ["liger-kernel==0.8.5", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""liger-kernel: fused linear cross entropy takes labels outside 0 … V-1, and computes with memory that is not the row's.

A label of V (a tokenizer that grew, and an lm_head that did not) reads the next row's first logit, so that the loss is wrong. From 0.8.2 on its
gradient is written there, too, or past the end of the buffer. Right is a refusal: LigerCrossEntropyFunction asserts the range, and torch raises.
No report was found. Runs on a GPU, or without one on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import os
import subprocess
from importlib.metadata import version

import torch
import torch.nn.functional as F

LIMIT = 1e-4
device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = "0" if device == "cuda" else "1"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(8, 16, 50), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")
parser.add_argument("--case", help=argparse.SUPPRESS)  # one label, in a process of its own
#: Name -> row, label, ignore_index.
RIGHT = {"all in range": (2, 0, -100), "-100, which is ignored": (2, -100, -100), "V, which is ignored": (2, "V", "V")}
WRONG = {"V": (2, "V", -100), "V, in the last row": (-1, "V", -100), "-100, where -1 is ignored": (2, -100, -1)}
WRONG["a million times -V"] = (2, "far", -100)


def release():
    from liger_kernel.ops import fused_linear_cross_entropy

    FACTS.update(file=fused_linear_cross_entropy.__file__, version=version("liger-kernel"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction


def applied(function, **given):
    """autograd.Function.apply takes no keywords, and their order differs between releases."""
    known = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean", "return_z_loss": False}
    order = list(inspect.signature(function.forward).parameters.values())[1:]
    out = function.apply(*((known | given).get(p.name, None if p.default is p.empty else p.default) for p in order))
    return out[0] if isinstance(out, tuple) else out


def inputs(case, BT, H, V):
    """x [BT, H], w [V, H], labels y [BT], what is ignored, and the rows whose label is neither that nor in range."""
    torch.manual_seed(0)
    x, w, y = torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randint(0, V, (BT,))
    row, label, ignore = (RIGHT | WRONG)[case]
    y[row], ignore = {"V": V, "far": -1_000_000 * V}.get(label, label), V if ignore == "V" else ignore
    return x, w, y, ignore, (y != ignore) & ((y < 0) | (y >= V))


def one(case, shape):
    """What the release makes of one label: how it ends, and how far off the gradient of the worst other row is."""
    x, w, y, ignore, bad = inputs(case, *shape)
    leaves = [t.detach().to(device).clone().requires_grad_() for t in (x, w)]
    names = {"_input": leaves[0], "weight": leaves[1], "linear": leaves[1], "target": y.to(device).clone()}
    try:
        (loss := applied(release(), **names, ignore_index=ignore)).backward()
        loss = loss.item()
    except (AssertionError, IndexError, ValueError, RuntimeError) as raised:  # any RuntimeError of CUDA names such assertions
        asserted = not isinstance(raised, RuntimeError) or "device-side assert triggered" in str(raised)
        return {"refused" if asserted else "failed": f"{type(raised).__name__}: {str(raised)[:99]}"}
    kept = torch.where(bad, ignore, y).to(device)
    exact = [t.to(device).double().requires_grad_() for t in (x, w)]
    F.cross_entropy(exact[0] @ exact[1].t(), kept, ignore_index=ignore, reduction="sum").div((y != ignore).sum()).backward()
    off = (leaves[0].grad - exact[0].grad)[kept != ignore].norm(dim=1) / exact[0].grad[kept != ignore].norm(dim=1)
    return {"loss": loss, "others": off.max().item()}


def main(shape):
    for case in RIGHT:
        check("control", f"labels {case}: gradients", error=one(case, shape).get("others", math.inf), limit=LIMIT)
    check("control", "one label of each other case is wrong", all(inputs(case, *shape)[-1].sum() == 1 for case in WRONG))
    runs = {case: subprocess.Popen([*sys.orig_argv, "--case", case], stdout=subprocess.PIPE, text=True) for case in WRONG}
    for case, run in runs.items():
        ended = {"died": f"exit {run.returncode}"} if run.wait() else json.loads(run.stdout.readlines()[-1])
        print(f"{case}: {ended}")
        check("trigger", f"a label of {case} is refused", "refused" in ended)
        if case == "V":
            off = 0 if "refused" in ended else ended.get("others", math.inf)
            check("trigger", "a label of V: gradients of the other rows", error=off, limit=LIMIT)
        # A loss, or the end that an access to memory brings that is nobody's.
        computed = "loss" in ended or "illegal memory" in ended.get("failed", "") or ended.get("died") == "exit -11"
        check("signature", f"a label of {case} is computed with", computed)
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
    options = parser.parse_args()
    if options.case:
        print(json.dumps(one(options.case, options.shape)), flush=True)
        os._exit(0)  # with a fault behind it, CUDA may abort what it cleans up
    main(options.shape)
