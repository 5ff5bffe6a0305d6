# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "einops", "megatron-core==0.19.2", "ml-dtypes", "numpy>=1.26,<3", "packaging", "psutil", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""megatron-core: SparseMLA's backward keeps P and dP in bf16. Would more bits give a better gradient of the keys and values?

An article calls the bf16 buffers P_shared_cast and dP_shared_cast a precision bug. Here the release's kernels run beside a copy of its
backward that keeps each as the sum of two bf16 numbers, about 16 bits, and both are compared with attention in fp64. The claim is taken to
hold (BUG_REPRODUCED) if that copy's dKV is at least 4 times nearer. https://github.com/NVIDIA/Megatron-LM, experimental_attention_variant
Without a Hopper GPU the release's source is read and its rounding redone in fp64. Needs kernels.py beside it. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
from importlib.metadata import version

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
D, TAIL = 512, 64  # channels of the values, and of the keys beside them
S, H, TOPK = (4096, 64, 2048) if HOPPER else (512, 8, 256)  # tokens, heads, keys of each token
FORMS = ("released", "bf16 high + low")


def release():
    """What is under test; what was run, and on what, goes into the report."""
    found = importlib.util.find_spec("megatron.core.transformer")
    try:
        found = found and importlib.util.find_spec("megatron.core.transformer.experimental_attention_variant.ops.sparse_mla")
    except ModuleNotFoundError:
        found = None
    if found is None:
        finish("UNTESTABLE", "no-api")
    import kernels

    FACTS.update(file=kernels.load("released").__file__, version=version("megatron-core"))
    FACTS["evidence"] = "device:sm_90" if HOPPER else "source"
    return kernels


def inputs(S, H, D, tail, topk, sharpness):
    """q [1, S, H, D + tail], kv [1, S, 1, D + tail], do [1, S, H, D] bf16; indices [1, S, 1, topk]: keys up to the token, some twice."""
    device = "cuda" if HOPPER else "cpu"
    torch.manual_seed(0)
    q, kv, do = (
        torch.randn(1, S, h, d, device=device, dtype=torch.bfloat16) for h, d in ((H, D + tail), (1, D + tail), (H, D))
    )
    row, slot = torch.arange(S, device=device)[:, None], torch.arange(topk, device=device)
    indices = torch.where(slot <= row, (torch.rand(S, topk, device=device) * (row + 1)).int(), -1).int()
    return q.mul_(sharpness), kv, do, indices[None, :, None]


def error(got, want):
    """||got - want|| / ||want|| in fp64, in blocks of tokens."""
    pairs = list(zip(got.split(4096, 1), want.split(4096, 1), strict=True))
    return (sum((g.double() - w).norm() ** 2 for g, w in pairs) / sum(w.norm() ** 2 for _, w in pairs)).sqrt().item()


def errors(got, dq, dkv):
    """Of dq and dkv as they are handed out, of dkv before it is rounded to bf16, and of the right dkv rounded, the least there can be."""
    pairs = {"dq": (got[0], dq), "dkv": (got[2], dkv), "dkv before rounding": (got[1], dkv), "least dkv": (dkv.bfloat16(), dkv)}
    return {name: error(*pair) for name, pair in pairs.items()}


def main():
    kernels = release()
    for form in FORMS:
        kernels.load(form)  # its edits fit the release: it keeps P and dP in bf16
    run = kernels.launched if HOPPER else kernels.emulated
    for name, sharpness in (("flat", 0.3), ("as drawn", 1.0), ("peaked", 4.0)):
        given = inputs(S, H, D, TAIL, TOPK, sharpness)
        right = kernels.attention(*given)
        released, more = (errors(run(form, *given), *right) for form in FORMS)
        FACTS["metrics"][name] = dict(zip(FORMS, (released, more), strict=True))
        print(f"{name}\n  released        {released}\n  bf16 high + low {more}")
        check("control", f"{name}: dq of the release", error=released["dq"], limit=5e-2)
        ratio = released["dkv before rounding"] / more["dkv before rounding"]
        check("control", f"{name}: before the last rounding more bits bring dKV nearer: {ratio:.1f} times", ratio > 1.2)
        ratio = released["dkv"] / more["dkv"]
        check("trigger", f"{name}: more bits do not bring dKV 4 times nearer: {ratio:.2f} times", ratio < 4)
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
    parser.parse_args()
    main()
