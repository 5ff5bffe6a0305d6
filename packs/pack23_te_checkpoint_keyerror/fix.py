"""The fix: whatever runs in FP8 in a checkpoint's first forward stores its scales, and an autocast that ends there updates them, gradients or not.

A reentrant checkpoint runs that forward without gradients. The second one updates nothing; where no gradients are wanted, nothing is stored or updated. The rest
is in later releases (#1577 in 2.2, #1723 in 2.4, #3284 in 2.19, #3394 in 2.20), and optional. FP8's state is in fp8.py up to 2.8, then in quantization.py.
"""

from common.transforms import insert_after, replace

_UPDATE = """\
        from .distributed import activation_recompute_forward

        forward = activation_recompute_forward.forward
        updates = forward == "first" or (torch.is_grad_enabled() and forward != "second")
"""


def _state(where):
    return (
        replace(
            f"{where}-update",
            r"^(        if enabled and [\w.]*(?:AUTOCAST_DEPTH|autocast_depth) == 0 and not _graph) and torch\.is_grad_enabled\(\):\n",
            lambda found: f"{_UPDATE}{found[1]} and updates:\n",
            optional=True,
        ),
        *(
            replace(
                f"{where}-copy-{what}",
                rf'^(        fp8_meta\["updated_\w+_fwd"\] = fp8_meta\["scaling_fwd"\]\.{what})\n',
                r"\1.clone()" "\n",
                optional=True,
            )
            for what in ("amax_history", "scale")
        ),
    )


FIX = {
    "transformer_engine/pytorch/fp8.py": _state("fp8"),
    "transformer_engine/pytorch/quantization.py": _state("quantization"),
    "transformer_engine/pytorch/module/base.py": (
        replace(
            "eval",
            r"self\.training and is_fp8_activation_recompute_enabled\(\)",
            "is_fp8_activation_recompute_enabled()",
            optional=True,
        ),
    ),
    "transformer_engine/pytorch/distributed.py": (
        insert_after(
            "forward",
            r"^    _is_first_fp8_module: List = \[\]\n",
            '    forward = None  # "first", or "second" while it is made again\n',
        ),
        insert_after(
            "enter",
            r"^    def __enter__\(self\):\n        global _\w+, _\w*RECOMPUTE_PHASE\n",
            "        self.before = activation_recompute_forward.forward\n"
            '        now = "second" if self.recompute_phase else "first"\n'
            "        activation_recompute_forward.forward = now if self.activation_recompute else None\n",
        ),
        insert_after(
            "exit",
            r"^    def __exit__\(self, \*exc_details\):\n        global _\w+, _\w*RECOMPUTE_PHASE\n",
            "        activation_recompute_forward.forward = self.before\n",
        ),
        replace(
            "region",
            r"^        (_FP8_ACTIVATION_RECOMPUTE_ENABLED) = \(\n            self\.activation_recompute and .*\n        \)\n",
            r"        \1 = self.activation_recompute" "\n",
            optional=True,
        ),
        replace(
            "enabled",
            r"^    return _FP8_ACTIVATION_RECOMPUTE_ENABLED\n",
            "    return _FP8_ACTIVATION_RECOMPUTE_ENABLED and FP8GlobalStateManager.is_fp8_enabled()\n",
            optional=True,
        ),
        replace(
            "no-input",
            r"^            with activation_recompute_forward\(activation_recompute=True, recompute_phase=False\):\n",
            "            wanted = any(ctx.needs_input_grad)\n"
            "            with activation_recompute_forward(activation_recompute=wanted, recompute_phase=False):\n",
            optional=True,
        ),
        insert_after(
            "no-gradients",
            r'^    debug = kwargs\.pop\("debug", False\)\n(?![\s\S]*unreachable FP8 recompute state)',
            "    if not torch.is_grad_enabled():\n        with context_fn()[0]:\n            return function(*args, **kwargs)\n\n",
            optional=True,
        ),
        insert_after(
            "recipe",
            r"^        ctx\.kwargs = kwargs\n(?![\s\S]*ctx\.fp8_recipe)",
            "        from .fp8 import fp8_autocast\n\n"
            "        recipe = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None\n"
            "        ctx.fp8_context = lambda: fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)\n",
            optional=True,
        ),
        replace(
            "autocast",
            r"^(        with torch\.enable_grad\(\), ctx\.recompute_ctx, .*\n            activation_recompute=True, recompute_phase=True\n        \)):\n",
            r"\1, ctx.fp8_context():" "\n",
            optional=True,
        ),
        replace(
            "autocast-not-reentrant",
            r"^(    def recompute_fn\(\*args, \*\*kwargs\):\n        with [\s\S]*?torch_cpu_amp_forward_ctx):\n",
            "    from .fp8 import fp8_autocast\n\n"
            "    recipe = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None\n\n"
            r"\1, fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):"
            "\n",
            optional=True,
        ),
    ),
}
