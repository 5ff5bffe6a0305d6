"""The deep check of pack22's fix: after every step all scales, histories, outputs and gradients are bitwise those without checkpointing.

Runs after repro.py on the patched side: other blocks, nesting, several layers in a block, microbatches, an evaluation or an error between steps,
other algorithms, outliers in inputs and gradients; scales by their definition; and that the kernel, reductions and other recipes are as before.
"""

import contextlib
import os
import sys
import threading
from functools import partial
from unittest import mock

import beside
import repro
import torch
from beside import as_two_ranks
from packaging.version import Version
from repro import check, data, finish
from torch.utils._python_dispatch import TorchDispatchMode

STEPS, LENGTH, EVERY, NAN = 14, 4, 6, 7  # an outlier is forgotten before the next one


def network(parts, layers):
    """``parts`` blocks of ``layers`` Linears."""
    all_of_them = repro.blocks(parts * layers)
    return torch.nn.ModuleList([torch.nn.Sequential(*all_of_them[i * layers : (i + 1) * layers]) for i in range(parts)])


def dropped():
    """Blocks with a dropout each, whose recomputation has to drop the same."""
    return torch.nn.ModuleList([torch.nn.Sequential(layer, torch.nn.Dropout()) for layer in repro.blocks()])


def states(parts):
    """All scales and amax histories of the forward and backward."""
    layers = [layer for part in parts for layer in part if hasattr(layer, "fp8_meta")]
    metas = [layer.fp8_meta[f"scaling_{way}"] for layer in layers for way in ("fwd", "bwd")]
    return [tensor.clone() for meta in metas for tensor in (meta.scale, meta.amax_history)]


def inputs(i, nan=False):
    """Input and gradient of step ``i``: an outlier in the one and then in the other; in between, with ``nan``, not a number."""
    x, gradient = data({0: "fwd", 3: "bwd"}.get(i % EVERY))
    if nan and i == NAN:
        x[0, 0] = float("nan")
    return x, gradient


def forward(parts, x, checkpointed=(), how="reentrant"):
    """As repro.forward; "within" is one checkpoint, with one in it of the second block, and of the blocks after that, if it is not the "last" thing in it.

    "within, deeper" has one more around the first three of its four blocks.
    """
    if "within" not in how or not checkpointed:
        return repro.forward(parts, x, checkpointed, how)
    checkpoint = partial(repro.te.checkpoint, use_reentrant="not reentrant" not in how)
    first, second, *rest = parts
    if "deeper" in how:
        return checkpoint(lambda x: rest[1](checkpoint(lambda x: rest[0](checkpoint(second, first(x))), x)), x)
    inner = lambda x: checkpoint(second, first(x))  # noqa: E731
    if "last" in how:
        return repro.forward(rest, checkpoint(inner, x))
    return checkpoint(lambda x: repro.forward(rest, inner(x)), x)


def trained(make, fp8, checkpointed=(), how="reentrant", microbatches=1, between=None, nan=False):
    """Per step: outputs, gradients, scales and histories."""
    parts, found = make(), []
    torch.manual_seed(1)
    for i in range(STEPS):
        pairs = [inputs(i, nan) for _ in range(microbatches)]
        outputs = []
        for x, _ in pairs:
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
                outputs.append(forward(parts, x.requires_grad_(), checkpointed, how))
        for y, (_, gradient) in zip(outputs, pairs, strict=True):
            y.backward(gradient)
        tensors = [*outputs, *(x.grad for x, _ in pairs), *(p.grad for p in parts.parameters()), *states(parts)]
        found.append([tensor.detach().clone() for tensor in tensors])
        parts.zero_grad()
        if between:
            between(parts, fp8, checkpointed, how)
    return found


def recipe(algorithm, length=LENGTH, margin=0):
    return repro.recipes.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)


def evaluation(parts, fp8, checkpointed, how):
    """Up to 2.19 without checkpoints: they store scales even where no gradients are wanted (#3394)."""
    late = Version(repro.FACTS["version"]) >= Version("2.20")
    with torch.no_grad(), repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        forward(parts, next(iter(data())), checkpointed if late else (), how)


def failure(parts, fp8, checkpointed, how):
    """What is checkpointed raises, before any layer has run."""

    def wrong(x):
        raise ValueError

    with contextlib.suppress(ValueError), repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        repro.te.checkpoint(wrong, next(iter(data())).requires_grad_(), use_reentrant=how != "not reentrant")


def lost(parts, fp8, checkpointed, how):
    """The recomputation of what is checkpointed raises, before any layer has run."""
    calls = []

    def once(x):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError
        return 2 * x

    with repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        if not checkpointed:
            return
        x = torch.ones(repro.ROWS, repro.SIZE, device="cuda", requires_grad=True)
        y = repro.te.checkpoint(once, x, use_reentrant=how != "not reentrant")
    with contextlib.suppress(ValueError):
        y.sum().backward()


def equal(a, b):
    """Bitwise the same, and what is no number in the same places."""
    return torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)) and torch.equal(a.isnan(), b.isnan())


def holds_tensors(value):
    """Of a list or tuple, which modules put into their state dicts with what it holds."""
    return isinstance(value, (list, tuple)) and any(isinstance(t, torch.Tensor) or holds_tensors(t) for t in value)


def same(name, make, fp8, **options):
    """Bitwise the same after all steps as without checkpointing."""
    made, plain = [], trained(make, fp8, **{**options, "checkpointed": ()})
    got = trained(lambda: made.append(make()) or made[0], fp8, **options)
    extra = [key for part in made[0].modules() for key, value in getattr(part, "fp8_meta", {}).items() if holds_tensors(value)]
    stored = getattr(repro.manager, "quantization_state", repro.manager).fp8_tensors_recompute_buffer
    check("trigger", f"{name}: nothing is kept for a recomputation that is over", not any(map(len, stored)))
    check("trigger", f"{name}: no tensors but scales and histories go into a state dict", not extra)
    wrong = next((i for i, (a, b) in enumerate(zip(got, plain, strict=True)) if not all(map(equal, a, b))), None)
    check(
        "trigger",
        f"{name}: bitwise as without checkpointing" + ("" if wrong is None else f" until step {wrong}"),
        wrong is None,
    )
    return plain


def defined(plain):
    """The scale of the first block's input, and of the gradient of the last one's output: of the largest of the last steps, where that is a number."""
    torch.manual_seed(1)
    zeros = 0.0 if repro.kernel else None  # the GPU's casts pass over what is no number
    amaxes = [
        [(t if zeros is None else t.nan_to_num(zeros)).float().abs().max() for t in inputs(i, nan=True)] for i in range(STEPS)
    ]
    for name, k, at, largest in (("input", 0, -16, 448), ("gradient", 1, -2, 57344)):
        for i, tensors in enumerate(plain):
            newest = torch.stack([amax[k] for amax in amaxes[max(0, i - LENGTH + 1) : i + 1]]).max()
            want = largest / newest if newest.isfinite() else plain[i - 1][at][0]  # what is no number changes no scale
            if not torch.isclose(tensors[at][0], want, rtol=1e-6):
                check("trigger", f"the scale of the {name} after step {i} is that of the largest of {LENGTH}", False)
                break
        else:
            check("trigger", f"the scale of the {name} is that of the largest of {LENGTH} steps", True)


def followed():
    """Scales of an input and of its weight, both of which change, with a margin: each that of the largest of its own last steps, or the largest number."""
    parts, seen, wrong = repro.blocks(1), ([], []), None
    torch.manual_seed(1)
    for i in range(STEPS):
        x, gradient = data("fwd" if i % EVERY == 0 else None)
        if i >= EVERY:
            x *= 1e-37 / x.abs().max()  # 448 over it is more than fp32 holds
        with torch.no_grad():
            parts[0].weight.mul_({3: 8, 4: 1 / 8}.get(i % EVERY, 1))
        step(parts, recipe(repro.largest, margin=1), x, gradient)
        for tensor, amaxes in zip((x, parts[0].weight), seen, strict=True):
            amaxes.append(tensor.float().abs().max().item())
        want = torch.tensor([448 / max(amaxes[-LENGTH:]) / 2 for amaxes in seen], dtype=torch.float64)
        want = want.clamp(max=torch.finfo(torch.float32).max).float()
        if wrong is None and not torch.allclose(parts[0].fp8_meta["scaling_fwd"].scale[:2].cpu(), want, rtol=1e-6):
            wrong = i
    until = "" if wrong is None else f" until step {wrong}"
    check("trigger", f"scales of input and weight, margin 1, are those of the largest of {LENGTH} steps{until}", wrong is None)


def by_functions():
    """A function's own number is taken, with a checkpoint and without: an average of a history, its newest row, a scale of its own."""
    own, smooth = (
        repro.recipes.DelayedScaling(amax_history_len=LENGTH, scaling_factor_compute_algo=function)
        for function in (doubled, smoothed)
    )
    for name, fp8, want in (
        ("the amax of the step before", recipe(before), lambda seen: 448 / seen[-2] if len(seen) > 1 else 1),
        ("a scale between the last one and that of the amax", smooth, scale_of_all),
        ("an average", recipe(average), lambda seen: 448 / (sum(seen[-LENGTH:]) / LENGTH)),
        ("the newest amax", recipe(newest), lambda seen: 448 / seen[-1]),
        ("a scale of a function", own, lambda seen: 448 / max(seen[-LENGTH:]) / 2),
    ):
        for how in ((), ((0,), "reentrant"), ((0,), "not reentrant"), ((0,), "nested")):
            parts, seen, wrong = repro.blocks(1), [], None
            torch.manual_seed(1)
            for i in range(STEPS):
                x, gradient = inputs(i)
                seen.append(x.float().abs().max().item())
                step(parts, fp8, x, gradient, *how)
                scale = parts[0].fp8_meta["scaling_fwd"].scale[0].item()
                if wrong is None and not abs(scale / want(seen) - 1) < 1e-5:
                    wrong = i
            case = f"{name}, {how[1] if how else 'no checkpoint'}"
            check(
                "trigger",
                f"{case}: the scale is that of the function{'' if wrong is None else f' until step {wrong}'}",
                wrong is None,
            )


def used():
    """Scales are those that tensors are quantized with: inputs and gradients beyond the ends of FP8 come out right."""
    parts = repro.blocks(1)
    torch.manual_seed(1)
    for _ in range(3):
        x, gradient = (large * t for large, t in zip((1e4, 1e6), data(), strict=True))
        parts.zero_grad()
        step(parts, recipe(repro.largest), x, gradient)
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest)), torch.no_grad():
            y = parts[0](x)
    exact = [t.double() for t in (x.detach(), gradient, parts[0].weight.detach(), parts[0].bias.detach())]
    want = exact[0] @ exact[2].t() + exact[3], exact[1] @ exact[2], exact[1].t() @ exact[0]
    for name, a, b in zip(("output", "dx", "dweight"), (y, x.grad, parts[0].weight.grad), want, strict=True):
        off = ((a.double() - b).norm() / b.norm()).item()
        check("trigger", f"{name} of large tensors is off fp64 by {off:.2g}, at most 0.2", off <= 0.2)


def kept():
    """A weight that is cast in the first two steps alone: no amax of it is new after them. The release forgets the older one, the kernel none; those of the input are."""
    parts, want = repro.blocks(1), [[], []]
    torch.manual_seed(1)
    for i in range(LENGTH + 3):
        x, gradient = data("fwd" if i == 1 else None)
        with torch.no_grad():
            parts[0].weight.mul_({0: 8, 1: 1 / 8}.get(i, 1))
        for tensor, amaxes in zip((x, parts[0].weight), want, strict=True):
            amaxes.append(tensor.float().abs().max().item())
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest)):
            y = parts[0](x.requires_grad_(), is_first_microbatch=i < 2)
        y.backward(gradient)
    scales = parts[0].fp8_meta["scaling_fwd"].scale[:2].cpu()
    known = [torch.tensor([448 / max(want[0][-LENGTH:]), 448 / amax]) for amax in (max(want[1][:2]), want[1][1])]
    same = any(torch.allclose(scales, each, rtol=1e-6) for each in known)
    check(
        "trigger", "a weight that is not cast again has a scale of those that it was cast with, and the input's goes on", same
    )


class Several(torch.nn.Module):
    """Two tensors, a number and a keyword in; two tensors out."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, other, factor, *, gain):
        y = self.layer(x * factor)
        return y + other, gain * y


def arguments(by_name):
    """What a checkpoint is given, by its place or ``by_name``, and gives back beside one tensor is as without it."""
    found = []
    for how in (None, {}, {"use_reentrant": False}):
        (layer,), seen = repro.blocks(1), []
        block, fp8 = Several(layer), recipe(repro.largest)
        torch.manual_seed(1)
        for i in range(EVERY):
            (x, gradient), (other, _) = inputs(i), data()
            named = {"x": x.requires_grad_(), "other": other.requires_grad_(), "factor": 2.0, "gain": 3.0}
            # Reentrant, as torch's, trains nothing where what is given by its place needs no gradient.
            given = [named.pop(each) for each in (("x", "other", "factor"), ("x",) if how == {} else ())[by_name]]
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
                outs = block(*given, **named) if how is None else repro.te.checkpoint(block, *given, **named, **how)
            (outs[0] - 2 * outs[1]).backward(gradient)
            seen += [*outs, x.grad, other.grad, *states([[layer]])]
        found.append([tensor.detach() for tensor in seen])
    for name, got in zip(("reentrant", "not reentrant"), found[1:], strict=True):
        same = all(map(equal, got, found[0]))
        what = "tensors and numbers by name" if by_name else "two tensors, a number and a keyword"
        check("trigger", f"{name}: {what}, two outputs: bitwise as without checkpointing", same)


class Waits(TorchDispatchMode):
    """What waits for the GPU: what gives its numbers to the host, and operators whose result's shape depends on numbers, as a mask picks them."""

    OPERATORS = (
        "_local_scalar_dense",
        "equal",
        "allclose",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    )
    METHODS = "item", "tolist", "cpu", "numpy", "to", "__bool__", "__int__", "__float__", "__index__"

    def __init__(self):
        super().__init__()
        self.found, self.patches = set(), contextlib.ExitStack()

    def __enter__(self):
        """A CPU tensor's numbers can be taken without an operator."""
        for owner, names in ((torch.Tensor, self.METHODS), (torch.cuda, ("synchronize",))):
            for name in names:
                self.patches.enter_context(mock.patch.object(owner, name, self.noting(name, getattr(owner, name))))
        return super().__enter__()

    def __exit__(self, *raised):
        self.patches.close()
        return super().__exit__(*raised)

    def noting(self, name, function):
        def noted(*given, **named):
            places = [str(each) for each in (*given, *named.values()) if isinstance(each, (str, torch.device))]
            if name != "to" or "cpu" in places:
                self.found.add(name)
            return function(*given, **named)

        return noted

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        picks = name.startswith(("index", "_index_put")) and isinstance(args[1], (list, tuple))
        if name in self.OPERATORS or (picks and any(t is not None and t.dtype is torch.bool for t in args[1])):
            self.found.add(f"{op}{' of a mask' * picks}")
        return op(*args, **(kwargs or {}))


def waits(*how):
    """What a second step waits for with a function."""
    parts = repro.blocks(1)
    step(parts, recipe(repro.largest), *data(), *how)
    x, gradient = data()
    with Waits() as mode:
        step(parts, recipe(repro.largest), x, gradient, *how)
    return mode.found


def step(parts, fp8, x, gradient, *how):
    with repro.te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        y = forward(parts, x.requires_grad_(), *how)
    y.backward(gradient)


def recomputed(how, runs):
    """With a function, too, a checkpointed block runs as often as it has to in each step: ``runs``."""
    parts, ran = repro.blocks(1), []
    parts[0].register_forward_pre_hook(lambda *_: ran.append(torch.is_grad_enabled()))
    for _ in range(2):
        step(parts, recipe(repro.largest), *data(), (0,), how)
    check("trigger", f"{how}, function: the block runs {len(ran)} times in two steps, of {2 * len(runs)}", ran == 2 * runs)


@contextlib.contextmanager
def replaced(owner, name, value):
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def reduced():
    """Each rank reduces as often, whatever its amaxes are, since the others wait for it; and an amax of another rank counts where the own is 0."""
    fp8 = recipe(repro.largest)
    for name, how in (("no checkpoint", ()), ("reentrant", ((1, 2), "reentrant")), ("nested", ((1, 2), "nested"))):
        sizes = {}
        for what, zeros in (("nothing", []), ("one weight", [1]), ("everything", range(4))):
            calls, parts = [], repro.blocks()
            with torch.no_grad():
                for i in zeros:
                    parts[i].weight.zero_()
            with as_two_ranks(lambda amaxes, calls=calls: calls.append(amaxes.numel())):
                step(parts, fp8, *((what != "everything") * t for t in data()), *how)
            sizes[what] = calls
        same = all(calls == sizes["nothing"] for calls in sizes.values()) and len(sizes["nothing"]) > 1
        check(
            "trigger", f"{name}: a step reduces {sizes['nothing']} amaxes, as many where one weight, or everything, is 0", same
        )
    parts = repro.blocks()
    with torch.no_grad():
        parts[1].weight.zero_()
    with as_two_ranks(lambda amaxes: amaxes.copy_(torch.where(amaxes == 0, 5.0, amaxes))):
        step(parts, fp8, *data())
    scale = parts[1].fp8_meta["scaling_fwd"].scale[1].item()
    check("trigger", "the scale of a weight that is 0 is that of another rank's", abs(scale * 5 / 448 - 1) < 1e-6)
    parts = repro.blocks(2)
    for run in (parts, parts[:1]):
        with as_two_ranks(lambda amaxes: amaxes.copy_(torch.where(amaxes == 0, 5.0, amaxes))):
            step(run, fp8, *data())
    amax = parts[1].fp8_meta["scaling_fwd"].amax_history[-1, 0].item()
    check("trigger", "a module that runs on another rank alone has the amax of that rank", amax == 5)
    parts = repro.blocks(1)
    with as_two_ranks(lambda amaxes: amaxes.fill_(5.0)):
        step(parts, fp8, *(0 * t for t in data()))
    for way, largest in repro.LARGEST.items():
        scale = parts[0].fp8_meta[f"scaling_{way}"].scale
        check(
            "trigger",
            f"{way}: the scale is that of another rank's amax",
            torch.allclose(scale, scale * 0 + largest / 5, rtol=1e-6),
        )


def states_of_steps(fp8, *how):
    """All scales and histories after each of a few steps, one with an outlier."""
    parts, seen = repro.blocks(), []
    torch.manual_seed(1)
    for i in range(EVERY):
        step(parts, fp8, *inputs(i), *how)
        seen += states([parts])
    return seen


def by_default():
    """What the kernel is called with in a step, after amaxes are reduced where there are two ranks; and that what it writes stays. It is one of torch's here."""
    tex = sys.modules["transformer_engine_torch"]
    if not hasattr(tex, "fused_amax_and_scale_update_after_reduction") or repro.kernel:
        return

    def kernel(amaxes, histories, scales, algorithm, dtype, margin):
        way = {tex.DType.kFloat8E4M3: "fwd", tex.DType.kFloat8E5M2: "bwd"}[dtype]
        metas = [part.fp8_meta[f"scaling_{way}"] for part in parts]
        own = [{t.data_ptr() for t in tensors} for tensors in (histories, scales)]
        right = own == [{meta.amax_history.data_ptr() for meta in metas}, {meta.scale.data_ptr() for meta in metas}]
        right &= torch.equal(amaxes, torch.cat([history[0] for history in histories]))
        calls.append(f"kernel, {way}" if right and (algorithm, margin) == asked else "kernel, called with something else")
        for history, scale in zip(histories, scales, strict=True):
            ran, amax = history[0] != 0, history.amax(0) if algorithm == "max" else history[0]
            scale.copy_(torch.where(ran & (amax > 0), repro.LARGEST[way] / amax / 2**margin, scale))
            turned = history.roll(-1, 0)
            turned[0] = 0
            history.copy_(torch.where(ran, turned, history))
            written[scale.data_ptr()] = scale, scale.clone()
            written[history.data_ptr()] = history[1:], history[1:].clone()  # a row more is collected in the first one

    unfused, plain = os.environ.pop("NVTE_UNFUSED_FP8_UPDATE", None), {}
    for how in ((), ((1, 2), "reentrant"), ((0,), "not reentrant"), ((1, 2), "nested")):
        for asked in (("max", 3), ("most_recent", 0)):
            parts, calls, written = repro.blocks(), [], {}
            fp8 = repro.recipes.DelayedScaling(amax_compute_algo=asked[0], margin=asked[1])
            with (
                replaced(tex, "fused_amax_and_scale_update_after_reduction", kernel),
                as_two_ranks(lambda amaxes, calls=calls: calls.append("reduction")),
            ):
                step(parts, fp8, *data(), *how)
            pairs = list(zip(calls[::2], calls[1::2], strict=False))
            known = [("reduction", f"kernel, {way}") for way in ("fwd", "bwd")]
            # The step's own updates, and beside them those of recomputations, whose amaxes are 0.
            right = pairs == known if not how else pairs[:1] == known[:1] and known[1] in pairs and set(pairs) <= {*known}
            right &= len(calls) == 2 * len(pairs)
            name = f"{how[1]} over {how[0]}" if how else "no checkpoint"
            check("trigger", f"by default, {asked[0]}, {name}: the kernel updates {[way for _, way in pairs]}", right)
            stays = len(written) == 16 and all(torch.equal(*pair) for pair in written.values())
            check("trigger", f"by default, {asked[0]}, {name}: what it writes stays", stays)
            with replaced(tex, "fused_amax_and_scale_update_after_reduction", kernel):
                seen = states_of_steps(fp8, *how)
            if how:
                same = all(map(torch.equal, seen, plain[asked]))
                check("trigger", f"by default, {asked[0]}, {name}: scales and histories are those without checkpoints", same)
            else:
                plain[asked] = seen
    if unfused is not None:
        os.environ["NVTE_UNFUSED_FP8_UPDATE"] = unfused
    meta = {"recipe": repro.recipes.MXFP8BlockScaling()}
    for name in (
        "copy_forward_fp8_meta_tensors_for_recompute",
        "get_old_fp8_meta_tensors_for_recompute",
        "restore_fp8_meta_tensors",
    ):
        check(
            "trigger", f"{name} does nothing for another recipe", getattr(repro.manager, name)(meta) is None and len(meta) == 1
        )


def inside():
    """FP8 that is switched on inside what is checkpointed is right from 2.19 on if that is not reentrant (pack23): and stays so."""
    found = []
    for checkpointed in (False, True):
        parts, seen = repro.blocks(1), []

        def block(x, parts=parts):
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest)):
                return parts[0](x)

        torch.manual_seed(1)
        for i in range(STEPS):
            x, gradient = inputs(i)
            y = (
                repro.te.checkpoint(block, x.requires_grad_(), use_reentrant=False)
                if checkpointed
                else block(x.requires_grad_())
            )
            y.backward(gradient)
            seen += [y.detach(), x.grad, *states([parts])]
        found.append(seen)
    check("trigger", "FP8 inside, not reentrant: bitwise as without checkpointing", all(map(equal, *found)))


def two_recipes():
    """Two modules, each in an autocast of its own recipe; in the second step the first one does not run, and the other's scale is updated all the same."""
    parts, largest = repro.blocks(2), []
    torch.manual_seed(1)
    for i in range(2):
        x, gradient = data("fwd" if i else None)
        for margin in (0, 1)[i:]:
            largest.append(x.detach().float().abs().max().item())
            with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest, margin=margin)):
                x = parts[margin](x.detach().requires_grad_())
        x.backward(gradient)
    scales = [part.fp8_meta["scaling_fwd"].scale[0].item() for part in parts]
    want = 448 / largest[0], 448 / max(largest[1:]) / 2
    same = all(abs(a / b - 1) < 1e-6 for a, b in zip(scales, want, strict=True))
    check("trigger", "two recipes: each module has the scale of its own", same)
    parts, (x, gradient) = repro.blocks(2), data("fwd")
    with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest)):
        h = parts[0](x.requires_grad_())
        with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest, margin=1)):
            y = parts[1](h)
    y.backward(gradient)
    scales = [part.fp8_meta["scaling_fwd"].scale[0].item() for part in parts]
    want = 448 / x.detach().float().abs().max().item(), 448 / h.detach().float().abs().max().item() / 2
    same = all(abs(a / b - 1) < 1e-6 for a, b in zip(scales, want, strict=True))
    check("trigger", "two recipes, an autocast in the other: each module has the scale of its own", same)


def forgotten():
    """An infinity is gone from a history after as many steps as it has rows."""
    parts = repro.blocks(1)
    for i in range(LENGTH + 2):
        x, gradient = data()
        if i == 1:
            x[0, 0] = float("inf")
        step(parts, recipe(repro.largest), x, gradient)
    rows = parts[0].fp8_meta["scaling_fwd"].amax_history
    check("trigger", f"an infinity is forgotten after {LENGTH} steps", bool(rows.isfinite().all()))


def threaded(how):
    """A backward runs in a thread of its own, as autograd's nodes of a GPU do."""
    raised, parts = [], repro.blocks(2)
    x, gradient = data()
    with repro.te.fp8_autocast(enabled=True, fp8_recipe=recipe(repro.largest)):
        y = forward(parts, x.requires_grad_(), (0, 1), how)

    def backward():
        try:
            y.backward(gradient)
        except Exception as error:
            raised.append(f" ({type(error).__name__}: {error})"[:80])

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    right = not raised and x.grad is not None
    check("trigger", f"{how}: a backward in another thread raises nothing{''.join(raised)}", right)


def main():
    recipes = repro.recipes
    one, function = lambda: network(4, 1), recipe(repro.largest)
    two = lambda: network(3, 2)  # noqa: E731
    every = (0, 1, 2, 3)
    plain, again = (trained(one, function, nan=True) for _ in range(2))
    alike = all(all(map(equal, a, b)) for a, b in zip(plain, again, strict=True))
    check("control", "without checkpoints, twice: bitwise the same", alike)
    defined(plain)
    followed()
    by_functions()
    used()
    kept()
    reduced()
    for how, runs in (
        ("reentrant", [False, True]),
        ("not reentrant", [True, True]),
        ("nested", [False, False, True]),
        ("three deep", [False, False, False, True]),
    ):
        recomputed(how, runs)
    by_default()
    two_recipes()
    forgotten()
    for how in ("reentrant", "not reentrant", "nested"):
        threaded(how)
    arguments(by_name=False)
    arguments(by_name=True)
    beside.main()
    for how in ("reentrant", "not reentrant", "nested"):
        found = waits((0,), how)
        check("trigger", f"{how}, function: {', '.join(found) or 'nothing'} waits for a GPU", not found)
    if Version(repro.FACTS["version"]) >= Version("2.19"):
        inside()
    for which in ((0,), (1,), (3,), (0, 2), every):
        same(f"blocks {which}, reentrant", one, function, checkpointed=which)
    for how in ("not reentrant", "nested"):
        for which in ((0,), (2,), every):
            same(f"blocks {which}, {how}", one, function, checkpointed=which, how=how)
    for which in ((1,), every):
        same(f"blocks {which}, three checkpoints deep", one, function, checkpointed=which, how="three deep")
    for how in ("reentrant", "not reentrant", "nested"):
        same(f"two layers a block, {how}", two, function, checkpointed=(0, 1, 2), how=how)
        for count, word in ((2, "two"), (3, "three")):
            same(f"{word} microbatches, {how}", one, function, checkpointed=every, how=how, microbatches=count)
        same(f"an error in a checkpoint between steps, {how}", one, function, checkpointed=(1, 2), how=how, between=failure)
        same(f"an error in a recomputation between steps, {how}", one, function, checkpointed=(1, 2), how=how, between=lost)
        same(f"an evaluation between steps, {how}", one, function, checkpointed=(1, 2), how=how, between=evaluation)
    for how in ("within", "within, last", "within, deeper", "within, not reentrant", "within, last, not reentrant"):
        for count in (1, 2):
            name = f"a checkpoint {how}, {count} microbatch{'es' * (count > 1)}"
            same(name, one, function, checkpointed=every, how=how, microbatches=count)
    for how in ("reentrant", "not reentrant", "nested"):
        same(f"dropout, {how}", dropped, function, checkpointed=every, how=how)
    for name, fp8 in (
        ("the newest amax", recipe(newest)),
        ("an average", recipe(average)),
        ("a scale of a function", recipes.DelayedScaling(amax_history_len=LENGTH, scaling_factor_compute_algo=doubled)),
        ("max", recipe("max")),
        ("most_recent", recipe("most_recent")),
        ("max of 1024", recipe("max", 1024)),
        ("a history of 1", recipe(repro.largest, 1)),
    ):
        same(f"{name}, reentrant", one, fp8, checkpointed=every)
        same(f"{name}, nested", one, fp8, checkpointed=(1, 2), how="nested")
    finish()


def newest(amaxes):
    return amaxes[0].clone()


def average(amaxes):
    return amaxes.mean(dim=0)


def before(amaxes):
    return amaxes[-1].clone()


def smoothed(amax, scale, fp8_max, recipe):
    """Halfway between the last scale and that of the amax, if there is one."""
    return torch.where(amax > 0, (scale + fp8_max / amax) / 2, scale)


def scale_of_all(seen):
    """What ``smoothed`` comes to after the amaxes that were ``seen``."""
    scale = 1
    for i in range(len(seen)):
        scale = (scale + 448 / max(seen[max(0, i - LENGTH + 1) : i + 1])) / 2
    return scale


def doubled(amax, scale, fp8_max, recipe):
    """Half of the scale that is the default's, or the last one where there is no amax."""
    return torch.where(amax > 0, fp8_max / amax / 2, scale)


if __name__ == "__main__":
    repro.te, repro.recipes, repro.manager, repro.kernel = repro.release()
    main()
