"""The deep check of pack26's fix: other reductions, gradients, layouts, vocabularies and dtypes, and two tensor-parallel ranks, against torch in fp64.

Runs after repro.py on the patched side. Two ranks talk through NCCL on two GPUs, and through gloo where there
is none.
"""

import argparse
import contextlib
import inspect
import math
import os
import subprocess
import sys
import tempfile
import traceback
from importlib import util
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from repro import FACTS, IGNORED, LAYOUTS, LIMIT, check, device, finish, inputs, off, outcome, release
from torch.utils._python_dispatch import TorchDispatchMode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", metavar="FILE", help=argparse.SUPPRESS)
B, S, V, SMALL = 2, 6, 40000, 1000  # more than one block of the kernels, 32,768, and what is quick without a GPU
HALF = torch.bfloat16 if device == "cuda" else torch.float16
WEIGHTS = torch.linspace(-1, 1.75, B * S, device=device).view(
    B, S
)  # a quarter more each: of both signs, one is 0, as a mask has it
TRITON = str(Path(util.find_spec("triton").origin).parent)


def judge(name, found):
    """Checks of a loss and a gradient, and that nothing is written out of bounds."""
    loss, grad, right, want, outside, _ = found
    check("trigger", f"{name}: loss", error=off(loss, right), limit=LIMIT)
    check("trigger", f"{name}: gradient", error=off(grad, want), limit=LIMIT)
    check("trigger", f"{name}: nothing written out of bounds", not outside)


def exact(logits, labels, given, mean=False):
    """torch's own loss and gradient in fp64."""
    x = logits.detach().double().contiguous().requires_grad_()
    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten().long(), reduction="mean" if mean else "none")
    loss.backward(given.double().reshape(loss.shape))
    return loss.detach(), x.grad


def called(function, name, logits, labels, given, mean=False):
    """Checks of a call with all as it is laid out: loss and gradient, shape and dtype of the loss, and that what is given stays as it is."""
    right, want = exact(logits, labels, given, mean)
    mine, before = logits.detach().requires_grad_(), [t.clone() for t in (labels, given, logits)]
    loss = function.apply(mine, labels, 0.0, mean, None)
    loss.backward(given := given.reshape(loss.shape))
    check("trigger", f"{name}: loss", error=off(loss.double().reshape(right.shape), right), limit=LIMIT)
    check("trigger", f"{name}: gradient", error=off(mine.grad.double(), want), limit=LIMIT)
    shape = loss.numel() == 1 if mean else loss.shape == labels.shape
    check("trigger", f"{name}: the loss is fp32, {'one number' if mean else '[B, S]'}", loss.dtype is torch.float32 and shape)
    kept = torch.equal(labels, before[0]) and torch.equal(given.flatten(), before[1].flatten())
    if tuple(map(int, FACTS["version"].split(".")[:2])) >= (2, 18):  # before, the logits' memory is taken for the gradient
        kept = kept and torch.equal(logits, before[2])
    check("trigger", f"{name}: what is given stays as it is", kept)


class Synchronizes(TorchDispatchMode):
    """What waits for the GPU, which a captured CUDA graph cannot: what gives its numbers to the host, and results whose shape depends on numbers."""

    OPERATORS = "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"
    METHODS = "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"

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
            if not any(frame.filename.startswith(TRITON) for frame in traceback.extract_stack(limit=8)):  # the interpreter
                self.found.add(name)
            return function(*given, **named)

        return noted

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        picks = name.startswith(("index", "_index_put")) and isinstance(args[1], (list, tuple))
        if name in self.OPERATORS or (picks and any(t is not None and t.dtype is torch.bool for t in args[1])):
            self.found.add(f"{op}{' of a mask' * picks}")
        return op(*args, **(kwargs or {}))


def calls(function):
    """Calls as people make them, and as they are laid out by broadcasting, padding and steps that share a graph."""
    (logits, labels), one = inputs(sizes=(B, S, SMALL)), torch.ones((), device=device)
    weights = WEIGHTS
    called(function, "mean, its gradient 1", logits.clone(), labels, one, mean=True)
    called(function, "mean, its gradient 3", logits.clone(), labels, 3 * one, mean=True)
    for mean in (True, False):
        mine = logits.clone().requires_grad_()
        loss = function.apply(mine, labels, 0.0, mean, None)
        loss.backward(torch.zeros_like(loss))
        check("trigger", f"{'mean' if mean else 'each token'}, its gradient 0: none for the logits", not mine.grad.any())
    called(function, "each token, weighted, as laid out", logits.clone(), labels, weights)
    for shift in (-200.0, 200.0):
        called(function, f"logits around {shift:g}", logits + shift, labels, weights)
    called(function, "labels in int32", logits.clone(), labels.int(), weights)
    called(function, "labels expanded", logits.clone(), labels[:1].expand(B, S), weights)
    called(function, "logits expanded", logits[:1].clone().expand(B, S, SMALL), labels, weights)
    padded = torch.cat([logits, torch.full((B, S, 64), 30.0, device=device)], -1)[..., :SMALL]
    called(function, "logits of a padded vocabulary", padded, labels, weights)
    pairs = [(logits.clone().requires_grad_(), labels), ((2 * logits).requires_grad_(), labels.roll(1, 1))]
    rights = [exact(x, y, torch.ones_like(labels)) for x, y in pairs]  # up to 2.17 the logits' memory is taken for the gradient
    losses = [function.apply(x, y, 0.0, False, None) for x, y in pairs]
    for loss in losses:
        loss.backward(torch.ones_like(loss))
    for i, (loss, (x, _), (right, want)) in enumerate(zip(losses, pairs, rights, strict=True)):
        name = f"two forwards, then two backwards, number {i + 1}"
        check("trigger", f"{name}: loss", error=off(loss.double().flatten(), right), limit=LIMIT)
        check("trigger", f"{name}: gradient", error=off(x.grad.double(), want), limit=LIMIT)
    broken = logits.clone()
    broken[0, 0, 0] = math.nan
    check(
        "trigger", "a logit that is no number: the mean is none", function.apply(broken, labels, 0.0, True, None).isnan().all()
    )
    if "is_cg_capturable" in inspect.signature(function.forward).parameters:
        for mean, given in ((False, weights), (True, 3 * one), (False, torch.ones_like(weights)), (True, one)):
            name = f"is_cg_capturable, {'a mean' if mean else 'each token'}, {'its gradient 1' if given.eq(1).all() else 'weighted'}"
            right, want = exact(logits, labels, given, mean)
            mine = logits.clone().requires_grad_()
            with Synchronizes() as mode:
                loss = function.apply(mine, labels, 0.0, mean, None, -100, True)
                loss.backward(given.reshape(loss.shape))
            check("trigger", f"{name}: nothing waits for a GPU: {mode.found or 'nothing'}", not mode.found)
            check("trigger", f"{name}: loss", error=off(loss.double().reshape(right.shape), right), limit=LIMIT)
            check("trigger", f"{name}: gradient", error=off(mine.grad.double(), want), limit=LIMIT)


def halves(function, name, given, **options):
    """The same in half precision: the gradient in roundings of the right one."""
    labelled = {"confident": True, "dtype": HALF, "sizes": (B, S, V), **options.pop("inputs", {})}
    loss, grad, right, want, *_ = outcome(function, *inputs(**labelled), given, **options)
    times = off(grad, want) / off(want.to(HALF).double(), want)
    check("trigger", f"{name}, {HALF}: loss off by less than 1e-4", (loss - right).abs().max() < 1e-4)
    check("trigger", f"{name}, {HALF}: gradient off by {times:.1f} roundings, at most 3", times <= 3)


def laid(logits, labels, layout):
    """The same numbers, as a transposed tensor or a slice has them."""
    if "logits transposed" in layout:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    if "logits[:, :-1]" in layout:
        logits = torch.cat([logits, logits[:, :1]], 1)[:, :-1]
    if "labels[:, 1:]" in layout:
        labels = torch.cat([labels[:, -1:], labels], 1)[:, 1:]
    return logits.requires_grad_(), labels


def of_ranks(file):
    """What each of two ranks finds for its half of the vocabulary."""
    gpus = torch.cuda.device_count() > 1
    torch.distributed.init_process_group("nccl" if gpus else "gloo")
    rank, found = torch.distributed.get_rank(), []
    if gpus:
        torch.cuda.set_device(rank)
    where = f"cuda:{rank}" if gpus else "cpu"
    function = release()
    ignores = "ignore_idx" in inspect.signature(function.forward).parameters
    alone = [torch.distributed.new_group([each]) for each in (0, 1)][rank]
    halves_of, whole = (lambda t: t.chunk(2, -1)[rank].contiguous()), (lambda t: t)
    both = torch.distributed.group.WORLD
    for name, group, part, mean, ignored in (
        ("no group", None, whole, False, 0),
        ("a group of its own", alone, whole, False, 0),
        ("each token", both, halves_of, False, 0),
        ("mean", both, halves_of, True, 0),
        *(
            (f"{'mean' if mean else 'each token'}, {how}", both, halves_of, mean, 0)
            for how in LAYOUTS
            for mean in (False, True)
        ),
        ("logits[:, :-1], labels[:, 1:]", both, halves_of, False, 0),
        *[("mean, ignored", both, halves_of, True, IGNORED)] * ignores,
    ):
        logits, labels = (t.to(where) for t in inputs(ignored, sizes=(B, S, V)))
        given = torch.tensor(-3.0, device=where) if mean else WEIGHTS.to(where)
        right, want = exact(logits, labels, given, mean)
        mine, labels = laid(part(logits), labels, name)
        loss = function.apply(mine, labels, 0.0, mean, group)
        loss.backward(given.reshape(loss.shape))
        errors = off(loss.detach().double().reshape(right.shape), right), off(mine.grad.double(), part(want))
        found.append(f"{name}\t{errors[0]}\t{errors[1]}")
    Path(f"{file}.{rank}").write_text("\n".join(found))
    torch.distributed.destroy_process_group()


def two_ranks():
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        words = [sys.executable, *sys.orig_argv[1:], "--ranks", f"{folder}/found"]
        done = subprocess.run([*run, *words], capture_output=True, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            check("trigger", f"two ranks end: {errors[0] if errors else done.returncode}", False)
            return
        for rank in (0, 1):
            for line in Path(folder, f"found.{rank}").read_text().splitlines():
                yield rank, *line.split("\t")


def main():
    function = release()
    ignores = "ignore_idx" in inspect.signature(function.forward).parameters
    two = torch.tensor(-3.0, device=device)
    weights = WEIGHTS
    apart = torch.linspace(-1, 4.75, 2 * B * S, device=device).view(S, 2 * B).t()[::2]  # strides of its own
    check("control", "a weight is 0", all((t == 0).sum() == 1 for t in (weights, apart)))
    check("control", "the gradients of these weights are not contiguous", not apart.is_contiguous())
    sizes = {"sizes": (B, S, V)}
    for name, given, options, more in (
        ("mean, its gradient -3", two, {"mean": True}, {}),
        ("each token, weights of both signs", weights, {}, {}),
        ("each token, weights with strides", apart, {}, {}),
        ("label smoothing 0.1", weights, {"smoothing": 0.1}, {}),
        ("label smoothing 0.1, mean", two, {"smoothing": 0.1, "mean": True}, {}),
        *((f"{layout}, weighted", weights, {"layout": layout}, {}) for layout in LAYOUTS),
        *(
            (f"{layout}, mean", two, {"layout": layout, "mean": True}, {})
            for layout in (*LAYOUTS, "logits[:, :-1], labels[:, 1:]")
        ),
        ("logits[..., ::2], weighted", weights, {"layout": "logits[..., ::2]"}, {}),
        ("V=1000", weights, {}, {"sizes": (B, S, 1000)}),
        ("V=151936", weights, {}, {"sizes": (B, S, 151936)}),
    ):
        judge(name, outcome(function, *inputs(**{**sizes, **more}), given, **options))
    logits, labels = inputs(**sizes)
    right, _ = exact(logits, labels, weights)
    with torch.no_grad():
        loss = function.apply(logits.clone(), labels, 0.0, False, None).double().reshape(right.shape)
    check("trigger", "each token, no gradients wanted: loss", error=off(loss, right), limit=LIMIT)
    for name, laid in (
        ("labels[:, :-1]", torch.cat([labels, labels[:, :1]], 1)[:, :-1]),
        ("labels transposed", labels.t().contiguous().t()),
        ("labels[:, ::2]", labels.repeat_interleave(2, 1)[:, ::2]),
    ):
        judge(f"{name}, weighted", outcome(function, logits, laid, weights))
    if ignores:
        for name, given, options in (
            ("each token, ignored and weighted", weights, {}),
            ("mean, ignored, logits transposed", two, {"mean": True, "layout": LAYOUTS[0]}),
            ("mean, ignored, label smoothing", two, {"mean": True, "smoothing": 0.1}),
        ):
            judge(name, outcome(function, *inputs(IGNORED, **sizes), given, **options))
        logits, labels = inputs(**sizes)
        if tuple(map(int, FACTS["version"].split(".")[:2])) >= (
            2,
            7,
        ):  # 2.4 to 2.6 take no other number: they raise in the backward
            labels[0, :3] = 7
            judge("mean, label 7 ignored", outcome(function, logits, labels, two, mean=True, ignore=7))
        mine = logits.clone().requires_grad_()
        loss = function.apply(mine, torch.full_like(labels, -100), 0.0, True, None)
        loss.backward(torch.ones_like(loss))
        check("trigger", "mean, all labels ignored: no loss and no gradient", not loss.any() and not mine.grad.any())
    calls(function)
    halves(function, "each token, weighted", weights)
    halves(function, "mean", two, mean=True)
    halves(function, "label smoothing 0.1", weights, smoothing=0.1)
    for layout in (*LAYOUTS, "logits[:, :-1], labels[:, 1:]"):
        halves(function, f"{layout}, weighted", weights, layout=layout)
    if ignores:
        halves(function, "mean, ignored", two, mean=True, inputs={"ignored": IGNORED})
    if device == "cuda" and torch.cuda.device_count() < 2:
        print("Two ranks were not tried: there is one GPU.")
    for rank, name, loss, grad in two_ranks() if device == "cpu" or torch.cuda.device_count() > 1 else ():
        check("trigger", f"rank {rank} of 2, {name}: loss", error=float(loss), limit=LIMIT)
        check("trigger", f"rank {rank} of 2, {name}: gradient", error=float(grad), limit=LIMIT)
    finish()


if __name__ == "__main__":
    options = parser.parse_args()
    if options.ranks:
        of_ranks(options.ranks)
    else:
        main()
