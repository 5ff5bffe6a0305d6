"""The deep check of a fix of pack18: any sequence of scales, with every option, whatever is trained; gradients that were handed out stay what they were.

Runs after repro.py on the patched side. A single forward and backward has to stay what the release gives, bit for bit, to make no more tensors and
to keep no more. A refusal by autograd is as good as a right gradient, as in repro.py, but not of all.
"""

import contextlib
import gc
import importlib.util
import inspect
import itertools
from importlib.metadata import distribution

import torch
import torch.nn.functional as F
from repro import applied, check, device, error, finish, release
from torch.utils._python_dispatch import TorchDispatchMode

BT, H, V = 5, 8, 32
HALF = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no scalars in bf16
SCALES = (0.5, 0.5), (0.5, 1.0), (1.0, 0.5), (0.0, 2.0), (-3.0, 0.5, 1.0), (1.0, 1.0)
OPTIONS = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-3,
    "return_z_loss": True,
    "ce_weight": torch.linspace(0.5, 2, V, device=device),
    "use_token_scaling": True,
    "ignore_index": 7,
}


class Made(TorchDispatchMode):
    """Counts tensors that are made, views not among them."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += not op.is_view
        return op(*args, **(kwargs or {}))


def as_released(module):
    """The release's own module, from the file that the patched one hides."""
    file = distribution("liger-kernel").locate_file(module.__name__.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(found := importlib.util.module_from_spec(spec))
    return found


class Graph:
    """A loss, and the leaves that it is a function of. A loss for each token is weighted, so that the gradients that come back differ."""

    def __init__(self, function, tensors, needs, y, given):
        leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        given = dict(given)
        slice_, self.cast = given.pop("slice", 0), given.pop("autocast", False)
        names = dict.fromkeys(("weight", "linear"), leaves[1]) if len(leaves) > 1 else {}
        names |= {"bias": leaves[2]} if len(leaves) > 2 else {}
        x = leaves[0] if names else F.pad(leaves[0], (0, slice_))[:, :V] if slice_ else leaves[0] * 1
        with self.casting():
            loss = applied(function, _input=x, target=y, **names, **given)
        self.unweighted, self.leaves = loss, [leaf for leaf in leaves if leaf.requires_grad]
        self.loss = (loss * torch.linspace(-1, 2, len(loss)).to(loss)).sum() if loss.dim() else loss

    def casting(self):
        return torch.autocast(device, HALF) if self.cast else contextlib.nullcontext()

    def again(self):
        """What a second autograd.grad gives for half of the loss, by which more may be differentiated; or the error."""
        try:
            for _ in range(2):
                found = torch.autograd.grad(self.loss * 0.5, self.leaves, create_graph=True)
        except RuntimeError as raised:
            return str(raised)
        return [t.detach() for t in found]

    def after(self, scales, keep_last=True, loss=None):
        """Gradients after a backward of the loss times each of ``scales``, or the error; the last may give the graph up."""
        loss = self.loss if loss is None else loss
        try:
            for i, scale in enumerate(scales, 1):
                with self.casting():
                    (loss * scale).backward(retain_graph=keep_last or i < len(scales))
        except RuntimeError as raised:
            return str(raised)
        return [leaf.grad for leaf in self.leaves]

    def handed_out(self, first, keep_last):
        """What autograd.grad gave for ``first`` times the loss, looked at after a later backward."""
        handed = torch.autograd.grad(self.loss * first, self.leaves, retain_graph=True)
        later = self.after((0.25,), keep_last)
        return later if isinstance(later, str) else handed


def alive():
    """Bytes of all tensors that Python knows; what shares memory counts once."""
    gc.collect()
    memory = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def left(function, *made_of):
    """Bytes that a loss and its gradients hold after a backward that gives the graph up."""
    before, graph = alive(), Graph(function, *made_of)
    graph.after((0.5,), keep_last=False)
    return alive() - before


def judge(name, got, want, limit):
    refused = isinstance(got, str) and "inplace operation" in got
    right = refused or (not isinstance(got, str) and error(got, want) <= limit)
    check("trigger", name + (": refused" if refused else ""), right)


def validate(said, fixed, released, tensors, needs, y, given, scales=SCALES[:1]):
    """One loss, with one option, of one dtype, with some tensors trained."""
    each = []
    for function in (released, fixed):
        try:
            with Made() as made:
                graph = Graph(function, tensors, needs, y, given)
                (graph.loss * 0.3).backward()
            each.append(([graph.unweighted, *(leaf.grad for leaf in graph.leaves)], made.count))
        except Exception as raised:  # up to 0.7.0 some releases do, where not all is trained: that has to stay, too
            each.append((f"{type(raised).__name__}: {raised}", 0))
    (want, least), (got, count) = each
    if isinstance(want, str) or isinstance(got, str):
        return check("control", f"{said}: the release's own error", want == got)
    alike = [g is w or (g is not None and w is not None and torch.equal(g, w)) for g, w in zip(got, want, strict=True)]
    check("control", f"{said}: one backward is the release's, bit for bit", all(alike))
    check("trigger", f"{said}: forward and backward make {count} tensors, {least} as released", count <= least)
    if any(g is None for g in want):  # of a frozen input, which is pack17
        return
    unit = [g.double() for g in Graph(released, tensors, needs, y, given).after((1.0,))]
    limit = 1e-5 if tensors[0].dtype == torch.float32 else 2e-2

    def new():
        return Graph(fixed, tensors, needs, y, given)

    for some, keep in itertools.product(scales, (True, False)):
        ends = "" if keep else ", the graph given up"
        judge(f"{said}: backwards of {some}{ends}", new().after(some, keep), [u * sum(some) for u in unit], limit)
    # Of 1, nothing is multiplied; and where the graph is given up later, nothing is copied then.
    for first, keep in ((1.0, False), (0.5, True)):
        got = new().handed_out(first, keep)
        judge(f"{said}: what autograd.grad gave for {first} is the same later", got, [u * first for u in unit], limit)
    if scales == SCALES:
        judge(f"{said}: a second autograd.grad with create_graph", new().again(), [u * 0.5 for u in unit], limit)
        kept, own = (left(f, tensors, needs, y, given) for f in (fixed, released))
        check("trigger", f"{said}: {kept} bytes are left after a backward, {own} as released", kept <= own)
        # A torch before 2.5 does not say whether the graph is kept.
        asked = vars(torch._C._autograd).pop("_get_current_graph_task_keep_graph", None)
        judge(f"{said}: an older torch", new().after(SCALES[0]), unit, limit)
        vars(torch._C._autograd)["_get_current_graph_task_keep_graph"] = asked
        plain = new()
        twice = plain.after((1.0, 1.0), loss=plain.unweighted.sum())
        check("trigger", f"{said}: the loss itself can be used twice", not isinstance(twice, str))


def main():
    torch.manual_seed(1)
    logits, x, w, b = (t.to(device) for t in (torch.randn(BT, V), torch.randn(BT, H), torch.randn(V, H), torch.randn(V)))
    y = torch.randint(0, V, (BT,)).to(device)
    y[2] = -100
    ce, flce = release()
    for module, name, kinds in (
        (ce, "LigerCrossEntropyFunction", {"": (logits,)}),
        (flce, "LigerFusedLinearCrossEntropyFunction", {"": (x, w), " with bias": (x, w, b)}),
    ):
        fixed, released = getattr(module, name), getattr(as_released(module), name)
        takes = inspect.signature(released.forward).parameters
        kept = list(inspect.signature(fixed.forward).parameters)
        another = fixed is not released and kept == list(takes)
        check("control", f"{name}: the release's is another one, with the same arguments", another)
        reductions = [{"reduction": r} for r in ("mean", "sum", "none")] if "reduction" in takes else [{}]
        options = {option: {option: value} for option, value in OPTIONS.items() if option in takes}
        options |= {"autocast": {"autocast": True}} | ({"a slice": {"slice": 3}} if module is ce else {})
        for (kind, tensors), reduction in itertools.product(kinds.items(), reductions):
            if len(tensors) > 2 and "bias" not in takes:
                continue
            every = [needs for needs in itertools.product((True, False), repeat=len(tensors)) if any(needs)]
            said = f"{name}{kind}, {reduction.get('reduction', 'mean')}"
            validate(said, fixed, released, tensors, every[0], y, reduction, SCALES)
            validate(f"{said}, {HALF}", fixed, released, [t.to(HALF) for t in tensors], every[0], y, reduction)
            for needs in every[1:]:
                trained = "".join(itertools.compress("xwb", needs))
                validate(f"{said}, trained: {trained}", fixed, released, tensors, needs, y, reduction)
            for option, given in options.items() if len(tensors) < 3 else ():
                labels = y.where(y != -100, 7) if option == "ignore_index" else y
                validate(f"{said}, {option}", fixed, released, tensors, every[0], labels, {**reduction, **given})
        many = [torch.randn(2, 2**23)] if module is ce else [torch.randn(2, 2**15), torch.randn(2**9, 2**15)]
        many, few, needs = [t.to(device) for t in many], y[:2], (True,) * len(many)
        unit = [g.double() for g in Graph(released, many, needs, few, {}).after((1.0,))]
        judge(f"{name}: 2**24 gradients", Graph(fixed, many, needs, few, {}).after((0.5, 0.5)), unit, 1e-5)
    finish()


if __name__ == "__main__":
    main()
