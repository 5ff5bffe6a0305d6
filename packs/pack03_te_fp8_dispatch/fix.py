"""The fix: the dispatcher looks for quantized tensors before it looks at dtypes.

Without gradients, FP8 data and scales of query and key go to an FP8 variant of the forward kernel, and nothing is dequantized. Everything else (gradients,
other formats, a single quantized operand) is dequantized by name, with one warning. The FP8 kernel is made from the release's bf16 one: both GEMMs take e4m3,
scores are multiplied by the two scales, weights by 256 before they become e4m3, which would lose the small ones, and the output by the key's scale over 256.
"""

import re

from common.errors import AnchorError
from common.transforms import insert_after, insert_before, replace

_OPS = "megatron/core/transformer/experimental_attention_variant/ops"
_FP8_KERNEL = {
    r"^def sparse_mla_fwd\(": "def sparse_mla_fwd_fp8(",
    r"^    dtype = T\.bfloat16\n": "    dtype, out_dtype = T.float8_e4m3fn, T.bfloat16\n",
    r"^        Output: T\.Tensor\(o_shape, dtype\)": "        Scales: T.Tensor([2], accum_dtype),\n        Output: T.Tensor(o_shape, out_dtype)",
    r"^ +O_shared = .*\n": "",
    r"^( +)T\.copy\(m_i, m_i_prev\)\n": r"\1for h_i, bi_i in T.Parallel(H_per_block, BI):\n"
    r"\1    acc_s[h_i, bi_i] = acc_s[h_i, bi_i] * Scales[0] * Scales[1]\n\g<0>",
    r"^( +)T\.copy\(acc_s, S_shared\)\n": r"\1for h_i, bi_i in T.Parallel(H_per_block, BI):\n"
    r"\1    acc_s[h_i, bi_i] = acc_s[h_i, bi_i] * 256\n\g<0>",
    r"acc_o\[h_i, d_i\] / sumexp\[h_i\]": "acc_o[h_i, d_i] * Scales[1] / (256 * sumexp[h_i])",
}
_QUANTIZED = '''\
def _quantized_types():
    """transformer-engine's quantized tensors, and their storages, which are no torch.Tensors; no types without it."""
    found = []
    for module in ("tensor", "tensor.quantized_tensor", "quantized_tensor"):
        try:
            names = vars(importlib.import_module(f"transformer_engine.pytorch.{module}"))
        except (ImportError, OSError, RuntimeError, AssertionError):
            continue
        found += [names[n] for n in ("QuantizedTensor", "QuantizedTensorStorage", "QuantizedTensorBase") if n in names]
    return tuple(found)


def is_quantized(tensor) -> bool:
    return isinstance(tensor, _quantized_types())


def fp8_parts(tensor):
    """The e4m3 data of a tensor with one scale, as bytes, and the scale's inverse; None for all others."""
    data, scale_inv = getattr(tensor, "_data", None), getattr(tensor, "_scale_inv", None)
    e4m3 = getattr(getattr(tensor, "_fp8_dtype", None), "name", "") == "kFloat8E4M3"
    return (data, scale_inv.float().reshape(1)) if e4m3 and data is not None and scale_inv.numel() == 1 else None


@functools.cache
def _warn_of_dequantizing():
    warnings.warn("SparseMLA dequantizes FP8 tensors: its FP8 kernel has no backward, and takes e4m3 with one scale", stacklevel=3)


def dequantized(tensor):
    if not is_quantized(tensor):
        return tensor
    _warn_of_dequantizing()
    return tensor.dequantize()


'''
_ROUTE = """\
    if scales is None and (is_quantized(query) or is_quantized(key)):
        parts = fp8_parts(query), fp8_parts(key)
        trains = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (query, key))
        if None not in parts and not trains:
            (query, query_scale), (key, key_scale) = parts
            scales = torch.cat([query_scale, key_scale])
        else:
            query, key = dequantized(query), dequantized(key)

"""
_LAUNCH = """\
    if scales is None:
        out, _ = SparseMLA.apply(query_bshd, key_bshd, indices_bsgk, softmax_scale)
    else:
        fp8 = (t.view(torch.float8_e4m3fn) for t in (query_bshd, key_bshd))
        out, _ = sparse_mla_fwd_interface(*fp8, indices_bsgk, sm_scale=softmax_scale, scales=scales)
        out = _zero_invalid_heads(out, _valid_head_mask(indices_bsgk, out.size(-2)))
"""


def _with_fp8_kernel(match):
    kernel = match[0]
    for anchor, code in _FP8_KERNEL.items():
        kernel, count = re.subn(anchor, code, kernel, flags=re.MULTILINE)
        if count != 1:
            raise AnchorError(f"transform 'kernel': anchor {anchor!r} was found {count} times, not once")
    return f"{match[0]}\n\n{kernel}"


FIX = {
    f"{_OPS}/sparse_mla.py": (
        insert_after("imports", r"^import torch\n", "import functools\nimport importlib\nimport warnings\n"),
        insert_before("types", r"^def _canonicalize_batch_stride\(", _QUANTIZED),
        insert_before(
            "apply",
            r"^        indices = _canonicalize_batch_stride\(indices\)\n",
            "        q, kv = dequantized(q), dequantized(kv)\n",
        ),
    ),
    f"{_OPS}/tilelang_dsa.py": (
        replace(
            "names",
            r"^    from (megatron\S*\.ops\.sparse_mla) import SparseMLA\n",
            r"    from \1 import (\n        SparseMLA, _valid_head_mask, _zero_invalid_heads,\n"
            r"        dequantized, fp8_parts, is_quantized, sparse_mla_fwd_interface,\n    )\n",
        ),
        replace("scales", r"(def fused_sparse_mla_absorbed\(\n(?:    .*\n)+?    v_channels: int,\n)", r"\1    scales=None,\n"),
        insert_before("route", r"^    if query\.ndim != 4 or key\.ndim != 4 or topk_indices\.ndim != 3:\n", _ROUTE),
        replace(
            "gate",
            r"^    if not _all_bfloat16\(query, key\):\n(?=        return None\n    if key\.size\(2\) != 1)",
            "    if scales is None and not _all_bfloat16(query, key):\n",
        ),
        replace("launch", r"^    out, _ = SparseMLA\.apply\(query_bshd, key_bshd, indices_bsgk, softmax_scale\)\n", _LAUNCH),
    ),
    f"{_OPS}/tilelang_sparse_mla_fwd.py": (
        replace("kernel", r"^@tilelang_jit\(out_idx=\[-2, -1\](?:.*\n)+?    return main\n", _with_fp8_kernel),
        replace(
            "argument", r"(def _get_sparse_mla_fwd_kernel\(\n(?:    .*\n)+?    threads: int,\n)", r"\1    fp8: bool = False,\n"
        ),
        insert_after("key", r"^    key = \(\n", "        fp8,\n"),
        replace("choice", r"lambda: sparse_mla_fwd\(", "lambda: (sparse_mla_fwd_fp8 if fp8 else sparse_mla_fwd)("),
        replace("given", r"(def sparse_mla_fwd_interface\(\n    .*), threads=256\n", r"\1, threads=256, scales=None\n"),
        replace(
            "asked",
            r"^        threads=threads,\n    \)\n    out, lse = kernel\(q, kv, indices\)\n",
            '        threads=threads,\n        **({} if scales is None else {"fp8": True}),\n    )\n'
            "    out, lse = kernel(q, kv, indices, *(() if scales is None else (scales,)))\n",
        ),
    ),
}
