# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "mamba-ssm==2.3.2.post1", "numpy>=1.26", "setuptools", "torch==2.13.0", "triton==3.7.1"]
# ///
"""mamba-ssm: the backward kernel of Mamba-3 SISO writes V @ dO^T three times for each chunk.

mamba3_siso_bwd_kernel_dqkv computes the same [chunk, chunk] product, and the same causal decay mask, for dADT, for dK and for
dQ. The gradients are right. Triton's CSE merges the three today; whether it does is the compiler's to decide, not the source's.

Runs on an NVIDIA GPU. With --codegen it needs none: the kernel is compiled for sm_90, and the products are counted at each
stage. Exits 10 (BUG_REPRODUCED: more than one is written), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import statistics
import sys
import types
from importlib.metadata import distribution

os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a cache would hide what is left out

import torch
import torch.nn.functional as F
import triton

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--codegen", action="store_true", help="compile for sm_90 and count, with no GPU; run no kernel")
parser.add_argument("--measure", action="store_true", help="also time the backward, release and patched in turns (needs a GPU)")
options = parser.parse_args()
if options.measure and not torch.cuda.is_available():
    parser.error("--measure needs a GPU")

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
facts = {"reproducer": 1, "comparisons": [], "claims": [], "metrics": {}}
metrics = facts["metrics"]
patched = os.environ.get("REPRODUCER_SIDE") == "patched"


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append(
        {"role": role, "name": name, "holds": bool(holds)} if not measured else {"role": role, "name": name, **measured}
    )
    print(f"{role:<8} {name:<72} {measured.get('error', holds)}")


if not (options.codegen or interpreted or torch.cuda.is_available()):
    print("Without a GPU: nox -s pack04 runs this on Triton's interpreter; repro.py --codegen compiles it for sm_90.")
    finish("UNTESTABLE", "no-device")
facts["evidence"] = (
    "codegen"
    if options.codegen
    else "interpreter"
    if interpreted
    else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
)

# mamba_ssm/__init__.py loads CUDA extensions that these kernels do not use: import past it.
package = types.ModuleType("mamba_ssm")
package.__path__ = list(importlib.util.find_spec("mamba_ssm").submodule_search_locations)
sys.modules["mamba_ssm"] = package
release = distribution("mamba-ssm")
facts["version"] = release.version
try:
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd as bwd
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_combined as siso
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("mamba_ssm.ops"):
        raise
    print(error)
    finish("UNTESTABLE", "no-api")

facts["file"] = bwd.__file__
print(f"mamba-ssm {release.version}, torch {torch.__version__}, triton {triton.__version__}, {facts['evidence']}")


def original():
    """The release's own module beside the patched one, for a comparison in one run."""
    path = release.locate_file("mamba_ssm/ops/triton/mamba3/mamba3_siso_bwd.py")
    spec = importlib.util.spec_from_file_location("original_bwd", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(tensors, out_grad, chunk, runs=30):
    """ms of compute_dqkv, release and patched in turns: medians, quartiles, and the ratio."""
    given = {}
    fixed = siso.compute_dqkv
    siso.compute_dqkv = lambda **arguments: given.update(arguments) or fixed(**arguments)
    gradients(by_kernel(chunk), tensors, out_grad)
    siso.compute_dqkv = fixed
    times = {"release": [], "patched": []}
    for i in range(runs + 5):
        for name, function in (("release", original_bwd.compute_dqkv), ("patched", fixed)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            function(**given)
            end.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end)] if i >= 5 else []
    found = {name: dict(zip(("q1", "median", "q3"), statistics.quantiles(ms, n=4), strict=True)) for name, ms in times.items()}
    ratios = [p / r for p, r in zip(times["patched"], times["release"], strict=True)]
    return {**found, "ratio_median": statistics.median(ratios), "ratio_stdev": statistics.stdev(ratios), "runs": runs}


def one_config(module):
    """Autotuning may choose another config for each side, and takes minutes: both get the first of 4 warps, a warp group."""
    for kernel in vars(module).values():
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel.configs = [c for c in kernel.configs if c.num_warps == 4][:1] or kernel.configs[:1]


def compiled(module, chunk, n, p, cse=True):
    """The kernel compiled for sm_90: V @ dO^T counted as written, after the inliner and at the end; what the machine gets."""
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    one_config(module)
    chosen, kernel = module.mamba3_siso_bwd_kernel_dqkv.configs[0], module.mamba3_siso_bwd_kernel_dqkv.fn
    config = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    constexprs = {"CHUNK_SIZE": chunk, "HEADDIM_QK": n, "HEADDIM_V": p, "RECOMPUTE_MASK": False, "HAS_D_OSSM_STATE": False}
    constexprs |= {"RETURN_D_ISSM_STATE": False, "IS_VARLEN": False} | dict.fromkeys(
        ("d_OSSM_State", "d_ISSM_State", "Cu_Seqlens")
    )
    # Strides of 1, as the host makes them: constants, which TMA asks for.
    constexprs |= {f"stride_{name}_qkdim": 1 for name in ("q", "k", "dq", "dk", "ssm_states")}
    constexprs |= {f"stride_{name}_vdim": 1 for name in ("v", "do", "dv")}
    constexprs |= {f"stride_{name}_seqlen": 1 for name in ("da_cs", "da_cs_sum", "qk_dot", "dadt", "dQK_dot")}
    types_of = dict.fromkeys(("Q", "K", "V", "SSM_States", "dO", "dQ", "dK", "dV"), "*bf16")
    types_of |= dict.fromkeys(("DA_CS", "DA_CS_SUM", "QK_Dot", "D", "dADT", "dQK_Dot", "dD"), "*fp32")
    signature = {name: "constexpr" if name in constexprs else types_of.get(name, "i32") for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constexprs}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    given, context = backend.parse_options(config), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    first = [target] if "target" in inspect.signature(source.make_ir).parameters else []  # from Triton 3.5 on
    written = source.make_ir(*first, given, backend.get_codegen_implementation(given), backend.get_module_map(), context)
    stages = {"as written": str(written)}
    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    try:
        manager.run(written, "inliner")
    except TypeError:  # Triton 3.5 takes no name.
        manager.run(written)
    stages["after the inliner"] = str(written)
    add_cse = passes.common.add_cse
    passes.common.add_cse = add_cse if cse else lambda manager: None
    try:
        binary = triton.compile(source, target=target, options=config)
    finally:
        passes.common.add_cse = add_cse
    stages["at the end"] = binary.asm["ttir"]
    product = (
        rf"tt\.dot [^\n]*: tensor<{chunk}x{p}x\w+> \* tensor<{p}x{chunk}x\w+>"  # no other has this shape: chunk, n and p differ
    )
    # Less what only says where a line of source was.
    ptx = re.sub(
        r"^\s*(?:\.loc|\.file|//).*\n|^\$L__tmp.*\n|\.section\s+\.debug[\s\S]*", "", binary.asm["ptx"], flags=re.MULTILINE
    )
    return {
        "products": {stage: len(re.findall(product, text)) for stage, text in stages.items()},
        "dots": {stage: text.count("tt.dot ") for stage, text in stages.items()},
        "ptx_sha256": hashlib.sha256(ptx.encode()).hexdigest(),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "shared_bytes": binary.metadata.shared,
        "cubin_bytes": len(binary.asm["cubin"]),
    }


def report_products(count, how):
    metrics["products"] = count
    state("trigger", f"V @ dO^T is computed {count} times a chunk, {how}", count > 1)


def reference(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z):
    """Mamba-3 SISO by its definition, quadratic in S, in fp64. Q, K [B, S, G, N]; V, Z [B, S, H, P]; ADT, DT, Trap [B, H, S]."""
    groups = V.shape[2] // Q.shape[2]
    q, k = (x.repeat_interleave(groups, 2) + bias for x, bias in ((Q, Q_bias), (K, K_bias)))
    angle = (torch.tanh(Angles) * math.pi * DT.transpose(1, 2)[..., None]).cumsum(1)

    def rotated(x):
        x0, x1 = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x0 * angle.cos() - x1 * angle.sin(), x0 * angle.sin() + x1 * angle.cos()), -1).flatten(-2)

    gamma = DT * torch.sigmoid(Trap)
    scale = gamma + F.pad((DT * torch.sigmoid(-Trap))[..., 1:], (0, 1))
    decay = ADT.cumsum(-1)
    decay = (decay[..., :, None] - decay[..., None, :]).tril(-1).exp().tril(-1)
    weights = torch.einsum("bthn,bshn->bhts", rotated(q), rotated(k)) * decay * scale[:, :, None, :]
    here = (gamma * torch.einsum("bshn,bshn->bhs", q, k) + D[:, None]).transpose(1, 2)[..., None]
    return (torch.einsum("bhts,bshp->bthp", weights, V) + here * V) * F.silu(Z)


NAMES = ("dQ", "dK", "dV", "dADT", "dDT", "dTrap", "dQ_bias", "dK_bias", "dAngles", "dD", "dZ")


def inputs(B, S, G, H, N, P, device):
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, device=device)  # noqa: E731
    DT = 0.05 + 0.2 * uniform(B, H, S)
    half = lambda x: x.to(torch.bfloat16)  # noqa: E731
    return [half(normal(B, S, G, N)), half(normal(B, S, G, N)), half(normal(B, S, H, P)), -2 * uniform(B, H, S) * DT, DT,
            half(normal(B, H, S)), 0.1 * normal(H, N), 0.1 * normal(H, N), half(3 * normal(B, S, H, N // 2)), normal(H),
            half(normal(B, S, H, P))], half(normal(B, S, H, P))  # fmt: skip


def gradients(function, tensors, out_grad):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    function(*leaves).backward(out_grad)
    return [leaf.grad for leaf in leaves]


def by_kernel(chunk, lengths=None):
    ends = (
        None
        if lengths is None
        else torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)
    )
    return lambda *leaves: siso.mamba3_siso_combined(*leaves, chunk_size=chunk, cu_seqlens=ends)


def by_definition(lengths=None):
    def function(*leaves):
        outs, start = [], 0
        for length in lengths or [leaves[2].shape[1]]:
            part = slice(start, start + length)
            cut = [x[..., part] if i in (3, 4, 5) else x[:, part] if i in (0, 1, 2, 8, 10) else x for i, x in enumerate(leaves)]
            outs.append(reference(*cut))
            start += length
        return torch.cat(outs, 1)

    return function


if options.codegen:
    try:
        found, without = compiled(bwd, 64, 128, 32), compiled(bwd, 64, 128, 32, cse=False)
    except triton.CompilationError as error:
        print(error)
        finish("UNTESTABLE", "compile")
    metrics.update(triton=triton.__version__, compiled=found, without_cse=without)
    for name, what in (("as compiled", found), ("without CSE", without)):
        print(f"{name}: V @ dO^T {what['products']}, all dots {what['dots']}; wgmma {what['wgmma']}, mma {what['mma']}, "
              f"shared {what['shared_bytes']} B, cubin {what['cubin_bytes']} B, PTX {what['ptx_sha256'][:12]}")  # fmt: skip
    report_products(found["products"]["as written"], "as written")
    state("note", "Triton's CSE merges them", found["products"]["at the end"] == 1)
    state("control", "K @ Q^T is found too: the counting works", found["dots"]["as written"] > found["products"]["as written"])
    if patched:
        other = compiled(original(), 64, 128, 32)
        metrics["original"] = other
        state("note", "the same PTX as the release's", other["ptx_sha256"] == found["ptx_sha256"])
    finish("REPRODUCED" if metrics["products"] > 1 else "ABSENT")

device = "cpu" if interpreted else "cuda"
limit = 1e-5 if interpreted else 0.1  # relative; the kernels compute in fp32 there, in bf16 here
original_bwd = original() if patched else None
for module in (
    sys.modules[siso.angle_dt_fwd.__module__],
    sys.modules[siso.mamba3_siso_fwd.__module__],
    bwd,
    *([original_bwd] if patched else []),
):
    one_config(module)
small = [
    ("dense", (2, 32, 4, 4, 32, 64), 16, None),
    ("GQA, ragged", (1, 37, 2, 4, 32, 64), 16, None),
    ("varlen", (1, 48, 2, 4, 32, 64), 16, (20, 1, 27)),
]
large = [
    ("S=256", (2, 256, 8, 8, 64, 64), 64, None),
    ("S=4096", (1, 4096, 1, 24, 64, 128), 64, None),
    ("varlen", (1, 1000, 1, 8, 64, 64), 64, (200, 1, 300, 499)),
]
counted = []
if interpreted:  # each product that the interpreter executes, by its shape: no other is [chunk, P] x [P, chunk]
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def counting(self, a, b, *rest):
        counted.append((a.data.shape, b.data.shape))
        return create_dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = counting
digest = hashlib.sha256()
for name, shape, chunk, lengths in small if interpreted else large:
    tensors, out_grad = inputs(*shape, device)
    B, S, G, H, N, P = shape
    counted.clear()
    found = gradients(by_kernel(chunk, lengths), tensors, out_grad)
    if interpreted:
        chunks = B * H * sum(math.ceil(length / chunk) for length in lengths or [S])
        executed = counted.count(((chunk, P), (P, chunk))) / chunks
    for grad in found:
        digest.update(grad.float().cpu().numpy().tobytes())
    again = gradients(by_kernel(chunk, lengths), tensors, out_grad)
    state("control", f"{name}: a second run is bitwise equal", all(map(torch.equal, found, again)))
    if patched:
        fixed, siso.compute_dqkv = siso.compute_dqkv, original_bwd.compute_dqkv
        released = gradients(by_kernel(chunk, lengths), tensors, out_grad)
        siso.compute_dqkv = fixed
        state(
            "control",
            f"{name}: all {len(found)} gradients bitwise equal to the release's",
            all(map(torch.equal, found, released)),
        )
    right = gradients(by_definition(lengths), [t.double() for t in tensors], out_grad.double())
    errors = {n: ((g.double() - r).norm() / r.norm()).item() for n, g, r in zip(NAMES, found, right, strict=True)}
    metrics.setdefault("errors", {})[name] = errors
    # The angles are summed over the sequence in bf16 on a GPU, so theirs and dDT's errors grow with S; the kernel at issue has no part in it.
    own = {n: e for n, e in errors.items() if interpreted or n in ("dQ", "dK", "dV", "dADT", "dD", "dZ")}
    worst = max(own, key=lambda name: (math.isnan(own[name]), own[name]))  # Python's max drops NaN
    print("         " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    state(
        "control",
        f"{name} B={B} S={S} G={G} H={H} N={N} P={P}: gradients against fp64, worst {worst}",
        None,
        error=errors[worst],
        limit=limit,
    )
    if options.measure and patched and lengths is None:
        metrics.setdefault("ms", {})[name] = timed(tensors, out_grad, chunk)
        print(f"         {name}: compute_dqkv {metrics['ms'][name]}")
metrics["gradients_sha256"] = digest.hexdigest()
if patched:
    facts["claims"] = ["BITWISE_IDENTICAL"]
if interpreted:
    report_products(round(executed), "executed")
else:
    report_products(compiled(bwd, 64, 128, 32)["products"]["as written"], "as written")
finish("REPRODUCED" if metrics["products"] > 1 else "ABSENT")
