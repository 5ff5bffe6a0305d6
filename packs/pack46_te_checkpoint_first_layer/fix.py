"""The fix: with gradients on, a first forward in a checkpoint stores the weight as its recomputation will.

The weight is stored transposed for the backward where the input needs a gradient, and in a first forward in a checkpoint always: a reentrant one has gradients off
there, and cannot know. One that is not reentrant knows, and its recomputation goes by it.
"""

from common.transforms import replace


def _with_gradients(name, needs):
    return replace(
        name,
        rf"^( +columnwise_usage = is_grad_enabled and {needs}\n(?:.*\n){{,5}}?( +)is_fp8_activation_recompute_enabled\(\)\n)",
        r"\1\2and not is_grad_enabled" "\n",
    )


FIX = {
    "transformer_engine/pytorch/module/linear.py": (
        _with_gradients("linear", r"(?:inp\.|args\.input_)requires_grad(?: and not is_fsdp2)?"),
    ),
    "transformer_engine/pytorch/module/grouped_linear.py": (_with_gradients("grouped", r"inp\.requires_grad"),),
}
