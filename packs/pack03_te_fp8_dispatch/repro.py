# /// script
# requires-python = ">=3.12"
# dependencies = ["apache-tvm-ffi==0.1.12", "einops", "megatron-core==0.19.2", "numpy>=1.26,<3", "onnx", "onnxscript", "packaging", "pydantic", "tilelang==0.1.15", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""megatron-core: fused SparseMLA takes transformer-engine's FP8 tensors for bf16: it hands a kernel a null pointer, or dequantizes them in silence.

A Float8Tensor says bf16 and address 0; most torch operators dequantize it, as documented, and so does the dispatcher, past its gate for bf16. SparseMLA called with two
batches hands its kernel the wrapper. megatron-core's own layers give both plain tensors. Right is plain tensors and a warning, or a refusal. Exits with 10, 0 or 125.
"""

import warnings
from importlib import import_module, metadata, util
from unittest import mock

import torch

OPS = "megatron.core.transformer.experimental_attention_variant.ops"
S, H, TOPK, TOTAL, VALUE = 256, 16, 64, 576, 512  # 256 rows are a bucket of SparseMLA: fewer are padded, which dequantizes
SCALE, device = TOTAL**-0.5, "cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu"


def release():
    """transformer-engine's module of Float8Tensor; megatron-core's modules of the dispatcher, of SparseMLA, and of its forward kernel."""
    global tensors, dsa, mla, fwd
    if [*map(int, FACTS.setdefault("version", metadata.version("transformer-engine")).split(".")[:2])] < [2, 1]:
        finish("UNTESTABLE", "no-api")  # its FP8 tensors are of another kind
    if "transformer_engine_torch" not in sys.modules and util.find_spec("transformer_engine_torch") is None:
        print("This needs transformer-engine's compiled library; nox -s pack03 runs it without, on a stand-in for it.")
        finish("UNTESTABLE", "no-device")
    tensors = import_module("transformer_engine.pytorch.tensor.float8_tensor")
    dsa, mla, fwd = (import_module(f"{OPS}.{name}") for name in ("tilelang_dsa", "sparse_mla", "tilelang_sparse_mla_fwd"))
    FACTS.update(file=dsa.__file__, evidence="source")  # on a GPU, too: kernel launches are replaced


def fp8(values, dtype=torch.bfloat16):
    """A Float8Tensor of e4m3 with one scale, made of its parts: bytes, and the scale's inverse."""
    scale_inv = (values.float().abs().max() / 448).reshape(1)
    data = (values.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
    e4m3 = sys.modules["transformer_engine_torch"].DType.kFloat8E4M3
    return tensors.Float8Tensor(shape=data.shape, data=data, fp8_scale_inv=scale_inv, fp8_dtype=e4m3, dtype=dtype)


def inputs(B, S=S, H=H):
    """query [S, B, H, 576] and key [S, B, 1, 576], unit normal, in bf16; causal top-k indices [B, S, topk], -1 for none."""
    torch.manual_seed(0)
    query, key = (torch.randn(S, B, heads, TOTAL, device=device).to(torch.bfloat16) for heads in (H, 1))
    indices = torch.arange(S, device=device)[:, None] - torch.arange(TOPK, device=device)
    return query, key, indices.clamp_min(-1).expand(B, -1, -1)


def used(call, *given):
    """The output of a call or its error; query, key and all else that it hands its kernel; the warnings, as Python shows them, of what is (de)quantized."""
    launched, numbers = [], torch.arange(VALUE, dtype=torch.bfloat16, device=device)
    given_back = lambda dim, q: (numbers.expand(*q.shape[:3], dim).clone(), torch.full(q.shape[:3], 1 / 3, device=device))  # noqa: E731
    launch = lambda how, q, kv, *rest: launched.append((q, kv, how, rest)) or given_back(how["dim"], q)  # noqa: E731
    build = mock.patch.object(fwd, "_get_sparse_mla_fwd_kernel", lambda **how: lambda *given: launch(how, *given))
    with build, warnings.catch_warnings(record=True, action="always") as told:
        try:
            out = call(*given)
        except Exception as error:  # what it raises is the finding
            out = error
    hidden = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning  # by default, most of them
    return out, launched, [w for w in told if "quantiz" in str(w.message).lower() and not issubclass(w.category, hidden)]


def refuses(name, out):
    """Whether it says that it takes no quantized tensor: None of the dispatcher, whose callers then go another way, or an error that is raised for it."""
    if not isinstance(out, TypeError | ValueError | NotImplementedError):
        return out is None and name == "the dispatcher"
    return "quantize" in str(out).lower() and "raise " in traceback.extract_tb(out.__traceback__)[-1].line


def calls(query, key, indices, made=lambda t: t):
    """Each way to call it: its name, the function, its arguments with ``made`` of query and key, and both [B, S, H, 576] as a kernel wants them."""
    turned = [t.permute(1, 0, 2, 3).contiguous() for t in (query, key)]
    yield "the dispatcher", dsa.fused_sparse_mla_absorbed, (made(query), made(key), indices, SCALE, VALUE), turned
    yield "SparseMLA", mla.SparseMLA.apply, (*map(made, turned), indices[:, :, None].int().contiguous(), SCALE), turned


def main():
    release()
    for B in (1, 2):
        q8 = fp8((plain := inputs(B))[0])
        told = q8.dtype == torch.bfloat16 and q8.data_ptr() == 0 != q8._data.data_ptr()
        check("control", f"B={B}: an FP8 tensor's dtype is bf16, its pointer 0, and that of its data is not", told)
        for (name, call, given, turned), (*_, given8, _) in zip(calls(*plain), calls(*plain, fp8), strict=True):
            _, launched, warned = used(call, *given)
            same = len(launched) == 1 and all(map(torch.equal, launched[0][:2], turned))
            check("control", f"B={B}, {name}: bf16 reaches the kernel as it is", same and not warned)
            out, launched, warned = used(call, *given8)
            null, refused = any(t.data_ptr() == 0 for pair in launched for t in pair[:2]), not launched and refuses(name, out)
            got = "a null pointer" if null else f"plain tensors, {len(warned)} warnings" if launched else f"nothing: {out!r}"
            check("trigger", f"B={B}, {name}: the kernel gets {got}", refused or (launched and warned and not null))
            check("signature", f"B={B}, {name}: it is launched all the same, or refused", launched or refused)
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
    main()
