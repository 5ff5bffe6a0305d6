# /// script
# requires-python = ">=3.10"
# dependencies = ["mamba-ssm==2.3.2.post1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: Mamba-3 SISO rounds the angles that it turns q and k by, summed over the tokens and between 0 and 2 pi, to bf16.

Mamba-3's module hands Angles over in fp32, and its MIMO kernels get their sum in fp32. mamba3_siso_combined casts Angles to bf16, and the sum takes their
dtype: the angle of each token, and the state that decoding goes on from, are up to 0.016 rad off. The release's own angle_dt_fwd is exact in fp32.
Caught is what the release hands its main kernel, which runs on a GPU alone. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import os
from importlib.metadata import version

device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
import torch
import triton

H, N, P, A = 24, 128, 64, 32  # heads, d_state, headdim, angles: Mamba-3 with d_model 768
LIMIT = 1e-4  # rad; fp32 is 1e-5 off
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=1024, metavar="S", help="length of the sequence (default 1024)")
autotune = triton.autotune  # slow, and no matter of numbers
triton.autotune = lambda configs, **rest: autotune(configs[:1], **rest)


def release():
    """The module under test. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    if importlib.util.find_spec("mamba_ssm.ops.triton.mamba3") is None:
        finish("UNTESTABLE", "no-api")
    if device == "cuda" and not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack44 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_combined as module

    gpu = "interpreter" if device == "cpu" else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    FACTS.update(file=module.__file__, version=version("mamba-ssm"), evidence=gpu)
    return module


def inputs(S, B=1, H=H):
    """The function's arguments by their names: Q, K [B, S, 1, N]; V [B, S, H, P]; ADT, DT, Trap [B, H, S]; Angles [B, S, H, A], numbers of bf16 in fp32."""
    torch.manual_seed(0)
    shapes = {"Q": (B, S, 1, N), "K": (B, S, 1, N), "V": (B, S, H, P), "Trap": (B, H, S), "Angles": (B, S, H, A)}
    given = {name: torch.randn(*shape, device=device).bfloat16() for name, shape in shapes.items()}
    DT = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    biases = {name: 0.1 * torch.randn(H, N, device=device) for name in ("Q_bias", "K_bias")}
    return {**given, "Angles": given["Angles"].float(), "ADT": -DT, "DT": DT, **biases}


def handed(module, given, **options):
    """All that the release hands its main kernel, by its parameters' names, and the angle state [B, H, A] that it returns."""
    kernel, seen = module.mamba3_siso_fwd, {}

    def caught(*args, **more):
        seen.update(
            zip(("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z", "states"), args, strict=True)
        )
        return kernel(*args, **more) if device == "cuda" else (args[2], *[None] * 9, (None, None, None))

    module.mamba3_siso_fwd = caught
    state = module.mamba3_siso_combined(**given, **options, return_final_states=True)[1]
    module.mamba3_siso_fwd = kernel
    return seen, state.detach()


def turn(got, want):
    """The largest turn, in rad, between two angles."""
    return (torch.remainder(got.double() - want + math.pi, 2 * math.pi) - math.pi).abs().max().item()


def main(options):
    module, given = release(), inputs(options.tokens)
    Angles, DT, S = given["Angles"], given["DT"], options.tokens
    exact = (torch.tanh(Angles.double()) * math.pi * DT.double().transpose(1, 2)[..., None]).cumsum(1)
    off = turn(module.angle_dt_fwd(Angles, DT), exact)
    # A GPU has an approximation of tanh, and they are sums of it: so what the release's kernel gives in fp32 is the measure.
    check("control", f"angle_dt_fwd, called with fp32, is {off:.0e} rad off fp64", off < (1e-5 if device == "cpu" else 2e-2))
    states = tuple(torch.rand(1, H, *shape, device=device) for shape in ((A,), (P, N), (N,), (P,)))
    ends = torch.tensor([0, 1, S // 3, S], device=device, dtype=torch.int32)
    for name, more, own in (
        ("no gradient", {}, {}),
        ("training", {}, {}),
        ("after a segment", {"Input_States": states}, {"init_state": states[0]}),
        ("three sequences", {"cu_seqlens": ends}, {"cu_seqlens": ends}),
    ):
        want, last = module.angle_dt_fwd(Angles, DT, return_output_state=True, **own)
        with torch.set_grad_enabled(name == "training"):
            seen, state = handed(module, {**given, "Angles": Angles.clone().requires_grad_()}, **more)
        check("trigger", f"{name}: angles that the main kernel gets, rad", error=turn(seen["Angles"], want), limit=LIMIT)
        check("trigger", f"{name}: angle state that is returned, rad", error=turn(state, last), limit=LIMIT)
        check("signature", f"{name}: they are the same in bf16", torch.equal(seen["Angles"], want.bfloat16()))
        same = all(seen[n].dtype == t.dtype and torch.equal(seen[n], t) for n, t in given.items() if n != "Angles")
        check("control", f"{name}: all else is handed on as it is given", same)
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
    main(parser.parse_args())
