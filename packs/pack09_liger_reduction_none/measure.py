"""Time and peak memory of eager, `mean` and `none` on a GPU, medians of 10 runs, and how far `none` is off. No verdict."""

import torch
from repro import FACTS, eager, finish, liger, parser, release, run

RUNS, WARM_UP = 10, 3


def measure(function, x, w, y, reduction, scale):
    """Median ms of forward and backward, and the peak MiB of the forward and of the whole."""
    times, start, stop = [], torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_UP + RUNS):
        x.grad = w.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start.record()
        loss = (function(x, w, y, reduction=reduction) * scale).sum()
        forward = torch.cuda.max_memory_allocated() - before
        loss.backward()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    return {"ms": sorted(times[WARM_UP:])[RUNS // 2], "forward_peak_mib": forward / 2**20, "peak_mib": peak / 2**20}


def main(options):
    release()
    if not torch.cuda.is_available():
        print("It measures a GPU, and torch sees none here.")
        finish("UNTESTABLE", "no-device")
    B, S, H, V = options.shape
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.manual_seed(0)
    x = torch.randn(B * S, H, device="cuda", dtype=dtype, requires_grad=True)
    w = (torch.randn(V, H, device="cuda", dtype=dtype) / H**0.5).requires_grad_()
    y = torch.randint(0, V, (B * S,), device="cuda")
    weight = torch.rand(B * S, device="cuda")
    for name, function, reduction, scale in (
        ("eager_mean", eager, "mean", 1.0),
        ("mean", liger, "mean", 1.0),
        ("none", liger, "none", weight),
    ):
        FACTS["metrics"][name] = found = measure(function, x, w, y, reduction, scale)
        print(
            f"{name:<11} {found['ms']:.2f} ms  peak: forward {found['forward_peak_mib']:.1f} MiB, whole {found['peak_mib']:.1f} MiB"
        )
    # The two figures that articles give of this bug: the largest difference from eager, element by element.
    got, want = (run(function, (x, w), y, weight, reduction="none")[1:] for function in (liger, eager))
    for name, g, e in zip(("dx", "dw"), got, want, strict=True):
        FACTS["metrics"][f"max_abs_{name}"] = found = (g.double() - e.double()).abs().max().item()
        print(f"largest difference of {name} from eager, weights uniform in [0, 1): {found:.2e}")
    FACTS["metrics"] |= {"shape": [B, S, H, V], "dtype": options.dtype}
    finish("MEASURED")


if __name__ == "__main__":
    main(parser.parse_args())
