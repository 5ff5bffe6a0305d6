"""The fix: a branch for ``1 < G < H``. The heads of a group read the same q and k, so dq and dk are summed over them.

The biases belong to heads: their gradients are taken from dq and dk before that sum. Dense sums the rest over the batch, varlen over
batch and sequences, as the other branches of each do.
"""

from common.transforms import insert_before


def _branch(name: str, summed: str):
    return insert_before(
        name,
        r"^    else:\n        raise ValueError\(f\"G value of",
        f"""\
    elif H % G == 0:
        dq_bias_tilelang = dq_tilelang.sum(dim=(0, 1)).permute((1, 0, 2))
        dk_bias_tilelang = dk_tilelang.sum(dim=(0, 1)).permute((1, 0, 2))
        dq_tilelang = dq_tilelang.unflatten(3, (G, H // G)).sum(dim=4)
        dk_tilelang = dk_tilelang.unflatten(3, (G, H // G)).sum(dim=4)
        dmimo_v = dmimo_v.sum(dim={summed})
        dmimo_z = dmimo_z.sum(dim={summed}) if dmimo_z is not None else None
        dD = dD.sum(dim={summed}) if dD is not None else None
""",
    )


FIX = {
    "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py": (_branch("dense", "0"),),
    "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd_varlen.py": (_branch("varlen", "(0, 2)"),),
}
