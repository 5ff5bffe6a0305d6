"""The deep check of pack46's fix: other sizes, recipes, parts that are frozen, microbatches, blocks, and reentrant checkpoints; all bitwise as without te.checkpoint.

Runs after repro.py on the patched side. Blocks have to be run again as they were run, what they store has to be freed, and an input that needs no gradient has to
stay so.
"""

import contextlib
import gc
import sys
import weakref
from functools import partial
from unittest import mock

import measure
import repro
import torch
from repro import STEPS, check, finish


def layer(rows, columns, dtype=torch.bfloat16):
    return repro.te.Linear(rows, columns, device="cuda", params_dtype=dtype)


def one():
    return torch.nn.Sequential(layer(64, 48))


def two(between=torch.nn.GELU):
    return torch.nn.Sequential(layer(64, 96), between(), layer(96, 48))


def frozen(*names):
    """Two layers, of which the first one's ``names`` are not trained."""
    block = two()
    for name in names:
        getattr(block[0], name).requires_grad_(False)
    return block


class Embedded(torch.nn.Sequential):
    """A frozen embedding of what the input says, and a layer."""

    def __init__(self):
        super().__init__(layer(64, 48))
        self.table = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)

    def forward(self, x):
        return super().forward(self.table[(x[:, 0] > 0).long()])


class Scaled(torch.nn.Sequential):
    def forward(self, x, *, scale):
        return super().forward(x * scale)


class Beside(torch.nn.Sequential):
    """Two layers that take the same input."""

    def forward(self, x):
        return self[0](x) * self[1](x)


class Twice(torch.nn.Sequential):
    """A layer that is called with what needs a gradient, and with what may need none."""

    calls = 2

    def __init__(self):
        super().__init__(layer(64, 48))
        self.factor = torch.nn.Parameter(torch.full((64,), 2.0, device="cuda", dtype=torch.bfloat16))

    def forward(self, x):
        return self[0](x * self.factor) + self[0](x)


class Nested(torch.nn.Sequential):
    """A checkpoint of an activation, and a layer after it that takes the block's input."""

    def forward(self, x):
        return repro.te.checkpoint(torch.nn.GELU(), self[0](x)) * self[1](x)


class Detached(torch.nn.Sequential):
    """The input needs a gradient, and what the layer gets of it needs none."""

    def forward(self, x):
        return super().forward(x.detach()) * x[:, :48]


class Inside(torch.nn.Sequential):
    """FP8 is on in the block alone."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.recipe = delayed()

    def forward(self, x):
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            return super().forward(x)


class Drawn(torch.nn.Sequential):
    """Draws of a generator that ``get_rng_state_tracker`` knows."""

    generator = torch.Generator()

    def __init__(self):
        super().__init__(layer(64, 48))
        self.generator.manual_seed(0)

    def forward(self, x):
        return super().forward(x * torch.rand(x.shape, generator=self.generator).to(x))


class Tracker:
    def get_states(self):
        return {"drawn": Drawn.generator.get_state()}

    def set_states(self, states):
        Drawn.generator.set_state(states["drawn"])


def in_fp32():
    """A layer of torch's with weights in fp32, which takes the other's output in torch.autocast alone."""
    return torch.nn.Sequential(layer(64, 48), torch.nn.Linear(48, 48, device="cuda"))


def delayed(**options):
    return repro.recipes.DelayedScaling(amax_history_len=1024, **options)


def recipes():
    """By name, with a size; the lane te-cpu has delayed scaling alone."""
    known = {"delayed scaling": (delayed, 64)}
    known["delayed scaling, the most recent"] = partial(delayed, amax_compute_algo="most_recent"), 64
    if repro.FACTS["evidence"].startswith("device"):
        known |= {kind: (recipe, measure.SIZE) for kind, recipe in measure.recipes()}
    return known


@contextlib.contextmanager
def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cuda", dtype=torch.bfloat16):
        yield


def trained(
    make,
    recipe,
    how=None,
    wanted=False,
    size=(32, 64),
    dtype=torch.bfloat16,
    microbatches=1,
    cached=False,
    after=None,
    between=None,
    mixed=False,
    backwards=False,
    dropped=False,
    **options,
):
    """Outputs, gradients and scales of each step, after which weights change their sign; how often the block ran; inputs that have another gradient than is wanted."""
    torch.manual_seed(0)
    repro.manager.reset()
    block, last, found, ran, odd = make(), after and layer(48, 48), [], [], 0
    block[0].register_forward_pre_hook(lambda *_: ran.append(1))
    amp, named = options.pop("amp", False), options
    parameters = [*block.parameters(), *(last.parameters() if last else ())]
    for _ in range(STEPS):
        pairs = []
        for i in range(-dropped, microbatches):  # one whose backward never comes is the first
            needs = wanted != ((mixed and i % 2 == 1) or i < 0)
            x = torch.randn(size, device="cuda", dtype=dtype).requires_grad_(needs)
            run = partial(block[0], is_first_microbatch=i == 0) if cached else block
            around = autocast() if amp else contextlib.nullcontext()
            with repro.te.fp8_autocast(enabled=not isinstance(block, Inside), fp8_recipe=recipe), around:
                y = run(x, **named) if how is None else repro.te.checkpoint(run, x, **named, **how)
                y = repro.te.checkpoint(last, y, **how or {}) if last and how is not None else last(y) if last else y
            pairs += [(x, y)] if i >= 0 else []
            if between:  # the layers are run besides, too
                with between(), repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                    y = block(torch.randn(size, device="cuda", dtype=dtype))
                pairs += [(None, y)] if y.requires_grad else []
        for i, (x, y) in list(enumerate(pairs))[:: -1 if cached or backwards else 1]:
            needs = wanted != (mixed and i % 2 == 1)
            y.backward(torch.randn_like(y))
            odd += x is not None and ((x.grad is not None) != needs or x.requires_grad != needs)
            found += [y.detach(), *([x.grad] if needs and x is not None else [])]
        found += [block.generator.get_state()] if isinstance(block, Drawn) else []
        found += [p.grad.clone() for p in parameters if p.requires_grad]
        states = [m.fp8_meta["scaling_fwd"] for m in block if hasattr(m, "fp8_meta")]
        found += [state.scale.clone() for state in states if hasattr(state, "scale")]
        for p in parameters:
            p.data.neg_()
            p.grad = None
    return found, len(ran) // getattr(block, "calls", 1), odd


def same(name, make, **options):
    """Bitwise the same as without a checkpoint, with two runs of the block for each forward.

    With ``scaled`` as near as FP8 is: scales are then taken in another order than without (pack22).
    """
    how = {"use_reentrant": options.pop("reentrant", False), **options.pop("how", {})}
    recipe, scaled = options.pop("recipe", delayed), options.pop("scaled", False)
    want, runs, _ = trained(make, recipe(), **options)
    got, again, odd = trained(make, recipe(), how, **options)
    check("control", f"{name}: gradients without te.checkpoint are numbers", all(t.isfinite().all() for t in want))
    if scaled:
        far = [
            (a.double() - b.double()).norm().cpu() / b.double().norm().cpu()
            if a.is_floating_point()
            else torch.tensor(float(not torch.equal(a, b)))  # the state of a generator
            for a, b in zip(got, want, strict=True)
        ]
        check("trigger", f"{name}: as without te.checkpoint, but for scales", error=torch.stack(far).max(), limit=0.2)
    else:
        check("trigger", f"{name}: bitwise as without te.checkpoint", all(map(torch.equal, got, want)))
    runs += STEPS * options.get("microbatches", 1)  # a forward whose backward never comes is not run again
    check("trigger", f"{name}: blocks run {again} times, of {runs}", again == runs)
    check("trigger", f"{name}: inputs have a gradient where one is wanted", not odd)


def modules():
    """Modules that the lane te-cpu has no GEMM of, and those that were right, with each recipe of a GPU."""
    for of, module, more in measure.modules():
        for kind, recipe in measure.recipes():
            for wanted in (True, False) if of != "LayerNormMLP" or "override" not in kind else ():
                repro.manager.reset()
                name = f"{of}, {kind}, an input that needs {'a' if wanted else 'no'} gradient"
                found = measure.outcome(module, more, recipe(), wanted)
                check("trigger", f"{name}: bitwise as without te.checkpoint", found["right"] == 1)


def right(wanted):
    """Outputs and gradients are those of the layer, as far as FP8 goes; the input is given by its name."""
    torch.manual_seed(0)
    repro.manager.reset()
    (part,) = one()
    for _ in range(2):  # the second one has scales, and another weight
        part.weight.data.neg_()
        x, gradient = (torch.randn(64, n, device="cuda", dtype=torch.bfloat16) for n in (64, 48))
        part.zero_grad()
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=delayed()):
            y = repro.te.checkpoint(part, inp=x.requires_grad_(wanted), use_reentrant=False)
        y.backward(gradient)
    wide = [t.detach().double() for t in (x, part.weight, part.bias, gradient)]
    cases = [("output", y, wide[0] @ wide[1].T + wide[2]), ("gradient of the weight", part.weight.grad, wide[3].T @ wide[0])]
    cases += [("gradient of the bias", part.bias.grad, wide[3].sum(0))]
    cases += [("gradient of the input", x.grad, wide[3] @ wide[1])] if wanted else []
    for name, got, want in cases:
        name = f"an input that needs {'a' if wanted else 'no'} gradient: {name} against fp64"
        error = ((got - want).norm() / want.norm()).item()
        check("trigger", name, error=error, limit=0.1)
        if name.endswith(("output against fp64", "weight against fp64")):
            check("trigger", f"{name}: it is in FP8", error > 0.01)


def products():
    """How often the layer multiplies: a checkpoint runs the forward once more, and no more than that."""
    part, module = one(), sys.modules["transformer_engine.pytorch.module.linear"]
    for wanted in (True, False):
        called = []
        for run in (part, partial(repro.te.checkpoint, part, use_reentrant=False)):
            x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(wanted)
            with mock.patch.object(module, "general_gemm", wraps=module.general_gemm) as gemm:
                with repro.te.fp8_autocast(enabled=True, fp8_recipe=delayed()):
                    y = run(x)
                called.append(gemm.call_count)
                y.sum().backward()
                called.append(gemm.call_count)
        forward, both, _, again = called
        name = f"an input that needs {'a' if wanted else 'no'} gradient: {both} products, and {again} in a checkpoint"
        check("trigger", name, (forward, both, again) == (1, 2 + wanted, 3 + wanted))


def entered():
    """Each run is in its context of ``context_fn``."""
    for wanted in (True, False):
        part, seen, ran = one(), [], []
        part[0].register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))

        @contextlib.contextmanager
        def context(which, seen=seen, ran=ran):
            seen.append((which, len(ran)))
            yield

        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(wanted)
        both = lambda context=context: (context("first"), context("again"))  # noqa: E731
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=delayed()):
            y = repro.te.checkpoint(part, x, use_reentrant=False, context_fn=both)
        y.sum().backward()
        name = f"an input that needs {'a' if wanted else 'no'} gradient: each run is in its context"
        check("trigger", name, seen == [("first", 0), ("again", 1)])


def tensors(*dtypes):
    """How many tensors Python knows, of these dtypes or of any."""
    gc.collect()
    known = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(not dtypes or (type(each) is torch.Tensor and each.dtype in dtypes and each.ndim > 1) for each in known)


def freed(wanted):
    """What a block stores is freed after its forward, in FP8 and not, and nothing is kept after the backward."""
    block, inner, alive, counts = two(), [], [], []
    first = (
        2 if int(repro.FACTS["version"].split(".")[1]) >= 4 else STEPS + 9
    )  # before 2.4 weights in FP8 are kept till the backward
    block[1].register_forward_hook(lambda _, __, y: inner.append(weakref.ref(y)))
    for i in range(7):
        before = tensors(torch.uint8)
        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(wanted)
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=delayed()):
            y = repro.te.checkpoint(block, x, use_reentrant=False)
        alive.append(sum(each() is not None for each in inner) + (tensors(torch.uint8) - before) * (i >= first))
        y.sum().backward()
        del x, y
        counts += [tensors()] * (i in (2, 6))
    name = f"an input that needs {'a' if wanted else 'no'} gradient: activations are freed after the forward"
    check("trigger", name, not any(alive))
    check("trigger", f"{name}; {counts[1] - counts[0]} tensors more are there", counts[1] <= counts[0])


def without_gradients():
    """Where none are wanted a checkpoint gives what the block gives, and nothing to recompute."""
    for name, block, mode in (
        ("without gradients", two(), torch.no_grad),
        ("all parameters frozen", two().requires_grad_(False), torch.enable_grad),
    ):
        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
        repro.manager.reset()
        with mode(), repro.te.fp8_autocast(enabled=True, fp8_recipe=delayed()):
            want = block(x)
            got = repro.te.checkpoint(block, x, use_reentrant=False)
        check("trigger", f"{name}: bitwise as without te.checkpoint", torch.equal(got, want))
        check("trigger", f"{name}: the output needs none", not got.requires_grad)


def main():
    for name, (recipe, features) in recipes().items():
        make = lambda features=features: torch.nn.Sequential(layer(features, features))  # noqa: E731
        for rows in (features, 2 * features):
            same(f"{name}, {rows} rows", make, recipe=recipe, size=(rows, features))
        same(f"{name}, an input that needs a gradient", make, recipe=recipe, size=(features, features), wanted=True)
    for rows in (16, 64):
        same(f"64 x 48, {rows} rows", one, size=(rows, 64))
    same("two layers", two)
    same("dropout", partial(two, torch.nn.Dropout))
    same("the output of a frozen embedding", Embedded)
    same("two layers beside each other", lambda: Beside(layer(64, 48), layer(64, 48)))
    same("an input that is detached in the block", lambda: Detached(layer(64, 48)), wanted=True)
    if int(repro.FACTS["version"].split(".")[1]) >= 19:  # before, a checkpoint has to be called with FP8 on, whatever its input
        same("FP8 in the block alone", lambda: Inside(layer(64, 48)))
    for wanted in (True, False):
        kind = f"an input that needs {'a' if wanted else 'no'} gradient"
        same(f"{kind}, a checkpoint in the block", lambda: Nested(layer(64, 48), layer(64, 48)), wanted=wanted, scaled=True)
        same(f"{kind}, a layer called twice", Twice, wanted=wanted, scaled=True)
        same(f"{kind}, the next microbatch's otherwise", two, wanted=wanted, microbatches=2, mixed=True)
        if int(repro.FACTS["version"].split(".")[1]) >= 4:  # before, another forward's scales are taken (pack22)
            last_first = {"microbatches": 2, "mixed": True, "backwards": True}
            same(f"{kind}, a forward without a backward before", one, wanted=wanted, dropped=True, scaled=True)
            same(f"{kind}, the next microbatch's otherwise, backwards", two, wanted=wanted, scaled=True, **last_first)
        same(f"{kind}, an evaluation between", two, wanted=wanted, between=torch.no_grad, scaled=True)
        same(f"{kind}, another batch without te.checkpoint between", two, wanted=wanted, between=torch.enable_grad, scaled=True)
    for count in (1, 2):
        tracked = {"how": {"get_rng_state_tracker": Tracker}, "microbatches": count, "backwards": True}
        same(f"draws of its own, {count} at a time", Drawn, scaled=count > 1, **tracked)
    same("a sequence of batches", one, size=(16, 2, 64))
    for dtype in (torch.float32, torch.float16):
        same(f"weights in {dtype}", lambda dtype=dtype: torch.nn.Sequential(layer(64, 48, dtype)), dtype=dtype)
    same("a keyword besides", lambda: Scaled(layer(64, 48)), scale=3.0)
    same("in torch.autocast", in_fp32, amp=True)
    same("its weight is frozen", partial(frozen, "weight"))
    same("its bias is frozen", partial(frozen, "bias"))
    same("all of it is frozen", partial(frozen, "weight", "bias"))
    same("two blocks", one, after=True)
    for count in (2, 3):
        same(f"{count} microbatches", two, microbatches=count)
    for reentrant in (True, False):
        kind = "reentrant" if reentrant else "not reentrant"
        same(f"an input that needs a gradient, {kind}", two, wanted=True, reentrant=reentrant)
        same(f"an input that needs a gradient, {kind}, two blocks", one, wanted=True, reentrant=reentrant, after=True)
        same(
            f"an input that needs a gradient, {kind}, dropout", partial(two, torch.nn.Dropout), wanted=True, reentrant=reentrant
        )
    for reentrant, wanted in ((True, True), (False, True), (False, False)):
        name = (
            f"weights cast once for 3 microbatches, {'' if reentrant else 'not '}reentrant, {'a' if wanted else 'no'} gradient"
        )
        same(name, one, microbatches=3, cached=True, reentrant=reentrant, wanted=wanted, scaled=True)
    right(True)
    right(False)
    entered()
    products()
    if repro.FACTS["evidence"].startswith("device"):
        modules()
    freed(False)
    freed(True)
    without_gradients()
    finish()


if __name__ == "__main__":
    repro.te, repro.recipes, repro.manager = repro.release()
    main()
