"""The fix: the rank-3 tiles of the MIMO backward become rank-2, [chunk, R, N] as [chunk * R, N] and [chunk, R, R] as [chunk, R * R].

Same bytes, same order in memory, same arithmetic: q and k go in as views, and QK_DOT, which only these two kernels see, has its last two
dimensions in one. In the second kernel q is loaded by T.copy as k is, and qk_dot is read from shared memory, for a flattened fragment
of it is what tilelang 0.1.7.post2 - 0.1.11 cannot lay out (pack13).
"""

from common.transforms import replace

_FIRST, _SECOND = r"(def mamba_mimo_bwd_fwd_kernel\([\s\S]*?)", r"(def mamba_mimo_bwd_bwd_kernel\([\s\S]*?)"
_TILE = "T.copy({Q}[i_b, fused_chunk_start:fused_chunk_start+fused_chunk_size, i_h_qk, :], {shared})\n"
_BIASED = """\
                {q}_frag = T.alloc_fragment([chunk_size, R, N], dtype)
                for cs, r, n in T.Parallel(chunk_size, R, N):
                    {q}_frag[cs, r, n] = {shared}[cs*R + r, n]
                for cs, r, n in T.Parallel(chunk_size, R, N):
                    {q}_frag[cs, r, n] += {q}_bias_frag[r, n]
                for cs, r, n in T.Parallel(chunk_size, R, N):
                    {shared}[cs*R + r, n] = {q}_frag[cs, r, n]
"""


def _argument(name: str, kernel: str, argument: str, shape: str):
    old = r"\[B, H, S, R, R\]" if argument == "QK_DOT" else r"\[B, S, R, G, N\]"
    return replace(name, kernel + rf"(\n +{argument}: T\.Tensor\(){old}", rf"\g<1>\g<2>{shape}")


def _load(name: str, q: str, shared: str):
    """The [chunk, R, N] view that a tile was loaded through, and the bias added in, as rank 2."""
    tile = _TILE.format(Q=q.upper(), shared=shared) + _BIASED.format(q=q, shared=shared)
    return replace(
        name,
        rf"^( +){q}_reshaped_shared = T\.view\({shared}, .*\n(?:.*\n)*?\1T\.copy\({q}_frag, {q}_reshaped_shared\)\n",
        lambda found: found[1] + tile,
    )


def _call(name: str, kernel: str):
    return replace(
        name, rf"^( +{kernel}\(\n +dout,\n +)q, *\n( +)k, *\n", r"\1q.view(B, S * R, G, N),\n\2k.view(B, S * R, G, N),\n"
    )


FIX = {
    "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py": (
        _argument("first-q", _FIRST, "Q", "[B, S * R, G, N]"),
        _argument("first-k", _FIRST, "K", "[B, S * R, G, N]"),
        _argument("first-qk-dot", _FIRST, "QK_DOT", "[B, H, S, R * R]"),
        _load("first-q-tile", "q", "q_shared"),
        _load("first-k-tile", "k", "k_shared"),
        replace("first-store", r"(QK_DOT\[i_b, i_h, chunk_start \+ cs, )r_out, r_in\]", r"\1r_out * R + r_in]"),
        _argument("second-q", _SECOND, "Q", "[B, S * R, G, N]"),
        _argument("second-k", _SECOND, "K", "[B, S * R, G, N]"),
        _argument("second-qk-dot", _SECOND, "QK_DOT", "[B, H, S, R * R]"),
        replace(
            "second-q-tile",
            r"^( +)for cs, r, n in T\.Parallel\(chunk_size, R, N\):\n +q_shared\[cs\*R \+ r, n\] = Q\[.*\n",
            lambda found: found[1] + _TILE.format(Q="Q", shared="q_shared"),
        ),
        _load("second-k-tile", "k", "k_pre_trap_shared"),
        replace(
            "second-k-rotated",
            r"^ +k_first_half_frag\[cs, r, n\] = k_reshaped_shared\[(?:.*\n){5}",
            lambda found: found[0].replace("k_reshaped_shared[cs, r, ", "k_pre_trap_shared[cs*R + r, "),
        ),
        replace("second-qk-dot-tile", r"(qk_dot_shared = T\.alloc_shared\()\[chunk_size, R, R\]", r"\1[chunk_size, R * R]"),
        replace(
            "second-qk-dot-load",
            r"^ +qk_dot_frag = T\.alloc_fragment\(\[chunk_size, R, R\], dtype\)\n(.*chunk_size), :, :\], qk_dot_shared\)\n.*qk_dot_frag\)\n",
            r"\1, :], qk_dot_shared)\n",
        ),
        replace("second-qk-dot-read", r"qk_dot_frag\[cs, r_out, r_in\]", "qk_dot_shared[cs, r_out * R + r_in]"),
        replace(
            "second-gamma-tile",
            r"(dgamma_diag_prereduce_frag = T\.alloc_fragment\()\[chunk_size, R, R\]",
            r"\1[chunk_size, R * R]",
        ),
        replace(
            "second-gamma", r"dgamma_diag_prereduce_frag\[cs, r_out, r_in\]", "dgamma_diag_prereduce_frag[cs, r_out * R + r_in]"
        ),
        replace(
            "second-gamma-sum",
            r"T\.view\(dgamma_diag_prereduce_frag, shape=\[chunk_size, R\*R\]\)",
            "dgamma_diag_prereduce_frag",
        ),
        _call("first-call", "bwd_fwd_kernel"),
        _call("second-call", "bwd_bwd_kernel"),
        replace("host-qk-dot", r"(qk_dot = torch\.zeros\(\[B, H, S, )R, R\]", r"\1R * R]"),
    ),
}
