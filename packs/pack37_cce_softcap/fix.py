"""The fix: mask the columns beyond the vocabulary after the softcap, not before it, for the softcap makes -softcap of -inf."""

from common.transforms import replace

FIX = {
    "cut_cross_entropy/cce_lse_forward.py": (
        replace(
            "mask last",
            r"^    logits = tl\.where\((.+), accum, (-float\(\"inf\"\))\)\n    if HAS_SOFTCAP:\n        logits = tl_softcapping\(logits, softcap\)\n",
            r"""    if HAS_SOFTCAP:
        accum = tl_softcapping(accum, softcap)
    logits = tl.where(\1, accum, \2)
""",
        ),
    ),
}
