"""The fix: an autocast that a recomputation leaves does not update the forward history, which the forward has done already.

Recomputations are counted: the flags that te.checkpoint has are reset by a checkpoint within another. Such a one also records the amax of its own forward, which
is taken back. The state of FP8 is in fp8.py up to 2.8 and in quantization.py from 2.9; a release has one condition to change.
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


def _when(name, signature, code):
    return insert_after(name, rf"^    def {signature}:\n        global _\w+, _\w*RECOMPUTE_PHASE\n", code)


COUNT = "        activation_recompute_forward.depth {}= int(self.recompute_phase)\n"
KEEP = """        states = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
        histories = [h for each in states.global_amax_history_buffer.values() for h in each] if self.recompute_phase else []
        self.newest = [(history, history[0].clone()) for history in histories]
"""
TAKE_BACK = """        for history, newest in self.newest:
            history[0].copy_(newest)
"""
FIX = {
    "transformer_engine/pytorch/fp8.py": (_exit("fp8"),),
    "transformer_engine/pytorch/quantization.py": (_exit("quantization"),),
    "transformer_engine/pytorch/distributed.py": (
        insert_after(
            "depth", r"^    _is_first_fp8_module: List = \[\]\n", "    depth = 0  # of recomputations, one in the other\n"
        ),
        _when("enter", r"__enter__\(self\)", COUNT.format("+")),
        _when("exit", r"__exit__\(self, \*exc_details\)", COUNT.format("-")),
        _when("keep", r"__enter__\(self\)", KEEP),
        _when("take back", r"__exit__\(self, \*exc_details\)", TAKE_BACK),
    ),
}
