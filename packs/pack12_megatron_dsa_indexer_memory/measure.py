"""Time and peaks of forward and backward on a GPU, as released and fixed in turns, by the number of attention heads. No verdict."""

import os
import statistics

import torch
from repro import D_ATTENTION, FACTS, GIB, HEADS, B, D, H, S, finish, inputs, loss_of, release
from validate import as_released

RUNS, WARM_UP = 10, 2


def once(dsa, given):
    """ms, and the peaks of forward and backward in GiB above the inputs; None where memory does not suffice."""
    before, start, end = torch.cuda.memory_allocated(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        torch.cuda.reset_peak_memory_stats()
        start.record()
        loss = loss_of(dsa, *given)[0]
        forward = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), (forward - before) / GIB, (torch.cuda.max_memory_allocated() - before) / GIB
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        for tensor in given:
            tensor.grad = None


def main():
    modules = {"fixed" if os.environ.get("REPRODUCER_SIDE") == "patched" else "released": release()}
    if not torch.cuda.is_available():
        print("It measures a GPU, and torch sees none here.")
        finish("UNTESTABLE", "no-device")
    if "fixed" in modules:
        modules["released"] = as_released()
    for heads in (1, 16, 32, HEADS):
        given = inputs(S, B, heads, H, D_ATTENTION, D, dtype=torch.bfloat16)
        found = {name: [] for name in modules}
        for _ in range(WARM_UP + RUNS):
            for name, dsa in modules.items():
                if found[name] != [None]:
                    found[name] = [*found[name], run] if (run := once(dsa, given)) else [None]
        del given
        torch.cuda.empty_cache()
        for name, runs in found.items():
            if runs == [None]:
                FACTS["metrics"][f"{heads} heads, {name}"] = "out of memory"
                print(f"{heads:>4} attention heads, {name:<8}  out of memory")
                continue
            ms = statistics.quantiles([run[0] for run in runs[WARM_UP:]], n=4)
            forward, backward = (max(run[i] for run in runs) for i in (1, 2))
            row = {"q1": ms[0], "median": ms[1], "q3": ms[2], "forward peak GiB": forward, "backward peak GiB": backward}
            FACTS["metrics"][f"{heads} heads, {name}"] = row
            print(f"{heads:>4} attention heads, {name:<8}  {ms[1]:7.1f} ms  peaks {forward:.2f}, {backward:.2f} GiB")
    finish("MEASURED")


if __name__ == "__main__":
    main()
