"""Which modules and recipes fail: te.checkpoint(use_reentrant=False) of each, with an input that needs no gradient, and with one that does."""

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


def outcome(module, more, recipe, wanted):
    """ "right" where parameters have the gradients that they have without a checkpoint, or what is raised."""
    found, gradient = [], torch.randn(128, SIZE, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(128, SIZE, device="cuda", dtype=torch.bfloat16).requires_grad_(wanted)
    try:
        for checkpointed in (False, True):
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = repro.te.checkpoint(module, x, *more, use_reentrant=False) if checkpointed else module(x, *more)
            y.backward(gradient)
            found.append([p.grad.clone() for p in module.parameters()])
            module.zero_grad()
    except Exception as error:  # what it raises is the finding
        return {"right": 0, "raises": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
    return {"right": int(all(map(torch.equal, *found)))}


def main():
    for name, module, more in modules():
        for recipe in (repro.recipes.Float8CurrentScaling(), repro.recipes.Float8BlockScaling()):
            for wanted in (True, False):
                repro.manager.reset()
                case = f"{name}, {type(recipe).__name__}, an input that needs {'a' if wanted else 'no'} gradient"
                FACTS["metrics"][case] = outcome(module, more, recipe, wanted)
                print(f"{case}: {FACTS['metrics'][case]}", flush=True)
    right = [row["right"] for case, row in FACTS["metrics"].items() if "needs a " in case]
    check("control", "with an input that needs a gradient all are right", all(right))
    finish("MEASURED")


if __name__ == "__main__":
    repro.te, repro.recipes, repro.manager = repro.release()
    main()
