"""The fix: the update in Python leaves a history alone whose newest amax is 0, as the CUDA kernel does (#825); and a checkpoint in a recomputation is part of it.

Such an inner checkpoint runs its forward with the scales of the first one, which its own recomputation needs once more, and when it ends the outer
recomputation goes on. The state of FP8 is in fp8.py up to 2.8 and in quantization.py from 2.9.
"""

from common.transforms import insert_after, insert_before, replace


def _state(where):
    return (
        insert_before(
            f"{where}-before",
            r"^    new_amax_history, amax = _compute_amax_and_update_history\(\n        amax_history,\n",
            "    ran, old_history, old_scale = amax_history[0] != 0, amax_history.clone(), scale.clone()\n",
            optional=True,
        ),
        replace(
            f"{where}-left-alone",
            r"^    scale\.copy_\(new_scale\)\n    amax_history\.copy_\(new_amax_history\)\n",
            "    scale.copy_(torch.where(ran, new_scale, old_scale))\n"
            "    amax_history.copy_(torch.where(ran, new_amax_history, old_history))\n",
            optional=True,
        ),
        replace(
            f"{where}-needed-again",
            r"^        stashed_fp8_meta = (cls\.[\s\S]+?\])\.popleft\(\)\n",
            r"        from .distributed import activation_recompute_forward"
            "\n\n"
            r"        stash = \1"
            "\n"
            r"        if activation_recompute_forward.inner:"
            "\n"
            r"            # Its own recomputation may have been before this one: nothing but this is of use of the forward then."
            "\n"
            r'            stashed_fp8_meta = stash[0] if stash else (fp8_meta["scaling_fwd"].amax_history, fp8_meta["scaling_fwd"].scale)'
            "\n"
            r"        else:"
            "\n"
            r"            stashed_fp8_meta = stash.popleft()"
            "\n",
            optional=True,
        ),
    )


FIX = {
    "transformer_engine/pytorch/fp8.py": (
        *_state("fp8"),
        replace(
            "copied",  # up to 2.3, as #1723 does: what is put back in the end has to be what was there
            r'^( +fp8_meta\["updated_amax_history_fwd"\] = .*\.amax_history)\n( +fp8_meta\["updated_scale_fwd"\] = .*\.scale)\n',
            r"\1.clone()" "\n" r"\2.clone()" "\n",
            optional=True,
        ),
    ),
    "transformer_engine/pytorch/quantization.py": _state("quantization"),
    "transformer_engine/pytorch/distributed.py": (
        insert_after(
            "inner",
            r"^    _is_first_fp8_module: List = \[\]\n",
            "    inner = False  # the forward of a checkpoint in a recomputation\n",
        ),
        replace(
            "outer",
            r"^(    def __enter__\(self\):\n        global (_\w+), (_\w*RECOMPUTE_PHASE)\n)",
            r"\1        self.outer = \2, \3, activation_recompute_forward.inner" "\n",
        ),
        replace(
            "phase",
            r"^        (_\w*RECOMPUTE_PHASE) = self\.recompute_phase\n",
            r"        \1 = self.recompute_phase or self.outer[1]"
            "\n"
            r"        activation_recompute_forward.inner = self.outer[1] and not self.recompute_phase"
            "\n",
        ),
        replace(
            "back",
            r"^        (_\w+) = False\n        (_\w*RECOMPUTE_PHASE) = False\n",
            r"        \1, \2, activation_recompute_forward.inner = self.outer" "\n",
        ),
    ),
}
