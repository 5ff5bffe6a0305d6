"""Time of compute_dqkv, the release's and the fixed one in turns: medians, quartiles and the ratio, on a GPU. No verdict."""

import os
import statistics

import torch
from repro import FACTS, check, finish, inputs, parser, release
from validate import CASES, gradients, original

RUNS, WARM_UP = 30, 5


def timed(siso, released, shape, chunk):
    given = {}
    fixed = siso.compute_dqkv
    siso.compute_dqkv = lambda **arguments: given.update(arguments) or fixed(**arguments)
    gradients(lambda *leaves: siso.mamba3_siso_combined(*leaves, chunk_size=chunk), *inputs(*shape))
    siso.compute_dqkv = fixed
    times = {"release": [], "patched": []}
    for i in range(WARM_UP + RUNS):
        for name, function in (("release", released), ("patched", fixed)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            function(**given)
            end.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end)] if i >= WARM_UP else []
    found = {name: dict(zip(("q1", "median", "q3"), statistics.quantiles(ms, n=4), strict=True)) for name, ms in times.items()}
    ratios = [p / r for p, r in zip(times["patched"], times["release"], strict=True)]
    return {**found, "ratio_median": statistics.median(ratios), "ratio_stdev": statistics.stdev(ratios), "runs": RUNS}


def main():
    if not torch.cuda.is_available():
        print("It times a GPU, and torch sees none here.")
        finish("UNTESTABLE", "no-device")
    siso = release()
    released = siso.compute_dqkv if os.environ.get("REPRODUCER_SIDE") != "patched" else original().compute_dqkv
    for name, shape, chunk, lengths in CASES:
        if lengths is None:
            FACTS["metrics"][name] = timed(siso, released, shape, chunk)
            print(name, FACTS["metrics"][name])
    check("control", "each was timed", len(FACTS["metrics"]) == 2)
    finish("MEASURED")


if __name__ == "__main__":
    parser.parse_args()
    main()
