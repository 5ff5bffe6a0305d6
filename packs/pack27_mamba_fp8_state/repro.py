# /// script
# requires-python = ">=3.10"
# dependencies = ["mamba-ssm==2.3.2.post1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: what it costs to keep the state of Mamba-3's scan in FP8.

No release does so; an article says that FP8 is not worth it for scans. The release's own SISO kernel is called for segments of a sequence, each with the state
[H, P, N] that the one before ended with, cast in between to bf16 or e4m3. Reports the output's error for heads that forget fast and slowly.
A measurement, and no bug. Runs on a GPU; nox -s pack27 runs it without one. Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

import os
from importlib import import_module, metadata, util
from unittest import mock

device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
import torch
import triton

HEADS = {f"forgets {rate:g} a token": rate for rate in (0.1, 0.01, 0.001)}  # of its state: a decay of exp(-rate)
SEGMENT, N, P, CHUNK = 64, *((32, 32, 16) if device == "cpu" else (128, 64, 64))  # SEGMENT: tokens between two handovers
autotune = triton.autotune  # slow, and no matter of numbers
triton.autotune = lambda configs, **rest: autotune(configs[:1], **rest)


def release():
    """The release's module. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    global module
    FACTS["version"] = metadata.version("mamba-ssm")
    sys.modules["mamba_ssm"] = util.module_from_spec(util.find_spec("mamba_ssm"))
    util.find_spec("mamba_ssm.ops.triton.mamba3") or finish("UNTESTABLE", "no-api")
    if device == "cuda" and not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack27 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    module = import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")
    level = "interpreter" if device == "cpu" else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    FACTS.update(file=module.__file__, evidence=level)


def fp8(state, dtype=torch.float8_e4m3fn):
    """To FP8 and back, with a scale from the largest entry of the last two dimensions."""
    scale = torch.finfo(dtype).max / state.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
    return (state * scale).to(dtype).float() / scale


def inputs(S):
    """The scan's inputs as the function names them: one sequence, a head for each rate."""
    torch.manual_seed(0)
    H, options = len(HEADS), {"device": device}
    shapes = {"Q": (1, S, 1, N), "K": (1, S, 1, N), "V": (1, S, H, P), "Angles": (1, S, H, N // 2), "Trap": (1, H, S)}
    given = {name: torch.randn(*shape, **options).bfloat16() for name, shape in shapes.items()}
    ADT = -torch.tensor([*HEADS.values()], **options)[None, :, None].repeat(1, 1, S)
    return {**given, "DT": torch.full((1, H, S), 0.1, **options), "ADT": ADT}


@torch.no_grad()
def scan(given, segment, between=lambda state: state):
    """The output [S, H, P] and the last state as it came, called for ``segment`` tokens at a time; ``between`` changes the state."""
    outs, states, S, bias = [], None, given["V"].shape[1], torch.zeros(len(HEADS), N, device=device)
    # The release casts Angles to bf16, and with them the angles' state that it hands back: here it is the same kernel's, in fp32.
    turned = module.angle_dt_fwd(given["Angles"].float(), given["DT"], chunk_size=CHUNK)
    for start in range(0, S, segment):
        dims = {name: 2 if name in ("DT", "ADT", "Trap") else 1 for name in given}
        part = {name: given[name].narrow(dim, start, min(segment, S - start)).contiguous() for name, dim in dims.items()}
        part |= {"Q_bias": bias, "K_bias": bias, "Input_States": states and tuple(states)}
        out, *states = module.mamba3_siso_combined(**part, chunk_size=CHUNK, return_final_states=True)
        last, states[0] = states[1], turned[:, min(start + segment, S) - 1].contiguous()
        states[1] = between(last)
        outs.append(out[0].float())
    return torch.cat(outs).double().cpu(), last.cpu()


def off(got, want):
    """||got - want|| / ||want|| of each head."""
    return ((got - want).norm(dim=(0, 2)) / want.norm(dim=(0, 2))).tolist()


def main():
    release()
    S, limit, least = (512, 1e-5, 8) if device == "cpu" else (8192, 1e-2, 4)  # a GPU rounds the output to bf16
    exact, state = scan(given := inputs(S), SEGMENT)
    check("control", "the release's state is in fp32", not torch.equal(state, state.bfloat16().float()))
    check("control", "a state in fp32: as in one call", error=max(off(scan(given, S)[0], exact)), limit=limit)
    for name, cast, low, high in (("bf16", lambda s: s.bfloat16().float(), 0.001, 0.003), ("e4m3", fp8, 0.02, 0.04)):
        once = [((cast(state * size) / size - state).norm() / state.norm()).item() for size in (1, 2**20, 2**-20)]
        check("control", f"{name}: one cast is off by {once[0]:.2%}, at any scale", all(low < error < high for error in once))
        casts = mock.Mock(side_effect=cast)
        FACTS["metrics"][name] = dict(zip(HEADS, off(scan(given, SEGMENT, casts)[0], exact), strict=True))
        check("control", f"{name}: {casts.call_count} handovers of {S} tokens are cast", casts.call_count == S // SEGMENT)
        print(name, *(f"{error:.2%}, {head}" for head, error in FACTS["metrics"][name].items()), sep="  ", flush=True)
    found = [[FACTS["metrics"][name][head] for name in ("bf16", "e4m3")] for head in HEADS]
    check("control", f"e4m3 makes the output over {least} times as wrong as bf16", all(b > least * a > 0 for a, b in found))
    finish("MEASURED")


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
