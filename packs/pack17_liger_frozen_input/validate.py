"""The deep check of a fix of pack17: gradients are those of the release where the input needs one, bit for bit, whatever the options.

Runs after repro.py on the patched side. Nothing else may change: not the losses, not what a trained input gets, not
the reduction none, which is as the release has it, not the cost under no_grad.
"""

import importlib.util
import inspect
import itertools
from importlib.metadata import distribution

import torch
from repro import check, device, error, finish, release
from torch.utils._python_dispatch import TorchDispatchMode

# Four chunks, one of them of one token; V a power of two: with another the release's own softcap is wrong up to 0.8.3.
BT, H, V = 13, 16, 64


class Made(TorchDispatchMode):
    """Counts tensors of ``shape`` that are made, views not among them."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.count += isinstance(tensor, torch.Tensor) and tensor.shape == self.shape and not op.is_view
        return out


def as_released():
    """The release's own function, from the file that the patched one hides."""
    file = distribution("liger-kernel").locate_file("liger_kernel/ops/fused_linear_cross_entropy.py")
    spec = importlib.util.spec_from_file_location("as_released", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.LigerFusedLinearCrossEntropyFunction


def call(function, leaves, y, given):
    """All outputs of the release's own function: the loss, then z-loss, accuracy and predicted tokens, or None."""
    given = {**dict(zip(("_input", "weight", "bias"), leaves, strict=False)), "target": y, **given}
    outs = function.apply(
        *(given.get(p.name, p.default) for p in list(inspect.signature(function.forward).parameters.values())[1:])
    )
    return list(outs) if isinstance(outs, tuple) else [outs]


def outcome(function, tensors, needs, y, scale, given):
    """Outputs, and the gradients of those of ``tensors`` that need one, or the error that it ends with."""
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
    try:
        outs = call(function, leaves, y, given)
        if any(needs):
            weights = torch.linspace(-1, 2, len(outs[0])) if outs[0].dim() else torch.ones([])  # for none, one a token
            outs[0].backward((scale * weights).to(outs[0]))
    except Exception as raised:  # what it raises has to stay the same, too
        return [f"{type(raised).__name__}: {raised}"]
    return [*outs, *(leaf.grad for leaf, n in zip(leaves, needs, strict=True) if n)]


def backward_makes(function, tensors, y, given):
    """How many tensors of the weight's shape a backward makes where all is trained: none, for the forward has made them."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    loss = call(function, leaves, y, given)[0]
    with Made(leaves[1].shape) as made:
        loss.backward()
    return made.count


def same(one, other):
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b for a, b in pairs
    )


def main():
    fixed, released = release().LigerFusedLinearCrossEntropyFunction, as_released()
    takes = list(inspect.signature(released.forward).parameters)
    kept = list(inspect.signature(fixed.forward).parameters)
    check("control", "arguments stand in the release's order", kept[: len(takes)] == takes)
    check("control", "the release's function is another one", fixed is not released)
    torch.manual_seed(1)
    x, w, b = (t.to(device) for t in (torch.randn(BT, H), torch.randn(V, H) / H**0.5, torch.randn(V)))
    y = torch.randint(0, V, (BT,)).to(device)
    y[3::4] = -100
    options = {
        "lse_square_scale": 1e-3,
        "label_smoothing": 0.1,
        "ignore_index": int(y[0]),
        "ce_weight": torch.rand(V, device=device) + 0.5,
    }
    options |= {
        "return_z_loss": True,
        "return_token_accuracy": True,
        "return_predicted_tokens": True,
        "use_token_scaling": True,
    }
    options |= {"accum_dtype": torch.float64, "chunk_mem_const": 2}
    # Triton's interpreter cannot run the release's own softcap, whatever the reduction.
    options |= {"softcap": 3.0} if device == "cuda" else {}
    options = {name: {name: value, "lse_square_scale": 1e-3} for name, value in options.items() if name in takes}
    kinds = {"fp32": (x, w, b), "bf16": tuple(t.bfloat16() for t in (x, w, b)), "autocast": (x, w, b), "no bias": (x, w)}
    # Each kind without options, and each option in fp32, with a bias and without.
    cases = [(kind, {}, 1.0) for kind in kinds]
    cases += [(kind, given, 0.3) for kind in ("fp32", "no bias") for given in [{}, *options.values()]]
    for (kind, given, scale), reduction in itertools.product(cases, ("mean", "sum", "none")):
        name, given = f"{kind}, {reduction}, {next(iter(given), 'plain')}, x {scale}", {**given, "reduction": reduction}
        tensors, labels = kinds[kind], y.clamp(min=0) if "ignore_index" in given else y
        with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
            known = outcome(released, tensors, [True] * len(tensors), labels, scale, given)
            every = list(itertools.product((True, False), repeat=len(tensors)))
            # With an option: all trained, and all but the input.
            for needs in every[:: len(every) // 2] if given.keys() & options else every:
                found, trained = outcome(fixed, tensors, needs, labels, scale, given), "".join(itertools.compress("xwb", needs))
                frozen = any(needs) and not needs[0] and reduction != "none"
                gradients = list(itertools.compress(known[-len(tensors) :], needs))
                want = (
                    [*known[: -len(tensors)], *gradients] if frozen else outcome(released, tensors, needs, labels, scale, given)
                )
                role = "trigger" if frozen else "control"
                check(role, f"{name}, trained: {trained or 'nothing'}: bit for bit the release's", same(found, want))
    for reduction in ("mean", "sum"):
        least, made = (backward_makes(function, (x, w), y, {"reduction": reduction}) for function in (released, fixed))
        check(
            "trigger",
            f"{reduction}, a trained input: backward makes {made} tensors of the weight's shape, {least} as released",
            made <= least,
        )
        head = w.clone().requires_grad_()
        with torch.no_grad(), Made(w.shape) as made:
            call(fixed, (x, head), y, {"reduction": reduction})
        check("trigger", f"{reduction}, no_grad: no tensor of the weight's shape is made", not made.count)
        with Made(w.shape) as made:
            loss = call(fixed, (x, head), y, {"reduction": reduction})[0]
        head.data = torch.zeros_like(head)  # as a sharded optimizer does it
        for retain in (True, False):
            loss.backward(torch.tensor(0.3, device=device), retain_graph=retain)
        want = outcome(released, (x, w), (True, True), y, 0.6, {"reduction": reduction})[-1]
        check(
            "trigger",
            f"{reduction}: weight.data replaced, two backwards over one graph",
            error=error([head.grad], [want.double()]),
            limit=1e-5,
        )
    finish()


if __name__ == "__main__":
    main()
