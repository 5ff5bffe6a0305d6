"""The deep check of a fix of pack07: output and all gradients are, bit for bit, the release's, and right against the definition in fp64.

Runs after repro.py on the patched side. The kernels run with TMA off, as the fix leaves them, and on a GPU with TMA on, too.
Shared memory with TMA off is the release's to the byte.
"""

import importlib
import math
import os
import sys
from pathlib import Path

import torch
from repro import FACTS, KERNELS, check, finish, lowered, release

sys.path.append(str(Path(__file__).parents[1] / "pack05_mamba_mimo_gqa"))
from mimo import NAMES, definition, inputs, off, run

on_cpu = os.environ.get("TRITON_INTERPRET") == "1"  # lane tilelang-cpu: kernels run on the CPU, in fp32
device, dtype, LIMIT = ("cpu", torch.float32, 1e-5) if on_cpu else ("cuda", torch.bfloat16, 0.1)
#: B, S, G, H, R, N, P and the chunk.
SHAPES = (
    [((2, 16, 4, 4, 2, 16, 16), 8), ((1, 32, 1, 4, 2, 16, 16), 8)]
    if on_cpu
    else [((2, 256, 16, 16, 4, 64, 64), 16), ((1, 1024, 1, 32, 4, 128, 64), 16)]
)


def original():
    """The release's own modules: what the patched ones hide on sys.path is imported for once in their place."""
    file = FACTS["file"]
    overlay = str(Path(file).parents[4])
    patched = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "mamba_ssm"}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    own = modules()
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(patched)
    FACTS["file"] = file
    return own


def modules():
    """The function that calls the kernels, and the module of the kernels of its backward."""
    import triton

    backward = release()
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo

    for module in [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton")]:
        for kernel in vars(module).values():  # autotuning of the small kernels beside these takes minutes
            if isinstance(kernel, triton.runtime.Autotuner):
                kernel.configs = kernel.configs[:1]
    return mamba3_mimo, backward


def with_tma():
    """The patched modules, the backward's kernels built with TMA lowering and warp specialisation on."""
    import tilelang

    jit, keys = tilelang.jit, tilelang.PassConfigKey
    passes = {keys.TL_DISABLE_TMA_LOWER: False, keys.TL_DISABLE_WARP_SPECIALIZED: False, keys.TL_ENABLE_FAST_MATH: True}
    mine = {f"mamba_ssm.ops.tilelang.mamba3.{name}": None for name in ("mamba3_mimo", "mamba3_mimo_bwd")}
    mine = {name: sys.modules.pop(name) for name in mine}
    tilelang.jit = lambda *given, **named: jit(*given, **({**named, "pass_configs": passes} if named else named))
    found = modules()
    tilelang.jit = jit
    sys.modules.update(mine)
    return found


def main():
    if not on_cpu and not torch.cuda.is_available():
        print("The kernels run on an NVIDIA GPU, and torch sees none; nox -s pack07 runs them through TileLang's C backend.")
        finish("UNTESTABLE", "no-device")
    fixed, released = modules(), original()
    sides = {"as released": released, "fixed": fixed} | ({} if on_cpu else {"fixed, TMA on": with_tma()})
    FACTS["evidence"] = "interpreter" if on_cpu else "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    for (B, S, G, H, R, N, P), chunk in SHAPES:
        shape = f"B={B} S={S} G={G} H={H} R={R} N={N} P={P}"
        tensors, grad = inputs(B, S, G, H, R, N, P, device, dtype)
        right_out, right = run(definition, [t.double() for t in tensors], grad.double())
        before = None
        for name, (mamba3_mimo, _) in sides.items():

            def function(*leaves, module=mamba3_mimo, chunk=chunk):
                return module.mamba3_mimo(*leaves, chunk_size=chunk, rotary_dim_divisor=4, dtype=dtype)

            out, found = run(function, tensors, grad)
            errors = {"output": off(out, right_out)} | {n: off(g, r) for n, g, r in zip(NAMES, found, right, strict=True)}
            FACTS["metrics"].setdefault("errors", {})[f"{shape}, {name}"] = errors
            worst = max(error if math.isfinite(error) else math.inf for error in errors.values())
            role = "control" if before is None else "trigger"
            check(role, f"{shape}, {name}: output and 14 gradients against fp64", error=worst, limit=LIMIT)
            before = before or [out, *found]
            if role == "trigger":
                same = all(map(torch.equal, [out, *found], before))
                check("trigger", f"{shape}, {name}: output and 14 gradients are the release's, bit for bit", same)
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path not in FACTS["file"])}
    first = next(iter(KERNELS))  # the second takes minutes, or does not compile: variants lower it
    fixed, released = (lowered(first, "off", "0", env=env).get("shared_bytes") for env in (None, own))
    FACTS["metrics"]["shared_bytes"] = {"fixed": fixed, "as released": released}
    check("trigger", f"{first}, TMA off: the release's shared memory to the byte", fixed is not None and fixed == released)
    FACTS["claims"] = {"BITWISE_IDENTICAL": "bit for bit"}
    finish()


if __name__ == "__main__":
    main()
