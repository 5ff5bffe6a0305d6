"""The fix: V @ dO^T and its causal decay mask are computed once a chunk, for dADT, and used again for dK and dQ.

Equal to what the compiler makes of the release, written into the source: no order of additions changes, so every gradient
stays bitwise the same.
"""

from common.transforms import insert_before, replace

_PRODUCT = r"tl\.dot\(v_block, tl\.trans\(do_block\)\).*\n(?:.*\n){{1,12}}?            {name} \*= causal_decay_mask\n"


def _again(name: str, block: str):
    return replace(name, rf"^        {block} = " + _PRODUCT.format(name=block), f"        {block} = vdot_masked\n")


FIX = {
    "mamba_ssm/ops/triton/mamba3/mamba3_siso_bwd.py": (
        insert_before(
            "keep",
            r"^        dAinv \*= tl\.dot\(k_block, tl\.trans\(q_block\)\).*\n",
            "        vdot_masked = dAinv  # V @ dO^T under the causal decay mask, for dADT, dK and dQ\n",
        ),
        _again("dk", "dp_t_block"),
        _again("dq", "s_block"),
    ),
}
