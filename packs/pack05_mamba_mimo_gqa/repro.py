# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops", "mamba-ssm==2.3.2.post1", "numpy>=1.26,<3", "setuptools", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1", "z3-solver==4.15.4.0"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: the backward of Mamba-3 MIMO raises when heads share q and k in groups (1 < G < H), after a forward that works.

The kernels write dq and dk for each head. mamba_mimo_bwd_combined adds them up for G = 1, takes them as they are for G = H, and has
no branch between; nor has its varlen twin. On main: https://github.com/state-spaces/mamba/pull/967, in no release yet.
Runs on an NVIDIA GPU. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import logging
import os
from importlib.metadata import version

import torch

on_cpu = os.environ.get("TRITON_INTERPRET") == "1"  # the lane's: kernels run on the CPU, in fp32
device, dtype, LIMIT = ("cpu", torch.float32, 1e-5) if on_cpu else ("cuda", torch.bfloat16, 0.02)
B, S, H, R, N, P, CHUNK = (2, 16, 6, 2, 16, 16, 8) if on_cpu else (2, 256, 16, 4, 128, 64, 16)
LENGTHS = (S // 2 + 1, 1, S // 2 - 2)  # of the sequences that varlen packs into one


def release():
    """The module under test. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    if importlib.util.find_spec("mamba_ssm.ops.tilelang") is None:
        finish("UNTESTABLE", "no-api")
    import tilelang.language  # noqa: F401

    logging.disable(logging.WARNING)  # TileLang says of every kernel that it is compiled, or was
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo

    modules = [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton")]
    for kernel in [value for module in modules for value in vars(module).values() if hasattr(value, "configs")]:
        kernel.configs = kernel.configs[:1]  # autotuning of the small kernels beside these takes minutes
    FACTS.update(file=sys.modules[mamba3_mimo.mamba_mimo_bwd_combined.__module__].__file__, version=version("mamba-ssm"))
    FACTS["evidence"] = "interpreter" if on_cpu else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    FACTS["metrics"]["tilelang"] = version("tilelang")
    return mamba3_mimo


def inputs(B, G):
    """The function's arguments in its order, and the gradient of its output [B, S, H, P]: Q, K [B, S, R, G, N]; V, Z [B, S, H, P]."""
    torch.manual_seed(0)
    shapes = (B, S, R, G, N), (B, S, R, G, N), (B, S, H, P), (B, H, S), (B, S, H, P), (B, S, H, P)
    q, k, v, trap, z, grad = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    DT = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    biases = [torch.randn(H, R, N, device=device) for _ in range(2)]
    weights = [1 + 0.1 * torch.randn(H, R, P, device=device) for _ in range(3)]
    angles = 3 * torch.rand(B, S, H, N // 4, device=device)
    return [q, k, v, -2 * DT * torch.rand_like(DT), DT, trap, *biases, *weights, angles, torch.randn(H, device=device), z], grad


def forward(mamba3_mimo, tensors, lengths, copies=1):
    """Output and leaves. ``copies`` gives each head its own copy of its group's q and k, whose gradients autograd adds up."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    q, k = (t.repeat_interleave(copies, 3) for t in leaves[:2])
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int() if lengths else None
    options = {"chunk_size": CHUNK, "rotary_dim_divisor": 4, "dtype": dtype, "cu_seqlens": ends}
    return mamba3_mimo.mamba3_mimo(q, k, *leaves[2:], **options), leaves


def off(found, right):
    """The largest ||a - b|| / ||b|| of some tensors; NaN where one is."""
    return torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, right, strict=True)]).max()


def main():
    if not on_cpu and not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack05 runs it without one, through TileLang's C backend.")
        finish("UNTESTABLE", "no-device")
    mamba3_mimo, refused = release(), []
    for case, batch, lengths in (("dense", B, None), ("varlen", 1, LENGTHS)):
        for G, role in ((1, "control"), (2, "trigger")):
            tensors, grad = inputs(batch, G)
            right, expected = forward(mamba3_mimo, tensors, lengths, copies=H // G)  # G = H, which the release computes
            right.backward(grad)
            out, leaves = forward(mamba3_mimo, tensors, lengths)
            name = f"{case}, G={G} of H={H}"
            check("control", f"{name}: output as with a copy for each head", error=off([out], [right]), limit=LIMIT)
            try:
                out.backward(grad)
                error, said = off([t.grad for t in leaves], [t.grad for t in expected]), ""
            except ValueError as caught:
                error, said = None, str(caught)
            check(role, f"{name}: 14 gradients as with a copy for each head", error=error, limit=LIMIT)
            refused += ["G value of" in said] if error is None or not error <= LIMIT else []
    check("signature", "each backward that fails says that it does not support G", refused and all(refused))
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
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
