"""dKV's and dQ's error and the backward kernel's time over context length, for what the release does and with more bits. No verdict."""

import argparse
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from repro import FACTS, FORMS, HOPPER, errors, finish, inputs, release

HEADS = 64
RUNS, WARM_UP = 10, 2
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--compile", nargs=4, help=argparse.SUPPRESS)


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


def main(given):
    kernels = release()
    if not HOPPER:
        print("It measures a Hopper GPU, and there is none here.")
        finish("UNTESTABLE", "no-device")
    if given:  # in a process of its own, to fill TileLang's cache: kernels compile one after the other in one
        form, D, tail, topk = given[0], *map(int, given[1:])
        kernels.launched(form, *inputs(256, HEADS, D, tail, topk, 1.0))
        sys.exit()
    shapes = list(itertools.product(((512, 64), (64, 64)), (256, 2048)))
    jobs = [(form, str(D), str(tail), str(topk)) for (D, tail), topk in shapes for form in FORMS]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: subprocess.run([sys.executable, __file__, "--compile", *job]), jobs))
    for (D, tail), topk in shapes:
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
    main(parser.parse_args().compile)
