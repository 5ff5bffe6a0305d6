# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core (dev branch): fused linear cross entropy is for compute capability 10 alone, and is -inf where logits are far below 0.

The dispatcher has one entry, compute capability 10; for any other it raises, and for 10 without CUTLASS, or with half of it, too. The epilogues' maximum starts
at 0: where all logits of a token are near -128 the sum of exponentials underflows, and its logarithm is -inf. What is simulated is the
capability that torch gives; a GPU is asked for its own first. No release has this: nox -s pack10 makes a wheel of the commit.
Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import contextlib
import importlib
import types
import warnings
from importlib.metadata import distribution
from unittest import mock

import torch
import torch.nn.functional as F

REFUSED = ((8, 0), (8, 9), (9, 0), (12, 0))  # a feature that is missing
FUSED = "megatron.core.fusions.fused_linear_cross_entropy"
BLACKWELL = "megatron.core.fusions.linear_cross_entropy.blackwell"
T, V, SPLITS, IGNORED = (
    40,
    143360,
    70,
    -100,
)  # tokens, vocabulary, and the parts of it that the main loop hands to the epilogues
device = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def as_if(capability):
    """A GPU of that compute capability, for the dispatcher alone: nothing runs on it. None is the machine's own."""
    fused = importlib.import_module(FUSED)
    fused.Platform._instance = None
    fused._get_platform.cache_clear()
    given = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_capability": lambda *_: capability}
    # nvtx, marks for a profiler, is not in a CPU build of torch.
    with mock.patch.multiple(torch.cuda, **given if capability else {}, nvtx=mock.MagicMock()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield fused


def loss_error(capability):
    """Error of the mean loss of 24 tokens, H=16 V=512, relative to fp64; or None and what is raised."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(24, 16), torch.randn(512, 16), torch.randint(0, 512, (24,))
    want = F.cross_entropy(hidden.double() @ weight.double().t(), labels).item()
    try:
        with as_if(capability) as fused:
            got = fused.linear_cross_entropy(hidden.to(device), weight.to(device), labels.to(device))
    except Exception as error:  # what it raises is the finding
        frame = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == fused.__file__][-1]
        return None, f"{type(error).__name__} in {frame.name}: {error}"
    return abs(got.item() - want) / want, "a loss"


@contextlib.contextmanager
def importable(*names, **attributes):
    """Modules that can be imported and hold nothing, but for Blackwell's entry, which holds ``attributes``."""
    made = {name: types.ModuleType(name) for name in names}
    for name in made:
        parent, _, child = name.rpartition(".")
        if parent in made:
            setattr(made[parent], child, made[name])
    entry, package = types.ModuleType(f"{BLACKWELL}.entry"), importlib.import_module(BLACKWELL)
    vars(entry).update(attributes)
    given = made | ({entry.__name__: entry} if attributes else {})
    with mock.patch.dict(sys.modules, given), mock.patch.object(package, "entry", entry, create=True):
        yield


def dispatched(capability):
    """Whether the dispatcher takes the fused kernels where all that they need can be imported."""
    fused = {"forward": lambda *_: None, "backward": lambda *_: None}
    with (
        importable("cutlass", "cutlass.cute", "cuda", "cuda.bindings", "cuda.bindings.driver", **fused),
        as_if(capability) as made,
    ):
        return made._get_platform().forward_func is fused["forward"] and made._get_platform().backward_func is fused["backward"]


def epilogues(shift, reduction):
    """Losses [T] (``reduction`` 0), their sum (1) or mean (2) as the kernels make them of the main loop's maxima and sums; the right ones."""
    kernels = importlib.import_module(f"{BLACKWELL}.triton")
    torch.manual_seed(0)
    logits, labels = torch.randn(T, V, device=device) + shift, torch.randint(0, V, (T,), device=device)
    labels[::7] = IGNORED
    right = F.cross_entropy(logits.double(), labels, reduction=("none", "sum", "mean")[reduction], ignore_index=IGNORED)
    parts, picked = logits.view(T, SPLITS, -1), logits.gather(1, labels.clamp_min(0)[:, None])[:, 0].contiguous()
    own = parts.amax(-1).contiguous()
    total = (parts - own[..., None]).exp().sum(-1).contiguous()
    above = (own + 0.5).contiguous()  # as if another rank's maximum were larger
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # which knows no autotuning; there is one configuration

    def run(kernel, *args, **sizes):
        (kernel.fn if interpreted else kernel)[(3,)](*args, **sizes if interpreted else {})

    (dp, tp, count), (top, sums) = torch.zeros(3, device=device).unbind(), torch.empty(2, T, device=device).unbind()
    count = (labels != IGNORED).sum()
    of_dp, of_tp, blocks = picked.clone(), picked.clone(), {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64}
    args = (T, SPLITS, IGNORED, labels, 1, count, own, SPLITS, 1, total, SPLITS, 1, top, 1, sums, 1, of_dp, 1, dp, reduction)
    run(kernels.forward_dp_epilogue, *args, **blocks)
    run(kernels.forward_tp_epilogue, T, SPLITS, above, SPLITS, 1, own, SPLITS, 1, total, SPLITS, 1, top, 1, sums, 1, **blocks)
    args = (T, IGNORED, count, labels, 1, of_tp, 1, top, 1, sums, 1, tp, reduction)
    run(kernels.forward_tp_epilogue_update_logprobs, *args, BLOCK_SIZE_M=16)
    found = (dp, tp) if reduction else (of_dp, of_tp)
    return dict(zip(("forward_dp_epilogue", "forward_tp_epilogue"), found, strict=True)), right, count


def main():
    release = distribution("megatron-core")
    FACTS["version"] = release.version
    if not release.locate_file(f"{FUSED.replace('.', '/')}.py").exists():
        print("No release has fused linear cross entropy: nox -s pack10 -- --variant d48bd6be0a runs a commit that has it.")
        finish("UNTESTABLE", "no-api")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("This needs a GPU, and torch sees none; nox -s pack10 runs it in the lane triton-interpreter, without one.")
        finish("UNTESTABLE", "no-device")
    own = torch.cuda.get_device_capability() if device == "cuda" else None
    FACTS.update(file=importlib.import_module(FUSED).__file__, evidence="device:sm_{}{}".format(*own) if own else "interpreter")
    for capability in ((10, 0), (10, 3)):
        name = "compute capability {}.{} with CUTLASS: the dispatcher takes the fused kernels".format(*capability)
        check("control", name, dispatched(capability))
    for capability, missing in [(each, "") for each in REFUSED] + [((10, 0), "CUTLASS"), ((10, 3), "cutlass.cute")]:
        half = ("cutlass", "cuda", "cuda.bindings", "cuda.bindings.driver") if missing == "cutlass.cute" else ()
        with importable(*half):
            error, said = loss_error(None if capability == own else capability)
        name = "compute capability {}.{}".format(*capability) + (f" without {missing}" if missing else "")
        check("trigger", f"{name}: {said}", error=error, limit=1e-5)
        lost = "has no attribute 'forward'" if missing else f"ValueError in __init__: Unsupported architecture: {capability[0]}"
        check("signature", f"{name}: the dispatcher raises", said.endswith(lost))
    for shift, reduction in ((0.0, 0), (0.0, 1), (0.0, 2), (-128.0, 0), (-1e4, 0)):
        found, right, count = epilogues(shift, reduction)
        for kernel, loss in found.items():
            error, role = ((loss.double() - right).norm() / right.norm()).item(), "trigger" if shift else "control"
            what = ("losses", "their sum", "their mean")[reduction]
            check(role, f"{kernel}, V={V}, logits around {shift:g}: {what}", error=error, limit=1e-4)
            if shift:
                check("signature", f"{kernel}: every loss is -inf", (loss == -torch.inf).sum() == count)
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and error <= limit
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {
        role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ("control", "trigger", "signature")
    }
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
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


sys.excepthook = unexpected
# --- end of report/1 ---

if __name__ == "__main__":
    main()
