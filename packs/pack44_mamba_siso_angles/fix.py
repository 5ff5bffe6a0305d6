"""The fix: Angles are fp32, as DT and ADT are and as the MIMO kernels get them; their sum over the tokens takes their dtype."""

from common.transforms import insert_before, replace

FIX = {
    "mamba_ssm/ops/triton/mamba3/mamba3_siso_combined.py": (
        replace("cast", r"^    Angles = Angles\.to\(torch\.bfloat16\)\n", "", optional=True),  # which #876 brought
        insert_before(
            "fp32",
            r"^    return _Mamba3Function\.apply\(\n",
            "    Angles = Angles.to(torch.float32)  # their sum over the tokens, up to 2 pi, keeps this dtype\n",
        ),
    ),
}
