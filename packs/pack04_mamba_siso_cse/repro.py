# /// script
# requires-python = ">=3.10"
# dependencies = ["mamba-ssm==2.3.2.post1", "numpy>=1.26", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""mamba-ssm: the backward kernel of Mamba-3 SISO writes V @ dO^T three times for each chunk.

mamba3_siso_bwd_kernel_dqkv computes the same [chunk, chunk] product, and the same causal decay mask, for dADT, for dK and for
dQ. The gradients are right. Triton's CSE merges the three today; whether it does is the compiler's to decide, not the source's.
Runs on an NVIDIA GPU. Exits with 10 (BUG_REPRODUCED: more than one is written), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import os
import re
from importlib.metadata import version

os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a cache would hide what is written
import torch
import triton

interpreted, device = (True, "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else (False, "cuda")
SHAPE = (1, 37, 2, 4, 32, 64, 16) if interpreted else (1, 4096, 1, 24, 128, 64, 32)  # B, S, G, H, N, P, chunk
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
autotune = triton.autotune  # slow, and may choose another config for each side: each kernel gets its first of 4 warps
triton.autotune = lambda configs, **rest: autotune([c for c in configs if c.num_warps == 4][:1] or configs[:1], **rest)


def release():
    """The module under test. mamba_ssm/__init__.py loads CUDA extensions that it does not use, so it is not executed."""
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    if importlib.util.find_spec("mamba_ssm.ops.triton.mamba3") is None:
        finish("UNTESTABLE", "no-api")
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd, mamba3_siso_combined

    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "codegen"
    FACTS.update(file=mamba3_siso_bwd.__file__, version=version("mamba-ssm"), evidence="interpreter" if interpreted else gpu)
    return mamba3_siso_combined


def inputs(B, S, G, H, N, P):
    """The function's arguments in its order, and the gradient of its output: Q, K [B, S, G, N]; V, Z [B, S, H, P]; ADT, DT [B, H, S]."""
    torch.manual_seed(0)
    shapes = {"Q": (B, S, G, N), "K": (B, S, G, N), "V": (B, S, H, P), "Trap": (B, H, S), "Angles": (B, S, H, N // 2)}
    t = {name: torch.randn(*shape, device=device).to(torch.bfloat16) for name, shape in shapes.items()}
    Q_bias, K_bias, D = (0.1 * torch.randn(*shape, device=device) for shape in ((H, N), (H, N), (H,)))
    DT = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    Z, grad = torch.randn_like(t["V"]), torch.randn_like(t["V"])
    listed = t["Q"], t["K"], t["V"], -2 * DT * torch.rand_like(DT), DT, t["Trap"], Q_bias, K_bias, 3 * t["Angles"], D, Z
    return [tensor.requires_grad_() for tensor in listed], grad


def products():
    """Filled from now on: the shapes of both sides of each product that the interpreter executes, or that is written in a kernel."""
    owner = triton.runtime.interpreter.InterpreterBuilder if interpreted else triton.compiler.ASTSource
    name, seen = "create_dot" if interpreted else "make_ir", []
    method = getattr(owner, name)

    def kept(self, *given):
        made = method(self, *given)
        if not interpreted:  # before any pass but the inliner, so that a product in a helper function counts at each call
            manager = triton._C.libtriton.ir.pass_manager(made.context)
            triton._C.libtriton.passes.common.add_inliner(manager)
            manager.run(made, "inliner")
        types = [] if interpreted else re.findall(r"tt\.dot .*: tensor<([\dx]+)x\w+> \* tensor<([\dx]+)x\w+>", str(made))
        written = [[[int(n) for n in side.split("x")] for side in sides] for sides in types]
        seen.extend([[t.data.shape for t in given[:2]]] if interpreted else written)
        return made

    setattr(owner, name, kept)
    return seen


def main():
    if not interpreted and not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack04 runs it without one, on Triton's interpreter.")
        finish("UNTESTABLE", "no-device")
    (B, S, _, H, N, P, chunk), (leaves, grad) = SHAPE, inputs(*SHAPE[:6])
    out = release().mamba3_siso_combined(*leaves, chunk_size=chunk)
    seen = products()  # the backward's
    out.backward(grad)
    check("control", "gradients are finite, and none is zero", all(t.grad.isfinite().all() and t.grad.any() for t in leaves))

    def count(inner):
        """[chunk, inner] x [inner, chunk] products of a chunk, each matrix of a rank-3 dot for one. V @ dO^T has P inside, K @ Q^T N."""
        alike = [a for a, b in seen if (*a[-2:], *b[-2:]) == (chunk, inner, inner, chunk)]
        return sum(math.prod(a[:-2]) for a in alike) / (B * H * -(-S // chunk) if interpreted else 1)

    FACTS["metrics"] |= {"V @ dO^T": count(P), "K @ Q^T": count(N)}
    check("control", "both products are found: the counting works", count(N) >= 1 and count(P) >= 1)
    check("trigger", "V @ dO^T is written once a chunk", count(P) == 1)
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
    parser.parse_args()
    main()
