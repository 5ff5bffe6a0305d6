"""Time of a whole backward of Mamba-3 MIMO on a GPU: the release's kernels, the fixed ones, and those with TMA on, in turns. No verdict."""

import os
import statistics

import torch
from repro import FACTS, check, finish, parser
from validate import device, dtype, inputs, modules, original, with_tma

SHAPE, CHUNK, RUNS, WARM_UP = (1, 2048, 32, 32, 4, 128, 64), 16, 20, 5  # B, S, G, H, R, N, P


def traced_once(backward):
    """The host traces each kernel anew in every call, which takes longer than the kernels: once is enough, for one shape."""
    for name in ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"):
        known, build = {}, getattr(backward, name)

        def once(*args, known=known, build=build):
            if str(args) not in known:
                known[str(args)] = build(*args)
            return known[str(args)]

        setattr(backward, name, once)


def main():
    if not torch.cuda.is_available():
        print("It times a GPU, and torch sees none here.")
        finish("UNTESTABLE", "no-device")
    sides = {"as released": modules()}
    if os.environ.get("REPRODUCER_SIDE") == "patched":
        fixed, released = sides["as released"], original()
        sides = {"as released": released, "fixed, TMA off": fixed, "fixed, TMA on": with_tma()}
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    tensors, grad = inputs(*SHAPE, device, dtype)
    leaves, times = [t.requires_grad_() for t in tensors], {name: [] for name in sides}
    for _, backward in sides.values():
        traced_once(backward)
    for i in range(WARM_UP + RUNS):
        for name, (mamba3_mimo, _) in sides.items():
            out = mamba3_mimo.mamba3_mimo(*leaves, chunk_size=CHUNK, rotary_dim_divisor=4, dtype=dtype)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out.backward(grad)
            end.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end)] if i >= WARM_UP else []
    for name, ms in times.items():
        FACTS["metrics"][name] = dict(zip(("q1", "median", "q3"), statistics.quantiles(ms, n=4), strict=True))
        print(f"{name}: backward at B, S, G, H, R, N, P = {SHAPE}, ms: {FACTS['metrics'][name]}")
    check("control", "each was timed", len(times) == len(sides))
    finish("MEASURED")


if __name__ == "__main__":
    parser.parse_args()
    main()
