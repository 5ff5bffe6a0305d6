"""The fix: with gradients on, a first forward in a checkpoint stores the weight as its recomputation will.

The weight is stored transposed for the backward where the input needs a gradient, and in a first forward in a checkpoint always: a reentrant one has gradients off
there, and cannot know. One that is not reentrant knows, and its recomputation goes by it.
"""

from common.transforms import replace


def _with_gradients(name, needs, **options):
    return replace(
        name,
        rf"^( +columnwise_usage = is_grad_enabled and {needs}\n(?:.*\n){{,5}}?( +)is_fp8_activation_recompute_enabled\(\)\n)",
        r"\1\2and not is_grad_enabled" "\n",
        **options,
    )


FIX = {
    "transformer_engine/pytorch/module/linear.py": (
        _with_gradients("linear", r"(?:inp\.|args\.input_)requires_grad(?: and not is_fsdp2)?"),
        # What torch.compile is told that the forward gives, in releases that have it.
        _with_gradients("compiled", r"args\.input_requires_grad and not args\.is_fsdp2", optional=True),
    ),
    "transformer_engine/pytorch/module/grouped_linear.py": (_with_gradients("grouped", r"inp\.requires_grad"),),
}
