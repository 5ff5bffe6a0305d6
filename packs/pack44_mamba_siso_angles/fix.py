"""The fix: Angles stay in fp32, as DT and ADT do and as the MIMO kernels get them; their sum over the tokens takes their dtype."""

from common.transforms import replace

FIX = {
    "mamba_ssm/ops/triton/mamba3/mamba3_siso_combined.py": (
        replace(
            "fp32",
            r"^    Angles = Angles\.to\(torch\.bfloat16\)\n",
            "    Angles = Angles.to(torch.float32)  # their sum over the tokens, up to 2 pi, keeps this dtype\n",
        ),
    ),
}
