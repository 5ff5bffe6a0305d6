"""Which modules and recipes fail: te.checkpoint(use_reentrant=False) of each, with an input that needs no gradient, and with one that does.

A recipe's ``backward_override``, where it has one, is a backward in another precision than FP8. No verdict.
"""

from functools import partial

import repro
import torch
from repro import FACTS, check, finish

SIZE = 256


def modules():
    """By name: how each is made, and what it takes besides its input."""
    te, bf16 = repro.te, {"device": "cuda", "params_dtype": torch.bfloat16}
    yield "Linear", te.Linear(SIZE, SIZE, **bf16), ()
    yield "LayerNormLinear", te.LayerNormLinear(SIZE, SIZE, **bf16), ()
    yield "LayerNormMLP", te.LayerNormMLP(SIZE, 4 * SIZE, **bf16), ()
    yield "GroupedLinear", te.GroupedLinear(2, SIZE, SIZE, **bf16), ([64, 64],)


def outcome(module, more, recipe, wanted, **named):
    """1 under "right" where output and gradients are bitwise those without a checkpoint; 0, and what is raised, where something is."""
    found, gradient = [], torch.randn(128, SIZE, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(128, SIZE, device="cuda", dtype=torch.bfloat16)
    try:
        for checkpointed in (False, True):
            x = values.clone().requires_grad_(wanted)
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = (
                    repro.te.checkpoint(module, x, *more, use_reentrant=False, **named)
                    if checkpointed
                    else module(x, *more, **named)
                )
            y.backward(gradient)
            found.append([y.detach(), *([x.grad] if wanted else []), *(p.grad.clone() for p in module.parameters())])
            module.zero_grad()
    except Exception as error:  # what it raises is the finding
        return {"right": 0, "raises": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
    return {"right": int(all(map(torch.equal, *found)))}


def recipes():
    """By name: how each is made."""
    current, field = repro.recipes.Float8CurrentScaling, "backward_override"
    yield "Float8CurrentScaling", current
    yield "Float8BlockScaling", repro.recipes.Float8BlockScaling
    for kind in ("high_precision", "dequantized") if field in current.__dataclass_fields__ else ():
        yield f"Float8CurrentScaling({field}={kind})", partial(current, **{field: kind})


def measured(case, *given, **named):
    repro.manager.reset()
    FACTS["metrics"][case] = outcome(*given, **named)
    print(f"{case}: {FACTS['metrics'][case]}", flush=True)


def main():
    for name, module, more in modules():
        for kind, recipe in recipes():
            for wanted in (True, False):
                measured(
                    f"{name}, {kind}, an input that needs {'a' if wanted else 'no'} gradient", module, more, recipe(), wanted
                )
    _, linear, _ = next(modules())
    measured(
        "Linear, is_first_microbatch=True", linear, (), repro.recipes.Float8CurrentScaling(), False, is_first_microbatch=True
    )
    right = [row["right"] for case, row in FACTS["metrics"].items() if "needs a " in case and "override" not in case]
    check("control", "with an input that needs a gradient all are right, but for backward_override", all(right))
    finish("MEASURED")


if __name__ == "__main__":
    repro.te, repro.recipes, repro.manager = repro.release()
    main()
