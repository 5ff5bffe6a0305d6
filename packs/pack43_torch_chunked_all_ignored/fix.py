"""The fix: where every label is ignored a token weighs nothing, and the loss alone is NaN."""

from common.transforms import replace

FIX = {
    "torch/nn/modules/linear_cross_entropy.py": (
        replace(
            "weights",
            r"torch\.where\(d == 0, torch\.nan, -d\)",
            "torch.where(mask.all(), torch.inf, torch.where(d == 0, torch.nan, -d))",
        ),
        replace(
            "loss",
            r"^    if reduction == \"mean\" and ctx\.num_batches == 0:\n        output\.fill_\(torch\.nan\)\n",
            """    if reduction == "mean":
        # Where no token counts, its gradients are 0, as cross_entropy's are.
        output.masked_fill_(ctx._mask.all(), torch.nan)
""",
        ),
    ),
}
