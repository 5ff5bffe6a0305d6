"""The deep check of pack03's fix: other formats, gradients, one FP8 operand; the FP8 kernel is lowered for sm_90, and on a GPU its output is compared with fp64.

Runs after repro.py on the patched side.
"""

import repro
import torch
from repro import SCALE, TOTAL, VALUE, check, finish, fp8, inputs, used

FP8, BF16 = ["float8_e4m3fn"] * 2, ["bfloat16"] * 2
called = []  # kernels that `chosen` was given, by their names


def definition(query, key, indices):
    """Attention of each row over its keys in fp64, [S, B, H, 512]; 64 rows at a time, for memory."""
    out = query.new_zeros(*query.shape[:3], VALUE, dtype=torch.float64)
    for b in range(query.shape[1]):
        for start in range(0, query.shape[0], 64):
            chosen = indices[b, start : start + 64].long()
            keys = key[chosen.clamp_min(0), b, 0].double()
            scores = torch.einsum("shd,skd->shk", query[start : start + 64, b].double(), keys) * SCALE
            weights = scores.masked_fill((chosen < 0)[:, None], float("-inf")).softmax(-1)
            out[start : start + 64, b] = torch.einsum("shk,skd->shd", weights, keys[..., :VALUE])
    return out


def lowered(topk):
    """CUDA code of the FP8 kernel that a call of H=64 and ``topk`` keys builds, for sm_90, and its bytes of shared memory."""
    import tilelang
    from tilelang import tvm

    build = repro.fwd.sparse_mla_fwd_fp8
    function = build.get_tir(64, VALUE, TOTAL - VALUE, topk, 1, SCALE)
    passes = {getattr(key, "value", key): setting for key, setting in (build.pass_configs or {}).items()}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        found = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    functions = found.device_mod.functions.values()
    return str(found.kernel_source), sum(
        int(f.attrs["dyn_shared_memory_buf"]) for f in functions if "dyn_shared_memory_buf" in f.attrs
    )


def chosen(given, in_fp8):
    """Which of the two kernels the release's cache of kernels gives a call of its interface."""
    query, key, indices = given
    index, pair, more = indices[:, :, None].int().contiguous(), [t.permute(1, 0, 2, 3).contiguous() for t in (query, key)], {}
    if in_fp8:
        pair, more = [t.to(torch.float8_e4m3fn) for t in pair], {"scales": torch.ones(2, device=repro.device)}
    built = {name: getattr(repro.fwd, name) for name in ("sparse_mla_fwd", "sparse_mla_fwd_fp8")}
    for name in built:
        setattr(repro.fwd, name, lambda *_, name=name, **__: lambda q, *_: built_as(name, q))

    def built_as(name, q):
        called.append(name)
        return torch.zeros(*q.shape[:3], VALUE), torch.zeros(q.shape[:3])

    try:
        repro.fwd.sparse_mla_fwd_interface(*pair, index, sm_scale=0.1 + SCALE, **more)  # a scale that no other call has
    finally:
        for name, function in built.items():
            setattr(repro.fwd, name, function)
    return {"sparse_mla_fwd": "bf16", "sparse_mla_fwd_fp8": "fp8"}[called[-1]]


def main():
    for B in (1, 2):
        query, key, indices = inputs(B)
        q8, k8 = fp8(query), fp8(key)
        with torch.no_grad():
            _, seen = used(repro.dispatched, query, key, indices, SCALE, VALUE)
            check(
                "control", f"B={B}: bf16 reaches the kernel as it is", [each["tensors"] for each in seen["launched"]] == [BF16]
            )
            out, seen = used(repro.dispatched, q8, k8, indices, SCALE, VALUE)
            given = [(each["tensors"], each["pointer 0"], each["scales"]) for each in seen["launched"]]
            check(
                "trigger",
                f"B={B}: FP8 data and scales reach the kernel, nothing is dequantized",
                (given, seen["dequantized"]) == ([(FP8, False, 1)], 0),
            )
            if repro.on_gpu:
                exact = definition(q8.dequantize(), k8.dequantize(), indices)
                check(
                    "trigger",
                    f"B={B}: output against fp64 of the same FP8 values",
                    error=(out.double() - exact).norm() / exact.norm(),
                    limit=5e-2,
                )
            for name, pair in (("query", (q8, key)), ("key", (query, k8))):
                _, seen = used(repro.dispatched, *pair, indices, SCALE, VALUE)
                given = [(each["tensors"], each["pointer 0"]) for each in seen["launched"]]
                check(
                    "trigger",
                    f"B={B}: with FP8 in {name} alone both are bf16, dequantized with a warning",
                    given == [(BF16, False)] and seen["warned"],
                )
            wide = fp8(query)
            wide._fp8_dtype = type(wide._fp8_dtype).kFloat8E5M2
            _, seen = used(repro.dispatched, wide, k8, indices, SCALE, VALUE)
            given = [(each["tensors"], each["pointer 0"]) for each in seen["launched"]]
            check("trigger", f"B={B}: e5m2 is dequantized with a warning", given == [(BF16, False)] and seen["warned"])
        trains = fp8(query).requires_grad_()
        _, seen = used(repro.dispatched, trains, k8, indices, SCALE, VALUE)
        given = [(each["tensors"], each["pointer 0"]) for each in seen["launched"]]
        check(
            "trigger",
            f"B={B}: with gradients both are dequantized, for the FP8 kernel has no backward",
            given == [(BF16, False)] and seen["warned"],
        )
    code, shared = lowered(2048)
    check(
        "trigger",
        "the FP8 kernel for sm_90 multiplies in e4m3",
        code.count("fp8") + code.count("float8") > 0 and "bfloat16_t" in code,
    )
    check("trigger", f"it asks for {shared} bytes of shared memory, at most 227 KiB", 0 < shared <= 227 * 1024)
    names = [chosen(inputs(1), True), chosen(inputs(1), False), chosen(inputs(1), True)]
    check("trigger", f"kernels that are built for FP8, bf16 and FP8 once more: {names}", names == ["fp8", "bf16", "fp8"])
    finish()


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.tensors, repro.QuantizedTensor = repro.release()
    repro.dispatched, repro.SparseMLA, repro.fwd = repro.consumer()
    main()
