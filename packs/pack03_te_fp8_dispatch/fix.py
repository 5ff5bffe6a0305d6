"""The fix: SparseMLA and its dispatcher dequantize quantized tensors by name, with a warning, before they look at dtypes."""

from common.transforms import insert_before, replace

_OPS = "megatron/core/transformer/experimental_attention_variant/ops"
_DEQUANTIZED = '''\
def dequantized(tensor):
    """A tensor that a kernel can read: one of transformer-engine's, quantized, says that its dtype is bf16, and that it lies at address 0."""
    if not any(kind.__module__.startswith("transformer_engine.") for kind in type(tensor).__mro__):
        return tensor
    warnings.warn(f"SparseMLA has no FP8 kernel: it dequantizes this {type(tensor).__name__}", stacklevel=3)
    return tensor.dequantize()


'''

FIX = {
    f"{_OPS}/sparse_mla.py": (
        replace("imports", r"^import torch\n", "import warnings\n\nimport torch\n"),
        insert_before("function", r"^def _canonicalize_batch_stride\(", _DEQUANTIZED),
        insert_before(
            "apply",
            r"^        indices = _canonicalize_batch_stride\(indices\)\n",
            "        q, kv = dequantized(q), dequantized(kv)\n",
        ),
    ),
    f"{_OPS}/tilelang_dsa.py": (
        replace("name", r"^(    from megatron\S*\.ops\.sparse_mla import )SparseMLA\n", r"\1SparseMLA, dequantized\n"),
        insert_before(
            "dispatch",
            r"^    if query\.ndim != 4 or key\.ndim != 4 or topk_indices\.ndim != 3:\n",
            "    query, key = dequantized(query), dequantized(key)\n",
        ),
    ),
}
