"""The FP8 kernel of the fix against the bf16 one, S=4096, H=64, 8192 keys, top-k of 2048: error against fp64, time, shared memory, bytes. Needs a GPU."""

import repro
import torch
import validate
from repro import FACTS, SCALE, TOTAL, VALUE, finish, fp8

S, KEYS, TOPK, H = 4096, 8192, 2048, 64


def milliseconds(call, runs=20):
    """Median of a call after three others."""
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[runs // 2]


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def main():
    if not repro.on_gpu or not hasattr(repro.fwd, "sparse_mla_fwd_fp8"):
        print("This needs a GPU, and the fix: only the patched side has an FP8 kernel.")
        finish("UNTESTABLE", "no-device" if not repro.on_gpu else "no-api")
    torch.manual_seed(0)
    query, key = (torch.randn(s, 1, h, TOTAL, device="cuda").to(torch.bfloat16) for s, h in ((S, H), (KEYS, 1)))
    indices = torch.randint(0, KEYS, (1, S, TOPK), device="cuda")
    rows = slice(0, 256)
    q8, k8 = fp8(query), fp8(key)
    want = validate.definition(query[rows], key, indices[:, rows])
    quantized = validate.definition(q8.dequantize()[rows], k8.dequantize(), indices[:, rows])
    index, scales = indices[:, :, None].int().contiguous(), torch.cat([q8._scale_inv, k8._scale_inv])
    plain = [t.permute(1, 0, 2, 3).contiguous() for t in (query, key)]
    bytes8 = [t._data.permute(1, 0, 2, 3).contiguous().view(torch.float8_e4m3fn) for t in (q8, k8)]
    flop = 2 * S * H * TOPK * (TOTAL + VALUE)
    for name, pair, more, exact, size in (("bf16", plain, {}, want, 2), ("fp8", bytes8, {"scales": scales}, quantized, 1)):

        def call(pair=pair, more=more):
            return repro.fwd.sparse_mla_fwd_interface(*pair, index, sm_scale=SCALE, **more)

        ms, out = milliseconds(call), call()[0].permute(1, 0, 2, 3)[rows]
        FACTS["metrics"][name] = row = {
            "ms": ms,
            "TFLOP/s": flop / ms / 1e9,
            "error": error(out, want),
            "error for its inputs": error(out, exact),
            "bytes read": (query.numel() + S * TOPK * TOTAL) * size,
        }
        print(f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in row.items()))
    FACTS["metrics"]["fp8"]["shared memory"] = validate.lowered(TOPK)[1]
    finish("MEASURED")


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.tensors, repro.QuantizedTensor = repro.release()
    repro.dispatched, repro.SparseMLA, repro.fwd = repro.consumer()
    main()
