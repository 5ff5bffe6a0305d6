"""The change: SparseMLA takes the number of value channels, and the dispatcher admits what the kernels can be built for.

The kernels have their dimensions as parameters; what is fixed at 576 and 512 is the host code around them. Admitted are a tail of 64 channels,
which is MLA's, beside value channels that are a power of two, which the forward kernel asserts, and at least a tile of 64; if the forward's
shared memory fits the device: 64 query heads, two stages of 64 keys, and 10 KiB of scores, indices and sums. The backward needs less, unless
MCORE_DSA_TILELANG_BWD_MAX_BLOCK_H is 64: then it needs 2 to 10 KiB more than is counted here, and no GPU has a limit in between.
"""

from common.transforms import insert_before, replace

_OPS = "megatron/core/transformer/experimental_attention_variant/ops"
_SUPPORTED = '''\
def _is_supported_sparse_mla_dims(query: torch.Tensor, v_channels: int) -> bool:
    """Whether the SparseMLA kernels can be built for the channels and launched on the device of ``query``."""
    total = query.size(-1)
    if (total, v_channels) == (576, 512):
        return True
    if total - v_channels != 64 or v_channels < 64 or v_channels & (v_channels - 1):
        return False
    limit = 232_448  # bytes of shared memory that a block can have on sm_90
    if query.is_cuda:
        properties = torch.cuda.get_device_properties(query.device)
        limit = getattr(properties, "shared_memory_per_block_optin", 0)
    return (64 + 2 * 64) * total * query.element_size() + 10 * 1024 <= limit


'''

FIX = {
    f"{_OPS}/tilelang_dsa.py": (
        insert_before("supported", r"^def _all_bfloat16\(", _SUPPORTED),
        replace(
            "guard",
            r"^    if query\.size\(-1\) != 576 or v_channels != 512:\n( +#.*\n)+",
            "    if not _is_supported_sparse_mla_dims(query, v_channels):\n",
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
