# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops", "mamba-ssm==2.3.2.post1", "numpy>=1.26", "setuptools", "tilelang==0.1.8", "torch", "z3-solver==4.15.4.0"]
# ///
"""mamba-ssm: the backward of Mamba-3 MIMO raises when heads share q and k in groups (1 < G < H), after a forward that works.

Host code only: the kernels write dq and dk a head, and mamba_mimo_bwd_combined adds them up for G = 1, takes them as they are for
G = H, and has no branch between. The same in mamba_mimo_bwd_combined_varlen.
On main it is cured by https://github.com/state-spaces/mamba/pull/967, in no release yet.

Runs on an NVIDIA GPU. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import json
import logging
import math
import os
import statistics
import sys
import types
from importlib.metadata import distribution, version

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--measure", action="store_true", help="also time forward and backward at S=2048 (needs a GPU)")
options = parser.parse_args()
on_cpu = os.environ.get("TRITON_INTERPRET") == "1"  # the lane's: kernels run on the CPU, in fp32
device, dtype, limit = ("cpu", torch.float32, 1e-5) if on_cpu else ("cuda", torch.bfloat16, 0.1)
facts = {"reproducer": 1, "comparisons": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<76} {measured.get('error', holds)}")


if not (on_cpu or torch.cuda.is_available()):
    print("Without a GPU: nox -s pack05 runs this release's kernels through TileLang's C backend.")
    finish("UNTESTABLE", "no-device")
if options.measure and on_cpu:
    parser.error("--measure needs a GPU")
facts["evidence"] = "interpreter" if on_cpu else "device:sm_{}{}".format(*torch.cuda.get_device_capability())

# mamba_ssm/__init__.py loads CUDA extensions that these kernels do not use: import past it.
package = types.ModuleType("mamba_ssm")
package.__path__ = list(importlib.util.find_spec("mamba_ssm").submodule_search_locations)
sys.modules["mamba_ssm"] = package
facts["version"] = distribution("mamba-ssm").version
if importlib.util.find_spec("mamba_ssm.ops.tilelang") is None:
    print("This release has no mamba_ssm.ops.tilelang.")
    finish("UNTESTABLE", "no-api")
import tilelang.language as T
import triton

logging.disable(logging.WARNING)  # TileLang says of every kernel that it is compiled, or was
from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo as mimo

facts["file"] = sys.modules[mimo.mamba_mimo_bwd_combined.__module__].__file__
print(f"mamba-ssm {facts['version']}, tilelang {version('tilelang')}, triton {triton.__version__}, {facts['evidence']}")
# Triton's small kernels beside the TileLang ones: autotuning has no part in this, and takes minutes.
for module in [m for n, m in sys.modules.items() if n.startswith("mamba_ssm.ops.triton")]:
    for kernel in vars(module).values():
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel.configs = kernel.configs[:1]

NAMES = (
    "dQ",
    "dK",
    "dV",
    "dADT",
    "dDT",
    "dTrap",
    "dQ_bias",
    "dK_bias",
    "dMIMO_V",
    "dMIMO_Z",
    "dMIMO_Out",
    "dAngles",
    "dD",
    "dZ",
)


def inputs(B, S, G, H, R, N, P):
    """Leaves in the order of mamba3_mimo, and the gradient of its output [B, S, H, P]."""
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    DT = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    q, k, v, trap, z, out_grad = (
        normal(*shape).to(dtype)
        for shape in ((B, S, R, G, N), (B, S, R, G, N), (B, S, H, P), (B, H, S), (B, S, H, P), (B, S, H, P))
    )
    ADT = -2 * torch.rand(B, H, S, device=device) * DT
    weights = [1 + 0.1 * normal(H, R, P) for _ in range(3)]
    return [q, k, v, ADT, DT, trap, normal(H, R, N), normal(H, R, N), *weights,
            3 * torch.rand(B, S, H, N // 4, device=device), normal(H), z], out_grad  # fmt: skip


def definition(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D, Z):
    """Mamba-3 MIMO as defined, quadratic in S, in fp64. Shapes as in mamba3_mimo; Angles turn pairs (n, n + N/2), n < N/4."""
    heads = V.shape[2] // Q.shape[3]
    # A group's heads are neighbours.
    q, k = (x.repeat_interleave(heads, 3) + bias.transpose(0, 1) for x, bias in ((Q, Q_bias), (K, K_bias)))
    angle = (torch.tanh(Angles) * math.pi * DT.transpose(1, 2)[..., None]).cumsum(1)[:, :, None]
    turned = angle.shape[-1]

    def rotated(x):
        (a, rest_a), (b, rest_b) = (half.tensor_split([turned], -1) for half in x.chunk(2, -1))
        return torch.cat((a * angle.cos() - b * angle.sin(), rest_a, a * angle.sin() + b * angle.cos(), rest_b), -1)

    gamma = DT * torch.sigmoid(Trap)
    scale = gamma + F.pad((DT * torch.sigmoid(-Trap))[..., 1:], (0, 1))
    cs = ADT.cumsum(-1)
    decay = (cs[..., :, None] - cs[..., None, :]).tril(-1).exp().tril(-1) * scale[:, :, None, :]
    x = V[:, :, None] * MIMO_V.transpose(0, 1)  # [B, S, R, H, P]
    scores = torch.einsum("btrhn,bsqhn->bhtrsq", rotated(q), rotated(k)) * decay[:, :, :, None, :, None]
    y = torch.einsum("bhtrsq,bsqhp->btrhp", scores, x)
    here = torch.einsum("bsrhn,bsqhn->bshrq", q, k) * gamma.transpose(1, 2)[..., None, None]
    y = y + torch.einsum("bshrq,bsqhp->bsrhp", here, x) + D[:, None] * x
    return (y * F.silu(Z[:, :, None] * MIMO_Z.transpose(0, 1)) * MIMO_Out.transpose(0, 1)).sum(2)


def by_definition(lengths):
    def function(*leaves):
        outs, start = [], 0
        for length in lengths or [leaves[2].shape[1]]:
            part = slice(start, start + length)
            cut = [
                x[..., part] if i in (3, 4, 5) else x[:, part] if i in (0, 1, 2, 11, 13) else x for i, x in enumerate(leaves)
            ]
            outs.append(definition(*cut))
            start += length
        return torch.cat(outs, 1)

    return function


def by_kernel(chunk, lengths):
    ends = None
    if lengths is not None:
        ends = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)
    return lambda *leaves: mimo.mamba3_mimo(*leaves, chunk_size=chunk, rotary_dim_divisor=4, dtype=dtype, cu_seqlens=ends)


def gradients(function, tensors, out_grad):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    function(*leaves).backward(out_grad)
    return [leaf.grad for leaf in leaves]


def examine(G, shape, chunk, lengths=None):
    """One backward: refused, or all 14 gradients against fp64 and against a second run. True when refused."""
    B, S, H, R, N, P = shape
    role = "trigger" if 1 < G < H else "control"
    name = f"{'varlen' if lengths else 'dense'} G={G} H={H}"
    tensors, out_grad = inputs(B, S, G, H, R, N, P)
    run = by_kernel(chunk, lengths)
    try:
        found = gradients(run, tensors, out_grad)
    except ValueError as error:
        if not str(error).startswith("G value of"):
            raise
        state(role, f"{name}: the backward refuses it", role == "trigger")
        return True
    if role == "trigger":
        state(role, f"{name}: the backward refuses it", False)
    right = gradients(by_definition(lengths), [t.double() for t in tensors], out_grad.double())
    errors = {n: ((g.double() - r).norm() / r.norm()).item() for n, g, r in zip(NAMES, found, right, strict=True)}
    metrics.setdefault("errors", {})[name] = errors
    error = max(errors.values()) if all(map(math.isfinite, errors.values())) else None
    print("         " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    worst = max(errors, key=errors.get)
    state(
        "control",
        f"{name} B={B} S={S} R={R} N={N} P={P}: gradients against fp64, worst {worst}",
        None,
        error=error,
        limit=limit,
    )
    if role == "trigger":
        again = gradients(run, tensors, out_grad)
        state("control", f"{name}: a second run is bitwise equal", all(map(torch.equal, found, again)))
    return False


def traced_once():
    """The host traces each kernel anew in every call, which takes longer than the kernels: once is enough, for one shape."""
    for host, names in (
        (mimo.mamba_mimo_forward, ["mamba_mimo_fwd"]),
        (mimo.mamba_mimo_bwd_combined, ["mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"]),
    ):
        for name in names:
            known, build = {}, host.__globals__[name]

            def once(*args, name=name, known=known, build=build, **kwargs):
                key = str((args, kwargs))
                if key not in known:
                    T.gemm = counting("backward" if "bwd" in name else "forward")
                    known[key] = build(*args, **kwargs)
                    T.gemm = gemm
                return known[key]

            host.__globals__[name] = once


def measure(G, shape, chunk, runs):
    """ms of forward and backward."""
    B, S, H, R, N, P = shape
    tensors, out_grad = inputs(B, S, G, H, R, N, P)
    leaves = [t.requires_grad_() for t in tensors]
    run, times = by_kernel(chunk, None), {"forward": [], "backward": []}
    for i in range(runs + 2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = run(*leaves)
        marks[1].record()
        out.backward(out_grad)
        marks[2].record()
        torch.cuda.synchronize()
        finite = all(bool(leaf.grad.isfinite().all()) for leaf in leaves)
        for leaf in leaves:
            leaf.grad = None
        if i >= 2:
            times["forward"].append(marks[0].elapsed_time(marks[1]))
            times["backward"].append(marks[1].elapsed_time(marks[2]))
        elif not finite:
            return {"finite": False}
    result = {"finite": finite, "runs": runs, "shape": {"B": B, "S": S, "G": G, "H": H, "R": R, "N": N, "P": P, "chunk": chunk}}
    for name, ms in times.items():
        q1, median, q3 = statistics.quantiles(ms, n=4)
        result[name] = {"ms": median, "q1": q1, "q3": q3}
    return result


flops, gemm = {"forward": 0, "backward": 0}, T.gemm  # of one head and chunk


def counting(name):
    """T.gemm, whose operations are counted as a kernel is traced."""

    def counted(A, B, C, *args, **kwargs):
        inner = A.shape[0] if kwargs.get("transpose_A") else A.shape[1]
        flops[name] += 2 * int(C.shape[0]) * int(C.shape[1]) * int(inner)
        return gemm(A, B, C, *args, **kwargs)

    return counted


if on_cpu:
    H, shape, chunk, lengths = 16, (1, 16, 16, 2, 16, 16), 8, (9, 1, 6)
    groups = (1, 2, 8, H)
else:
    H, shape, chunk, lengths = 128, (1, 256, 128, 4, 128, 64), 16, (100, 1, 155)
    groups = (1, 2, 8, H)
tensors, out_grad = inputs(1, 16, 3, 4, *shape[3:])
try:
    gradients(by_kernel(chunk, None), tensors, out_grad)
    refused = False
except AssertionError:
    refused = True
state("control", "G=3 H=4, which do not divide: refused before any kernel runs", refused)
results = {}
for name, given in (("dense", None), ("varlen", lengths)):
    for G in groups:
        B, S, *rest = shape
        results[name, G] = examine(G, (1, sum(given), *rest) if given else shape, chunk, given)
if not on_cpu:
    results["H=16", 2] = examine(2, (1, 256, 16, 4, 128, 64), chunk)
refused = {
    case: is_refused for case, is_refused in results.items() if (case[1] in groups and 1 < case[1] < H) or case[0] == "H=16"
}
if options.measure and not any(refused.values()):
    case = (8, (1, 2048, 128, 4, 128, 64)), (2, (1, 2048, 16, 4, 128, 64))
    metrics["as called"] = measure(*case[0], chunk, 5)
    traced_once()
    for G, timed in case:
        found = measure(G, timed, chunk, 20)
        B, S, H, *_ = timed
        for name, count in flops.items():
            found[name]["tflops"] = count * B * H * S / chunk / found[name]["ms"] / 1e9
        metrics.setdefault("measured", []).append(found)
        state("control", f"G={G} H={H} S=2048: finite over 22 runs", found["finite"])
        print(f"         {found}")
    print(f"         as called: {metrics['as called']}")
wrong = [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not (c.get("holds") or (c.get("error") is not None and c["error"] <= c["limit"]))]  # fmt: skip
if wrong:
    finish("CHANGED", wrong[0].partition(":")[0])
finish("REPRODUCED" if any(refused.values()) else "ABSENT")
