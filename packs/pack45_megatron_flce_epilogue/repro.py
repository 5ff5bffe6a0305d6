# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core (dev branch): the epilogues of fused linear cross entropy are -inf for a token whose logits are all far below 0.

They take the maximum over the parts of the vocabulary that the main loop hands them, and start it at 0: where all logits are near -128 the
sum of exponentials underflows, and its logarithm is -inf. The two Triton kernels run as they are, on a GPU or on Triton's interpreter; the
main loop, which needs compute capability 10, does not. No release has this: nox -s pack45 makes a wheel of the commit.
Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

from importlib import import_module, metadata, util
from pathlib import Path

import torch
import torch.nn.functional as F

EPILOGUES = "megatron.core.fusions.linear_cross_entropy.blackwell.triton"
T, V, SPLITS, IGNORED = 40, 143360, 70, -100  # tokens, vocabulary, and the parts of it that the main loop hands over
device = "cuda" if torch.cuda.is_available() else "cpu"


def above_own(splits):
    """How far each part's maximum over all ranks is above this rank's: as if another had larger ones in every third part."""
    return 30.0 * (torch.arange(splits, device=device) % 3 == 0)


def epilogues(shift, reduction=0, T=T, V=V, splits=SPLITS, ignored=IGNORED):
    """Kernel -> losses [T] (``reduction`` 0), their sum (1) or mean (2), maxima and sums of exponentials [T], of the main loop's; the right loss.

    ``shift``: around what logits are, one number, or one for each token, [T, 1], or for each logit.
    """
    kernels = import_module(EPILOGUES)
    torch.manual_seed(0)
    logits, labels = torch.randn(T, V, device=device) + shift, torch.randint(0, V, (T,), device=device)
    labels[::7] = ignored
    right = F.cross_entropy(logits.double(), labels, reduction=("none", "sum", "mean")[reduction], ignore_index=ignored)
    parts, picked = logits.view(T, splits, -1), logits.gather(1, labels.clamp_min(0)[:, None])[:, 0].contiguous()
    own = parts.amax(-1).contiguous()
    total = (parts - own[..., None]).exp().sum(-1).contiguous()
    above = own + above_own(splits)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # which knows no autotuning; there is one configuration

    def run(kernel, *args):
        blocks = kernel.configs[0].kwargs
        grid = -(-T // blocks["BLOCK_SIZE_M"])
        (kernel.fn if interpreted else kernel)[(grid,)](*args, **blocks if interpreted else {})

    (dp, tp), (top, sums) = torch.zeros(2, device=device).unbind(), torch.empty(2, T, device=device).unbind()
    count = (labels != ignored).sum()
    of_dp, of_tp = picked.clone(), picked.clone()
    args = (T, splits, ignored, labels, 1, count, own, splits, 1, total, splits, 1, top, 1, sums, 1, of_dp, 1, dp, reduction)
    run(kernels.forward_dp_epilogue, *args)
    found = {"forward_dp_epilogue": (dp if reduction else of_dp, top.clone(), sums.clone())}
    run(kernels.forward_tp_epilogue, T, splits, above, splits, 1, own, splits, 1, total, splits, 1, top, 1, sums, 1)
    args = (T, ignored, count, labels, 1, of_tp, 1, top, 1, sums, 1, tp, reduction)
    run(kernels.forward_tp_epilogue_update_logprobs, *args)
    return found | {"forward_tp_epilogue": (tp if reduction else of_tp, top, sums)}, right, logits, labels


def release():
    FACTS["version"] = metadata.version("megatron-core")
    core = Path(util.find_spec("megatron.core").origin).parent
    if not core.joinpath("fusions/linear_cross_entropy/blackwell/triton.py").exists():
        print("No release has fused linear cross entropy: nox -s pack45 -- --variant d48bd6be0a runs a commit that has it.")
        finish("UNTESTABLE", "no-api")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("This needs a GPU, and torch sees none; nox -s pack45 runs it in the lane triton-interpreter, without one.")
        finish("UNTESTABLE", "no-device")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "interpreter"
    FACTS.update(file=import_module(EPILOGUES).__file__, evidence=gpu)


def main():
    release()
    for shift in (0.0, -128.0, -1e4):
        found, right, _, labels = epilogues(shift)
        for kernel, (loss, *_) in found.items():
            error = ((loss.double() - right).norm() / right.norm()).item()
            name = f"{kernel}, V={V}, logits around {shift:g}"
            check("trigger" if shift else "control", f"{name}: losses", error=error, limit=1e-4)
            if shift:
                check("signature", f"{name}: every loss is -inf", ((loss == -torch.inf) == (labels != IGNORED)).all())
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
    main()
