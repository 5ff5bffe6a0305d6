# /// script
# requires-python = ">=3.12"
# dependencies = ["apache-tvm-ffi==0.1.12", "einops", "megatron-core==0.19.2", "numpy>=1.26,<3", "onnx", "onnxscript", "packaging", "pydantic", "tilelang==0.1.15", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""transformer-engine: an FP8 tensor says that it is bf16 and lies at address 0; megatron-core's fused SparseMLA believes it.

fused_sparse_mla_absorbed lets Float8Tensors through its gate for bf16, and permute dequantizes them in silence; SparseMLA called directly with two batches hands a
kernel the wrapper itself, whose pointer is 0. megatron-core's own layers give it plain tensors, so this is a contract for whoever calls it with others.
The release's own tensor classes and megatron-core's own dispatcher run. Without a GPU launches are replaced, and the lane te-cpu stands in for the compiled
libraries, of which only the values of dequantize matter. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import warnings
from importlib.metadata import distribution

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
DSA = "megatron.core.transformer.experimental_attention_variant.ops"
S, TOPK, TOTAL, VALUE = 256, 64, 576, 512  # 256 rows are a bucket of SparseMLA: fewer are padded, which dequantizes
on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
warned = []
device, H, SCALE = ("cuda", 64, TOTAL**-0.5) if on_gpu else ("cpu", 16, TOTAL**-0.5)  # heads


def release():
    """transformer-engine's Float8Tensor and QuantizedTensor."""
    warnings.filterwarnings("ignore")
    found = distribution("transformer-engine")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "source"
    FACTS.update(version=found.version, evidence=gpu)
    places = ("transformer_engine/pytorch/tensor/quantized_tensor.py", "transformer_engine/pytorch/quantized_tensor.py")
    if not any(found.locate_file(place).exists() for place in places):
        print("This release has no QuantizedTensor.")
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
    """megatron-core's dispatcher, its SparseMLA and the module of its forward kernel."""
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    if FACTS["version"].startswith("1."):  # megatron-core wants layers of newer ones for its own; SparseMLA wants none
        sys.modules.update(dict.fromkeys(loaded))
    found = [importlib.import_module(f"{DSA}.{name}") for name in ("tilelang_dsa", "sparse_mla", "tilelang_sparse_mla_fwd")]
    sys.modules.update(loaded)
    FACTS["file"] = found[0].__file__
    return found[0].fused_sparse_mla_absorbed, found[1].SparseMLA, found[2]


def fp8(values, dtype=torch.bfloat16):
    """A Float8Tensor of e4m3 with one scale, made of its parts: bytes, and the scale's inverse."""
    scale_inv = (values.float().abs().max() / 448).reshape(1)
    data = (values.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
    e4m3 = sys.modules["transformer_engine_torch"].DType.kFloat8E4M3
    shape = {"shape": data.shape} if hasattr(tensors, "Float8Quantizer") else {}  # from 2.0
    return tensors.Float8Tensor(**shape, data=data, fp8_scale_inv=scale_inv, fp8_dtype=e4m3, dtype=dtype)


def inputs(B):
    """query [S, B, H, 576] and key [S, B, 1, 576], unit normal, in bf16; causal top-k indices [B, S, topk], -1 for none."""
    torch.manual_seed(0)
    query, key = (torch.randn(S, B, heads, TOTAL, device=device).to(torch.bfloat16) for heads in (H, 1))
    indices = torch.arange(S, device=device)[:, None] - torch.arange(TOPK, device=device)
    return query, key, indices.clamp_min(-1).expand(B, -1, -1)


def used(call, *given):
    """What a call hands its kernel, how often it dequantizes, and whether it warns of that; its output."""
    seen = {"launched": [], "dequantized": 0}
    build, dequantize = fwd._get_sparse_mla_fwd_kernel, tensors.Float8Tensor.dequantize

    def building(**how):
        kernel = build(**how) if on_gpu else None

        def launch(q, kv, indices, *scales):
            kinds = ["wrapper" if isinstance(t, QuantizedTensor) else str(t.dtype).removeprefix("torch.") for t in (q, kv)]
            seen["launched"].append({"tensors": kinds, "pointer 0": 0 in (q.data_ptr(), kv.data_ptr()), "scales": len(scales)})
            if kernel is None:
                return torch.zeros(*q.shape[:3], how["dim"], dtype=torch.bfloat16), torch.zeros(q.shape[:3])
            return kernel(q, kv, indices, *scales)

        return launch

    def counting(*given, **named):
        seen["dequantized"] += 1
        return dequantize(*given, **named)

    fwd._get_sparse_mla_fwd_kernel, tensors.Float8Tensor.dequantize = building, counting
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            out = call(*given)
        except Exception as error:  # what it raises is the finding
            out, seen["raises"] = None, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    fwd._get_sparse_mla_fwd_kernel, tensors.Float8Tensor.dequantize = build, dequantize
    warned.extend(each for each in told if "dequantizes" in str(each.message))  # once is enough
    seen["warned"] = bool(warned)
    return out, seen


def main():
    calls = FACTS["metrics"]
    for B in (1, 2):
        query, key, indices = inputs(B)
        q8, k8, index = fp8(query), fp8(key), indices[:, :, None].int().contiguous()
        wrapped = [fp8(t.permute(1, 0, 2, 3).contiguous()) for t in (query, key)]
        told = q8.dtype == torch.bfloat16 and q8.data_ptr() == 0 and q8._data.data_ptr() != 0
        check("control", f"B={B}: an FP8 tensor's dtype is bf16, its pointer 0, and that of its data is not", told)
        with torch.no_grad():
            _, seen = used(dispatched, query, key, indices, SCALE, VALUE)
            fine = [each["tensors"] for each in seen["launched"]] == [["bfloat16"] * 2] and not seen["launched"][0]["pointer 0"]
            check("control", f"B={B}: bf16 reaches the kernel as it is", fine)
            for name, call, given in (
                ("dispatched", dispatched, (q8, k8, indices, SCALE, VALUE)),
                ("SparseMLA", SparseMLA.apply, (*wrapped, index, SCALE)),
            ):
                _, seen = used(call, *given)
                calls[f"B={B}, {name}"] = {k: v for k, v in seen.items() if k != "launched"} | {"launches": seen["launched"]}
                silent, nowhere = (
                    seen["dequantized"] and not seen["warned"],
                    any(each["pointer 0"] for each in seen["launched"]),
                )
                launched = " and ".join(map(str, (each["tensors"] for each in seen["launched"]))) or seen.get(
                    "raises", "nothing"
                )
                what = f"B={B}, {name}: dequantized {seen['dequantized']} times{' in silence' * bool(silent)}, launched with {launched}"
                check("trigger", f"{what}{', pointer 0' * nowhere}", seen["launched"] and not silent and not nowhere)
                if silent or nowhere:
                    check(
                        "signature",
                        "two tensors are dequantized, or the wrapper is handed on",
                        nowhere or seen["dequantized"] == 2,
                    )
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
