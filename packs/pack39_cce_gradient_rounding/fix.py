"""The fix: the backward sums the gradient of x [BT, H] in fp32, 4 bytes times BT * H for that time; autograd rounds it to x's dtype, once."""

from common.transforms import replace

FIX = {
    "cut_cross_entropy/cce_backward.py": (
        replace(
            "sum",
            r"^    de = torch\.zeros_like\(e\)\n",
            "    de = torch.zeros_like(e, dtype=torch.float32)  # over many blocks of columns\n",
        ),
    ),
}
