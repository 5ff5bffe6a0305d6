"""The fix: labels that are neither in 0 … V-1 nor ignored raise an IndexError, as in torch, before any kernel is started."""

import re

from common.transforms import replace


def _checked(match: re.Match[str]) -> str:
    indent = match[1]
    return f"""{match[0]}
{indent}# A kernel would read, and write, wherever such a label points to. Wide, for V may not fit the labels' dtype.
{indent}labels = target.long()
{indent}outside = ((labels < 0) | (labels >= V)) & (labels != ignore_index)
{indent}if outside.any():
{indent}    raise IndexError(f"Target {{labels[outside][0].item()}} is out of bounds. Expected 0 <= target < {{V}}.")
"""


FIX = {
    "liger_kernel/ops/fused_linear_cross_entropy.py": (replace("range", r"^( +)V = (?:weight|linear)\.shape\[0\]\n", _checked),)
}
