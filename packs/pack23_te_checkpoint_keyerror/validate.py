"""The deep check of a fix of pack23: several blocks, FP8 inside some of them, a part without gradients, evaluations, microbatches; all bitwise as without te.checkpoint.

Runs after repro.py where a patch is judged: the pack has no fix of its own. Where FP8 is switched on around several blocks, pack22's bug is in the way: that is not looked at here.
"""

import contextlib
import weakref
from functools import partial

import repro
import torch
from repro import ROWS, SIZE, check, finish
from torch import set_grad_enabled  # its name here is another one's, whatever torch's is made to be

STEPS, LENGTH, BLOCKS = 8, 4, 3
ran = []  # a block for each of its runs


def network():
    torch.manual_seed(0)
    repro.manager.reset()
    return torch.nn.ModuleList([repro.te.Linear(SIZE, SIZE, device="cuda", params_dtype=torch.bfloat16) for _ in range(BLOCKS)])


def tensor(scale):
    return scale * torch.randn(ROWS, SIZE, device="cuda", dtype=torch.bfloat16)


def forward(parts, x, recipe, in_fp8, checkpointed, how):
    """FP8 is switched on for each block of ``in_fp8`` by itself; blocks that are ``checkpointed`` are given to te.checkpoint with that inside."""

    def block(i, x):
        ran.append(i)
        if i == how.get("teacher"):  # a part of the function that wants no gradients
            with how.get("off", torch.no_grad)(), repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                taught = parts[i](x)
            if "student" not in how:
                return x + taught
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                return parts[how["student"]](x) + taught
        with repro.te.fp8_autocast(enabled=i in in_fp8, fp8_recipe=recipe):
            return parts[i](x)

    reentrant = {"use_reentrant": how.get("use_reentrant", True)}
    for i in range(BLOCKS):
        x = repro.te.checkpoint(lambda x, i=i: block(i, x), x, **reentrant) if i in checkpointed else block(i, x)
    return x


def scales(parts):
    """Scales and histories of the forward and backward; not the history's first row, where the next amax is collected."""
    metas = [part.fp8_meta.get(f"scaling_{way}") for part in parts for way in ("fwd", "bwd")]
    return [t.clone() for meta in metas if meta is not None for t in (meta.scale, meta.amax_history[1:])]


def stored():
    state = getattr(repro.manager, "quantization_state", repro.manager)
    return sum(map(len, state.fp8_tensors_recompute_buffer))


def trained(in_fp8, checkpointed, how, microbatches=1, training=True, evaluate=False):
    """Outputs, gradients, scales and histories after each step; and whether an evaluation between steps left scales and histories as they were."""
    parts, recipe, found, untouched = network().train(training), repro.recipes.DelayedScaling(amax_history_len=LENGTH), [], True
    torch.manual_seed(1)
    for step in range(STEPS):
        inputs = [tensor(1000 if step % 3 == 0 else 1).requires_grad_() for _ in range(microbatches)]
        outputs = [forward(parts, x, recipe, in_fp8, checkpointed, how) for x in inputs]
        for y in outputs:
            y.backward(tensor(1))
        found.append(
            [
                t.detach().clone()
                for t in (
                    *outputs,
                    *(x.grad for x in inputs),
                    *(p.grad for p in parts.parameters() if p.grad is not None),
                    *scales(parts),
                )
            ]
        )
        parts.zero_grad()
        if evaluate:
            before, x = scales(parts), tensor(5000)
            with torch.no_grad():
                forward(parts, x, recipe, in_fp8, checkpointed, how)
            untouched &= all(map(torch.equal, before, scales(parts)))
            repro.te.checkpoint(lambda x: forward(parts, x, recipe, in_fp8, (), {}), tensor(1))  # its input wants no gradient
    return found, untouched


def switched_off():
    return torch.set_grad_enabled(False)


def by_another_name():
    return set_grad_enabled(False)


@contextlib.contextmanager
def underneath():
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        yield
    finally:
        torch._C._set_grad_enabled(before)


def freed(how):
    """Whether an activation in a checkpoint, which the backward needs, is freed when the forward is over."""
    parts, recipe, inside = network(), repro.recipes.DelayedScaling(), []

    def block(x):
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            inside.append(weakref.ref(y := parts[0](x)))
            return parts[1](y.sin())

    out = repro.te.checkpoint(block, tensor(1).requires_grad_(), **how)
    return inside[0]() is None and out.requires_grad


def drawn(x):
    """Random numbers of the device of ``x``, and of the CPU."""
    return torch.rand_like(x[0, :4].float()).tolist(), torch.rand(4).tolist()


def around(how):
    """What the second run shares with the first one: random numbers, torch.autocast, contexts of context_fn; and whether who draws after it is not disturbed."""
    parts, recipe, runs, entered = network(), repro.recipes.DelayedScaling(), [], []

    def block(x):
        autocasts = [(torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in ("cpu", "cuda")]
        runs.append((drawn(x.detach()), autocasts))
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return parts[0](x)

    @contextlib.contextmanager
    def context(name):
        entered.append((name, len(runs)))
        yield

    contexts = lambda: (context("first"), context("again"))  # noqa: E731
    x, gradient = tensor(1).requires_grad_(), tensor(1)
    torch.manual_seed(2)
    want = [drawn(x.detach()) for _ in range(3)]
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cuda", dtype=torch.float16):
        y = repro.te.checkpoint(block, x, context_fn=contexts, **how)
    later = [drawn(x.detach())]
    y.backward(gradient.to(y.dtype))
    later.append(drawn(x.detach()))
    asked = [(True, torch.bfloat16), (True, torch.float16)]
    return {
        "random numbers are the first run's": [numbers for numbers, _ in runs] == [want[0]] * 2,
        "torch.autocast is the first run's": [autocasts for _, autocasts in runs] == [asked] * 2,
        "it is in its context of context_fn": entered == [("first", 0), ("again", 1)],
        "random numbers after it go on": later == want[1:],
    }


class Several(torch.nn.Module):
    """Two tensors, a number and a keyword in, two tensors or two and a number out, FP8 inside."""

    def __init__(self, layer, recipe, gives):
        super().__init__()
        self.layer, self.recipe, self.gives = layer, recipe, gives

    def forward(self, x, other, factor, *, gain):
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            y = self.layer(x * factor)
        return (y + other, gain * y, 3)[: self.gives]


def several(gives, **checkpoint):
    """After each step what comes back, gradients, scales and histories, or what is raised."""
    parts, found = network(), []
    block = Several(parts[0], repro.recipes.DelayedScaling(amax_history_len=LENGTH), gives)
    call = partial(repro.te.checkpoint, block, **checkpoint) if checkpoint else block
    torch.manual_seed(1)
    try:
        for i in range(STEPS):
            x, other = tensor(1000 if i % 3 == 0 else 1).requires_grad_(), tensor(1).requires_grad_()
            first, second, *rest = call(x, other, 2.0, gain=3.0)
            (first - 2 * second).backward(tensor(1))
            tensors = [first, second, x.grad, other.grad, *(p.grad for p in parts[0].parameters()), *scales(parts[:1])]
            found.append((rest, [t.detach().clone() for t in tensors]))
            parts.zero_grad()
    except Exception as error:  # what it raises is the finding
        return f"{type(error).__name__}: {error}"
    return found


def main():
    every = tuple(range(BLOCKS))
    for how in {}, {"use_reentrant": False}:
        parts, recipe = network(), repro.recipes.DelayedScaling()
        ran.clear()
        forward(parts, tensor(1).requires_grad_(), recipe, every, every, how).backward(tensor(1))
        name = f"{'not ' * bool(how)}reentrant"
        check("trigger", f"{name}: blocks run {len(ran)} times in a step, of {2 * BLOCKS}", len(ran) == 2 * BLOCKS)
        check("trigger", f"{name}: an activation inside is freed after the forward", freed(how))
        for what, same in around(how).items():
            check("trigger", f"{name}, the second run: {what}", same)
        for gives, what in ((2, "two"), (3, "two and a number")):
            want, got = several(gives), several(gives, use_reentrant=how.get("use_reentrant", True))
            raised = got if isinstance(got, str) else ""
            same = not raised and all(
                a[0] == b[0] and all(map(torch.equal, a[1], b[1])) for a, b in zip(got, want, strict=True)
            )
            case = f"{name}, two tensors and a keyword in, {what} back"
            check("trigger", f"{case}: bitwise as without te.checkpoint{raised and f' ({raised})'}", same)
    for name, options in (
        ("FP8 inside all blocks", {}),
        ("FP8 inside the second block", {"in_fp8": (1,)}),
        ("all but the last block checkpointed", {"checkpointed": (0, 1)}),
        ("two microbatches", {"microbatches": 2}),
        ("eval mode", {"training": False}),
        ("evaluations between steps", {"evaluate": True}),
        ("a part without gradients", {"teacher": 1}),
        ("a part without gradients beside one with them", {"teacher": 1, "student": 2, "checkpointed": (1,)}),
        *(
            (f"the same by {what}", {"teacher": 1, "student": 2, "checkpointed": (1,), "off": off})
            for what, off in (
                ("torch.set_grad_enabled(False)", switched_off),
                ("set_grad_enabled(False)", by_another_name),
                ("torch._C._set_grad_enabled(False)", underneath),
            )
        ),
    ):
        for how in ({}, {"use_reentrant": False}):
            given = {"in_fp8": every, "checkpointed": every, **options}
            how = how | {key: given.pop(key) for key in ("teacher", "student", "off") if key in given}
            case = f"{name}{', use_reentrant=False' if 'use_reentrant' in how else ''}"
            (want, still), (got, untouched) = trained(how=how, **{**given, "checkpointed": ()}), trained(how=how, **given)
            wrong = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not all(map(torch.equal, a, b))), None)
            check(
                "trigger",
                f"{case}: bitwise as without te.checkpoint" + ("" if wrong is None else f" until step {wrong}"),
                wrong is None,
            )
            if (
                "teacher" not in how or "use_reentrant" not in how
            ):  # there 2.20.2 keeps what no recomputation takes: another bug
                check("trigger", f"{case}: nothing is kept for a recomputation that is over", not stored())
            if "evaluate" in options:
                check("control", f"{case}: without te.checkpoint they change no scale", still)
                check("trigger", f"{case}: they change no scale", untouched)
            if "use_reentrant" not in how:
                check("control", f"{case}: scales change", len({step[-4].sum().item() for step in want}) > 2)
    finish()


if __name__ == "__main__":
    repro.te, repro.recipes, repro.manager = repro.release()
    main()
