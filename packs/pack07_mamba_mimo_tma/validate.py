"""The deep check of a fix of pack07: output and 14 gradients are the release's, bit for bit; on a GPU also with TMA on.

Dense sequences; one group for all heads, and one for each. The kernels of varlen are others, which a fix may not touch: they are not tried.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from repro import FACTS, check, finish, release

on_cpu = os.environ.get("TRITON_INTERPRET") == "1"  # lane tilelang-cpu: kernels run on the CPU, in fp32
device, dtype = ("cpu", torch.float32) if on_cpu else ("cuda", torch.bfloat16)
#: The backward asks for S that is a multiple of the chunk. On a CPU no two sizes of a tile are the same: a transposed one would not fit, or give other numbers.
B, S, H, R, N, P, CHUNK = (2, 40, 5, 3, 48, 16, 8) if on_cpu else (2, 256, 6, 4, 128, 32, 16)
if "--state" in sys.argv and not on_cpu:
    N = int(sys.argv[sys.argv.index("--state") + 1])
SIDES = "released", "TMA off", "TMA on"
MAMBA3 = "mamba_ssm.ops.tilelang.mamba3"
#: What is given of MIMO_Z (9), MIMO_Out (10), D (12) and Z (13), by their places among the arguments: with the cases that have
#: all of them, each two of D, Z and MIMO_Out are both given, both left out, and one without the other.
GIVEN = {"D alone": (9, 12), "Z alone, rotated throughout": (9, 13), "MIMO_Out alone": (10,)}
CASES = "G=1", f"G={H} of H={H}", *GIVEN
VARLEN = "mamba3_mimo_bwd_varlen.py"


def modules(side):
    """The function that calls the kernels; on the fixed sides those of its backward are built with TMA on or off, whatever the fix asks for."""
    import tilelang
    import triton

    jit, keys = tilelang.jit, tilelang.PassConfigKey
    off = side == "TMA off"
    passes = {keys.TL_DISABLE_TMA_LOWER: off, keys.TL_DISABLE_WARP_SPECIALIZED: off, keys.TL_ENABLE_FAST_MATH: True}
    tilelang.jit = jit if side == "released" else lambda **given: jit(**{**given, "pass_configs": passes})
    backward = release()
    tilelang.jit = jit
    forward = importlib.import_module(f"{MAMBA3}.mamba3_mimo")
    assert forward.mamba_mimo_bwd_combined is backward.mamba_mimo_bwd_combined
    for module in [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton")]:
        for kernel in vars(module).values():  # autotuning of the small kernels beside these takes minutes
            if isinstance(kernel, triton.runtime.Autotuner):
                kernel.configs = kernel.configs[:1]
    return forward.mamba3_mimo


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


def case(name):
    """The arguments of a case, the gradient of its output, and which share of the channels is rotated (one in ...)."""
    if name not in GIVEN:
        return *inputs(1 if name == CASES[0] else H), 4
    divisor = 2 if "rotated" in name else 4
    tensors, grad = inputs(H, divisor)
    some = [None if i in (9, 10, 12, 13) and i not in GIVEN[name] else t for i, t in enumerate(tensors)]
    return some, grad if 10 in GIVEN[name] else torch.randn(B, S, R, H, P, device=device).to(dtype), divisor


def run(side):
    """For each case, of the output and of the gradients of the tensors that there are: their bytes' SHA-256, and whether they are finite and not zero.

    A second run has to give the same. Beside it, the TMA loads of the backward's kernels that were built.
    """
    mamba3_mimo, found = modules(side), {}
    for name in CASES * 2:
        tensors, grad, divisor = case(name)
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
        out = mamba3_mimo(*leaves, chunk_size=CHUNK, rotary_dim_divisor=divisor, dtype=dtype)
        out.backward(grad)
        # MIMO_Z has no gradient where there is no Z.
        grads = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
        seen = [t.detach().cpu().contiguous() for t in (out, *grads)]
        digests = [hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for t in seen]
        rows = list(zip(digests, [bool(t.isfinite().all() and t.any()) for t in seen], strict=True))
        if found.setdefault(name, rows) != rows:
            raise RuntimeError(f"{name}: a second run gives other numbers")
    texts = [path.read_text() for path in Path(os.environ["TILELANG_CACHE_DIR"]).rglob("*.cu")]
    loads = [text.count("tl::tma_load") for text in texts if "mamba_mimo_bwd" in text]
    varlen = hashlib.sha256(Path(FACTS["file"]).with_name(VARLEN).read_bytes()).hexdigest()
    print(json.dumps({"file": FACTS["file"], "cases": found, "loads": loads, "varlen": varlen}))


def ran(side):
    """`run` in a process of its own, for each compiles for minutes; without the overlay for the release's own kernels."""
    overlay, environment = str(Path(FACTS["file"]).parents[4]), dict(os.environ)
    if side == "released":
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path.rstrip("/") != overlay]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["TILELANG_CACHE_DIR"] = (
        f"{environment.get('TILELANG_CACHE_DIR', tempfile.gettempdir())}/{side.replace(' ', '-')}"
    )
    done = subprocess.run([sys.executable, *sys.orig_argv[1:], side], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["file"] == FACTS["file"]) == (side != "released"), f"{side} ran {found['file']}"
    return found


def main():
    if not on_cpu and not torch.cuda.is_available():
        print("The kernels run on an NVIDIA GPU, and torch sees none; nox -s pack07 runs them through TileLang's C backend.")
        finish("UNTESTABLE", "no-device")
    if not on_cpu and torch.cuda.get_device_capability()[0] < 9:
        print(
            "TMA needs a GPU of compute capability 9.0 or newer; nox -s pack07 without a GPU runs the kernels through TileLang's C backend."
        )
        finish("UNTESTABLE", "no-device")
    release()
    FACTS["evidence"] = "interpreter" if on_cpu else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    sides = SIDES[: 2 if on_cpu else 3]
    with ThreadPoolExecutor(min(len(sides), os.cpu_count() or 1)) as pool:
        released, *others = pool.map(ran, sides)
    for side, found in zip(sides, (released, *others), strict=True):
        if not on_cpu:
            check(
                "control",
                f"{side}: the backward's kernels load by TMA: {found['loads']}",
                any(found["loads"]) == (side == "TMA on"),
            )
            check("control", f"{side}: the backward's kernels were built", len(found["loads"]) > 1)
    untouched = all(found["varlen"] == released["varlen"] for found in others)
    check("control", f"{VARLEN}, which is not tried, is the release's own", untouched)
    for name, before in released["cases"].items():
        check("control", f"{name}: what the release computes is finite and not zero", all(sound for _, sound in before))
        for side, found in zip(sides[1:], others, strict=True):
            other = [i for i, (a, b) in enumerate(zip(found["cases"][name], before, strict=True)) if a != b]
            print(f"          {name}, {side}: {len(before)} tensors, others than the release's: {other or 'none'}")
            check("trigger", f"{name}, {side}: output and gradients are the release's, bit for bit", not other)
    FACTS["claims"] = {"BITWISE_IDENTICAL": "bit for bit"}
    finish()


if __name__ == "__main__":
    run(sys.argv[-1]) if sys.argv[-1] in SIDES else main()
