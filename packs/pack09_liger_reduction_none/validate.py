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
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

# A power of two: with another V the release's own softcap is wrong up to 0.8.3. repro.py has V = 200.
B, S, H, V = 1, 7, 16, 64  # three chunks of two tokens and one of one
LIMIT = 1e-5
NO_PART = "accum_dtype", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"  # of what the loss is


def wrappers():
    """Liger's Module and functional, as functions of input, weight, labels, bias and options, and their parameters; none where they
    do not import without transformers.
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
    "of 1e-9": 1e-9 * torch.randn(B * S, device=device),
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
    "softcap": 3.0,
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
        choices = (1, 1, 1), (0, 1, 1), (1, 0, 1), *(((0, 0, 0), (1, 1), (0, 1)) if name == "plain" else ())
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
        for needs in choices[1:3]:
            some = outcome(FIXED, few, labels[:4], needs, reduction="none", **given)
            kept = same(some, [*after[:-3], *(g if n else None for g, n in zip(after[-3:], needs, strict=True))])
            check("trigger", f"none of what is trained is what it is when all is: {name}, trained {needs}", kept)
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


def parts(out):
    """The tensors of what a wrapper returns, and what kind of thing it is."""
    return [out] if torch.is_tensor(out) else [type(out).__name__, *(vars(out).values() if hasattr(out, "__dict__") else out)]


def through_the_wrappers():
    """Liger's Module and functional have the release's parameters and defaults, and hand on every option."""
    known = {"ignore_index": int(y[3]), "ce_weight": CLASSES, "lse_square_scale": 1e-3, "label_smoothing": 0.1, "softcap": 3.0}
    known |= {"return_z_loss": False, "use_token_scaling": True, "accum_dtype": torch.float64}
    for wrapper, (function, options) in wrappers().items():
        before, theirs = WRAPPERS[wrapper]
        kept = [(p.name, p.default) for p in options.values()][: len(theirs)] == [(p.name, p.default) for p in theirs.values()]
        check("control", f"parameters of {wrapper} are the release's, and their defaults", kept)
        extra = {name: True for name in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens") if name in theirs}
        for reduction in ("mean", "none"):
            given = {"reduction": reduction, "lse_square_scale": 1e-3, **extra}
            each = [parts(f(x[:4].clone().requires_grad_(), w, y[:4], None, **given)) for f in (before, function)]
            check("control", f"all outputs of {reduction} by {wrapper} are the release's, byte for byte", same(*each))
        for name in ("reduction", *(name for name in known if name in options)):
            if name == "softcap" and device != "cuda":
                continue
            given = {name: known[name]} if name in known else {}
            labels = (y if name == "ignore_index" else IGNORED["some"])[:4]
            few = x[:4], w, b
            each = [run(f, few, labels, reduction="mean", **given) for f in (before, function)]
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
        for name, mine, theirs in (("", None, {}), (", fp32 class weights", CLASSES, {"weight": CLASSES.double()})):
            before, after = (outcome(f, half, y, reduction="none", ce_weight=mine) for f in (RELEASED, FIXED))
            want = run(eager, exact, y, reduction="none", **theirs)[:1]
            kept = same(before[:-3], after[:-3]) or (len(after) > 1 and error(after[:1], want) <= error(before[:1], want))
            check("control", f"{dtype}: outputs of none are the release's, byte for byte, or nearer to fp64{name}", kept)
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
    """One row for each choice; backward runs again over one graph, with other weights, which adds the gradients up."""
    for needs in itertools.product((True, False), repeat=3):
        got = [t.detach().clone().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        want = [t.detach().double().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        scales = [torch.full_like(DENSE, 0.5), torch.full_like(DENSE, 3.0)] if all(needs) else []
        scales += [DENSE, -2 * DENSE.flip(0)] if any(needs) else []
        losses = []
        for function, (leaf, weight, bias) in ((liger, got), (eager, want)):
            loss = function(leaf, weight, y, bias, reduction="none")
            for i, scale in enumerate(scales, 1):
                loss.backward(scale.to(loss.dtype), retain_graph=i < len(scales))
            losses.append(loss.detach())
        pairs = [tuple(losses), *((g.grad, w.grad) for g, w, n in zip(got, want, needs, strict=True) if n)]
        kept = all(g is not None for g, _ in pairs) and [t.requires_grad for t in got] == list(needs)
        trained = " ".join(name for name, n in zip(("input", "weight", "bias"), needs, strict=True) if n) or "nothing"
        found = error(*zip(*pairs, strict=True)) if kept else None
        check("trigger", f"trained: {trained}; several backwards over one graph", error=found, limit=LIMIT)
    trained = outcome(RELEASED, (x, w, b), y, reduction="none")[:-3]
    for mode in (torch.no_grad, torch.inference_mode):  # 0.6.3 - 0.7.0 raise there where there is a bias
        with mode():
            found = outcome(FIXED, (x, w, b), y, (0, 0, 0), reduction="none")[:-3]
        check("control", f"{mode.__name__}: outputs of none are those in training, byte for byte", same(trained, found))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    want = run(eager, [t.double() for t in (x, w, b)], y, DENSE, reduction="none")[1:]
    found = torch.autograd.grad(liger(leaves[0], leaves[1], y, leaves[2], reduction="none"), leaves, DENSE, create_graph=True)
    check("trigger", "create_graph: the same gradients", error=error(found, want), limit=LIMIT)

    def in_a_checkpoint(x, w, y, b, **given):
        return checkpoint(liger, x, w, y, b, use_reentrant=False, **given)

    found = run(in_a_checkpoint, (x, w, b), y, DENSE, reduction="none")[1:]
    check("trigger", "in a checkpoint: the same gradients", error=error(found, want), limit=LIMIT)
    with torch.inference_mode():
        labels, classes = y.clone(), CLASSES.clone()
    unchanged("labels and class weights made under inference_mode", (x[:4], w), labels[:4], ce_weight=classes)
    try:
        compare(
            "labels and class weights made under inference_mode: their gradients, or a refusal",
            (x, w),
            labels,
            ce_weight=classes,
        )
    except RuntimeError as raised:  # the definition asks for no gradient of them, either
        check("trigger", f"labels and class weights made under inference_mode: {raised}", "saved for backward" in str(raised))


def changed_before_backward(function, name, scale, reduction):
    """Gradients of what is trained where an argument is swapped or written to between forward and backward, or a refusal's word."""
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    names = "input", "weight", "bias", "labels", "class weights"
    given = dict(zip(names, (*leaves, y.clone(), CLASSES.clone()), strict=True))
    with using(function):
        loss = liger(*leaves[:2], given["labels"], leaves[2], reduction=reduction, ce_weight=given["class weights"])
        with torch.no_grad():
            if name == "weight swapped":
                leaves[1].data = torch.zeros_like(w)
            else:
                given[name.removesuffix(" changed in place")].zero_()
        try:
            loss.backward(scale)
        except RuntimeError as raised:
            return ["refused" if "modified by an inplace operation" in str(raised) else str(raised)]
    return [leaf.grad for leaf in leaves]


def between_forward_and_backward():
    """What is swapped or changed there (pipeline stages do) is not the loss's; a loss may be changed, and others come between."""
    want = run(eager, [t.double() for t in (x, w, b)], y, DENSE, reduction="none", weight=CLASSES.double())[1:]
    places = "input", "weight", "bias", "labels", "class weights"
    for name in ("weight swapped", *(f"{place} changed in place" for place in places)):
        found = changed_before_backward(FIXED, name, DENSE, "none")
        off = error(found, want) if len(found) == 3 else 0.0 if found == ["refused"] and name != "weight swapped" else None
        check("trigger", f"{name} before backward: the loss's own gradients, or a refusal", error=off, limit=LIMIT)
        each = [changed_before_backward(f, name, torch.ones((), device=device), "mean") for f in (RELEASED, FIXED)]
        check("control", f"mean is the release's, byte for byte: {name} before backward", same(*each))
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
    """Matrix products; bytes of the largest tensor that an operation gives, and of all of them that are alive at a matrix product."""

    products = largest = peak = 0

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.dtype != torch.uint8:  # bytes are the interpreter's own copies
            self.largest = max(self.largest, out.numel() * out.element_size())
            self.given.append(TensorWeakRef(out))
        if str(function).split(".")[1].rstrip("_") in ("mm", "addmm", "bmm", "baddbmm"):
            self.products += 1
            gc.collect()  # the interpreter leaves cycles
            alive = [tensor.untyped_storage() for each in self.given if (tensor := each()) is not None]
            self.peak = max(self.peak, sum({each.data_ptr(): each.nbytes() for each in alive}.values()))
        return out


def cost(function, reduction, needs):
    """What a call costs whose logits are larger than its weight: 20 tokens in ten chunks, bf16."""
    tensors = tokens[:20, :4].bfloat16(), w[:, :4].bfloat16()
    gc.collect()
    gc.freeze()  # what is there already need not be looked through at each product
    try:
        with Cost() as found:
            outcome(function, tensors, spread[:20], needs, reduction=reduction)
    finally:
        gc.unfreeze()
    return found


def memory_and_cost():
    torch.rand(1)  # a seed set by the fix would be seen
    state, before = torch.get_rng_state(), alive()
    run(liger, (x, w, b), y, DENSE, reduction="none")
    check("trigger", "no tensor is left after a backward", alive() <= before)
    check("trigger", "the state of the random numbers is as before", torch.equal(state, torch.get_rng_state()))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    loss = liger(leaves[0], leaves[1], y, leaves[2], reduction="none")
    loss.backward(DENSE)
    grads = [leaf.grad for leaf in leaves]  # from here on Python knows them
    kept = alive() - before - sum(t.nbytes for t in (*leaves, *grads))
    check("trigger", "after a backward the loss keeps nothing but itself", kept <= loss.nbytes)
    del leaves, loss, grads
    before = alive()
    with torch.no_grad():
        liger(x.clone(), w.clone(), y, b, reduction="none")
    liger(x.clone().requires_grad_(), w.clone().requires_grad_(), y, b, reduction="none")
    check("trigger", "no tensor is left of an evaluation, nor of a loss that is dropped", alive() <= before)
    own = held(RELEASED, "sum")
    for reduction in ("none", "sum", "mean"):
        kept = held(FIXED, reduction)
        more = 8 * MANY if reduction == "none" else 0
        check("trigger", f"until its backward {reduction} holds {kept} bytes, and the release's sum {own}", kept <= own + more)
    for trained, needs in (("all", (1, 1)), ("the input", (1, 0))):
        own = cost(RELEASED, "sum", needs)
        for reduction in ("none", "sum", "mean"):
            found = cost(FIXED, reduction, needs)
            what = f"{found.products} matrix products, at most twice the {own.products} of the release's sum"
            check("trigger", f"{reduction}, trained {trained}: {what}", 0 < found.products <= 2 * own.products)
            what = f"the largest tensor has {found.largest} bytes, and that of the release's sum {own.largest}"
            check("trigger", f"{reduction}, trained {trained}: {what}", found.largest <= own.largest)
            what = f"{found.peak} bytes at a time, and the release's sum {own.peak}"
            check("trigger", f"{reduction}, trained {trained}: {what}", found.peak <= own.peak + 8 * 20)


def main():
    callers = [x, w, b, CLASSES, *IGNORED.values(), *WEIGHTS.values()]
    as_they_were = [t.clone() for t in callers]
    before, after = ([(p.name, p.default) for p in inspect.signature(f.forward).parameters.values()] for f in (RELEASED, FIXED))
    check("control", "arguments stand in the release's order, and have its defaults", after[: len(before)] == before)
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
