"""The deep check of a fix of pack38: any sequence of scales, with every option, whatever is trained; gradients that were handed out stay what they were.

Runs after repro.py on the patched side. A single forward and backward has to stay what the release gives, bit for bit, and to make no more tensors. A
refusal by autograd is as good as a right gradient, as in repro.py, but not of all.
"""

import importlib.util
import inspect
import itertools
from importlib.metadata import distribution

import torch
from repro import check, device, error, finish, release
from torch.utils._python_dispatch import TorchDispatchMode

SCALES = (0.5, 0.5), (0.5, 1.0), (1.0, 0.5), (0.0, 2.0), (-3.0, 0.5, 1.0), (1.0, 1.0)
OPTIONS = {
    "reduction": "sum",
    "label_smoothing": 0.1,
    "ignore_index": 7,
    "logit_scale": 0.5,
    "num_chunks": 1,
    "logit_softcapping": 2.0,
    "use_l2warp": True,
    "accumulate_grad_in_fp32": False,
}
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-2}


class Made(TorchDispatchMode):
    """Counts tensors that are made, views not among them."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += not op.is_view
        return op(*args, **(kwargs or {}))


def as_released(function):
    """The release's own function, from the file that the patched one hides."""
    file = distribution("fla-core").locate_file(function.__module__.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(found := importlib.util.module_from_spec(spec))
    for name, value in vars(inspect.getmodule(function)).items():  # what repro.py puts in for the interpreter
        if name in ("exp", "exp2", "log", "log2"):
            setattr(found, name, value)
    return getattr(found, function.__name__)


class Graph:
    """A loss of its own leaves, scaled once before it is used."""

    def __init__(self, loss, tensors, needs):
        leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        self.loss, self.leaves = loss(*leaves), [leaf for leaf in leaves if leaf.requires_grad]

    def after(self, scales, keep_last=True):
        """Gradients after a backward of the loss times each of ``scales``, or the error; the last may give the graph up."""
        try:
            for i, scale in enumerate(scales, 1):
                (self.loss * scale).backward(retain_graph=keep_last or i < len(scales))
        except RuntimeError as raised:
            return str(raised)
        return [leaf.grad for leaf in self.leaves]

    def again(self):
        """What a second autograd.grad gives for half of the loss, by which more may be differentiated; or the error."""
        try:
            for _ in range(2):
                found = torch.autograd.grad(self.loss * 0.5, self.leaves, create_graph=True)
        except RuntimeError as raised:
            return str(raised)
        return [t.detach() for t in found]

    def handed_out(self, first, keep_last):
        """What autograd.grad gave for ``first`` times the loss, looked at after a later backward."""
        handed = torch.autograd.grad(self.loss * first, self.leaves, retain_graph=True)
        later = self.after((0.25,), keep_last)
        return later if isinstance(later, str) else handed


def judge(name, got, want, limit):
    refused = isinstance(got, str) and "inplace operation" in got
    right = refused or (not isinstance(got, str) and error(got, want) <= limit)
    check("trigger", name + (": refused" if refused else ""), right)


def validate(said, fixed, released, tensors, needs, every=SCALES[:2]):
    """One loss, with one option, of one dtype, with some tensors trained."""
    each = []
    for loss in (released, fixed):
        try:
            with Made() as made:
                graph = Graph(loss, tensors, needs)
                (graph.loss * 0.3).backward()
        except Exception as raised:
            return check("control", f"{said}: one backward ends: {type(raised).__name__}", False)
        each.append(([graph.loss, *(leaf.grad for leaf in graph.leaves)], made.count))
    (want, least), (got, count) = each
    alike = all(g is not None and torch.equal(g, w) for g, w in zip(got, want, strict=True))
    check("control", f"{said}: one backward is the release's, bit for bit", alike)
    check("trigger", f"{said}: forward and backward make {count} tensors, {least} as released", count <= least)
    unit = [g.double() for g in Graph(released, tensors, needs).after((1.0,))]
    limit = LIMITS[tensors[0].dtype]
    for scales, keep in itertools.product(every, (True, False)):
        ends = "" if keep else ", the graph given up"
        got = Graph(fixed, tensors, needs).after(scales, keep)
        judge(f"{said}: backwards of {scales}{ends}", got, [u * sum(scales) for u in unit], limit)
    for first, keep in ((1.0, False), (0.5, True)):
        got = Graph(fixed, tensors, needs).handed_out(first, keep)
        judge(f"{said}: what autograd.grad gave for {first} is the same later", got, [u * first for u in unit], limit)
    if every == SCALES:
        judge(
            f"{said}: a second autograd.grad with create_graph",
            Graph(fixed, tensors, needs).again(),
            [u * 0.5 for u in unit],
            limit,
        )
    # A torch before 2.5 does not say whether the graph is kept.
    asked = vars(torch._C._autograd).pop("_get_current_graph_task_keep_graph", None)
    judge(f"{said}: an older torch", Graph(fixed, tensors, needs).after(SCALES[0]), unit, limit)
    vars(torch._C._autograd)["_get_current_graph_task_keep_graph"] = asked
    plain = Graph(fixed, tensors, needs)
    check("trigger", f"{said}: the loss itself can be used twice", not isinstance(plain.after((1.0, 1.0)), str))


def calls(given, functions, y, teacher):
    """Of each function the loss of x [BT, H], w [V, H] and perhaps a bias [V]; ``teacher`` is the x and w of a KL divergence's other side."""

    def divergence(function):
        return lambda x, w: function(x, teacher[0].to(x.dtype), w, teacher[1].to(x.dtype), **given)

    def linear(function):
        labels = y.where(y != -100, 7) if "ignore_index" in given else y
        return lambda x, w, b=None: function(x, labels, w, b, **given)

    return [(divergence if teacher else linear)(function) for function in functions]


def main():
    torch.manual_seed(1)
    for name, function in zip(("fused_linear_cross_entropy_loss", "fused_kl_div_loss"), release(), strict=True):
        old, takes = as_released(function), inspect.signature(function).parameters
        same = list(takes) == list(inspect.signature(old).parameters)
        check("control", f"{name}: the release's is another one, with the same arguments", same and old is not function)
        for BT, H, V in ((5, 8, 32), (70, 40, 130)):
            x, w, b, *teacher = (
                t.to(device)
                for t in (torch.randn(BT, H), torch.randn(V, H), torch.randn(V), torch.randn(BT, H), torch.randn(V, H))
            )
            y = torch.randint(0, V, (BT,)).to(device)
            y[2] = -100

            of = {"functions": (function, old), "y": y, "teacher": teacher if name == "fused_kl_div_loss" else None}
            said = f"{name}, {(BT, H, V)}"
            validate(said, *calls({}, **of), (x, w), (True, True), SCALES)
            half = [t.to(torch.float16) for t in (x, w)]
            validate(f"{said}, fp16", *calls({}, **of), half, (True, True))
            if (BT, H, V) != (5, 8, 32):
                continue
            for needs in ((True, False), (False, True)):
                validate(f"{said}, trained: {'xw'[needs[1]]}", *calls({}, **of), (x, w), needs)
            if name == "fused_linear_cross_entropy_loss":
                for needs in itertools.product((True, False), repeat=3):
                    if any(needs):
                        trained = "".join(itertools.compress("xwb", needs))
                        validate(f"{said} with bias, trained: {trained}", *calls({}, **of), (x, w, b), needs)
            for option, value in OPTIONS.items():
                if option in takes and not (option == "reduction" and name == "fused_kl_div_loss"):
                    validate(f"{said}, {option}", *calls({option: value}, **of), (x, w), (True, True))
    finish()


if __name__ == "__main__":
    main()
