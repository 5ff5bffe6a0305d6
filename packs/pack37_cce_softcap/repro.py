# /// script
# requires-python = ">=3.10"
# dependencies = ["cut-cross-entropy==25.1.1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# ///
"""cut-cross-entropy: with a softcap, columns beyond the vocabulary count in the loss.

The forward's kernel sets the logits of its last block that lie beyond the vocabulary to -inf, and then applies the softcap, which makes
-softcap of them: n = -V mod BLOCK_V columns too many, each worth exp(-softcap), are in the log-sum-exp, and so in the loss [BT] and in the
gradients of x [BT, H] and w [V, H]. No report was found.
Runs on a GPU; without one its lane runs it on Triton's interpreter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import inspect
import os
from importlib.metadata import version

import torch
import torch.nn.functional as F

LIMIT = 1e-4  # of the mean loss, in nats: the kernel sums in fp32, but rounds the logits of the labels to fp16
BLOCK = 256  # the largest BLOCK_V of the kernel's configurations
device = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # with libdevice's functions, which Triton's own interpreter lacks
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(128, 32, 70), type=lambda text: tuple(map(int, text.split(","))), metavar="BT,H,V")


def release():
    """The module under test; what was run, and on what, goes into the report."""
    import cut_cross_entropy as module

    FACTS.update(file=module.__file__, version=version("cut-cross-entropy"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    return module


def cce(x, w, y, **given):
    """The release's own loss of each token, [BT] fp32; gradients are not left out for being small."""
    function = release().linear_cross_entropy
    whole = {"filter_eps": None} if "filter_eps" in inspect.signature(function).parameters else {}
    return function(x, w, y, reduction="none", impl="cce", **whole, **given)


def eager(x, w, y, softcap=None):
    """The definition, with logits in full."""
    logits = x @ w.t()
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), y, reduction="none")


def run(function, x, w, y, dtype, **given):
    """The loss of each token, and the gradients of x and w of their mean."""
    x, w = (t.detach().to(dtype).requires_grad_() for t in (x, w))
    loss = function(x, w, y, **given)
    loss.mean().backward()
    return [t.detach().double() for t in (loss, x.grad, w.grad)]


def main(options):
    if device == "cpu" and not interpreted:
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack37 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    BT, H, V = options.shape
    torch.manual_seed(0)
    for columns, softcap in [(V, None), (-(-V // BLOCK) * BLOCK, 1.0), (V, 1.0)]:
        x, w = torch.randn(BT, H).half().to(device), (torch.randn(columns, H) / H**0.5).half().to(device)
        y = torch.randint(0, columns, (BT,)).to(device)
        given = {} if softcap is None else {"softcap": softcap}
        got, want = run(cce, x, w, y, torch.float16, **given), run(eager, x, w, y, torch.float64, **given)
        role = "control" if softcap is None or columns % BLOCK == 0 else "trigger"
        name = f"V={columns}, softcap {softcap}"
        check(role, f"{name}: mean loss", error=(got[0] - want[0]).mean().abs().item(), limit=LIMIT)
        far = torch.stack([(g - r).norm() / r.norm() for g, r in zip(got[1:], want[1:], strict=True)]).max()  # NaN, if one is
        FACTS["metrics"][f"{name}: relative error of the gradients, in fp16"] = far.item()
    # What one column too many adds to the sum of exponentials, as a part of it.
    part = torch.exp(-softcap - torch.logsumexp(softcap * torch.tanh(x.double() @ w.double().t() / softcap), 1))
    far = {-V % block: (got[0] - want[0] - torch.log1p(-V % block * part)).mean().abs().item() for block in (32, 64, 128, 256)}
    many = min(far, key=far.get)
    check("signature", f"{many} columns of logit -{softcap} too many", error=far[many], limit=LIMIT)
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
