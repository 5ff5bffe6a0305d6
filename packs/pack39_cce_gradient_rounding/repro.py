# /// script
# requires-python = ">=3.10"
# dependencies = ["cut-cross-entropy==25.1.1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# ///
"""cut-cross-entropy: the gradient of x is summed in half precision, block of columns by block, and loses what is small.

The backward adds the part of each block of the vocabulary to the gradient of x [BT, H] in x's own dtype: at V=32000 that is 250 and more additions
in bf16 or fp16, where a product with the logits' gradient in full sums in fp32 and rounds once. So the error grows with V. The reduction is "sum", which
keeps the logits' gradients in fp16's range, and small gradients are not filtered out (filter_eps=None). main has an option for it.
Runs on a GPU; without one its lane runs it on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import os
from importlib.metadata import version

import torch
import torch.nn.functional as F

LIMIT, SMALL = 4, 256  # times the error of torch's own gradient in the same dtype; a vocabulary of one block or a few
device = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # with libdevice's functions, which Triton's own interpreter lacks
DTYPES = [torch.bfloat16, torch.float16] if device == "cuda" else [torch.float16]  # the interpreter has no bf16
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(16, 32, 32000), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")


def release():
    """The module under test; what was run, and on what, goes into the report."""
    import cut_cross_entropy as module

    FACTS.update(file=module.__file__, version=version("cut-cross-entropy"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return module


def cce(x, w, y, **given):
    """The release's own loss; gradients are not left out for being small."""
    function = release().linear_cross_entropy
    whole = {"filter_eps": None} if "filter_eps" in inspect.signature(function).parameters else {}
    return function(x, w, y, impl="cce", **whole, **given)


def eager(x, w, y, **given):
    """The definition, with logits in full: the loss of their fp32 values."""
    logits = x @ w.t()
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y, **given)


def run(function, x, w, y, **given):
    """The sum of the losses, and the gradients of x and w."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    loss = function(x, w, y, reduction="sum", **given)
    return [t.detach().double() for t in (loss, *torch.autograd.grad(loss, (x, w)))]


def error(got, want):
    """||got - want|| / ||want||."""
    return ((got - want).norm() / want.norm()).item()


def added(x, w, y, block):
    """The gradient of x, of which each block of columns is added in x's dtype: what a release does that has the bug."""
    rows = torch.softmax(x.double() @ w.double().t(), 1)
    rows[torch.arange(len(y), device=x.device), y] -= 1
    total = torch.zeros_like(x)
    for start in range(0, len(w), block):
        total += (rows[:, start : start + block] @ w[start : start + block].double()).to(x.dtype)
    return total.double()


def main(options):
    if device == "cpu" and not interpreted:
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack39 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    BT, H, V = options.shape
    torch.manual_seed(0)
    for dtype in DTYPES:
        for columns in (SMALL, V):
            x, w = torch.randn(BT, H).to(device, dtype), (torch.randn(columns, H) / H**0.5).to(device, dtype)
            y, said = torch.randint(0, columns, (BT,)).to(device), f"{str(dtype)[6:]}, V={columns}"
            want, ours, got = run(eager, x.double(), w.double(), y), run(eager, x, w, y), run(cce, x, w, y)
            check("control", f"{said}: loss", error=error(got[0], want[0]), limit=1e-3)
            for name, g, t, r in zip("xw", got[1:], ours[1:], want[1:], strict=True):
                ok, role = error(g, r) <= LIMIT * error(t, r), "trigger" if columns == V else "control"
                if columns == SMALL or name == "x":
                    check(role, f"{said}: the error of the gradient of {name} is at most {LIMIT} times torch's", ok)
                FACTS["metrics"][f"{said}: relative error of the gradient of {name}"] = error(g, r)
                FACTS["metrics"][f"{said}: torch's relative error of the gradient of {name}"] = error(t, r)
            if columns == V:
                off, far = error(got[1], want[1]), error(added(x, w, y, 128), want[1])
                FACTS["metrics"][f"{said}: relative error of such a sum over blocks of 128 columns"] = far
                check("signature", f"{said}: like a sum of blocks of columns in this dtype", far / 3 < off < 3 * far)
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
