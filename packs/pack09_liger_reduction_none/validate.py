"""The deep check of a fix of pack09: every option beside per-token weights of any sign and stride, against the definition in fp64.

Runs after repro.py on the patched side. ``mean`` and ``sum`` have to stay what the release computes, byte for byte.
"""

import contextlib
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


FIXED = release().LigerFusedLinearCrossEntropyFunction
RELEASED, WRAPPERS = as_released()
TAKES = list(inspect.signature(RELEASED.forward).parameters)

torch.manual_seed(1)
x, w, b = (t.to(device) for t in (torch.randn(B * S, H), torch.randn(V, H) / H**0.5, torch.randn(V)))
y = torch.randint(0, V, (B * S,)).to(device)
IGNORED = {"none": y, "some": torch.where(torch.arange(B * S, device=device) % 3 == 2, -100, y)}
IGNORED["token 0"] = torch.where(torch.arange(B * S, device=device) == 0, -100, y)
WEIGHTS = {
    "dense": torch.randn(B * S, device=device),
    "strided": torch.randn(B * S, 2, device=device)[:, 0],
    "of stride 0": torch.randn(1, device=device).expand(B * S),
    "negative": -torch.rand(B * S, device=device),
    "zero but one": torch.eye(B * S, device=device)[3],
}
DENSE = WEIGHTS["dense"]
CLASSES = torch.rand(V, device=device) + 0.5
MANY = 50  # tokens, in chunks of 16
tokens, spread, scales = (
    torch.randn(MANY, H, device=device),
    torch.arange(MANY, device=device) % V,
    torch.randn(MANY, device=device),
)
OPTIONS = {
    "use_token_scaling": True,
    # Triton's interpreter cannot run the release's own softcap, whatever the reduction.
    **({"softcap": 3.0} if device == "cuda" else {}),
    "ignore_index": int(y[3]),
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-3,
    "ce_weight": CLASSES,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "accum_dtype": torch.float64,
}


def definition(x, w, y, b=None, *, softcap=None, use_token_scaling=False, lse_square_scale=0.0, ignore_index=-100, **given):
    """`eager` with two more options: logits capped to ±softcap, and losses times the (detached) probability of the label."""
    logits = x @ w.t() + (0 if b is None else b)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    loss = F.cross_entropy(logits, y, ignore_index=ignore_index, **given)
    loss = loss + lse_square_scale * logits.logsumexp(-1) ** 2 * (y != ignore_index)
    scaling = logits.softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0].detach()
    return loss * scaling if use_token_scaling else loss


@contextlib.contextmanager
def using(function):
    """`liger`, and the release's code around it, run ``function`` meanwhile."""
    flce = release()
    known, flce.LigerFusedLinearCrossEntropyFunction = flce.LigerFusedLinearCrossEntropyFunction, function
    try:
        yield
    finally:
        flce.LigerFusedLinearCrossEntropyFunction = known


def outcome(function, tensors, labels, needs=None, scale=1.0, **given):
    """All that a call gives: its outputs and the gradients of those ``tensors`` that need one, or the error that it ends with."""
    needs = needs or (1,) * len(tensors)
    leaves = [t.detach().clone().requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=True)]
    order = list(inspect.signature(function.forward).parameters.values())[1:]
    given |= dict(zip(("_input", "weight", "bias"), leaves, strict=False), target=labels)
    try:
        with using(function):
            outs = function.apply(*(given.get(p.name, p.default) for p in order))
            outs = outs if isinstance(outs, tuple) else (outs,)
            if any(needs):
                outs[0].backward(torch.as_tensor(scale, dtype=outs[0].dtype, device=device).expand_as(outs[0]))
        return [*outs, *(leaf.grad for leaf in leaves)]
    except Exception as raised:
        return [type(raised).__name__]


def same(before, after):
    """Whether two outcomes are the same, byte for byte."""
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(
        torch.equal(b, a) if torch.is_tensor(b) and torch.is_tensor(a) else b == a for b, a in pairs
    )


def compare(name, tensors, labels=y, scale=DENSE, ce_weight=None, limit=LIMIT, **given):
    """none's loss and gradients are those of the definition in fp64."""
    weight = {} if ce_weight is None else {"weight": ce_weight.double()}
    weight |= {option: value for option, value in given.items() if option not in NO_PART}
    want = run(definition, [t.double() for t in tensors], labels, scale, reduction="none", **weight)
    got = run(liger, tensors, labels, scale, reduction="none", ce_weight=ce_weight, **given)
    check("trigger", name, error=error(got, want), limit=limit)


def unchanged(name, tensors, labels, scale=1.0, around=contextlib.nullcontext, **given):
    """What mean and sum give is what the release gives, and no error."""
    for reduction in ("mean", "sum"):
        with around():
            each = [outcome(f, tensors, labels, scale=scale, reduction=reduction, **given) for f in (RELEASED, FIXED)]
        check("control", f"{reduction} is the release's, byte for byte: {name}", same(*each) and len(each[0]) > 1)


def options_together():
    """All of them with some labels ignored; none and all of them also with no label ignored, and with that of token 0."""
    grid = [(*options, "some") for options in itertools.product((0, 1), (0.0, 0.1), (0.0, 1e-3), (0, 1))]
    for bias, smoothing, z, weighted, which in grid + [(*grid[i][:4], name) for i in (0, -1) for name in ("none", "token 0")]:
        given = {"label_smoothing": smoothing, "lse_square_scale": z, "ce_weight": CLASSES if weighted else None}
        tensors, labels = (x, w, b)[: 2 + bias], IGNORED[which]
        name = f"bias {bias} smoothing {smoothing} z {z} class weights {weighted} ignored {which}"
        compare(name, tensors, labels, **given)
        if which == "some":
            scale = 0.5 if bias and weighted else 1.0  # another kernel runs for each of the two
            unchanged(name, (x[:4], *tensors[1:]), labels[:4], scale, **given)
    together = {name: value for name, value in OPTIONS.items() if name in TAKES and name != "ignore_index"}
    compare("all options together", (x, w, b), **together, ignore_index=int(y[3]))
    del together["ce_weight"]
    compare("all options but class weights and bias together", (x, w), **together, ignore_index=int(y[3]))


def each_option():
    """mean and sum as released, whatever is trained; none's outputs as released, its gradients those of sum."""
    for name, value in [("", None), *((name, value) for name, value in OPTIONS.items() if name in TAKES)]:
        given = {"lse_square_scale": 1e-3, name: value} if name else {}
        labels = y if name == "ignore_index" else IGNORED["some"]
        few, name, full = (x[:4], w, b), name or "plain", []  # in four chunks
        choices = (1, 1, 1), (0, 1, 1), *(((1, 0, 1), (0, 0, 0), (1, 1), (0, 1)) if name == "plain" else ())
        for reduction, needs in itertools.product(("mean", "sum"), choices):
            n = len(needs)
            before, after = (outcome(f, few[:n], labels[:4], needs, reduction=reduction, **given) for f in (RELEASED, FIXED))
            full = before if all(needs) else full
            # Of a frozen input (pack17) gradients may come out right as well.
            right = not needs[0] and any(needs) and same(after[1 - n :], full[1 - n :]) and same(after[:-n], full[:-n])
            kept = same(before, after) or right
            check("control", f"{reduction} is the release's, byte for byte: {name}, trained {needs}", kept)
        before, after = (outcome(f, few, labels[:4], reduction="none", **given) for f in (RELEASED, FIXED))
        check("control", f"outputs of none are the release's, byte for byte: {name}", same(before[:-3], after[:-3]))
        summed = outcome(RELEASED, few, labels[:4], reduction="sum", **given)
        found = error(after[-3:], [t.double() for t in summed[-3:]]) if len(after) > 3 else None
        check("trigger", f"weights of 1 give the gradients of sum: {name}", error=found, limit=LIMIT)
        compare(f"weights dense: {name}", (x, w, b), labels, **given)


def weights_and_labels():
    for name, weight in WEIGHTS.items():
        compare(f"weights {name}", (x, w), scale=weight)
    compare("16 classes, which are one chunk", (x, w[:16]), y % 16)
    compare("strided labels", (x, w), torch.stack((y, y), 1)[:, 0])
    if len(outcome(RELEASED, (x, w), y.int(), reduction="sum")) > 1:
        want = run(eager, [x.double(), w.double()], y, DENSE, reduction="none")
        found = error(run(liger, (x, w), y.int(), DENSE, reduction="none"), want)
        check("trigger", "labels in int32, which the release's sum takes", error=found, limit=LIMIT)
    compare("one token", (x[:1], w, b), y[:1], DENSE[:1])
    compare("ignore_index 5", (x, w), torch.where(y % 4 == 0, 5, y), ignore_index=5)
    zeros = run(liger, (x, w, b), torch.full_like(y, -100), DENSE, reduction="none")
    check("trigger", "all labels ignored: loss and gradients are zero", all(t.eq(0).all() for t in zeros))


def sizes_and_strides():
    compare("logits of 60", (20 * x, w, b), limit=1e-4)  # where fp32 has four digits less
    for times in (1, 3, 100) if device == "cuda" else (1, 3):  # 100 tokens take the interpreter a second
        compare(f"{times * MANY} tokens", (tokens.repeat(times, 1), w), spread.repeat(times), scales.repeat(times))
    unchanged("150 tokens", (tokens.repeat(3, 1), w), spread.repeat(3))
    turned = [x.t().contiguous().t(), w.t().contiguous().t(), b]  # a copy of them keeps the strides
    compare("input and weight transposed", turned)
    unchanged("transposed", turned, y)
    # A row takes the release's kernels more than one block, which has 32768 elements.
    compare("V=40,000", (x[:, :8], torch.randn(40_000, 8, device=device) / 8**0.5), 7_777 * (y % 6))


def through_the_wrappers():
    """Liger's Module and functional hand on every option."""
    known = {"ignore_index": int(y[3]), "ce_weight": CLASSES, "lse_square_scale": 1e-3, "label_smoothing": 0.1, "softcap": 3.0}
    known |= {"return_z_loss": False, "use_token_scaling": True, "accum_dtype": torch.float64}
    for wrapper, (function, options) in wrappers().items():
        for name in ("reduction", *(name for name in known if name in options)):
            if name == "softcap" and device != "cuda":
                continue
            given = {name: known[name]} if name in known else {}
            labels = (y if name == "ignore_index" else IGNORED["some"])[:4]
            few = x[:4], w, b
            each = [run(f, few, labels, reduction="mean", **given) for f in (WRAPPERS[wrapper][0], function)]
            check("control", f"mean by {wrapper} is the release's, byte for byte: {name}", same(*each))
            each = [run(f, few, labels, DENSE[:4], reduction="none", **given) for f in (liger, function)]
            check("trigger", f"none by {wrapper} is that of the function, byte for byte: {name}", same(*each))


def half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        half = x.to(dtype), w.to(dtype), b.to(dtype)
        exact, factors = [t.double() for t in half], CLASSES.to(dtype)
        off = error(outcome(RELEASED, half, y, reduction="sum")[-3:], run(eager, exact, y, reduction="sum")[1:])
        for name, mine, theirs in (("", {}, {}), (", class weights", {"ce_weight": factors}, {"weight": factors.double()})):
            want = run(eager, exact, y, DENSE, reduction="none", **theirs)
            found = error(run(liger, half, y, DENSE, reduction="none", **mine), want)
            check("trigger", f"{dtype}: at most four times as far off as the release's sum{name}", found <= 4 * off)
        before, after = (outcome(f, half, y, reduction="none") for f in (RELEASED, FIXED))
        want = run(eager, exact, y, reduction="none")[:1]
        kept = same(before[:-3], after[:-3]) or (len(after) > 1 and error(after[:1], want) <= error(before[:1], want))
        check("control", f"{dtype}: outputs of none are the release's, byte for byte, or nearer to fp64", kept)
        unchanged(f"{dtype}", half, y)
    leaves = x.bfloat16().requires_grad_(), w.clone().requires_grad_()

    def autocast():
        return torch.autocast(device, torch.bfloat16)

    with autocast():
        able = len(outcome(RELEASED, leaves, y, reduction="sum")) > 1  # 0.5.3 is not
        loss = liger(*leaves, y, reduction="none") if able else None
    if able:
        loss.backward(DENSE)
        want = run(eager, [x.double(), w.double()], y, DENSE, reduction="none")
        check("trigger", "autocast, bf16: within 0.1", error([loss, *(leaf.grad for leaf in leaves)], want) <= 0.1)
        unchanged("autocast, bf16", leaves, y, around=autocast)
    if "accum_dtype" in TAKES:  # 50 chunks, whose gradients of w are summed in fp32 here, and in bf16 without it
        wide = tokens.bfloat16(), (torch.randn(1024, H, device=device) / 4).bfloat16()
        want = run(eager, [t.double() for t in wide], spread, reduction="sum")[2:]

        def off(function, reduction, kind):
            return error(outcome(function, wide, spread, reduction=reduction, accum_dtype=kind)[-1:], want)

        exact, rounded = off(RELEASED, "sum", torch.float32), off(RELEASED, "sum", None)
        found = off(FIXED, "none", torch.float32)
        check("trigger", "accum_dtype: no further off than the release's sum", found <= 1.1 * exact)
        check("control", "accum_dtype: without it, the release's sum is further off", rounded > 1.1 * exact)


def what_is_trained():
    """One row for each choice; backward runs twice over one graph, which adds the gradients up."""
    for needs in itertools.product((True, False), repeat=3):
        got = [t.detach().clone().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        want = [t.detach().double().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        losses = []
        for function, (leaf, weight, bias), scale in ((liger, got, DENSE), (eager, want, DENSE.double())):
            loss = function(leaf, weight, y, bias, reduction="none")
            for again in (True, False) if any(needs) else ():
                loss.backward(scale, retain_graph=again)
            losses.append(loss.detach())
        pairs = [tuple(losses), *((g.grad, w.grad) for g, w, n in zip(got, want, needs, strict=True) if n)]
        found = error(*zip(*pairs, strict=True)) if all(g is not None for g, _ in pairs) else None
        trained = " ".join(name for name, n in zip(("input", "weight", "bias"), needs, strict=True) if n) or "nothing"
        check("trigger", f"trained: {trained}; two backwards over one graph", error=found, limit=LIMIT)
    trained = outcome(RELEASED, (x, w, b), y, reduction="none")[:-3]
    for mode in (torch.no_grad, torch.inference_mode):  # 0.6.3 - 0.7.0 raise there where there is a bias
        with mode():
            found = outcome(FIXED, (x, w, b), y, (0, 0, 0), reduction="none")[:-3]
        check("control", f"{mode.__name__}: outputs of none are those in training, byte for byte", same(trained, found))


def between_forward_and_backward():
    """What is swapped or changed there (pipeline stages do) is not the loss's; a loss may be changed, and others come between."""
    want = run(eager, [t.double() for t in (x, w, b)], y, DENSE, reduction="none", weight=CLASSES.double())[1:]
    for name in ("swapped", "input", "weight", "bias", "labels", "class weights"):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        given = dict(
            zip(("input", "weight", "bias", "labels", "class weights"), (*leaves, y.clone(), CLASSES.clone()), strict=True)
        )
        loss = liger(leaves[0], leaves[1], given["labels"], leaves[2], reduction="none", ce_weight=given["class weights"])
        with torch.no_grad():
            if name == "swapped":
                leaves[1].data = torch.zeros_like(w)
            else:
                given[name].zero_()
        try:
            loss.backward(DENSE)
            found = error([leaf.grad for leaf in leaves], want)
        except RuntimeError as raised:
            found = 0.0 if name != "swapped" and "modified by an inplace operation" in str(raised) else None
        what = "weight swapped" if name == "swapped" else f"{name} changed in place"
        check("trigger", f"{what} before backward: the loss's own gradients, or a refusal", error=found, limit=LIMIT)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    loss = liger(*leaves, y, reduction="none")
    loss *= DENSE
    loss.sum().backward()
    want = run(eager, [x.double(), w.double()], y, DENSE, reduction="none")[1:]
    check("trigger", "a loss that is multiplied in place", error=error([leaf.grad for leaf in leaves], want), limit=LIMIT)
    # Several losses before one backward, as several heads have them.
    leaves, losses, wants = [x.clone().requires_grad_() for _ in range(3)], [], []
    for leaf, labels, weight, given in (
        (leaves[0], y, DENSE, {"reduction": "none"}),
        (leaves[1], IGNORED["some"], torch.ones((), device=device), {"reduction": "mean"}),
        (leaves[2], y, WEIGHTS["negative"], {"reduction": "none", "label_smoothing": 0.1, "ignore_index": int(y[3])}),
    ):
        losses.append(liger(leaf, w, labels, **given))
        wants.append(run(eager, [x.double(), w.double()], labels, weight, **given)[1])
    torch.autograd.backward(losses, (DENSE, torch.ones_like(losses[1]), WEIGHTS["negative"]))
    found = error([leaf.grad for leaf in leaves], wants)
    check("trigger", "none, mean and none with other options before one backward", error=found, limit=LIMIT)


def alive():
    """Bytes of all tensors that Python knows; what shares memory counts once."""
    gc.collect()
    memory = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def held(function, reduction):
    """Bytes that a loss holds until its backward, itself included; the hooks make Python know what autograd saves."""
    leaves, before = [t.clone().requires_grad_() for t in (tokens, w)], alive()
    with using(function), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = liger(*leaves, spread, reduction=reduction)  # noqa: F841  it is held
    return alive() - before


class Cost(TorchDispatchMode):
    """Elements of the largest tensor that an operation gives, and the number of matrix products."""

    elements = products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.products += str(function).split(".")[1].rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        if torch.is_tensor(out):
            self.elements = max(self.elements, out.numel())
        return out


def memory_and_cost():
    torch.rand(1)  # a seed set by the fix would be seen
    state, before = torch.get_rng_state(), alive()
    run(liger, (x, w, b), y, DENSE, reduction="none")
    check("trigger", "no tensor is left after a backward", alive() <= before)
    check("trigger", "the state of the random numbers is as before", torch.equal(state, torch.get_rng_state()))
    before = alive()
    with torch.no_grad():
        liger(x.clone(), w.clone(), y, b, reduction="none")
    liger(x.clone().requires_grad_(), w.clone().requires_grad_(), y, b, reduction="none")
    check("trigger", "no tensor is left of an evaluation, nor of a loss that is dropped", alive() <= before)
    kept, own = held(FIXED, "none"), held(RELEASED, "sum")
    check("trigger", f"until its backward the loss holds {kept} bytes, and the release's sum {own}", kept <= own + 8 * MANY)
    cost = {}
    for name, function, reduction in (
        ("as released", RELEASED, "sum"),
        ("none", FIXED, "none"),
        ("sum", FIXED, "sum"),
        ("mean", FIXED, "mean"),
    ):
        with Cost() as cost[name]:
            outcome(function, (tokens[:20], w), spread[:20], reduction=reduction)
    own = cost.pop("as released")
    for name, each in cost.items():
        what = f"the largest tensor has {each.elements} elements, and that of the release's sum {own.elements}"
        check("trigger", f"20 tokens, {name}: {what}", each.elements <= own.elements)
        what = f"{each.products} matrix products, at most twice the {own.products} of the release's sum"
        check("trigger", f"20 tokens, {name}: {what}", 0 < each.products <= 2 * own.products)


def main():
    callers = [x, w, b, CLASSES, *IGNORED.values(), *WEIGHTS.values()]
    as_they_were = [t.clone() for t in callers]
    kept = list(inspect.signature(FIXED.forward).parameters)[: len(TAKES)]
    check("control", "arguments stand in the release's order", kept == TAKES)
    options_together()
    each_option()
    weights_and_labels()
    sizes_and_strides()
    through_the_wrappers()
    half_precision()
    what_is_trained()
    between_forward_and_backward()
    memory_and_cost()
    check(
        "trigger", "nothing was written into the caller's tensors and gradients", all(map(torch.equal, callers, as_they_were))
    )
    finish()


if __name__ == "__main__":
    main()
