"""The deep check of pack26's fix: other reductions, gradients, layouts, vocabularies and dtypes, and two tensor-parallel ranks, against torch in fp64.

Runs after repro.py on the patched side. Two ranks talk through NCCL on two GPUs, and through gloo where there
is none.
"""

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from repro import FACTS, IGNORED, LAYOUTS, LIMIT, check, device, finish, inputs, off, outcome, release

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", metavar="FILE", help=argparse.SUPPRESS)
B, S, V = 2, 6, 40000  # more than one block of the kernels, 32,768
HALF = torch.bfloat16 if device == "cuda" else torch.float16


def judge(name, found):
    """Checks of a loss and a gradient, and that nothing is written out of bounds."""
    loss, grad, right, want, outside, _ = found
    check("trigger", f"{name}: loss", error=off(loss, right), limit=LIMIT)
    check("trigger", f"{name}: gradient", error=off(grad, want), limit=LIMIT)
    check("trigger", f"{name}: nothing written out of bounds", not outside)


def halves(function, name, given, **options):
    """The same in half precision: the gradient in roundings of the right one."""
    labelled = {"confident": True, "dtype": HALF, "sizes": (B, S, V), **options.pop("inputs", {})}
    loss, grad, right, want, *_ = outcome(function, *inputs(**labelled), given, **options)
    times = off(grad, want) / off(want.to(HALF).double(), want)
    check("trigger", f"{name}, {HALF}: loss off by less than 1e-4", (loss - right).abs().max() < 1e-4)
    check("trigger", f"{name}, {HALF}: gradient off by {times:.1f} roundings, at most 3", times <= 3)


def of_ranks(file):
    """What each of two ranks finds for its half of the vocabulary."""
    both = torch.cuda.device_count() > 1
    torch.distributed.init_process_group("nccl" if both else "gloo")
    rank, found = torch.distributed.get_rank(), []
    if both:
        torch.cuda.set_device(rank)
    where = f"cuda:{rank}" if both else "cpu"
    function = release()
    ignores = "ignore_idx" in inspect.signature(function.forward).parameters
    for name, mean, ignored in (("each token", False, 0), ("mean", True, 0), ("mean, ignored", True, IGNORED))[: 2 + ignores]:
        logits, labels = (t.to(where) for t in inputs(ignored, sizes=(B, S, V)))
        exact = logits.double().requires_grad_()
        right = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="mean" if mean else "none")
        given = torch.tensor(-3.0, device=where) if mean else torch.linspace(-1, 2, B * S, device=where).view(B, S)
        right.backward(given.double().reshape(right.shape))
        mine = logits.chunk(2, -1)[rank].contiguous().requires_grad_()
        loss = function.apply(mine, labels, 0.0, mean, torch.distributed.group.WORLD)
        loss.backward(given.reshape(loss.shape))
        errors = (
            off(loss.detach().double().reshape(right.shape), right.detach()),
            off(mine.grad.double(), exact.grad.chunk(2, -1)[rank]),
        )
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
    weights = torch.linspace(-1, 2, B * S, device=device).view(B, S)
    apart = torch.linspace(-1, 2, 2 * B * S, device=device).view(S, 2 * B).t()[::2]  # strides of its own
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
    halves(function, "each token, weighted", weights)
    halves(function, "mean", two, mean=True)
    halves(function, "label smoothing 0.1", weights, smoothing=0.1)
    if ignores:
        halves(function, "mean, ignored", two, mean=True, inputs={"ignored": IGNORED})
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
