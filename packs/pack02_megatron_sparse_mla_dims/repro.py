# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops", "megatron-core==0.19.2", "numpy>=1.26,<3", "packaging", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""megatron-core: fused SparseMLA is for 576 channels with 512 of value alone, though its TileLang kernels have them as parameters.

Every other shape goes to the unfused path, which makes [B, H, S, S] in fp32. Without a GPU the release's own dispatcher and autograd function
run with the launches replaced, and its kernels are lowered for sm_90a; with one all of it runs, against a dense fp64 definition.
Exits 10 (BUG_REPRODUCED: a shape falls back), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--no-lowering", action="store_true", help="run the host code, and lower no kernel")
parser.add_argument(
    "--memory", action="store_true", help="also the peak memory of fused and unfused, S = 1k to 32k (needs a GPU)"
)
parser.add_argument("--lower", nargs=4, help=argparse.SUPPRESS)
options = parser.parse_args()

DSA = "megatron.core.transformer.experimental_attention_variant"
SHAPES = ((576, 512), (128, 64), (192, 128))  # channels of q and k, of which value; the first is the one that is admitted
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "comparisons": [], "claims": [], "metrics": {}}
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "codegen"
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<92} {measured.get('error', holds)}", flush=True)


def lower(folder, kernel, total, value):
    """One kernel at 64 heads, top-k of 64, lowered for sm_90a: what is in its source, its shared memory."""
    import tilelang
    from tilelang import tvm

    path = f"{folder}/tilelang_sparse_mla_{kernel}.py"
    spec = importlib.util.spec_from_file_location(f"{DSA}.ops.lowered", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = module.sparse_mla_fwd if kernel == "fwd" else module.bwd
    function = built.get_tir(64, value, total - value, 64, 1, 0.1)
    passes = {getattr(key, "value", key): setting for key, setting in (built.pass_configs or {}).items()}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        artifact = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    functions = artifact.device_mod.functions.values()
    return {
        "shared_bytes": sum(int(f.attrs["dyn_shared_memory_buf"]) for f in functions if "dyn_shared_memory_buf" in f.attrs),
        "wgmma": artifact.kernel_source.count("wgmma"),
        "tma_load": len(re.findall(r"\btl::tma_load\w*[<(]", artifact.kernel_source)),
        "sha256": hashlib.sha256(artifact.kernel_source.encode()).hexdigest(),
    }


def in_its_own_process(job):
    command = [sys.executable, __file__, "--lower", *map(str, job)]
    done = subprocess.run(command, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": last[:200]}


warnings.filterwarnings("ignore")
if options.lower:
    print(json.dumps(lower(*options.lower[:2], *map(int, options.lower[2:]))))
    sys.exit()
if options.memory and not on_gpu:
    parser.error("--memory needs a GPU")
release = distribution("megatron-core")
facts["version"] = release.version
try:
    found = importlib.util.find_spec(f"{DSA}.ops.sparse_mla")
except ModuleNotFoundError:
    found = None
if found is None:
    print("This release has no SparseMLA.")
    finish("UNTESTABLE", "no-api")
if importlib.util.find_spec("tilelang") is None:
    raise ImportError("SparseMLA needs TileLang: pip install tilelang==0.1.8")
fwd, bwd, tilelang_dsa, dsa = (
    importlib.import_module(f"{DSA}.{name}")
    for name in ("ops.tilelang_sparse_mla_fwd", "ops.tilelang_sparse_mla_bwd", "ops.tilelang_dsa", "dsa")
)
facts["file"] = tilelang_dsa.__file__
import tilelang

print(f"megatron-core {release.version}, tilelang {tilelang.__version__}, torch {torch.__version__}, {facts['evidence']}")
launched = []


def launches_replaced():
    """On a CPU: what the host asks a kernel to be built for is noted, and the launch gives zeros of the right shape."""

    def forward(**given):
        launched.append(("forward", given["dim"], given["tail_dim"], given["heads"]))
        return lambda q, kv, indices: (q.new_zeros(*q.shape[:3], given["dim"]), q.new_zeros(q.shape[:3], dtype=torch.float32))

    def backward(heads, dim, tail, *_):
        launched.append(("backward", dim, tail, heads))
        return lambda q, kv, do, indices, lse, delta, dkv: torch.zeros_like(q)

    fwd._get_sparse_mla_fwd_kernel, bwd._get_bwd_kernel = forward, backward
    bwd._get_preprocess_kernel = lambda heads, dim: lambda o, do: o.new_zeros(o.shape[:3], dtype=torch.float32)
    bwd._get_postprocess_kernel = lambda dim, tail, group: lambda dkv: dkv.to(torch.bfloat16)


def inputs(total, value, S=128, B=2, H=64, topk=64, empty=True):
    """query [S, B, H, total] and key [S, B, 1, total] in bf16, which have gradients; causal top-k indices [B, S, topk], -1 for none."""
    torch.manual_seed(0)
    query, key = (torch.randn(S, B, heads, total, device=device).to(torch.bfloat16).requires_grad_() for heads in (H, 1))
    order = (
        torch.rand(B, S, S, device=device)
        .masked_fill(torch.ones(S, S, device=device).triu(1).bool(), -1)
        .argsort(-1, descending=True)
    )
    indices = order[..., :topk]
    indices = indices.masked_fill(indices > torch.arange(S, device=device)[:, None], -1)
    if empty:
        indices[:, 5] = -1  # a row with nothing to attend to, as packed sequences have them
    return query, key, indices


def definition(query, key, indices, scale, value):
    """Attention of each row over its keys, dense, in fp64; a row without keys is zero. [S, B, H, value]."""
    S, B = query.shape[:2]
    chosen = torch.zeros(B, S, key.shape[0] + 1, dtype=torch.bool, device=device)
    chosen.scatter_(-1, torch.where(indices < 0, key.shape[0], indices), True)
    scores = torch.einsum("sbhd,tbd->bhst", query, key[:, :, 0]) * scale
    scores = scores.masked_fill(~chosen[:, None, :, :-1], float("-inf"))
    weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
    return torch.einsum("bhst,tbd->sbhd", weights, key[:, :, 0, :value])


def outcome(total, value, heads=64):
    """What the dispatcher makes of a shape: None, or relative errors of the output, dq and dkv against fp64 (on a CPU: what it launched)."""
    query, key, indices = inputs(total, value, H=heads)
    scale = total**-0.5
    launched.clear()
    out = tilelang_dsa.fused_sparse_mla_absorbed(query, key, indices, scale, value)
    if out is None:
        return None
    gradient = torch.randn(out.shape, device=device).to(out.dtype)
    out.backward(gradient)
    if not on_gpu:
        return list(launched)
    exact = [t.detach().double().requires_grad_() for t in (query, key)]
    right = definition(*exact, indices, scale, value)
    right.backward(gradient.double())
    pairs = ("out", out.detach(), right.detach()), ("dq", query.grad, exact[0].grad), ("dkv", key.grad, exact[1].grad)
    return {name: ((got.double() - want).norm() / want.norm()).item() for name, got, want in pairs}


def peak(function, S, **known):
    """GiB above the inputs at the peak of forward and backward, B=1 H=16, 192 channels of which 128 of value, top-k of 512; None: out of memory."""
    query, key = (torch.randn(S, 1, n, 192, device=device).to(torch.bfloat16).requires_grad_() for n in (16, 1))
    indices = (torch.arange(S, device=device)[:, None] - torch.arange(512, device=device)).clamp_min(-1)[None]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        function(query, key, indices, 192**-0.5, 128, **known).float().sum().backward()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None
    return (torch.cuda.max_memory_allocated() - before) / 2**30


if not on_gpu:
    launches_replaced()
metrics["outcome"] = {}
for total, value in SHAPES:
    name = f"{total} channels, {value} of value"
    for heads in (64,) if total == 192 else (64, 8):
        found = outcome(total, value, heads)
        metrics["outcome"][f"{name}, {heads} heads"] = found
        print(f"         {name}, {heads} heads: {found}")
        if heads == 64:
            role = "control" if total == 576 else "trigger"
            state(
                role,
                f"{name}: {'runs fused' if role == 'control' else 'falls back to the unfused path'}",
                (found is None) == (role == "trigger"),
            )
        if found is None:
            continue
        if on_gpu:
            worst = max(found, key=found.get)
            error = found[worst] if all(e == e for e in found.values()) else None
            state(
                "control",
                f"{name}, {heads} heads, forward and backward against fp64, worst {worst}",
                None,
                error=error,
                limit=2e-2,
            )
        else:
            kernels = [("forward", value, total - value), ("forward", value, total - value), ("backward", value, total - value)]
            state(
                "control",
                f"{name}, {heads} heads: forward, recompute and backward are built for it",
                [k[:3] for k in found] == kernels,
            )
odd = outcome(160, 96)
state("control", "160 channels, 96 of value, for which the forward kernel cannot be built: unfused", odd is None)

if not on_gpu and not options.no_lowering:
    here, there = Path(fwd.__file__).parent, release.locate_file(f"{DSA.replace('.', '/')}/ops")
    shapes = SHAPES if patched else SHAPES[1:2]  # the release's kernels are not what is wrong: one shape shows it
    jobs = {f"{kernel} {total}/{value}": (here, kernel, total, value) for total, value in shapes for kernel in ("fwd", "bwd")}
    if patched:
        jobs |= {f"{kernel} 576/512, as released": (there, kernel, 576, 512) for kernel in ("fwd", "bwd")}
    with ThreadPoolExecutor(2) as pool:
        found = metrics["lowered"] = dict(zip(jobs, pool.map(in_its_own_process, jobs.values()), strict=True))
    for name, what in found.items():
        print(f"         {name}: {what}")
    for name in [n for n in jobs if "released" not in n]:
        state("control", f"the {name} kernel can be lowered for sm_90a", "error" not in found[name])
    if patched:
        same = all(found[f"{k} 576/512"] == found[f"{k} 576/512, as released"] for k in ("fwd", "bwd"))
        state("control", "576/512: the same source and shared memory as released", same)
if options.memory:
    metrics["peak_gib"] = {}
    for S in (1024, 2048, 4096, 8192, 16384, 32768):
        rows = torch.arange(S, device=device)
        causal = {"varlen_starts": 0 * rows, "varlen_ends": rows + 1, "key_positions": rows}
        row = {"unfused": peak(dsa._unfused_absorbed_dsa_fn, S, **causal)}
        if patched:
            row["fused"] = peak(tilelang_dsa.fused_sparse_mla_absorbed, S)
        metrics["peak_gib"][S] = row
        print(f"         S={S} B=1 H=16, 192 channels, 128 of value, top-k 512: GiB {row}")
if on_gpu:  # last, for it may write where it must not: heads are padded to 16 by the dispatcher, and not by SparseMLA itself
    query, key, indices = inputs(576, 512, H=8)
    ready = [t.transpose(0, 1).contiguous() for t in (query, key)]
    out = tilelang_dsa.SparseMLA.apply(*ready, indices[:, :, None].int(), 576**-0.5)[0]
    right = definition(query.double(), key.double(), indices, 576**-0.5, 512).transpose(0, 1)
    error = ((out.double() - right).norm() / right.norm()).item()
    metrics["8 heads, not padded"] = error if error == error else None
    state("note", f"SparseMLA.apply with 8 heads, not padded to 16: off by {error:.1e}", not error < 2e-2)
wrong = [
    c["name"]
    for c in facts["comparisons"]
    if c["role"] == "control" and not c.get("holds", c.get("error") is not None and c["error"] <= c.get("limit", 0))
]
if wrong:
    finish("CHANGED", wrong[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
