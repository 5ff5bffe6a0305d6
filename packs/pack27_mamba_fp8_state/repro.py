# /// script
# requires-python = ">=3.10"
# dependencies = ["mamba-ssm==2.3.2.post1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: what it costs to keep the state of Mamba-3's scan in FP8, over the length of a sequence.

No release does so; an article says that FP8 is not worth it for scans. The release's own SISO kernel is called for segments of a sequence, each with the state
[H, P, N] that the one before ended with, cast in between to bf16 or FP8. Reports the output's error over the length, for heads that forget fast and slowly.
A measurement, and no bug. Runs on a GPU, or without one on Triton's interpreter. Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

import argparse
import multiprocessing.dummy
import os
from functools import partial
from importlib import import_module, metadata, util

device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
import torch
import triton

RATES = (0.1, 0.01, 0.001)  # what a head's state forgets in a token: a decay of exp(-rate)
N, LENGTH, P, CHUNK = (32, 2048, 32, 16) if device == "cpu" else (128, 65536, 64, 64)
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--segment", type=int, default=64, metavar="TOKENS", help="tokens between two handovers (default 64)")
parser.add_argument("--length", type=int, default=LENGTH, metavar="S", help=f"tokens in all (default {LENGTH})")
autotune = triton.autotune  # slow, and no matter of numbers
triton.autotune = lambda configs, **rest: autotune(configs[:1], **rest)


def release():
    """The release's module. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    global module
    FACTS["version"] = metadata.version("mamba-ssm")
    sys.modules["mamba_ssm"] = util.module_from_spec(util.find_spec("mamba_ssm"))
    if util.find_spec("mamba_ssm.ops.triton.mamba3") is None:
        print("This release has no kernels of Mamba-3.")
        finish("UNTESTABLE", "no-api")
    if device == "cuda" and not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack27 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    module = import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")
    gpu = "interpreter" if device == "cpu" else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    FACTS.update(file=module.__file__, evidence=gpu)


def fp8(tensor, dtype):
    """To FP8 and back, with a scale from the largest entry of the last two dimensions."""
    scale = torch.finfo(dtype).max / tensor.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
    return (tensor * scale).to(dtype).float() / scale


CASTS = {"bf16": lambda state: state.bfloat16().float(), "e4m3": partial(fp8, dtype=torch.float8_e4m3fn)}
CASTS |= {"e5m2": partial(fp8, dtype=torch.float8_e5m2), "thrown away": torch.zeros_like, "as it is": lambda state: state}


def inputs(S):
    """The scan's inputs as the function names them: one sequence, a head for each rate."""
    torch.manual_seed(0)
    H = len(RATES)
    shapes = {"Q": (1, S, 1, N), "K": (1, S, 1, N), "V": (1, S, H, P), "Angles": (1, S, H, N // 2), "Trap": (1, H, S)}
    given = {name: torch.randn(*shape, device=device).bfloat16() for name, shape in shapes.items()}
    ADT = -torch.tensor(RATES, device=device)[None, :, None].expand(1, H, S).contiguous()
    return {**given, "DT": torch.full((1, H, S), 0.1, device=device), "ADT": ADT}


@torch.no_grad()
def scan(given, segment, cast="as it is"):
    """The output [S, H, P] in fp32 and the last state, called for ``segment`` tokens at a time; the state is cast in between."""
    outs, states, S, bias = [], None, given["V"].shape[1], torch.zeros(len(RATES), N, device=device)
    # The release casts Angles to bf16, and with them the angles' state that it hands back: here it is the same kernel's, in fp32.
    turned = module.angle_dt_fwd(given["Angles"].float(), given["DT"], chunk_size=CHUNK)
    for start in range(0, S, segment):
        dims = {name: 2 if name in ("DT", "ADT", "Trap") else 1 for name in given}
        part = {name: given[name].narrow(dim, start, min(segment, S - start)).contiguous() for name, dim in dims.items()}
        part |= {"Q_bias": bias, "K_bias": bias, "Input_States": states and tuple(states)}
        out, *states = module.mamba3_siso_combined(**part, chunk_size=CHUNK, return_final_states=True)
        kept, states[1] = states[1].dtype, CASTS[cast](states[1].float())
        states[0] = turned[:, min(start + segment, S) - 1].contiguous()
        outs.append(out[0].float())
    return torch.cat(outs).cpu().numpy(), states[1].cpu().numpy(), kept is torch.float32


def errors(got, want):
    """||got - want|| / ||want|| of each head, over the whole length and over each eighth of it."""
    off, want, parts = (
        (got - want).double(),
        want.double(),
        [slice(None), *(slice(i * len(want) // 8, (i + 1) * len(want) // 8) for i in range(8))],
    )
    return [[round((off[part, h].norm() / want[part, h].norm()).item(), 6) for part in parts] for h in range(len(RATES))]


def call(name):
    return scan(*jobs[name])


def main(options):
    global jobs
    release()
    given, S = inputs(options.length), options.length
    e4m3 = {name: CASTS["e4m3"](given[name].float()).bfloat16() for name in "QKV"}  # bf16 holds every e4m3
    jobs = {name: (given, options.segment, name) for name in CASTS}
    jobs |= {"in one call": (given, S), "Q, K and V in e4m3": (given | e4m3, S)}
    torch.set_num_threads(1)  # the interpreter uses one, and two calls run at a time
    pool = multiprocessing.dummy.Pool(1) if device == "cuda" else multiprocessing.get_context("fork").Pool(2)
    outs = {name: [torch.as_tensor(what) for what in found] for name, found in zip(jobs, pool.map(call, jobs, 1), strict=True)}
    exact, state, kept = outs.pop("as it is")
    check("control", "the release's state is in fp32", kept)
    found = {name: errors(out, exact) for name, (out, *_) in outs.items()}
    whole = torch.tensor(found.pop("in one call")).max().item()
    check("control", "a state in fp32: as in one call", error=whole, limit=1e-5 if device == "cpu" else 1e-2)
    for name, least, most in (("bf16", 2**-11, 2**-8), ("e4m3", 2**-7, 2**-4), ("e5m2", 2**-6, 2**-3)):
        once = ((CASTS[name](state) - state).norm() / state.norm()).item()
        check("control", f"{name}: one cast of the state is off by {100 * once:.2g} %", least < once < most)
    least = 8 if device == "cpu" else 4  # a GPU rounds the output to bf16
    for name, times, than in (("e4m3", least, "bf16"), ("e5m2", 1.5, "e4m3"), ("thrown away", 10, "bf16")):
        seen = all(a[0] > times * b[0] for a, b in zip(found[name], found[than], strict=True))
        check("control", f"{name} costs more than {times} times what {than} costs", seen)
    check("control", "Q, K and V in e4m3 cost 2 to 8 %", all(0.02 < each[0] < 0.08 for each in found["Q, K and V in e4m3"]))
    for i, rate in enumerate(RATES):
        row = {name: {"all": heads[i][0], "by eighth": heads[i][1:]} for name, heads in found.items()}
        FACTS["metrics"][f"forgets {rate:g} a token"] = row
        print(f"forgets {rate:g} a token", *(f"  {name}: {figure}" for name, figure in row.items()), sep="\n")
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
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    if role not in ROLES or not name or number or (limit is not None and not 0 < limit < math.inf):
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
