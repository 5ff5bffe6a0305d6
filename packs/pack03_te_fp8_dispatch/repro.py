# /// script
# requires-python = ">=3.12"
# dependencies = ["apache-tvm-ffi==0.1.12", "einops", "megatron-core==0.19.2", "numpy>=1.26,<3", "onnx", "onnxscript", "packaging", "pydantic", "tilelang==0.1.15", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""megatron-core: fused SparseMLA takes transformer-engine's FP8 tensors for bf16: it hands a kernel a null pointer, or dequantizes them in silence.

A Float8Tensor says that its dtype is bf16 and that it lies at address 0; most torch operators dequantize it, which is documented. The dispatcher
fused_sparse_mla_absorbed lets it through its gate for bf16, and permute dequantizes it; SparseMLA called with two batches hands its kernel the wrapper. megatron-core's
own layers give both plain tensors, so this is a contract for whoever calls them with others. Right is: plain tensors and a warning, or a refusal.
The release's own tensor classes and megatron-core's own dispatcher run; kernel launches are replaced, and the lane te-cpu stands in for the compiled
libraries. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import warnings
from importlib.metadata import distribution

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
OPS = "megatron.core.transformer.experimental_attention_variant.ops"
S, H, TOPK, TOTAL, VALUE = 256, 16, 64, 576, 512  # 256 rows are a bucket of SparseMLA: fewer are padded, which dequantizes
SCALE = TOTAL**-0.5
device = "cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu"


def release():
    """transformer-engine's module of Float8Tensor, and QuantizedTensor."""
    warnings.filterwarnings("ignore")
    found = distribution("transformer-engine")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(version=found.version, evidence=gpu)
    if found.version < "2" or not found.locate_file("transformer_engine/pytorch/tensor/float8_tensor.py").exists():
        print("megatron-core 0.19.2 does not work with this release.")
        finish("UNTESTABLE", "no-api")
    try:
        tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    except (OSError, AssertionError, RuntimeError, ImportError) as error:
        if "transformer_engine_torch" in sys.modules:
            raise
        print(f"No compiled transformer-engine ({str(error).splitlines()[0][:60]}): nox -s pack03 runs it without.")
        finish("UNTESTABLE", "no-device")
    return tensors, importlib.import_module("transformer_engine.pytorch.tensor").QuantizedTensor


def consumer():
    """megatron-core's dispatcher, SparseMLA, and the module of its forward kernel."""
    found = [importlib.import_module(f"{OPS}.{name}") for name in ("tilelang_dsa", "sparse_mla", "tilelang_sparse_mla_fwd")]
    FACTS["file"] = found[0].__file__
    return found[0].fused_sparse_mla_absorbed, found[1].SparseMLA, found[2]


def fp8(values, dtype=torch.bfloat16):
    """A Float8Tensor of e4m3 with one scale, made of its parts: bytes, and the scale's inverse."""
    scale_inv = (values.float().abs().max() / 448).reshape(1)
    data = (values.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
    e4m3 = sys.modules["transformer_engine_torch"].DType.kFloat8E4M3
    return tensors.Float8Tensor(shape=data.shape, data=data, fp8_scale_inv=scale_inv, fp8_dtype=e4m3, dtype=dtype)


def inputs(B, S=S):
    """query [S, B, H, 576] and key [S, B, 1, 576], unit normal, in bf16; causal top-k indices [B, S, topk], -1 for none."""
    torch.manual_seed(0)
    query, key = (torch.randn(S, B, heads, TOTAL, device=device).to(torch.bfloat16) for heads in (H, 1))
    indices = torch.arange(S, device=device)[:, None] - torch.arange(TOPK, device=device)
    return query, key, indices.clamp_min(-1).expand(B, -1, -1)


def used(call, *given):
    """The output of a call or its error, the query and key that it hands its kernel, and the warnings that name what is dequantized or quantized."""
    launched, build = [], fwd._get_sparse_mla_fwd_kernel

    def building(**how):
        def launch(q, kv, *_):
            launched.append((q, kv))
            return torch.zeros(*q.shape[:3], how["dim"], dtype=torch.bfloat16, device=device), torch.zeros(
                q.shape[:3], device=device
            )

        return launch

    fwd._get_sparse_mla_fwd_kernel = building
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            out = call(*given)
        except Exception as error:  # what it raises is the finding
            out = f"{type(error).__name__}: {error}"
    fwd._get_sparse_mla_fwd_kernel = build
    return out, launched, [str(each.message) for each in told if "quantize" in str(each.message)]


def calls(query, key, indices, made=lambda t: t):
    """Each way to call it: its name, the function, its arguments with ``made`` of query and key, and both [B, S, H, 576] as a kernel wants them."""
    turned = [t.permute(1, 0, 2, 3).contiguous() for t in (query, key)]
    yield "the dispatcher", dispatched, (made(query), made(key), indices, SCALE, VALUE), turned
    yield "SparseMLA", SparseMLA.apply, (*map(made, turned), indices[:, :, None].int().contiguous(), SCALE), turned


def main():
    for B in (1, 2):
        query, key, indices = inputs(B)
        q8 = fp8(query)
        told = q8.dtype == torch.bfloat16 and q8.data_ptr() == 0 and q8._data.data_ptr() != 0
        check("control", f"B={B}: an FP8 tensor's dtype is bf16, its pointer 0, and that of its data is not", told)
        for name, call, given, turned in calls(query, key, indices):
            _, launched, warned = used(call, *given)
            same = len(launched) == 1 and all(map(torch.equal, launched[0], turned))
            check("control", f"B={B}, {name}: bf16 reaches the kernel as it is", same and not warned)
        for name, call, given, _ in calls(query, key, indices, fp8):
            out, launched, warned = used(call, *given)
            null = any(t.data_ptr() == 0 for pair in launched for t in pair)
            refused = not launched and (out is None or "quantize" in str(out))
            tensors = f"plain tensors, {'with a warning' if warned else 'in silence'}" if launched else f"nothing: {out}"
            got = "a null pointer" if null else tensors
            check("trigger", f"B={B}, {name}: the kernel gets {got}", refused or (launched and warned and not null))
            if not refused and (null or not warned):
                check("signature", f"B={B}, {name}: it is launched all the same", launched)
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
    tensors, QuantizedTensor = release()
    dispatched, SparseMLA, fwd = consumer()
    main()
