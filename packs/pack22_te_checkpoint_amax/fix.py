"""The fix: an autocast that a recomputation leaves does not update the forward history, which the forward has done already.

Recomputations are counted: the flags that te.checkpoint has are reset by a checkpoint within another. The state of FP8 is in fp8.py up to 2.8
and in quantization.py from 2.9; a release has one condition to change.
"""

from common.transforms import insert_after, replace


def _exit(where):
    return replace(
        f"{where}-recompute",
        r"^(        )(if enabled and [\w.]*(?:AUTOCAST_DEPTH|autocast_depth) == 0 and not _graph and torch\.is_grad_enabled\(\)):\n",
        r"\1from .distributed import activation_recompute_forward\n\n"
        r"\1recomputed = activation_recompute_forward.depth > 0\n"
        r"\1\2 and not recomputed:\n",
        optional=True,
    )


def _counts(name, signature, sign):
    code = f"        activation_recompute_forward.depth {sign}= int(self.recompute_phase)\n"
    return insert_after(name, rf"^    def {signature}:\n        global _\w+, _\w*RECOMPUTE_PHASE\n", code)


FIX = {
    "transformer_engine/pytorch/fp8.py": (_exit("fp8"),),
    "transformer_engine/pytorch/quantization.py": (_exit("quantization"),),
    "transformer_engine/pytorch/distributed.py": (
        insert_after(
            "depth", r"^    _is_first_fp8_module: List = \[\]\n", "    depth = 0  # of recomputations, one in the other\n"
        ),
        _counts("enter", r"__enter__\(self\)", "+"),
        _counts("exit", r"__exit__\(self, \*exc_details\)", "-"),
    ),
}
