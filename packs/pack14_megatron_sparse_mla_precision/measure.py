"""dKV's and dQ's error and the backward kernel's time over context length, as released and with more bits. No verdict."""

import argparse
from types import SimpleNamespace

import torch
from alternatives import load
from repro import FACTS, HOPPER, attention, error, finish, inputs, launched, release

HEADS, FORMS = 64, ("released", "bf16 high + low")
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


def cases():
    """D, tail, top-k, tokens, what the scores are like, factor of the queries, mean of the keys' channels beside the values."""
    for D, topk in ((512, 256), (512, 2048), (64, 256), (64, 2048)):
        for S in (512, 2048, 8192, 32768, 131072):
            yield D, 64, topk, S, "flat", 0.3, 0
            if S < 131072:
                yield D, 64, topk, S, "peaked", 4.0, 0
    for mean in (4, 8, 16):
        yield 512, 64, 2048, 8192, f"key mean {mean}", 1.0, mean


def right_delta(q, kv, do, indices):
    """The row sums of O * dO [1, S, H] fp32 that the backward takes from dS: of O in fp64, where the release has it in bf16."""
    delta = torch.empty(q.shape[:3], dtype=torch.float32)
    for rows in torch.arange(q.shape[1]).split(2**16 // indices.shape[3]):
        at, x = indices[0, rows, 0].long(), q[0, rows].double()
        keys = kv[0, at.clamp(min=0), 0].double()
        p = (x @ keys.mT * q.shape[3] ** -0.5).masked_fill((at < 0)[:, None], float("-inf")).softmax(-1)
        delta[0, rows] = ((p @ keys[..., : do.shape[3]]) * do[0, rows]).sum(-1).float()
    return delta


def main():
    fwd, bwd = release()
    if not HOPPER:
        print("It measures a Hopper GPU, and there is none here.")
        finish("UNTESTABLE", "no-device")
    FACTS["evidence"] = "device:sm_90"
    modules = {form: load(bwd, form) for form in FORMS}
    for D, tail, topk, S, name, sharpness, mean in cases():
        given = inputs(S, HEADS, D, tail, topk, sharpness, mean)
        right = attention(*given)
        forms = dict(modules)
        if mean:
            delta = right_delta(*given)
            known = {"_get_preprocess_kernel": lambda H, D, delta=delta: lambda out, do: delta}
            forms |= {f"{form}, right delta": SimpleNamespace(**{**vars(m), **known}) for form, m in modules.items()}
        for form, module in forms.items():
            (dq, dkv, summed), once_more = launched(fwd, module, *given)
            found = {"dq": error(dq, right[0]), "dkv": error(dkv, right[1]), "dkv before rounding": error(summed, right[1])}
            found |= {"least dq": error(right[0].bfloat16(), right[0]), "least dkv": error(right[1].bfloat16(), right[1])}
            found["ms"] = milliseconds(once_more)
            FACTS["metrics"][f"{D + tail}/{D} topk {topk} S {S} {name} {form}"] = found
            print(f"{D + tail}/{D} topk {topk} S {S} {name} {form}: {found}", flush=True)
        del given, right, dq, dkv, summed, once_more
    finish("MEASURED")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
