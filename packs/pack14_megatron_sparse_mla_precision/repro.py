# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "einops", "megatron-core==0.19.2", "ml-dtypes", "numpy>=1.26,<3", "packaging", "psutil", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""megatron-core: SparseMLA's backward keeps P and dP in bf16. Could gradients be better if it kept more bits?

An article calls the bf16 buffers P_shared_cast and dP_shared_cast a precision bug. Gradients are handed out in bf16, so none can be nearer
to attention in fp64 than that, rounded to bf16. The claim is taken to hold (BUG_REPRODUCED) if dKV or dQ is more than 4 times further off.
https://github.com/NVIDIA/Megatron-LM, experimental_attention_variant. `--variant sweep` runs the kernel with twice the bits beside it.
Needs a Hopper GPU. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
from importlib.metadata import version

import torch

OPS = "megatron.core.transformer.experimental_attention_variant.ops"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
S, H, D, TAIL, TOPK = 4096, 64, 512, 64, 2048  # tokens, heads, channels of values, of keys beside them, keys of a token


def release():
    """The release's modules of the forward and the backward kernel."""
    try:
        fwd, bwd = (importlib.import_module(f"{OPS}.tilelang_sparse_mla_{name}") for name in ("fwd", "bwd"))
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("megatron.core."):
            raise
        finish("UNTESTABLE", "no-api")
    FACTS.update(file=bwd.__file__, version=version("megatron-core"))
    return fwd, bwd


def inputs(S, H, D, tail, topk, sharpness, mean=0.0):
    """q [1, S, H, D + tail], kv [1, S, 1, D + tail], do [1, S, H, D] bf16; indices [1, S, 1, topk]: keys up to the token, some twice.

    The channels of the keys beside the values have the given mean; q is scaled by ``sharpness``.
    """
    torch.manual_seed(0)
    torch.set_default_device("cuda" if HOPPER else "cpu")
    q, kv, do = (torch.randn(1, S, h, d, dtype=torch.bfloat16) for h, d in ((H, D + tail), (1, D + tail), (H, D)))
    kv[..., D:] += mean
    row, slot = torch.arange(S)[:, None], torch.arange(topk)
    indices = torch.where(slot <= row, (torch.rand(S, topk) * (row + 1)).int(), -1).int()
    return q.mul_(sharpness), kv, do, indices[None, :, None]


def attention(q, kv, do, indices):
    """dq and dkv in fp64, shaped like q and kv; in blocks of tokens."""
    dq, kv = torch.empty_like(q, dtype=torch.float64), kv.double().requires_grad_()
    for rows in torch.arange(q.shape[1]).split(2**16 // indices.shape[3]):
        at, x = indices[0, rows, 0].long(), q[0, rows].double().requires_grad_()
        keys = kv[0, at.clamp(min=0), 0]
        scores = (x @ keys.mT * q.shape[3] ** -0.5).masked_fill((at < 0)[:, None], float("-inf"))
        (scores.softmax(-1) @ keys[..., : do.shape[3]]).backward(do[0, rows].double())
        dq[0, rows] = x.grad
    return dq, kv.grad


def launched(fwd, bwd, q, kv, do, indices):
    """dq and dkv in bf16, and dkv in fp32 before it is rounded; and a function that runs the backward kernel once more."""
    (H, C), D, topk = q.shape[2:], do.shape[3], indices.shape[3]
    given = {"heads": H, "dim": D, "tail_dim": C - D, "topk": topk, "kv_group": 1, "sm_scale": C**-0.5}
    out, lse = fwd._get_sparse_mla_fwd_kernel(**given, block_I=64, num_stages=2, threads=256)(q, kv, indices)
    delta, kernel = bwd._get_preprocess_kernel(H, D)(out, do), bwd._get_bwd_kernel(H, D, C - D, topk, 1, C**-0.5, 32)
    dq = kernel(q, kv, do, indices, lse, delta, dkv := torch.zeros_like(kv, dtype=torch.float32))
    once_more = lambda: kernel(q, kv, do, indices, lse, delta, dkv.clone())  # noqa: E731
    return (dq, bwd._get_postprocess_kernel(D, C - D, 1)(dkv), dkv), once_more


def error(got, want):
    """||got - want|| / ||want|| in fp64, in blocks of tokens."""
    pairs = list(zip(got.split(4096, 1), want.split(4096, 1), strict=True))
    return (sum((g.double() - w).norm() ** 2 for g, w in pairs) / sum(w.norm() ** 2 for _, w in pairs)).sqrt().item()


def main():
    fwd, bwd = release()
    if not HOPPER:
        print("This needs a Hopper GPU; without one, `nox -s pack14 -- --variant lower` compiles the kernels.")
        finish("UNTESTABLE", "no-device")
    FACTS["evidence"] = "device:sm_90"
    for name, sharpness in (("flat", 0.3), ("as drawn", 1.0), ("peaked", 4.0)):
        given = inputs(S, H, D, TAIL, TOPK, sharpness)
        (dq, dkv, _), _ = launched(fwd, bwd, *given)
        for what, got, want in zip(("dq", "dkv"), (dq, dkv), attention(*given), strict=True):
            off, least = error(got, want), error(want.bfloat16(), want)
            FACTS["metrics"][f"{name} {what}"] = {"error": off, "least": least}
            check("control", f"{name}: {what} is a gradient", error=off, limit=5e-2)
            times = f"{off / least:.2f} times as far off as bf16 has to be, less than 4"
            check("trigger", f"{name}: {what} is {times}", off < 4 * least)
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
