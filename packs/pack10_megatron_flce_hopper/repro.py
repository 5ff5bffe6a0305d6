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
import torch.nn.functional as F

FUSED = "megatron.core.fusions.fused_linear_cross_entropy"
BLACKWELL = "megatron.core.fusions.linear_cross_entropy.blackwell"
CUDA, CUTLASS = ("cuda", "cuda.bindings", "cuda.bindings.driver"), ("cutlass", "cutlass.cute", "cutlass.cute.runtime")
# Compute capability, what is missing of what its fused kernels need, and what can be imported.
CASES = [(each, "", ()) for each in ((8, 0), (8, 9), (9, 0), (12, 0))]  # a feature that is missing
CASES += [((10, 0), "CUTLASS", ()), ((10, 0), "CUDA bindings", CUTLASS), ((10, 3), "cutlass.cute", (*CUDA, "cutlass"))]
CASES += [((10, 3), "cutlass.cute.runtime", (*CUDA, *CUTLASS[:2]))]
device = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def as_if(capability):
    """A GPU of that compute capability, for the dispatcher alone; None is the machine's own. nvtx is not in a CPU build of torch."""
    fused = import_module(FUSED)
    fused.Platform._instance = None
    fused._get_platform.cache_clear()
    given = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_capability": lambda *_: capability}
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
    """Of CUTLASS and CUDA's bindings ``names`` alone can be imported, and hold nothing; Blackwell's entry is real, or holds ``attributes``."""
    made, package = {name: types.ModuleType(name) for name in names}, import_module(BLACKWELL)
    with mock.patch.dict(sys.modules, {"cutlass": None, "cuda": None} | made):
        sys.modules.pop(f"{BLACKWELL}.entry", None)
        vars(package).pop("entry", None)
        if attributes:
            package.entry = sys.modules[f"{BLACKWELL}.entry"] = types.SimpleNamespace(**attributes)
        yield


def dispatched(capability):
    """Whether the dispatcher takes the fused kernels where all that they need can be imported."""
    fused = {"forward": lambda *_: None, "backward": lambda *_: None}
    with importable(*CUDA, *CUTLASS, **fused), as_if(capability) as made:
        platform = made._get_platform()
    return platform.forward_func is fused["forward"] and platform.backward_func is fused["backward"]


def main():
    FACTS["version"] = metadata.version("megatron-core")
    core = Path(util.find_spec("megatron.core").origin).parent
    if not core.joinpath("fusions/fused_linear_cross_entropy.py").exists():
        print("No release has fused linear cross entropy: nox -s pack10 -- --variant d48bd6be0a runs a commit that has it.")
        finish("UNTESTABLE", "no-api")
    own = torch.cuda.get_device_capability() if device == "cuda" else None
    FACTS.update(file=import_module(FUSED).__file__, evidence="device:sm_{}{}".format(*own) if own else "source")
    for minor in (0, 3):
        check("control", f"compute capability 10.{minor} with CUTLASS: the fused kernels are taken", dispatched((10, minor)))
    for capability, missing, there in CASES:
        with importable(*there):
            error, said = loss_error(None if capability == own else capability)
        name = "compute capability {}.{}".format(*capability) + (f" without {missing}" if missing else "")
        check("trigger", f"{name}: {said}", error=error, limit=1e-5)
        lost = "has no attribute 'forward'" if missing else f"ValueError in __init__: Unsupported architecture: {capability[0]}"
        if error is None:
            check("signature", f"{name}: the dispatcher raises", said.endswith(lost))
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
