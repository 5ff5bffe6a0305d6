"""The fix: no value of a CUDA tensor is asked for by what packed, and by what non-packed, context-parallel DSA calls in every forward.

build_packed_allgather_cp_local_positions took empty sequences and segments out by boolean indices; repeat_interleave with their length, zero,
does that by itself; negative ones, as where a shorter list lies in a longer buffer, count as zero. What is left of the rows becomes padding, also
where the caller says that there is none, for cu_seqlens may still be zeros when a graph is captured. The lengths that ranks tell each other in the non-packed case are compared in eager mode, as they are
before any graph is captured, and not while one is.

The optional transforms are for commits between da482cf5c8 and d1cab16a01, which no release holds: validations stay in eager mode, and are left
out while a stream is captured; top-k indices are scattered without a branch, by amax, as upstream does it since.
"""

import re

from common.transforms import replace

_DSA = "megatron/core/transformer/experimental_attention_variant"

# Asked of CUDA tensors alone: in a CPU build of torch is_current_stream_capturing() raises.
_CAPTURING = "({0}.is_cuda and torch.cuda.is_current_stream_capturing())"
_SCATTER = """\
        valid_topk = idx_chunk >= 0
        values = torch.where(valid_topk, 0.0, float("-inf")).to(index_mask.dtype)
        index_mask[:, s0:s1].scatter_reduce_(-1, idx_chunk.clamp_min(0), values, reduce="amax")
"""

FIX = {
    f"{_DSA}/dsa_layout.py": (
        replace(
            "empty-sequences",
            r"^    nonzero = seq_lens > 0\n(?:    seq_\w+ = seq_\w+\[nonzero\]\n){3}    if seq_lens\.numel\(\) == 0:\n.*\n",
            "    seq_lens = seq_lens.clamp_min(0)\n",
        ),
        replace(
            "empty-segments", r"^    nonempty_segments = .*\n(?:    segment_\w+ = segment_\w+\[nonempty_segments\]\n){2}", ""
        ),
        replace(
            "padding",
            r"\(\n? *torch\.tensor\(output_size, dtype=torch\.int64, device=device\) - segment_lens\.sum\(\)\n? *\)",
            "(output_size - segment_lens.sum())",
            optional=True,
        ),
        replace(
            "always-padded",
            r"^    if not cu_seqlens_cover_output:\n((?:        .*\n)+)",
            lambda found: re.sub(r"^    ", "", found[1], flags=re.MULTILINE),
            optional=True,
        ),
        replace(
            "identical-ids",
            r"if position_ids\.size\(0\) > 1:",
            f"if position_ids.size(0) > 1 and not {_CAPTURING.format('position_ids')}:",
            optional=True,
        ),
    ),
    f"{_DSA}/dsa.py": (
        replace(
            "lengths",
            r"(def _validate_nonpacked_cp_uniform_length\([\s\S]*?    if \(\n +)",
            r"\1not (device.type == 'cuda' and torch.cuda.is_current_stream_capturing())\n        and ",
            optional=True,
        ),
    ),
    f"{_DSA}/dsa_masking.py": (
        replace(
            "scatter",
            r"^        if torch\.any\(idx_chunk < 0\):\n(?:.*\n)+?            index_mask\[:, s0:s1\]\.scatter_\(-1, idx_chunk, 0\.0\)\n",
            _SCATTER,
            optional=True,
        ),
        *(
            replace(name, rf"if (not torch\.equal\({tensor}\b)", rf"if not {_CAPTURING.format(tensor)} and \1", optional=True)
            for name, tensor in (("same-keys", "key_positions"), ("same-masks", "mask"), ("a-prefix", "finite"))
        ),
    ),
}
