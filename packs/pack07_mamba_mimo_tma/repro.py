# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops", "mamba-ssm==2.3.2.post1", "numpy>=1.26,<3", "setuptools", "tilelang==0.1.8", "torch==2.13.0", "triton", "z3-solver==4.15.4.0"]
# ///
"""mamba-ssm: the backward kernels of Mamba-3 MIMO keep rank-3 tiles in shared memory, for which TileLang emits no TMA load.

mamba_mimo_bwd_fwd and mamba_mimo_bwd_bwd load q and k through a [chunk, R, N] view, and qk_dot into [chunk, R, R]. They are built
with TMA lowering switched off. Switched on, tilelang 0.1.8, which the release asks for, does not compile them.

Lowers the kernels for sm_90a, with no GPU, and counts TMA loads and shared memory. With --gradients it runs them instead (on a GPU):
all 14 gradients, as released and flattened. Exits 10 (BUG_REPRODUCED: no TMA load), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution, version
from pathlib import Path

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--stages", type=int, default=0, help="pipeline stages of the kernels (default 0, as the release calls them)"
)
parser.add_argument("--kernels", default="first,second", help="which of the two to lower (default: first,second)")
parser.add_argument(
    "--compare", default="first", help="which to lower with TMA off too, and compare (default: first; each takes a minute)"
)
parser.add_argument("--seed-form", action="store_true", help="also lower the second kernel with a flattened qk_dot fragment")
parser.add_argument("--gradients", action="store_true", help="run the kernels and compare gradients; count nothing")
parser.add_argument("--lower", nargs=4, help=argparse.SUPPRESS)
options = parser.parse_args()

MODULE = "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py"
KERNELS = {"first": ("mamba_mimo_bwd_fwd", 128), "second": ("mamba_mimo_bwd_bwd", 256)}  # and its threads, as the host calls it
on_cpu = os.environ.get("TRITON_INTERPRET") == "1"  # lane tilelang-cpu: kernels run on the CPU, in fp32
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "evidence": "codegen", "comparisons": [], "claims": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<80} {measured.get('error', holds)}", flush=True)


def load(path, tma=None):
    """The module at ``path``. With ``tma``, TileLang's passes for TMA and warp specialisation are switched on or off, whatever it says."""
    spec = importlib.util.spec_from_file_location(f"mimo_bwd_{len(sys.modules)}", path)
    module = importlib.util.module_from_spec(spec)
    jit, keys = tilelang.jit, tilelang.PassConfigKey
    if tma is not None:
        passes = {keys.TL_DISABLE_TMA_LOWER: not tma, keys.TL_DISABLE_WARP_SPECIALIZED: not tma, keys.TL_ENABLE_FAST_MATH: True}
        tilelang.jit = lambda **given: jit(**{**given, "pass_configs": passes})
    spec.loader.exec_module(module)
    tilelang.jit = jit
    return module


def lower(path, kernel, tma, stages):
    """What becomes of one kernel at N=64 P=64 R=4 chunk=16 bf16: TMA loads and stores in its source, bytes of shared memory."""
    name, threads = KERNELS[kernel]
    built = getattr(load(path, tma), name)
    shape = [T.dynamic(letter) for letter in "BSHG"]
    function = built.get_tir(*shape, 64, 64, 4, True, True, True, 16, 4, "bfloat16", threads, stages)
    given = {"enable_host_codegen": False, "enable_device_compile": False}
    given = {key: value for key, value in given.items() if key in inspect.signature(tilelang.lower).parameters}
    passes = {getattr(key, "value", key): value for key, value in built.pass_configs.items()}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        artifact = tilelang.lower(function, target=target, **given)
    source = artifact.kernel_source
    shared = [
        int(f.attrs["dyn_shared_memory_buf"])
        for f in artifact.device_mod.functions.values()
        if "dyn_shared_memory_buf" in f.attrs
    ]
    return {
        "compiles": True,
        "tma_load": len(re.findall(r"\btl::tma_load\w*[<(]", source)),
        "tma_store": len(re.findall(r"\btl::tma_store\w*[<(]", source)),
        "shared_bytes": sum(shared),
        "wgmma": source.count("wgmma"),
    }


def in_its_own_process(job):
    """A crash of the compiler ends no more than that, and two run at once."""
    path, kernel, tma, stages = job
    command = [sys.executable, __file__, "--lower", str(path), kernel, "on" if tma else "off", str(stages)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
        found["fallbacks"] = len(re.findall(r"fall ?back", said, re.IGNORECASE))
    else:
        last = [line for line in done.stderr.splitlines() if re.search(r"Error|Check failed", line)] or [
            f"exit {done.returncode}"
        ]
        found = {"compiles": False, "error": re.sub(r"^.*?Check failed: ", "", last[-1])[:160], "tma_load": 0}
    return found


def seed_form(path):
    """The patched module with qk_dot read from a fragment [chunk, R * R] in registers, as the release reads its [chunk, R, R]."""
    source = Path(path).read_text()
    source, loads = re.subn(
        r"^( +)(T\.copy\(QK_DOT.*qk_dot_shared\)\n)",
        r"\1qk_dot_frag = T.alloc_fragment([chunk_size, R * R], dtype)\n\1\2\1T.copy(qk_dot_shared, qk_dot_frag)\n",
        source,
        flags=re.MULTILINE,
    )
    source, reads = re.subn(r"qk_dot_shared\[cs, r_out", "qk_dot_frag[cs, r_out", source)
    assert loads == reads == 1
    other = Path(os.environ.get("TMPDIR", "."), "mamba3_mimo_bwd_seed.py")
    other.write_text(source)
    return other


# mamba_ssm/__init__.py loads CUDA extensions that these kernels do not use: import past it.
package = types.ModuleType("mamba_ssm")
package.__path__ = list(importlib.util.find_spec("mamba_ssm").submodule_search_locations)
sys.modules["mamba_ssm"] = package
release = distribution("mamba-ssm")
facts["version"] = release.version
if importlib.util.find_spec("mamba_ssm.ops.tilelang") is None:
    print("This release has no mamba_ssm.ops.tilelang.")
    finish("UNTESTABLE", "no-api")
import tilelang
import tilelang.language as T
from tilelang import tvm

logging.disable(logging.WARNING)  # TileLang says of every kernel that it is compiled, or was
if options.lower:
    path, kernel, tma, stages = options.lower
    print(json.dumps(lower(path, kernel, tma == "on", int(stages))))
    sys.exit()
here = importlib.util.find_spec("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd").origin
released = release.locate_file(MODULE)
facts["file"] = here
metrics["tilelang"] = version("tilelang")


def count():
    """The kernels lowered, TMA on and off; on the patched side the release's too, TMA off, for its shared memory."""
    kernels, compared = options.kernels.split(","), options.compare.split(",")
    jobs = {f"{kernel}, TMA on": (here, kernel, True, options.stages) for kernel in reversed(kernels)}
    if options.stages:
        jobs |= {f"{kernel}, TMA on, no stages": (here, kernel, True, 0) for kernel in kernels}
    jobs |= {f"{kernel}, TMA off": (here, kernel, False, 0) for kernel in compared}
    if patched:
        jobs |= {f"{kernel}, TMA off, as released": (released, kernel, False, 0) for kernel in compared}
    if options.seed_form and patched:
        jobs["second, TMA on, a fragment"] = (seed_form(here), "second", True, 0)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(in_its_own_process, jobs.values()), strict=True))
    metrics.update(stages=options.stages, lowered=found)
    for name, what in found.items():
        print(f"         {name}: {what}")
    for kernel in kernels:
        state("trigger", f"{KERNELS[kernel][0]}, TMA on: no TMA load", found[f"{kernel}, TMA on"]["tma_load"] == 0)
    for kernel in compared:
        off = found[f"{kernel}, TMA off"]
        state("control", f"{KERNELS[kernel][0]}, TMA off: compiles, with no TMA load", off["compiles"] and off["tma_load"] == 0)
        if patched:
            same = off.get("shared_bytes") == found[f"{kernel}, TMA off, as released"].get("shared_bytes")
            state("control", f"{KERNELS[kernel][0]}, TMA off: the release's shared memory to the byte", same)
    if options.seed_form and patched:
        compiles = found["second, TMA on, a fragment"]["compiles"]
        state("note", "with a flattened qk_dot fragment the second kernel does not compile", not compiles)
    controls = all(c["holds"] for c in facts["comparisons"] if c["role"] == "control")
    broken = any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger")
    if not controls:
        finish("CHANGED", next(c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]))
    if patched and not broken and set(kernels) <= set(compared):
        facts["claims"] = ["LEGALITY_PROVED"]
    finish("REPRODUCED" if broken else "ABSENT")


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


def gradients(function, tensors, out_grad):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    function(*leaves).backward(out_grad)
    return [leaf.grad for leaf in leaves]


def compare():
    """All 14 gradients of one backward, as released and flattened, TMA off and, on a GPU, on; each against fp64."""
    import triton
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo as mimo

    for module in [m for n, m in sys.modules.items() if n.startswith("mamba_ssm.ops.triton")]:
        for kernel in vars(
            module
        ).values():  # Triton's small kernels beside these: autotuning has no part in this, and takes minutes.
            if isinstance(kernel, triton.runtime.Autotuner):
                kernel.configs = kernel.configs[:1]
    B, S, H, R, N, P, chunk = (1, 16, 4, 2, 16, 16, 8) if on_cpu else (1, 256, 16, 4, 64, 64, 16)
    shape = f"B={B} S={S} H={H} R={R} N={N} P={P}"
    tensors, out_grad = inputs(B, S, H, H, R, N, P)
    run = lambda *leaves: mimo.mamba3_mimo(*leaves, chunk_size=chunk, rotary_dim_divisor=4, dtype=dtype)  # noqa: E731
    right = gradients(definition, [t.double() for t in tensors], out_grad.double())
    sides = {"as released": (released, None)}
    if patched:
        sides |= {"flattened, TMA off": (here, None)} | ({} if on_cpu else {"flattened, TMA on": (here, True)})
    found = {}
    for name, (path, tma) in sides.items():
        mimo.mamba_mimo_bwd_combined = cached(load(path, tma)).mamba_mimo_bwd_combined
        found[name] = gradients(run, tensors, out_grad)
        errors = {n: ((g.double() - r).norm() / r.norm()).item() for n, g, r in zip(NAMES, found[name], right, strict=True)}
        metrics.setdefault("errors", {})[name] = errors
        print("         " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
        worst = max(errors, key=errors.get)
        error = errors[worst] if all(map(math.isfinite, errors.values())) else None
        state(
            "control",
            f"{name}, {shape}: gradients against fp64, worst {worst}",
            None,
            error=error,
            limit=1e-5 if on_cpu else 0.1,
        )
        if not on_cpu:
            metrics.setdefault("ms", {})[name] = timed(run, H, R, N, P)
            print(f"         {name}: backward at S=2048 H=32 {metrics['ms'][name]}")
    state("trigger", "the tiles are rank-3", "T.view(k_pre_trap_shared, shape=[chunk_size, R, N])" in Path(here).read_text())
    if patched:
        for name in list(sides)[1:]:
            different = [n for n, a, b in zip(NAMES, found[name], found["as released"], strict=True) if not torch.equal(a, b)]
            metrics.setdefault("differ", {})[name] = different
            state(
                "note",
                f"{name}: all 14 gradients bitwise equal to the release's{': not ' + ', '.join(different) if different else ''}",
                not different,
            )
        if not any(metrics["differ"].values()):
            facts["claims"] = ["BITWISE_IDENTICAL"]
    wrong = [c["name"] for c in facts["comparisons"] if "limit" in c and (c["error"] is None or c["error"] > c["limit"])]
    if wrong:
        finish("CHANGED", wrong[0].partition(",")[0])
    finish("ABSENT" if patched else "REPRODUCED")


def cached(module):
    """The host traces each kernel anew in every call, which takes seconds: once is enough, for these shapes."""
    for name, _ in KERNELS.values():
        known, build = {}, getattr(module, name)

        def once(*args, known=known, build=build):
            if str(args) not in known:
                known[str(args)] = build(*args)
            return known[str(args)]

        setattr(module, name, once)
    return module


def timed(run, H, R, N, P, runs=20):
    """ms of a whole backward at S=2048: median and quartiles."""
    tensors, out_grad = inputs(1, 2048, 32, 32, R, N, P)
    leaves, times = [t.requires_grad_() for t in tensors], []
    for i in range(runs + 5):
        out = run(*leaves)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out.backward(out_grad)
        end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end)] if i >= 5 else []
    return dict(zip(("q1", "median", "q3"), statistics.quantiles(times, n=4), strict=True))


device, dtype = ("cpu", torch.float32) if on_cpu else ("cuda", torch.bfloat16)
if on_cpu or (options.gradients and torch.cuda.is_available()):
    facts["evidence"] = "interpreter" if on_cpu else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
elif options.gradients:
    print("Without a GPU: nox -s pack07 -- --variant gradients runs them through TileLang's C backend.")
    finish("UNTESTABLE", "no-device")
print(f"mamba-ssm {facts['version']}, tilelang {metrics['tilelang']}, {facts['evidence']}")
compare() if options.gradients else count()
