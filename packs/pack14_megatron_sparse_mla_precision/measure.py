"""dKV's and dQ's error and the backward kernel's time over context length, for what the release does and with more bits. No verdict."""

import argparse
import itertools

import torch
from repro import FACTS, FORMS, HOPPER, errors, finish, inputs, release

HEADS = 64
RUNS, WARM_UP = 10, 2


def milliseconds(run):
    """Median of RUNS calls of the backward kernel alone."""
    times, start, stop = [], torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_UP + RUNS):
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[WARM_UP:])[RUNS // 2]


def main():
    kernels = release()
    if not HOPPER:
        print("It measures a Hopper GPU, and there is none here.")
        finish("UNTESTABLE", "no-device")
    for (D, tail), topk in itertools.product(((512, 64), (64, 64)), (256, 2048)):
        for S, (name, sharpness) in itertools.product((512, 2048, 8192, 32768, 131072), (("flat", 0.3), ("peaked", 4.0))):
            if S == 131072 and (topk == 2048 or name == "peaked"):
                continue  # its fp64 definition takes minutes
            given = inputs(S, HEADS, D, tail, topk, sharpness)
            right = kernels.attention(*given)
            for form in FORMS:
                got = kernels.launched(form, *given)
                found = {**errors(got, *right), "ms": milliseconds(got[3])}
                FACTS["metrics"][f"{D + tail}/{D} topk {topk} S {S} {name} {form}"] = found
                print(f"{D + tail}/{D} topk {topk} S {S} {name} {form}: {found}", flush=True)
            del given, right, got
    finish("MEASURED")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
