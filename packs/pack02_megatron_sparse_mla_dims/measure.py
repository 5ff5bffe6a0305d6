"""Peak memory of the unfused path and, on the patched side, of the fused one: 16 heads, 192/128, top-k of 512. Needs a GPU, no verdict."""

import importlib
import os

import torch
from repro import DSA, FACTS, finish, release


def peak(function, S, **known):
    """GiB above the inputs at the peak of forward and backward, B=1; None where memory does not suffice."""
    query, key = (torch.randn(S, 1, n, 192, device="cuda").to(torch.bfloat16).requires_grad_() for n in (16, 1))
    indices = (torch.arange(S, device="cuda")[:, None] - torch.arange(512, device="cuda")).clamp_min(-1)[None]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        function(query, key, indices, 192**-0.5, 128, **known).float().sum().backward()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main():
    if not torch.cuda.is_available():
        print("It measures a GPU, and torch sees none here.")
        finish("UNTESTABLE", "no-device")
    dispatcher = release()
    dsa = importlib.import_module(f"{DSA}.dsa")
    for S in (1024, 2048, 4096, 8192, 16384, 32768):
        rows = torch.arange(S, device="cuda")
        causal = {"varlen_starts": 0 * rows, "varlen_ends": rows + 1, "key_positions": rows}
        row = {"unfused": peak(dsa._unfused_absorbed_dsa_fn, S, **causal)}
        if os.environ.get("REPRODUCER_SIDE") == "patched":
            row["fused"] = peak(dispatcher.fused_sparse_mla_absorbed, S)
        FACTS["metrics"][f"S={S}, GiB"] = row
        print(f"S={S}: GiB {row}", flush=True)
    finish("MEASURED")


if __name__ == "__main__":
    main()
