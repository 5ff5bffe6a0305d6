"""The fix: no value of a CUDA tensor is asked for in the helpers of packed, context-parallel DSA.

build_packed_allgather_cp_local_positions took empty sequences and empty segments out by boolean indices; repeat_interleave with their
length, zero, does that by itself. The padding's length is computed where the lengths are. generate_varlen_mask_params takes the number of
rows from callers that know it; without it, it asks the GPU, as before.
"""

from common.transforms import replace

_DSA = "megatron/core/transformer/experimental_attention_variant"

FIX = {
    f"{_DSA}/dsa_layout.py": (
        replace(
            "empty-sequences",
            r"^    nonzero = seq_lens > 0\n(?:    seq_\w+ = seq_\w+\[nonzero\]\n){3}    if seq_lens\.numel\(\) == 0:\n.*\n",
            "",
        ),
        replace("empty-segments", r"^    nonempty_segments = .*\n(?:    segment_\w+ = segment_\w+\[nonempty_segments\]\n){2}", ""),
        replace(
            "padding",
            r"\(\n? *torch\.tensor\(output_size, dtype=torch\.int64, device=device\) - segment_lens\.sum\(\)\n? *\)",
            "(output_size - segment_lens.sum())",
        ),
    ),
    f"{_DSA}/dsa_masking.py": (
        replace("rows", r"(def generate_varlen_mask_params\(cu_seqlens: torch\.Tensor)\)", r"\1, seq_len: Optional[int] = None)"),
        replace(
            "rows-given",
            r"^    (seq_len = int\(cu_seqlens\[-1\]\.item\(\)\))\n",
            r"    if seq_len is None:\n        \1\n",
        ),
    ),
}
