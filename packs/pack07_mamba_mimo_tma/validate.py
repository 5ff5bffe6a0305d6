"""The deep check of a fix of pack07: output and 14 gradients are the release's, bit for bit; on a GPU also with TMA on.

Dense sequences; one group for all heads, and one for each. The kernels of varlen are others, which the fix does not touch.
"""

import importlib
import os
import sys
from pathlib import Path

import torch
from repro import FACTS, check, finish, release

on_cpu = os.environ.get("TRITON_INTERPRET") == "1"  # lane tilelang-cpu: kernels run on the CPU, in fp32
device, dtype = ("cpu", torch.float32) if on_cpu else ("cuda", torch.bfloat16)
#: The backward asks for S that is a multiple of the chunk. On a CPU no two sizes of a tile are the same: a transposed one would not fit, or give other numbers.
B, S, H, R, N, P, CHUNK = (2, 40, 5, 3, 48, 16, 8) if on_cpu else (2, 256, 6, 4, 64, 32, 16)
MAMBA3 = "mamba_ssm.ops.tilelang.mamba3"


def modules(tma=False):
    """The function that calls the kernels, and the module of those of its backward, imported anew; with ``tma``, built with TMA on."""
    import tilelang
    import triton

    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    jit, keys = tilelang.jit, tilelang.PassConfigKey
    passes = {keys.TL_DISABLE_TMA_LOWER: False, keys.TL_DISABLE_WARP_SPECIALIZED: False, keys.TL_ENABLE_FAST_MATH: True}
    release()
    del sys.modules[f"{MAMBA3}.mamba3_mimo_bwd"]
    tilelang.jit = (lambda **given: jit(**{**given, "pass_configs": passes})) if tma else jit
    backward = importlib.import_module(f"{MAMBA3}.mamba3_mimo_bwd")
    tilelang.jit = jit
    forward = importlib.import_module(f"{MAMBA3}.mamba3_mimo")
    assert forward.mamba_mimo_bwd_combined is backward.mamba_mimo_bwd_combined
    for module in [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton")]:
        for kernel in vars(module).values():  # autotuning of the small kernels beside these takes minutes
            if isinstance(kernel, triton.runtime.Autotuner):
                kernel.configs = kernel.configs[:1]
    return forward, backward


def as_released():
    """The release's own modules: the folder that hides them on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = str(Path(file).parents[4])
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    found = modules()
    sys.path.insert(0, overlay)
    assert FACTS["file"] != file, "the fixed file is the release's"
    FACTS["file"] = file
    return found


def inputs(G, divisor=4):
    """The function's arguments in its order, and the gradient of its output [B, S, H, P]: Q, K [B, S, R, G, N]; V, Z [B, S, H, P]."""
    torch.manual_seed(0)
    shapes = (B, S, R, G, N), (B, S, R, G, N), (B, S, H, P), (B, H, S), (B, S, H, P), (B, S, H, P)
    q, k, v, trap, z, grad = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    DT = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    ADT = -2 * torch.rand(B, H, S, device=device) * DT
    biases = [torch.randn(H, R, N, device=device) for _ in range(2)]
    weights = [1 + 0.1 * torch.randn(H, R, P, device=device) for _ in range(3)]
    angles = 3 * torch.rand(B, S, H, N // divisor, device=device)
    return [q, k, v, ADT, DT, trap, *biases, *weights, angles, torch.randn(H, device=device), z], grad


def run(mamba3_mimo, tensors, grad, divisor=4):
    """The output and the gradients of the tensors that there are."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    out = mamba3_mimo.mamba3_mimo(*leaves, chunk_size=CHUNK, rotary_dim_divisor=divisor, dtype=dtype)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def main():
    if not on_cpu and not torch.cuda.is_available():
        print("The kernels run on an NVIDIA GPU, and torch sees none; nox -s pack07 runs them through TileLang's C backend.")
        finish("UNTESTABLE", "no-device")
    release()
    sides = {"TMA off": modules()} | ({} if on_cpu else {"TMA on": modules(tma=True)})
    released = as_released()
    FACTS["evidence"] = "interpreter" if on_cpu else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    cases = {f"G={G} of H={H}": (*inputs(G), 4) for G in (1, H)}
    tensors, _ = inputs(H, divisor=2)
    bare = [*tensors[:9], None, None, tensors[11], None, None]
    cases["without D, Z and MIMO_Out, rotated throughout"] = bare, torch.randn(B, S, R, H, P, device=device).to(dtype), 2
    for case, given in cases.items():
        before = run(released[0], *given)
        sound = [bool(t.isfinite().all()) and bool(t.any()) for t in before]
        check("control", f"{case}: what the release computes is finite and not zero", all(sound))
        for name, (mamba3_mimo, _) in sides.items():
            found = run(mamba3_mimo, *given)
            other = [i for i, (a, b) in enumerate(zip(found, before, strict=True)) if not torch.equal(a, b)]
            print(f"          {case}, {name}: {len(found)} tensors, others than the release's: {other or 'none'}")
            check("trigger", f"{case}, {name}: output and gradients are the release's, bit for bit", not other)
    FACTS["claims"] = {"BITWISE_IDENTICAL": "bit for bit"}
    finish()


if __name__ == "__main__":
    main()
