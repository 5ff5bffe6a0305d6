"""The fix: SparseMLA takes the number of value channels, and the dispatcher admits what the kernels are built for.

The kernels have their dimensions as parameters; what is fixed at 576 and 512 is the host code around them. Admitted are value channels and
rotary tail that are powers of two, which the forward kernel asserts, and at least 64.
"""

from common.transforms import insert_before, replace

_OPS = "megatron/core/transformer/experimental_attention_variant/ops"
_SUPPORTED = '''\
def _is_supported_sparse_mla_dims(total: int, v_channels: int) -> bool:
    """Whether the SparseMLA kernels can be built for value channels and tail: powers of two, and at least a tile of 64."""
    return all(n >= 64 and n & (n - 1) == 0 for n in (v_channels, total - v_channels))


'''

FIX = {
    f"{_OPS}/tilelang_dsa.py": (
        insert_before("supported", r"^def _all_bfloat16\(", _SUPPORTED),
        replace(
            "guard",
            r"^    if query\.size\(-1\) != 576 or v_channels != 512:\n( +#.*\n)+",
            "    if not _is_supported_sparse_mla_dims(query.size(-1), v_channels):\n",
        ),
        replace(
            "dispatch",
            r"SparseMLA\.apply\(query_bshd, key_bshd, indices_bsgk, softmax_scale\)",
            "SparseMLA.apply(query_bshd, key_bshd, indices_bsgk, softmax_scale, v_channels)",
        ),
    ),
    f"{_OPS}/sparse_mla.py": (
        replace(
            "argument", r"def forward\(ctx, q, kv, indices, scaling\):", "def forward(ctx, q, kv, indices, scaling, d_v=512):"
        ),
        replace("kept", r"^( +)ctx\.scaling = scaling\n", r"\g<0>\1ctx.d_v = d_v\n"),
        replace(
            "forward",
            r"^        (tl_out, tl_lse = sparse_mla_fwd_interface\(q, kv, indices, sm_scale=scaling)\)",
            r"        \1, d_v=d_v)",
        ),
        replace(
            "recompute",
            r"^            (tl_out, tl_lse = sparse_mla_fwd_interface\(q, kv, indices, sm_scale=scaling)\)",
            r"            \1, d_v=ctx.d_v)",
        ),
        replace("backward", r"sm_scale=scaling, delta=delta\n( +)\)", r"sm_scale=scaling, delta=delta, d_v=ctx.d_v\n\1)"),
        replace("gradients", r"return tl_dq, tl_dkv, None, None\n", "return tl_dq, tl_dkv, None, None, None\n"),
    ),
    f"{_OPS}/tilelang_sparse_mla_fwd.py": (replace("assert", r"^    assert \(\n +dim_plus_tail_dim == 576\n +\), .*\n", ""),),
    f"{_OPS}/tilelang_sparse_mla_bwd.py": (
        replace(
            "bwd-argument", r"(def sparse_mla_bwd\(q, kv, o, do, indices, lse, sm_scale=None, delta=None)\)", r"\1, d_v=512)"
        ),
        replace("d", r"^    # This copied kernel .*\n    D = 512\n", "    D = d_v\n"),
    ),
}
