# /// script
# requires-python = ">=3.10"
# dependencies = ["mamba-ssm==2.3.2.post1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: Mamba-3 SISO rounds the angles that it turns q and k by, sums over the tokens between 0 and 2 pi, to bf16.

mamba3_siso_combined casts Angles to bf16, and their sum takes their dtype: the angle of a token and the state that decoding goes on from are up to 0.016 rad
off, more where Angles were no numbers of bf16. The MIMO kernels get fp32. Caught is what the functions get that launch the main kernels; none is run. Exits with 10, 0 or 125.
"""

import argparse
import contextlib
import os
from importlib import import_module, metadata, util
from inspect import signature
from unittest import mock

device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
import torch
import triton

H, N, P, A = 24, 128, 64, 32  # heads, d_state, headdim, angles: Mamba-3 with d_model 768
NAMES = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=512, metavar="S", help="length of the sequence (default 512)")
triton.autotune = lambda configs, of=triton.autotune, **rest: of(configs[:1], **rest)  # slow, and no matter of numbers
turn = lambda a, b: (torch.remainder(a.double() - b.double() + math.pi, 2 * math.pi) - math.pi).abs().max().item()  # noqa: E731


def release():
    """The module under test. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    FACTS["version"] = metadata.version("mamba-ssm")
    sys.modules["mamba_ssm"] = util.module_from_spec(util.find_spec("mamba_ssm"))
    util.find_spec("mamba_ssm.ops.triton.mamba3") or finish("UNTESTABLE", "no-api")
    if device == "cuda" and not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack44 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    evidence = "interpreter" if device == "cpu" else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    FACTS.update(evidence=evidence, file=(module := import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")).__file__)
    return module


def inputs(S, B=1):
    """The function's arguments by their names: Q, K [B, S, 1, N]; V, Z [B, S, H, P]; ADT, DT, Trap [B, H, S]; Angles [B, S, H, A]."""
    torch.manual_seed(0)
    sizes = {"Q": (S, 1, N), "K": (S, 1, N), "V": (S, H, P), "Z": (S, H, P), "Trap": (H, S), "Angles": (S, H, A)}
    given = {name: torch.randn(B, *size, device=device).bfloat16() for name, size in sizes.items()}
    given |= {"DT": (DT := 0.05 + 0.2 * torch.rand(B, H, S, device=device)), "ADT": -DT, "D": torch.randn(H, device=device)}
    given |= {name: 0.1 * torch.randn(H, N, device=device) for name in ("Q_bias", "K_bias")}
    return {name: given[name] for name in NAMES} | {"Angles": given["Angles"].float()}


def handed(module, given, train, more):
    """The angles that the main kernels of forward and, where it is trained, backward would get, and the state; all else that the first would."""
    seen, angles = {}, {}
    first, last = (signature(f).bind for f in (module.mamba3_siso_fwd, module.compute_dqktheta))

    def forward(*args, **options):
        (bound := first(*args, **options)).apply_defaults()
        seen.update(zip((*NAMES, "states"), bound.arguments.values(), strict=False))
        angles["forward"] = seen.pop("Angles")
        return (out := seen["V"]).clone(), *[None] * 9, (out, out, out)

    stubs = {"mamba3_siso_fwd": forward, "compute_dqkv": lambda *_, **__: [None] * 7}
    stubs["compute_dzdo"] = lambda do, *_, **__: (None, do)
    stubs["compute_dqktheta"] = lambda *args, **options: angles.update(backward=last(*args, **options).arguments["angles"])
    leaves = {name: t.detach().clone().requires_grad_(train) for name, t in given.items()}
    with mock.patch.multiple(module, **stubs), torch.set_grad_enabled(train), contextlib.suppress(TypeError):
        out = module.mamba3_siso_combined(**leaves, **more)
        if "return_final_states" in more:
            out, angles["state"] = out[:2]
        out.backward(torch.ones_like(out)) if train else None  # a TypeError: its last kernel gives nothing back
    return angles, seen


def main(options):
    module, one, two = release(), inputs(options.tokens), inputs(options.tokens // 2, B=2)
    Angles, DT, final = one["Angles"], one["DT"], {"return_final_states": True}
    some, limit = (None, 3e-5) if device == "cpu" else (16, 6e-3)  # a GPU approximates tanh, and this is a sum of it
    exact = (torch.tanh(Angles.double()) * math.pi * DT.double().transpose(1, 2)[..., None]).cumsum(1)[:, :some]
    check("control", f"fp32 is {(off := turn(module.angle_dt_fwd(Angles, DT)[:, :some], exact)):.0e} rad off fp64", off < limit)
    for name, given, train, more in (
        ("training", two, True, {}),
        ("training, Angles in bf16", {**one, "Angles": Angles.bfloat16()}, True, {}),
        ("prefill", one, False, final),
        ("prefill, Angles no numbers of bf16", {**one, "Angles": Angles * (1 + 2**-9 * torch.rand_like(Angles))}, False, final),
    ):
        want, last = module.angle_dt_fwd(given["Angles"].float(), given["DT"], return_output_state=True)
        angles = handed(module, given, train, more)[0]
        for what, got in angles.items():
            check("trigger", f"{name}: angles, {what}, rad", error=turn(got, last if what == "state" else want), limit=1e-4)
        check("control", f"{name}: {' and '.join(angles)} are seen", len(angles) == 2)
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
