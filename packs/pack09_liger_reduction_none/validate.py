"""The deep check of a fix of pack09: every option beside per-token weights of any sign and stride, against the definition in fp64.

Runs after repro.py on the patched side. ``mean`` and ``sum`` have to stay what the release computes, byte for byte.
"""

import gc
import importlib
import inspect
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from repro import FACTS, check, device, eager, error, finish, liger, release, run
from torch.utils._python_dispatch import TorchDispatchMode

# A power of two: with another V the release's own softcap is wrong up to 0.8.3. repro.py has V = 200.
B, S, H, V = 1, 7, 16, 64  # three chunks of two tokens and one of one
LIMIT = 1e-5
NO_PART = "accum_dtype", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"  # of what the loss is


def wrappers():
    """Liger's Module and functional, as functions of input, weight, labels, bias and options, and what options they take; none where
    they do not import without transformers.
    """
    try:
        layer = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss
        functional = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    except ImportError:
        return {}
    return {
        "Liger's Module": (lambda x, w, y, b, **given: layer(**given)(w, x, y, b), inspect.signature(layer).parameters),
        "Liger's functional": (functional, inspect.signature(functional).parameters),
    }


def as_released():
    """The release's own function with all that it imports, and its wrappers: what hides it on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = str(Path(file).parents[2])
    patched = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "liger_kernel"}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    function, around = release().LigerFusedLinearCrossEntropyFunction, wrappers()
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(patched)
    FACTS["file"] = file
    return function, around


def definition(x, w, y, b=None, *, softcap=None, use_token_scaling=False, lse_square_scale=0.0, ignore_index=-100, **given):
    """`eager` with two more options: logits capped to ±softcap, and losses times the (detached) probability of the label."""
    logits = x @ w.t() + (0 if b is None else b)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    loss = F.cross_entropy(logits, y, ignore_index=ignore_index, **given)
    loss = loss + lse_square_scale * logits.logsumexp(-1) ** 2 * (y != ignore_index)
    scaling = logits.softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0].detach()
    return loss * scaling if use_token_scaling else loss


class Cost(TorchDispatchMode):
    """Elements of the largest tensor that an operation gives, and the number of matrix products."""

    elements = products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.products += str(function).split(".")[1].rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        if torch.is_tensor(out):
            self.elements = max(self.elements, out.numel())
        return out


def alive():
    """Bytes of all tensors that Python knows; what shares memory counts once."""
    gc.collect()
    memory = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def held(function, tensors, y, reduction):
    """Bytes that a loss holds until its backward, itself included; the hooks make Python know what autograd saves."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    flce, before = release(), alive()
    known, flce.LigerFusedLinearCrossEntropyFunction = flce.LigerFusedLinearCrossEntropyFunction, function
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = liger(*leaves, y, reduction=reduction)  # noqa: F841  it is held
    flce.LigerFusedLinearCrossEntropyFunction = known
    return alive() - before


def outcome(function, tensors, needs, y, scale, **given):
    """All that a call gives: its outputs and the gradients of those ``tensors`` that need one, or the error that it ends with."""
    leaves = [t.detach().clone().requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=True)]
    flce = release()
    known, flce.LigerFusedLinearCrossEntropyFunction = flce.LigerFusedLinearCrossEntropyFunction, function
    order = list(inspect.signature(function.forward).parameters.values())[1:]
    given |= dict(zip(("_input", "weight", "bias"), leaves, strict=False), target=y)
    try:
        outs = function.apply(*(given.get(p.name, p.default) for p in order))
        outs = outs if isinstance(outs, tuple) else (outs,)
        if any(needs):
            outs[0].backward(torch.as_tensor(scale, dtype=outs[0].dtype, device=device).expand_as(outs[0]))
        return [*outs, *(leaf.grad for leaf in leaves)]
    except Exception as raised:
        return [type(raised).__name__]
    finally:
        flce.LigerFusedLinearCrossEntropyFunction = known


def same(before, after):
    """Whether two outcomes are the same, byte for byte."""
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(
        torch.equal(b, a) if torch.is_tensor(b) and torch.is_tensor(a) else b == a for b, a in pairs
    )


def main():
    flce = release()
    fixed, (released, before_it) = flce.LigerFusedLinearCrossEntropyFunction, as_released()
    takes = list(inspect.signature(released.forward).parameters)
    kept = list(inspect.signature(fixed.forward).parameters)[: len(takes)]
    check("control", "arguments stand in the release's order", kept == takes)
    torch.manual_seed(1)
    x, w, b = (t.to(device) for t in (torch.randn(B * S, H), torch.randn(V, H) / H**0.5, torch.randn(V)))
    y = torch.randint(0, V, (B * S,)).to(device)
    ignored = {"none": y, "some": torch.where(torch.arange(B * S, device=device) % 3 == 2, -100, y)}
    ignored["token 0"] = torch.where(torch.arange(B * S, device=device) == 0, -100, y)
    weights = {
        "dense": torch.randn(B * S, device=device),
        "strided": torch.randn(B * S, 2, device=device)[:, 0],
        "of stride 0": torch.randn(1, device=device).expand(B * S),
        "negative": -torch.rand(B * S, device=device),
        "zero but one": torch.eye(B * S, device=device)[3],
    }
    classes = torch.rand(V, device=device) + 0.5
    callers = [x, w, b, classes, *ignored.values(), *weights.values()]
    as_they_were = [t.clone() for t in callers]

    def compare(name, labels, scale, tensors, ce_weight=None, **given):
        weight = {} if ce_weight is None else {"weight": ce_weight.double()}
        weight |= {option: value for option, value in given.items() if option not in NO_PART}
        want = run(definition, [t.double() for t in tensors], labels, scale, reduction="none", **weight)
        got = run(liger, tensors, labels, scale, reduction="none", ce_weight=ce_weight, **given)
        check("trigger", name, error=error(got, want), limit=LIMIT)

    # All options together with some labels ignored; none and all of them also with none, and with that of token 0.
    grid = [(*options, "some") for options in itertools.product((0, 1), (0.0, 0.1), (0.0, 1e-3), (0, 1))]
    for bias, smoothing, z, weighted, which in grid + [(*grid[i][:4], name) for i in (0, -1) for name in ("none", "token 0")]:
        given = {"label_smoothing": smoothing, "lse_square_scale": z, "ce_weight": classes if weighted else None}
        tensors, labels = (x, w, b)[: 2 + bias], ignored[which]
        name = f"bias {bias} smoothing {smoothing} z {z} class weights {weighted} ignored {which}"
        compare(name, labels, weights["dense"], tensors, **given)
        upstream = 0.5 if bias and weighted else 1.0  # another kernel runs for each of the two
        for reduction in ("mean", "sum") if which == "some" else ():
            few = x[:4], *tensors[1:]
            each = [
                outcome(f, few, (1,) * len(few), labels[:4], upstream, reduction=reduction, **given) for f in (released, fixed)
            ]
            check("control", f"{reduction} is the release's, byte for byte: {name}", same(*each) and len(each[0]) > 1)
    for name, weight in weights.items():
        compare(f"weights {name}", y, weight, (x, w))
    compare("16 classes, which are one chunk", y % 16, weights["dense"], (x, w[:16]))
    compare("strided labels", torch.stack((y, y), 1)[:, 0], weights["dense"], (x, w))
    want = run(eager, [x.double(), w.double()], y, weights["dense"], reduction="none")
    if len(outcome(released, (x, w), (1, 1), y.int(), 1.0, reduction="sum")) > 1:
        found = error(run(liger, (x, w), y.int(), weights["dense"], reduction="none"), want)
        check("trigger", "labels in int32, which the release's sum takes", error=found, limit=LIMIT)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    loss = liger(*leaves, y, reduction="none")
    loss *= weights["dense"]
    loss.sum().backward()
    check("trigger", "a loss that is multiplied in place", error=error([leaf.grad for leaf in leaves], want[1:]), limit=LIMIT)
    compare("one token", y[:1], weights["dense"][:1], (x[:1], w, b))
    zeros = run(liger, (x, w, b), torch.full_like(y, -100), weights["dense"], reduction="none")
    check("trigger", "all labels ignored: loss and gradients are zero", all(t.eq(0).all() for t in zeros))
    large = [20 * x, w, b]  # logits of 60 and more, where fp32 has four digits less
    want = run(definition, [t.double() for t in large], y, weights["dense"], reduction="none")
    found = error(run(liger, large, y, weights["dense"], reduction="none"), want)
    check("trigger", "logits of 60", error=found, limit=1e-4)
    trained = outcome(released, (x, w, b), (1, 1, 1), y, 1.0, reduction="none")[:-3]
    for mode in (torch.no_grad, torch.inference_mode):  # 0.6.3 - 0.7.0 raise there where there is a bias
        with mode():
            found = outcome(fixed, (x, w, b), (0, 0, 0), y, 1.0, reduction="none")[:-3]
        check("control", f"{mode.__name__}: outputs of none are those in training, byte for byte", same(trained, found))
    torch.rand(1)  # a seed set by the fix would be seen
    state = torch.get_rng_state()
    before = alive()
    run(liger, (x, w, b), y, weights["dense"], reduction="none")
    check("trigger", "no tensor is left after a backward", alive() <= before)
    check("trigger", "the state of the random numbers is as before", torch.equal(state, torch.get_rng_state()))
    before = alive()
    with torch.no_grad():
        liger(x.clone(), w.clone(), y, b, reduction="none")
    liger(x.clone().requires_grad_(), w.clone().requires_grad_(), y, b, reduction="none")
    check("trigger", "no tensor is left of an evaluation, nor of a loss that is dropped", alive() <= before)
    compare("ignore_index 5", torch.where(y % 4 == 0, 5, y), weights["dense"], (x, w), ignore_index=5)
    many = 50  # tokens, in chunks of 16; and some more, which take the interpreter a second for each 100
    spread, scale = torch.arange(many, device=device) % V, torch.randn(many, device=device)
    tokens = torch.randn(many, H, device=device)
    for times in (1, 3, 100) if device == "cuda" else (1, 3):
        compare(f"{times * many} tokens", spread.repeat(times), scale.repeat(times), (tokens.repeat(times, 1), w))
    for reduction in ("mean", "sum"):
        given = (tokens.repeat(3, 1), w), (1, 1), spread.repeat(3), 1.0
        each = [outcome(f, *given, reduction=reduction) for f in (released, fixed)]
        check("control", f"{reduction} is the release's, byte for byte: 150 tokens", same(*each) and len(each[0]) > 1)
    kept, own = held(fixed, (tokens, w), spread, "none"), held(released, (tokens, w), spread, "sum")
    check("trigger", f"until its backward the loss holds {kept} bytes, and the release's sum {own}", kept <= own + 8 * many)
    turned = [x.t().contiguous().t(), w.t().contiguous().t(), b]  # a copy of them keeps the strides
    compare("input and weight transposed", y, weights["dense"], turned)
    for reduction in ("mean", "sum"):
        each = [outcome(f, turned, (1, 1, 1), y, 1.0, reduction=reduction) for f in (released, fixed)]
        check("control", f"{reduction} is the release's, byte for byte: transposed", same(*each) and len(each[0]) > 1)
    known = {"ignore_index": int(y[3]), "ce_weight": classes, "lse_square_scale": 1e-3, "label_smoothing": 0.1, "softcap": 3.0}
    known |= {"return_z_loss": False, "use_token_scaling": True, "accum_dtype": torch.float64}
    for wrapper, (function, options) in wrappers().items():
        for name in ("reduction", *(name for name in known if name in options)):
            if name == "softcap" and device != "cuda":
                continue
            given = {name: known[name]} if name in known else {}
            labels = (y if name == "ignore_index" else ignored["some"])[:4]
            few = x[:4], w, b
            each = [run(f, few, labels, reduction="mean", **given) for f in (before_it[wrapper][0], function)]
            check("control", f"mean by {wrapper} is the release's, byte for byte: {name}", same(*each))
            each = [run(f, few, labels, weights["dense"][:4], reduction="none", **given) for f in (liger, function)]
            check("trigger", f"none by {wrapper} is that of the function, byte for byte: {name}", same(*each))
    cost = {}
    for name, function, reduction in (
        ("as released", released, "sum"),
        ("none", fixed, "none"),
        ("sum", fixed, "sum"),
        ("mean", fixed, "mean"),
    ):
        with Cost() as cost[name]:
            outcome(function, (tokens[:20], w), (1, 1), spread[:20], 1.0, reduction=reduction)
    own = cost.pop("as released")
    for name, each in cost.items():
        what = (
            f"20 tokens, {name}: the largest tensor has {each.elements} elements, and that of the release's sum {own.elements}"
        )
        check("trigger", what, each.elements <= own.elements)
        what = f"20 tokens, {name}: {each.products} matrix products, at most twice the {own.products} of the release's sum"
        check("trigger", what, 0 < each.products <= 2 * own.products)
    # A row takes the release's kernels more than one block, which has 32768 elements.
    wide = torch.randn(40_000, 8, device=device) / 8**0.5
    compare("V=40,000", 7_777 * (y % 6), weights["dense"], (x[:, :8], wide))
    for dtype in (torch.bfloat16, torch.float16):
        half, trained = (x.to(dtype), w.to(dtype), b.to(dtype)), (1, 1, 1)
        exact, factors = [t.double() for t in half], classes.to(dtype)
        want = run(eager, exact, y, reduction="sum")[1:]
        off = error(outcome(released, half, trained, y, 1.0, reduction="sum")[-3:], want)
        want = run(eager, exact, y, weights["dense"], reduction="none")
        found = error(run(liger, half, y, weights["dense"], reduction="none"), want)
        check("trigger", f"{dtype}: at most four times as far off as the release's sum", found <= 4 * off)
        want = run(eager, exact, y, weights["dense"], reduction="none", weight=factors.double())
        found = error(run(liger, half, y, weights["dense"], reduction="none", ce_weight=factors), want)
        check("trigger", f"{dtype}: at most four times as far off as the release's sum, class weights", found <= 4 * off)
        before, after = (outcome(f, half, trained, y, 1.0, reduction="none") for f in (released, fixed))
        want = run(eager, exact, y, reduction="none")[:1]
        kept = same(before[:-3], after[:-3]) or (len(after) > 1 and error(after[:1], want) <= error(before[:1], want))
        check("control", f"{dtype}: outputs of none are the release's, byte for byte, or nearer to fp64", kept)
        for reduction in ("mean", "sum"):
            each = [outcome(f, half, trained, y, 1.0, reduction=reduction) for f in (released, fixed)]
            check("control", f"{dtype}: {reduction} is the release's, byte for byte", same(*each) and len(each[0]) > 1)
    options = {"use_token_scaling": True}
    # Triton's interpreter cannot run the release's own softcap, whatever the reduction.
    options |= {"softcap": 3.0} if device == "cuda" else {}
    # Each option on its own: mean and sum as released, whatever is trained; none's outputs as released, its gradients those of sum.
    options |= {"ignore_index": int(y[3]), "label_smoothing": 0.1, "lse_square_scale": 1e-3, "ce_weight": classes}
    options |= {
        "return_z_loss": True,
        "return_token_accuracy": True,
        "return_predicted_tokens": True,
        "accum_dtype": torch.float64,
    }
    for name, value in [("", None), *((name, value) for name, value in options.items() if name in takes)]:
        given = {name: value, "lse_square_scale": 1e-3} if name else {}
        labels = y if name == "ignore_index" else ignored["some"]
        choices = (1, 1, 1), (0, 1, 1), *(() if name else ((1, 0, 1), (0, 0, 0), (1, 1), (0, 1)))
        for reduction, needs in itertools.product(("mean", "sum"), choices):
            few = (x[:4], w, b)[: len(needs)]  # in four chunks
            each = [outcome(f, few, needs, labels[:4], 1.0, reduction=reduction, **given) for f in (released, fixed)]
            if all(needs):
                full = each[0]
            # Of a frozen input (pack17) gradients may come out right as well.
            n = len(needs)
            right = not needs[0] and any(needs) and same(each[1][1 - n :], full[1 - n :]) and same(each[1][:-n], full[:-n])
            kept = same(*each) or right
            check("control", f"{reduction} is the release's, byte for byte: {name or 'plain'}, trained {needs}", kept)
        few, all_of = (x[:4], w, b), (1, 1, 1)
        before, after = (outcome(f, few, all_of, labels[:4], 1.0, reduction="none", **given) for f in (released, fixed))
        check("control", f"outputs of none are the release's, byte for byte: {name or 'plain'}", same(before[:-3], after[:-3]))
        summed = outcome(released, few, all_of, labels[:4], 1.0, reduction="sum", **given)
        found = error(after[-3:], [t.double() for t in summed[-3:]]) if len(after) > 3 else None
        check("trigger", f"weights of 1 give the gradients of sum: {name or 'plain'}", error=found, limit=LIMIT)
        weight = {"ce_weight": classes} if name == "ce_weight" else {}
        compare(f"weights dense: {name or 'plain'}", labels, weights["dense"], (x, w, b), **{**given, **weight})
    together = {name: value for name, value in options.items() if name in takes and name != "ce_weight"}
    together |= {"lse_square_scale": 1e-3} if "lse_square_scale" in takes else {}
    compare("all options together", y, weights["dense"], (x, w, b), ce_weight=classes, **together)
    compare("all options but class weights and bias together", y, weights["dense"], (x, w), **together)
    if "accum_dtype" in takes:  # 50 chunks, whose gradients of w are summed in fp32 here, and in bf16 without it
        wide = [torch.randn(many, H, device=device).bfloat16(), (torch.randn(1024, H, device=device) / 4).bfloat16()]
        want = run(eager, [t.double() for t in wide], spread, reduction="sum")[2]
        off = {}
        for function, reduction, kind in (
            (released, "sum", None),
            (released, "sum", torch.float32),
            (fixed, "none", torch.float32),
        ):
            flce.LigerFusedLinearCrossEntropyFunction = function
            off[reduction, kind] = error([run(liger, wide, spread, reduction=reduction, accum_dtype=kind)[2]], [want])
        flce.LigerFusedLinearCrossEntropyFunction = fixed
        limit = 1.1 * off["sum", torch.float32]
        check("trigger", "accum_dtype: no further off than the release's sum", off["none", torch.float32] <= limit)
        check("control", "accum_dtype: without it, the release's sum is further off", off["sum", None] > limit)
    # One row for each choice of what is trained; backward runs twice over one graph, which adds the gradients up.
    for needs in itertools.product((True, False), repeat=3):
        got = [t.detach().clone().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        want = [t.detach().double().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        losses = []
        for function, (leaf, weight, bias), scale in (
            (liger, got, weights["dense"]),
            (eager, want, weights["dense"].double()),
        ):
            loss = function(leaf, weight, y, bias, reduction="none")
            for again in (True, False) if any(needs) else ():
                loss.backward(scale, retain_graph=again)
            losses.append(loss.detach())
        pairs = [tuple(losses), *((g.grad, w.grad) for g, w, n in zip(got, want, needs, strict=True) if n)]
        found = error(*zip(*pairs, strict=True)) if all(g is not None for g, _ in pairs) else None
        trained = " ".join(name for name, n in zip(("input", "weight", "bias"), needs, strict=True) if n) or "nothing"
        check("trigger", f"trained: {trained}; two backwards over one graph", error=found, limit=LIMIT)
    leaf, head = x.bfloat16().requires_grad_(), w.clone().requires_grad_()
    want = run(eager, [x.double(), w.double()], y, weights["dense"], reduction="none")
    with torch.autocast(device, torch.bfloat16):
        able = len(outcome(released, (leaf, head), (1, 1), y, 1.0, reduction="sum")) > 1  # 0.5.3 is not
        loss = liger(leaf, head, y, reduction="none") if able else None
    if able:
        loss.backward(weights["dense"])
        for reduction in ("mean", "sum"):
            with torch.autocast(device, torch.bfloat16):
                each = [outcome(f, (leaf, head), (1, 1), y, 1.0, reduction=reduction) for f in (released, fixed)]
            check("control", f"autocast, bf16: {reduction} is the release's, byte for byte", same(*each))
        check("trigger", "autocast, bf16: within 0.1", error([loss, leaf.grad, head.grad], want) <= 0.1)
    # What is swapped or changed between forward and backward (pipeline stages do) is not the loss's.
    want = run(eager, [t.double() for t in (x, w, b)], y, weights["dense"], reduction="none", weight=classes.double())[1:]
    for name in ("swapped", "input", "weight", "bias", "labels", "class weights"):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        given = dict(
            zip(("input", "weight", "bias", "labels", "class weights"), (*leaves, y.clone(), classes.clone()), strict=True)
        )
        loss = liger(leaves[0], leaves[1], given["labels"], leaves[2], reduction="none", ce_weight=given["class weights"])
        with torch.no_grad():
            if name == "swapped":
                leaves[1].data = torch.zeros_like(w)
            else:
                given[name].zero_()
        try:
            loss.backward(weights["dense"])
            found = error([leaf.grad for leaf in leaves], want)
        except RuntimeError as raised:
            found = 0.0 if name != "swapped" and "modified by an inplace operation" in str(raised) else None
        what = "weight swapped" if name == "swapped" else f"{name} changed in place"
        check("trigger", f"{what} before backward: the loss's own gradients, or a refusal", error=found, limit=LIMIT)
    # Several losses before one backward, as several heads have them.
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    losses, wants = [], []
    for leaf, labels, weight, given in (
        (leaves[0], y, weights["dense"], {"reduction": "none"}),
        (leaves[1], ignored["some"], torch.ones((), device=device), {"reduction": "mean"}),
        (leaves[2], y, weights["negative"], {"reduction": "none", "label_smoothing": 0.1, "ignore_index": int(y[3])}),
    ):
        losses.append(liger(leaf, w, labels, **given))
        wants.append(run(eager, [x.double(), w.double()], labels, weight, **given)[1])
    torch.autograd.backward(losses, (weights["dense"], torch.ones_like(losses[1]), weights["negative"]))
    found = error([leaf.grad for leaf in leaves], wants)
    check("trigger", "none, mean and none with other options before one backward", error=found, limit=LIMIT)
    kept = all(map(torch.equal, callers, as_they_were))
    check("trigger", "nothing was written into the caller's tensors and gradients", kept)
    finish()


if __name__ == "__main__":
    main()
