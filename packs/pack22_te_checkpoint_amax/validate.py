"""The deep check of pack22's fix: after every step all scales, histories, outputs and gradients are bitwise those without checkpointing.

Runs after repro.py on the patched side: other blocks, nesting, several layers in a block, microbatches, an evaluation or an error between steps,
other algorithms, and outliers in inputs and gradients.
"""

import repro
import torch
from repro import check, data, finish

STEPS, LENGTH, EVERY = 14, 4, 6  # an outlier is forgotten before the next one


def network(parts, layers):
    """``parts`` blocks of ``layers`` Linears."""
    all_of_them = repro.blocks(parts * layers)
    return torch.nn.ModuleList([torch.nn.Sequential(*all_of_them[i * layers : (i + 1) * layers]) for i in range(parts)])


def states(parts):
    """All scales and amax histories of the forward and backward, but what the last update has left of them unset."""
    metas = [layer.fp8_meta[f"scaling_{way}"] for part in parts for layer in part for way in ("fwd", "bwd")]
    return [tensor.clone() for meta in metas for tensor in (meta.scale, meta.amax_history)]


def trained(make, fp8, checkpointed=(), how="reentrant", microbatches=1, between=None):
    """Per step: outputs, gradients, scales and histories."""
    parts, found = make(), []
    torch.manual_seed(1)
    for i in range(STEPS):
        pairs = [list(data({0: "fwd", 3: "bwd"}.get(i % EVERY))) for _ in range(microbatches)]
        outputs = []
        for x, _ in pairs:
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
                outputs.append(repro.forward(parts, x.requires_grad_(), checkpointed, how))
        for y, (_, gradient) in zip(outputs, pairs, strict=True):
            y.backward(gradient)
        tensors = [*outputs, *(x.grad for x, _ in pairs), *(p.grad for p in parts.parameters()), *states(parts)]
        found.append([tensor.detach().clone() for tensor in tensors])
        parts.zero_grad()
        if between:
            between(parts, fp8, checkpointed, how)
    return found


def recipe(algorithm, length=LENGTH):
    return repro.recipes.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)


def evaluation(parts, fp8, *_):
    """Without checkpoints: up to 2.19 they store scales even where no gradients are wanted (#3394)."""
    with torch.no_grad(), repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        repro.forward(parts, next(iter(data())))


def failure(parts, fp8, *_):
    """A step whose backward is never made, for something raised before it."""
    try:
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
            repro.forward(parts, next(iter(data())).requires_grad_())
            raise ValueError
    except ValueError:
        pass


def same(name, make, fp8, **options):
    """Bitwise the same after all steps as without checkpointing."""
    plain = trained(make, fp8, **{**options, "checkpointed": ()})
    got = trained(make, fp8, **options)
    stored = getattr(repro.manager, "quantization_state", repro.manager).fp8_tensors_recompute_buffer
    check("trigger", f"{name}: nothing is kept for a recomputation that is over", not any(map(len, stored)))
    wrong = next((i for i, (a, b) in enumerate(zip(got, plain, strict=True)) if not all(map(torch.equal, a, b))), None)
    check(
        "trigger",
        f"{name}: bitwise as without checkpointing" + ("" if wrong is None else f" until step {wrong}"),
        wrong is None,
    )
    return plain


def defined(plain):
    """The scale of the first block's input, and of the gradient of the last one's output, by the definition: the largest of the last steps."""
    torch.manual_seed(1)
    amaxes = [[t.float().abs().max() for t in data({0: "fwd", 3: "bwd"}.get(i % EVERY))] for i in range(STEPS)]
    for name, k, at, largest in (("input", 0, -16, 448), ("gradient", 1, -2, 57344)):
        want = [largest / max(amax[k] for amax in amaxes[max(0, i - LENGTH + 1) : i + 1]) for i in range(STEPS)]
        right = all(torch.isclose(tensors[at][0], scale, rtol=1e-6) for tensors, scale in zip(plain, want, strict=True))
        check("control", f"the scale of the {name} is that of the largest of {LENGTH} steps", right)


def main():
    recipes = repro.recipes
    one, function = lambda: network(4, 1), recipe(repro.largest)
    two = lambda: network(3, 2)  # noqa: E731
    every = (0, 1, 2, 3)
    plain = same("no checkpoint", one, function)
    check(
        "control",
        "scales of the forward and backward change",
        all(len({run[i].sum().item() for run in plain}) > 2 for i in (-2, -4)),
    )
    for which in ((0,), (1,), (3,), (0, 2), every):
        same(f"blocks {which}, reentrant", one, function, checkpointed=which)
    for how in ("not reentrant", "nested"):
        for which in ((0,), (2,), every):
            same(f"blocks {which}, {how}", one, function, checkpointed=which, how=how)
    for how in ("reentrant", "not reentrant", "nested"):
        same(f"two layers a block, {how}", two, function, checkpointed=(0, 1, 2), how=how)
        same(f"two microbatches, {how}", one, function, checkpointed=every, how=how, microbatches=2)
        same(f"an evaluation between steps, {how}", one, function, checkpointed=(1, 2), how=how, between=evaluation)
    same("an error between steps", one, function, checkpointed=(1, 2), between=failure)
    for name, fp8 in (
        ("the newest amax", recipe(newest)),
        ("a scale of a function", recipes.DelayedScaling(amax_history_len=LENGTH, scaling_factor_compute_algo=doubled)),
        ("max", recipe("max")),
        ("most_recent", recipe("most_recent")),
        ("max of 1024", recipe("max", 1024)),
    ):
        same(f"{name}, reentrant", one, fp8, checkpointed=every)
        same(f"{name}, nested", one, fp8, checkpointed=(1, 2), how="nested")
    finish()


def newest(amaxes):
    return amaxes[0].clone()


def doubled(amax, scale, fp8_max, recipe):
    """Half of the scale that is the default's, or the last one where there is no amax."""
    return torch.where(amax > 0, fp8_max / amax / 2, scale)


if __name__ == "__main__":
    repro.parser.parse_args()
    repro.te, repro.recipes, repro.manager, repro.kernel = repro.release()
    main()
