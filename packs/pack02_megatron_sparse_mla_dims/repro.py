# /// script
# requires-python = ">=3.12"
# dependencies = ["apache-tvm-ffi==0.1.9", "cloudpickle", "einops", "megatron-core==0.19.2", "ml-dtypes", "numpy>=1.26,<3", "packaging", "psutil", "tilelang==0.1.8", "torch==2.13.0", "tqdm", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""megatron-core: fused SparseMLA runs for 576 channels of which 512 of value alone, though its kernels have both as parameters.

fused_sparse_mla_absorbed gives None for every other shape, and its caller takes the unfused path, which makes [B, heads, S, S] in fp32.
Without a GPU the kernels' launches are replaced, and what they are built for is looked at; with one they run, and are compared with
attention in fp64. Exits with 10 (BUG_REPRODUCED: a shape that the kernels can do is not fused), 0 (BUG_ABSENT) or 125 (neither).
"""

import warnings
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path

import torch

DSA = "megatron.core.transformer.experimental_attention_variant"
SCALE = 0.05  # MLA's is that of its heads before they are absorbed, and not total ** -0.5
device = "cuda" if torch.cuda.is_available() else "cpu"
mark = lambda *shape: torch.arange(math.prod(shape)).remainder(7).view(shape).bfloat16()  # what a replaced launch gives  # noqa: E731
launched, SIZES = [], ("heads", "dim", "tail_dim", "topk", "kv_group", "sm_scale")  # that kernels were built for


def release():
    """The release's dispatcher. Where there is no GPU its launches are replaced: they give numbers of the right shape."""
    warnings.filterwarnings("ignore")
    FACTS["version"], core = metadata.version("megatron-core"), getattr(util.find_spec("megatron.core"), "origin", None)
    if not core or not Path(core).parent.joinpath("transformer/experimental_attention_variant/ops/tilelang_dsa.py").exists():
        finish("UNTESTABLE", "no-api")
    import_module("tilelang")  # which SparseMLA needs
    fwd, bwd, dsa = (import_module(f"{DSA}.ops.tilelang_{n}") for n in ("sparse_mla_fwd", "sparse_mla_bwd", "dsa"))
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=dsa.__file__, evidence=gpu)
    if device == "cuda":
        return dsa

    def build(name, kernel, *given, **named):
        launched.append((name, *given[:6], *(named[size] for size in SIZES if named)))
        return kernel

    rows = lambda o, *_: o.new_zeros(o.shape[:3], dtype=torch.float32)  # noqa: E731
    fwd._get_sparse_mla_fwd_kernel = partial(build, "forward", lambda q, *_: (mark(*q.shape[:3], launched[-1][2]), rows(q)))
    bwd._get_preprocess_kernel = partial(build, "delta", rows)
    bwd._get_bwd_kernel = partial(build, "backward", lambda q, *_: mark(*q.shape))
    bwd._get_postprocess_kernel = partial(build, "dkv", lambda dkv: mark(*dkv.shape))
    return dsa


def inputs(total, S=256, B=2, heads=64, topk=64, rows=None):
    """query [rows or S, B, heads, total], key [S, B, 1, total] bf16; causal top-k indices [B, rows or S, topk], -1 for none, a row without keys."""
    torch.manual_seed(0)
    shapes = (rows or S, B, heads, total), (S, B, 1, total)
    query, key = (torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_() for shape in shapes)
    indices = torch.rand(B, S, S, device=device).tril().argsort(-1, descending=True)[..., :topk]
    indices = indices.masked_fill(indices > torch.arange(S, device=device)[:, None], -1)
    indices[:, 5] = -1
    return query, key, indices[:, :rows]


def definition(query, key, indices, value):
    """Attention of each row over its keys, dense; a row without keys is zero. [S, B, heads, value]."""
    chosen = (indices[..., None] == torch.arange(len(key), device=device)).any(-2)
    scores = torch.einsum("sbhd,tbd->bhst", query, key[:, :, 0]) * SCALE
    weights = scores.masked_fill(~chosen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhst,tbd->sbhd", weights, key[:, :, 0, :value])


def judge(tilelang_dsa, role, total, value, **sizes):
    """Whether a shape runs fused, and rightly: out, dq and dkv against fp64; on a CPU what the launches were built for."""
    query, key, indices = inputs(total, **sizes)
    name = f"{total} channels, {value} of value, {query.shape[2]} heads"
    launched.clear()
    out = tilelang_dsa.fused_sparse_mla_absorbed(query, key, indices, SCALE, value)
    if out is None:
        return check(role, f"{name}: runs fused", False)
    out.backward(gradient := torch.randn_like(out))
    if device == "cpu":
        sizes = max(query.shape[2], 16), value, total - value, -(-indices.shape[-1] // 64) * 64, 1, SCALE
        built = [("delta", *sizes[:2]), ("dkv", *sizes[1:3], 1), *((k, *sizes) for k in ("backward", "forward", "forward"))]
        return check(role, f"{name}: forward, recomputation and backward are built for it", sorted(launched) == sorted(built))
    exact = [t.detach().double().requires_grad_() for t in (query, key)]
    right = definition(*exact, indices, value)
    right.backward(gradient.double())
    for what, got, want in ("out", out, right), ("dq", query.grad, exact[0].grad), ("dkv", key.grad, exact[1].grad):
        check(role, f"{name}: {what} against fp64", error=((got - want).norm() / want.norm()).item(), limit=3e-2)


def main():
    tilelang_dsa = release()
    judge(tilelang_dsa, "control", 576, 512)
    for total, value in ((128, 64), (192, 128), (320, 256)):
        judge(tilelang_dsa, "trigger", total, value)
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
