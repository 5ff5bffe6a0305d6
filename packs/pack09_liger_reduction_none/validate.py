"""The deep check of a fix of pack09: every option beside per-token weights of any sign and stride, against the definition in fp64.

Runs after repro.py on the patched side. ``mean`` and ``sum`` have to stay what the release computes, byte for byte.
"""

import importlib
import inspect
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from repro import FACTS, check, device, eager, error, finish, liger, release, run

# A power of two: with another V the release's own softcap is wrong up to 0.8.3. repro.py has V = 200.
B, S, H, V = 1, 7, 16, 64  # three chunks of two tokens and one of one
LIMIT = 1e-5


def as_released():
    """The release's own function with all that it imports: what hides it on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = str(Path(file).parents[2])
    patched = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "liger_kernel"}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    function = release().LigerFusedLinearCrossEntropyFunction
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(patched)
    FACTS["file"] = file
    return function


def definition(x, w, y, b=None, *, softcap=None, use_token_scaling=False, **given):
    """`eager` with two more options: logits capped to ±softcap, and losses times the (detached) probability of the label."""
    if softcap is None and not use_token_scaling:
        return eager(x, w, y, b, **given)
    logits = x @ w.t()
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    loss = F.cross_entropy(logits, y, **given)
    scaling = logits.softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0].detach()
    return loss * scaling if use_token_scaling else loss


def main():
    flce = release()
    fixed, released = flce.LigerFusedLinearCrossEntropyFunction, as_released()
    takes = set(inspect.signature(fixed.forward).parameters)
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

    def compare(name, labels, scale, tensors, ce_weight=None, **given):
        weight = {} if ce_weight is None else {"weight": ce_weight.double()}
        want = run(definition, [t.double() for t in tensors], labels, scale, reduction="none", **weight, **given)
        got = run(liger, tensors, labels, scale, reduction="none", ce_weight=ce_weight, **given)
        check("trigger", name, error=error(got, want), limit=LIMIT)

    grid = itertools.product((0, 1), (0.0, 0.1), (0.0, 1e-3), (0, 1), ignored)
    for bias, smoothing, z, weighted, which in grid:
        given = {"label_smoothing": smoothing, "lse_square_scale": z, "ce_weight": classes if weighted else None}
        tensors, labels = (x, w, b)[: 2 + bias], ignored[which]
        name = f"bias {bias} smoothing {smoothing} z {z} class weights {weighted} ignored {which}"
        compare(name, labels, weights["dense"], tensors, **given)
        upstream = 0.5 if bias and weighted else 1.0  # another kernel runs for each of the two
        for reduction in ("mean", "sum") if which == "some" else ():
            flce.LigerFusedLinearCrossEntropyFunction = released
            before = run(liger, tensors, labels, upstream, reduction=reduction, **given)
            flce.LigerFusedLinearCrossEntropyFunction = fixed
            after = run(liger, tensors, labels, upstream, reduction=reduction, **given)
            check("control", f"{reduction} is the release's, byte for byte: {name}", all(map(torch.equal, before, after)))
    for name, weight in weights.items():
        compare(f"weights {name}", y, weight, (x, w))
    compare("ignore_index 5", torch.where(y % 4 == 0, 5, y), weights["dense"], (x, w), ignore_index=5)
    options = {"use_token_scaling": True}
    # Triton's interpreter cannot run the release's own softcap, whatever the reduction.
    options |= {"softcap": 3.0} if device == "cuda" else {}
    for name in sorted(options.keys() & takes):
        compare(name, y, weights["dense"], (x, w), **{name: options[name]})
    # Each option reaches the second pass: then weights of 1 give the gradients of the release's own sum.
    options = {"accum_dtype": torch.float64, "return_z_loss": True, "return_token_accuracy": True, **options}
    options |= {"ignore_index": int(y[3]), "label_smoothing": 0.1, "lse_square_scale": 1e-3, "ce_weight": classes}
    for name in sorted(options.keys() & takes):
        flce.LigerFusedLinearCrossEntropyFunction = released
        before = run(liger, (x, w, b), y, reduction="sum", **{name: options[name]})[1:]
        flce.LigerFusedLinearCrossEntropyFunction = fixed
        after = run(liger, (x, w, b), y, reduction="none", **{name: options[name]})[1:]
        same = all(map(torch.equal, before, after))
        check("trigger", f"weights of 1: gradients of the release's sum, byte for byte: {name}", same)
    # One row for each choice of what is trained; backward runs twice over one graph, which adds the gradients up.
    for needs in itertools.product((True, False), repeat=3):
        if not any(needs):
            continue
        got = [t.detach().clone().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        want = [t.detach().double().requires_grad_(n) for t, n in zip((x, w, b), needs, strict=True)]
        for function, (leaf, weight, bias), scale in (
            (liger, got, weights["dense"]),
            (eager, want, weights["dense"].double()),
        ):
            loss = function(leaf, weight, y, bias, reduction="none")
            loss.backward(scale, retain_graph=True)
            loss.backward(scale)
        pairs = [(g.grad, w.grad) for g, w, n in zip(got, want, needs, strict=True) if n]
        found = error(*zip(*pairs, strict=True)) if all(g is not None for g, _ in pairs) else None
        trained = " ".join(name for name, n in zip(("input", "weight", "bias"), needs, strict=True) if n)
        check("trigger", f"trained: {trained}; two backwards over one graph", error=found, limit=LIMIT)
    # Weights that are swapped between forward and backward (pipeline stages, optimizers that keep two copies) are not the loss's.
    leaf, head, want = x.clone().requires_grad_(), w.clone().requires_grad_(), x.double().requires_grad_()
    loss = liger(leaf, head, y, reduction="none")
    head.data = torch.zeros_like(head)
    loss.backward(weights["dense"])
    eager(want, w.double(), y, reduction="none").backward(weights["dense"].double())
    check("trigger", "weight.data is swapped before backward", error=error([leaf.grad], [want.grad]), limit=LIMIT)
    head = w.clone().requires_grad_()
    loss = liger(x.clone().requires_grad_(), head, y, reduction="none")
    with torch.no_grad():
        head.mul_(2)
    try:
        loss.backward(weights["dense"])
        refused = False
    except RuntimeError as raised:
        refused = "modified by an inplace operation" in str(raised)
    check("control", "a weight changed in place before backward is refused, as PyTorch's own functions do", refused)
    # Two losses before one backward, as several heads have them.
    first, second = (t.clone().requires_grad_() for t in (x, x))
    losses = liger(first, w, y, reduction="none"), liger(second, w, ignored["some"], reduction="mean")
    torch.autograd.backward(losses, (weights["dense"], torch.ones_like(losses[1])))
    mean = run(eager, [x.double(), w.double()], ignored["some"], reduction="mean")[1]
    check(
        "trigger", "none and mean before one backward", error=error([first.grad, second.grad], [want.grad, mean]), limit=LIMIT
    )
    finish()


if __name__ == "__main__":
    main()
