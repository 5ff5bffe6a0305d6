# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core (dev branch): the fused linear cross entropy is for compute capability 10 alone.

For any other the dispatcher raises, and for 10 where CUTLASS or CUDA's bindings are missing; torch is made to give those capabilities that
are not the GPU's own. nox -s pack10 makes a wheel of the commit. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import contextlib
import types
import warnings
from importlib import import_module, metadata, util
from pathlib import Path
from unittest import mock

import torch

FUSED = "megatron.core.fusions.fused_linear_cross_entropy"
BLACKWELL = "megatron.core.fusions.linear_cross_entropy.blackwell"
ALL = "cuda", "cuda.bindings", "cuda.bindings.driver", "cutlass", "cutlass.cute", "cutlass.cute.runtime"
# Compute capability, what its fused kernels miss or have of what they need, and what can be imported.
CASES = [(each, "", ()) for each in ((8, 0), (8, 9), (9, 0), (12, 0))]  # a feature that is missing
CASES += [(each, " with CUTLASS", ALL) for each in ((8, 0), (9, 0), (12, 0))]
CASES += [((10, 0), " without CUTLASS", ()), ((10, 0), " without CUDA bindings", ALL[3:])]
CASES += [((10, 3), f" without {ALL[n]}", ALL[:n]) for n in (4, 5)]
# Blackwell's kernels, with a loss and gradients that nothing else gives.
ENTRY = types.SimpleNamespace(
    forward=lambda hidden, *_: (hidden.new_tensor(7.0), *[hidden.new_ones(())] * 3, 0, 1, hidden),
    backward=lambda given, hidden, weight, *_: (2 * given + torch.zeros_like(hidden), 3 * given + torch.zeros_like(weight)),
)
device = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def as_if(capability, names):
    """A GPU of that compute capability (None: this one), where ``names`` of CUTLASS and CUDA's bindings can be imported; with all, Blackwell's entry is ENTRY."""
    fused, package = import_module(FUSED), import_module(BLACKWELL)
    fused.Platform._instance = None
    fused._get_platform.cache_clear()
    given = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_capability": lambda *_: capability}
    cuda = mock.patch.multiple(torch.cuda, **given if capability else {}, nvtx=mock.MagicMock())  # which a CPU build lacks
    there = {"cutlass": None, "cuda": None} | {name: types.ModuleType(name) for name in names}
    with cuda, mock.patch.dict(sys.modules, there), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules.pop(f"{BLACKWELL}.entry", None)
        vars(package).pop("entry", None)
        if names == ALL:
            package.entry = sys.modules[f"{BLACKWELL}.entry"] = ENTRY
        yield fused


def loss_error(capability, names):
    """Largest error of the mean loss of 24 tokens, H=16 V=512, dH and dW relative to fp64; or None and what is raised."""
    torch.manual_seed(0)
    leaves, labels = [torch.randn(n, 16, requires_grad=True) for n in (24, 512)], torch.randint(0, 512, (24,))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels)
    try:
        with as_if(capability, names) as fused:
            loss = fused.linear_cross_entropy(*(t.to(device) for t in leaves), labels.to(device))
            got = loss.cpu(), *torch.autograd.grad(loss, leaves)
    except Exception as error:  # what it raises is the finding
        frame = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == fused.__file__][-1]
        return None, f"{type(error).__name__} in {frame.name}: {error}"
    pairs = zip(got, (want, *torch.autograd.grad(want, exact)), strict=True)
    said = (
        "the fused kernels" if all((t == n).all() for t, n in zip(got, (7, 2, 3), strict=True)) else "a loss and its gradients"
    )
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item(), said


def main():
    FACTS["version"], core = metadata.version("megatron-core"), Path(util.find_spec("megatron.core").origin).parent
    if not core.joinpath("fusions/fused_linear_cross_entropy.py").exists():
        print("No release has fused linear cross entropy: nox -s pack10 -- --variant d48bd6be0a runs a commit that has it.")
        finish("UNTESTABLE", "no-api")
    own = torch.cuda.get_device_capability() if device == "cuda" else None
    FACTS.update(file=import_module(FUSED).__file__, evidence="device:sm_{}{}".format(*own) if own else "source")
    for minor in (0, 3):
        said = loss_error((10, minor), ALL)[1]
        check("control", f"compute capability 10.{minor} with CUTLASS: {said}", said == "the fused kernels")
    for capability, missing, there in CASES:
        error, said = loss_error(None if capability == own else capability, there)
        name = "compute capability {}.{}".format(*capability) + missing
        check("trigger", f"{name}: {said}", error=error, limit=1e-5)
        lost = (
            "has no attribute 'forward'"
            if "out" in missing
            else f"ValueError in __init__: Unsupported architecture: {capability[0]}"
        )
        if error is None:
            check("signature", f"{name}: the dispatcher raises", said.endswith(lost))
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
