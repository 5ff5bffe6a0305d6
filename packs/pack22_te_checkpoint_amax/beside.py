"""What te.checkpoint and delayed scaling do beside the histories, and what the fix has to leave alone.

Random numbers, contexts, memory, functions without a module of transformer-engine, activations that are spread over ranks; a recipe's format and
``reduce_amax``. Random numbers and ranks are stand-ins where there is no GPU, and ranks on one as well.
"""

import contextlib
import gc
import sys
import weakref
from functools import partial
from unittest import mock

import repro
import torch
from repro import check, data

WAYS = {"reentrant": True, "not reentrant": False}


def autocast(**options):
    fp8 = repro.recipes.DelayedScaling(amax_history_len=4, amax_compute_algo=repro.largest, **options)
    return repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8)


@contextlib.contextmanager
def as_two_ranks(reduce):
    """As if there were two: ``reduce`` is given the amaxes of each update."""
    ranks = {"is_initialized": lambda: True, "get_world_size": lambda *_, **__: 2}
    reduction = mock.patch.object(repro.manager, "reduce_tensor_across_group_op_max", lambda amaxes, *_: reduce(amaxes))
    with reduction, mock.patch.multiple(torch.distributed, **ranks):
        yield


def contexts():
    """What is run again is run in the torch.autocast of the first run, and in the contexts that are asked for."""
    for name, reentrant in WAYS.items():
        (layer,), ran, entered = repro.blocks(1), [], []

        def run(x, layer=layer, ran=ran):
            ran.append([(torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in ("cpu", "cuda")])
            return layer(x)

        @contextlib.contextmanager
        def context(which, entered=entered, ran=ran):
            entered.append((which, len(ran)))
            yield

        x, gradient = data()
        both = lambda context=context: (context("first"), context("again"))  # noqa: E731
        with autocast(), torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cuda", dtype=torch.float16):
            y = repro.te.checkpoint(run, x.requires_grad_(), use_reentrant=reentrant, context_fn=both)
        y.backward(gradient.to(y.dtype))
        want = [(True, torch.bfloat16), (True, torch.float16)]
        check("trigger", f"{name}: both runs are in the torch.autocast around the checkpoint", ran == [want, want])
        check("trigger", f"{name}: each run is in its context of context_fn", entered == [("first", 0), ("again", 1)])


class Numbers:
    """Random numbers of a GPU: there its own, elsewhere 1, 2, … from a state; and a tracker with a state of its own."""

    def __init__(self):
        self.state, self.tracked = torch.zeros(1), {"model-parallel-rng": torch.zeros(1)}
        self.patches = contextlib.ExitStack()
        torch.cuda.manual_seed(0) if repro.kernel else None

    def __enter__(self):
        if not repro.kernel:
            module = sys.modules["transformer_engine.pytorch.distributed"]
            own = {"_get_cuda_rng_state": lambda *_, **__: self.state, "_set_cuda_rng_state": self.put}
            self.patches.enter_context(mock.patch.multiple(module, **own))
        return self

    def __exit__(self, *raised):
        self.patches.close()

    def put(self, state, *_, **__):
        self.state = state

    def get_states(self):
        return dict(self.tracked)

    def set_states(self, states):
        self.tracked = dict(states)

    def drawn(self):
        if repro.kernel:
            number = torch.rand(1, device="cuda")
        else:
            number = self.state = self.state + 1
        self.tracked = {name: state + 1 for name, state in self.tracked.items()}
        return number.item(), self.tracked["model-parallel-rng"].item()


def random_numbers():
    """The second run draws what the first one drew, and who draws after it goes on as if it had not been."""
    for name, reentrant in WAYS.items():
        with Numbers() as numbers:
            want = [numbers.drawn() for _ in range(4)]
        (layer,), (x, gradient), drawn = repro.blocks(1), data(), []
        with Numbers() as numbers:

            def run(x, layer=layer, drawn=drawn, numbers=numbers):
                drawn.append(numbers.drawn())
                return layer(x)

            with autocast():
                more = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda numbers=numbers: numbers}
                y = repro.te.checkpoint(run, x.requires_grad_(), **more)
            drawn.append(numbers.drawn())
            y.backward(gradient)
            drawn.append(numbers.drawn())
        same = drawn == [want[0], want[1], want[0], want[2]]
        check("trigger", f"{name}: random numbers of the GPU and of a tracker: the second run's are the first one's", same)


def memory():
    """Nothing of a checkpoint is alive but its inputs and outputs; and after steps there is as much as before them."""
    for name, reentrant in {**WAYS, "nested": True}.items():
        (layer,), inner, counts, alive = repro.blocks(1), [], [], []

        def run(x, layer=layer, inner=inner):
            inner.append(weakref.ref(h := layer(x)))
            return h * h.sigmoid()

        part = partial(repro.te.checkpoint, run) if name == "nested" else run
        for i in range(9):
            x, gradient = data()
            with autocast():
                y = repro.te.checkpoint(part, x.requires_grad_(), use_reentrant=reentrant)
            gc.collect()
            alive.append(sum(each() is not None for each in inner))
            y.backward(gradient)
            given = [weakref.ref(x), weakref.ref(y)]
            del x, y, gradient
            gc.collect()
            alive.append(sum(each() is not None for each in inner + given))
            counts += [sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())] * (i in (3, 8))
        check("trigger", f"{name}: no tensor of what is checkpointed lives on, before or after its backward", not any(alive))
        more = counts[1] - counts[0]
        check("trigger", f"{name}: {max(more, 0)} tensors more are there after 5 steps", more <= 0)


def without_modules():
    """What has no module of transformer-engine is checkpointed as well."""
    for name, reentrant in WAYS.items():
        for what in ("torch's module", "a function"):
            ran, plain = [], torch.nn.Linear(repro.SIZE, repro.SIZE, device="cuda", dtype=torch.bfloat16)
            plain.register_forward_pre_hook(lambda *_, ran=ran: ran.append(torch.is_grad_enabled()))
            given = plain if what == "torch's module" else lambda x, plain=plain: plain(x)
            x, gradient = data()
            repro.te.checkpoint(given, x.requires_grad_(), use_reentrant=reentrant).backward(gradient)
            got = [x.grad, plain.weight.grad]
            x.grad = plain.weight.grad = None
            plain(x).backward(gradient)
            same = all(map(torch.equal, got, [x.grad, plain.weight.grad]))
            check("trigger", f"{name}, {what}: run twice, with the gradients of one run", len(ran) == 3 and same)


def without_fp8():
    """What was checkpointed outside of fp8_autocast is recomputed without FP8, wherever its backward is."""
    for name, reentrant in WAYS.items():
        (layer,), enabled = repro.blocks(1), []

        def run(x, layer=layer, enabled=enabled):
            enabled.append(repro.manager.is_fp8_enabled())
            return layer(x)

        for where in (contextlib.nullcontext(), autocast()):
            x, gradient = data()
            y = repro.te.checkpoint(run, x.requires_grad_(), use_reentrant=reentrant)
            with where:
                y.backward(gradient)
            got = [x.grad, layer.weight.grad, layer.bias.grad]
            x.grad = layer.weight.grad = layer.bias.grad = None
            layer(x).backward(gradient)
            same = all(map(torch.equal, got, [x.grad, layer.weight.grad, layer.bias.grad]))
            layer.zero_grad()
            check("trigger", f"{name}: what is not in FP8 is recomputed without: {enabled}", same and not any(enabled))


def reductions():
    """Amaxes are reduced by their maximum, over the group of fp8_autocast, also in a recomputation."""
    for name, how in (("no checkpoint", ()), ("reentrant", ((0,), "reentrant")), ("not reentrant", ((0,), "not reentrant"))):
        group, seen, parts = object(), [], repro.blocks(1)
        x, gradient = data()

        def reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False, seen=seen):
            seen.append((op == torch.distributed.ReduceOp.MAX, group, async_op))

        ranks = {"is_initialized": lambda: True, "get_world_size": lambda *_, **__: 2, "all_reduce": reduce}
        recipe = repro.recipes.DelayedScaling(amax_history_len=4, amax_compute_algo=repro.largest)
        with mock.patch.multiple(torch.distributed, **ranks):
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group):
                y = repro.forward(parts, x.requires_grad_(), *how)
            y.backward(gradient)
        check("trigger", f"{name}: {len(seen)} reductions by the maximum, over the group", {*seen} == {(True, group, False)})


def spread():
    """``distribute_saved_activations`` keeps a part of the input on each rank between the runs, and the second run gets the whole."""
    module, parts = sys.modules["transformer_engine.pytorch.distributed"], {}

    def split(tensor, *_, **__):
        flat = tensor.reshape(-1).clone()
        parts["other"] = flat[flat.numel() // 2 :]
        return flat[: flat.numel() // 2]

    def gathered(tensor, *_, **__):
        return torch.cat([tensor, parts.pop("other")])

    found = []
    for spread in (False, True):
        (layer,), seen = repro.blocks(1), []
        torch.manual_seed(1)
        x, gradient = data()
        here = {"split_tensor_into_1d_equal_chunks": split, "gather_split_1d_tensor": gathered}
        with as_two_ranks(lambda amaxes: None), mock.patch.multiple(module, **here):
            with autocast():
                run = lambda x, layer=layer, seen=seen: layer((seen.append(x.detach().clone()), x)[1])  # noqa: E731
                y = repro.te.checkpoint(run, x.requires_grad_(), distribute_saved_activations=spread)
            size = x.numel()
            y.backward(gradient)
        found.append([*seen, y, layer.weight.grad])
        want = repro.ROWS * repro.SIZE // (1 + spread)
        check(
            "trigger", f"distribute_saved_activations={spread}: {size} numbers of the input are kept, of {want}", size == want
        )
    same = len(found[0]) == len(found[1]) == 4 and all(map(torch.equal, *found))
    check("trigger", "distribute_saved_activations: both runs get the whole input, and nothing else changes", same)


def of_recipes():
    """A recipe's format says what the largest numbers are, and ``reduce_amax=False`` that ranks have scales of their own."""
    for name, backward in (("E4M3", 448), ("HYBRID", 57344)):
        for how in ((), ((0,), "reentrant")):
            parts = repro.blocks(1)
            x, gradient = data()
            with autocast(fp8_format=getattr(repro.recipes.Format, name)):
                y = repro.forward(parts, x.requires_grad_(), *how)
            y.backward(gradient)
            scales = [parts[0].fp8_meta[f"scaling_{way}"].scale[0].item() for way in ("fwd", "bwd")]
            want = [largest / t.float().abs().max().item() for largest, t in ((448, x), (backward, gradient))]
            same = all(abs(a / b - 1) < 1e-6 for a, b in zip(scales, want, strict=True))
            check("trigger", f"{name}, {how[1] if how else 'no checkpoint'}: scales are of the format's largest numbers", same)
    for reduce in (True, False):
        calls, parts = [], repro.blocks(1)
        x, gradient = data()
        with as_two_ranks(calls.append):
            with autocast(reduce_amax=reduce):
                y = repro.forward(parts, x.requires_grad_(), (0,), "reentrant")
            y.backward(gradient)
        check("trigger", f"reduce_amax={reduce}: {len(calls)} reductions", bool(calls) == reduce)


def main():
    contexts()
    random_numbers()
    memory()
    without_modules()
    without_fp8()
    reductions()
    spread()
    of_recipes()
