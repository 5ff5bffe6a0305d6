# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core (dev branch): fused linear cross entropy raises on every GPU that is not Blackwell, and its epilogue's maximum starts at 0.

The dispatcher has one entry, compute capability 10; on any other GPU, Hopper too, the loss raises. And where all logits of a token are far below
0, the sum of exponentials underflows against a maximum of 0: the loss is -inf.

The dispatcher is asked for each compute capability; the release's own epilogue kernels run on Triton's interpreter; on the patched side the
loss itself runs, on one rank and on two. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", metavar="FILE", help=argparse.SUPPRESS)
options = parser.parse_args()

FUSED = "megatron.core.fusions.fused_linear_cross_entropy"
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
on_cpu = os.environ.get("TRITON_INTERPRET") == "1"
device = "cpu" if on_cpu else "cuda"
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "evidence": "interpreter", "comparisons": [], "claims": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<96} {measured.get('error', holds)}", flush=True)


@contextlib.contextmanager
def as_if(capability):
    """A GPU of that compute capability, for the dispatcher alone: nothing runs on it."""
    names = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_capability": lambda *_: capability}
    before = {name: getattr(torch.cuda, name) for name in names}
    for name, function in names.items():
        setattr(torch.cuda, name, function)
    fused.Platform._instance = None
    fused._get_platform.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


def answer(capability):
    with as_if(capability) as said:
        try:
            entry = fused._get_platform().forward_func
        except Exception as error:  # what it raises is the finding
            return f"{type(error).__name__}: {error}"
        return f"{entry.__module__.rpartition('.')[2]}.{entry.__name__}" + (f", {len(said)} warning" if said else "")


def epilogues(shift):
    """Worst error of the loss of 40 tokens over 3 splits of a vocabulary of 96, as the two epilogue kernels make it from partial results."""
    kernels = importlib.import_module("megatron.core.fusions.linear_cross_entropy.blackwell.triton")
    torch.manual_seed(0)
    logits = torch.randn(40, 96, device=device) + shift
    labels = torch.randint(0, 96, (40,), device=device)
    parts = logits.view(40, 3, 32)
    maximum = parts.amax(-1).contiguous()
    accumulate = (parts - maximum[..., None]).exp().sum(-1).contiguous()
    picked = logits.gather(1, labels[:, None])[:, 0].contiguous()
    want = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    top, total, scalar = torch.empty(40, device=device), torch.empty(40, device=device), torch.zeros((), device=device)
    count = torch.tensor(40, device=device)
    losses = picked.clone()
    run = lambda kernel: kernel.fn[(3,)] if on_cpu else kernel[(3,)]  # noqa: E731  # autotuning has one configuration, and no part in this
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64} if on_cpu else {}
    run(kernels.forward_dp_epilogue)(
        40, 3, -100, labels, 1, count, maximum, 3, 1, accumulate, 3, 1, top, 1, total, 1, losses, 1, scalar, 0, **sizes
    )
    errors = {"forward_dp_epilogue": (losses.double() - want).abs().max().item()}
    run(kernels.forward_tp_epilogue)(40, 3, maximum, 3, 1, maximum, 3, 1, accumulate, 3, 1, top, 1, total, 1, **sizes)
    errors["forward_tp_epilogue"] = ((top + total.log() - picked).double() - want).abs().max().item()
    return errors


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor made."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def parity(group=None, rank=0, world=1, sequence_parallel=False, dtype=torch.float32):
    """Worst relative error of loss, dH and dW against fp64, over reductions; S=6 B=4 H=16 V=16384, of which 100 rows are padding."""
    S, B, H, V, worst, largest = 6, 4, 16, 16384, {}, 0
    for reduction in ("none", "sum", "mean"):
        torch.manual_seed(0)
        hidden, weight = torch.randn(S, B, H).to(dtype), (0.3 * torch.randn(V, H)).to(dtype)
        weight[-100:] = 0  # padded vocabulary rows, which are logits of 0, as Megatron pads them
        labels = torch.randint(0, V - 100, (S, B))
        labels[0, :2] = -100
        outer = torch.rand(S * B) if reduction == "none" else torch.rand(())
        exact = [t.double().requires_grad_() for t in (hidden, weight)]
        right = F.cross_entropy(exact[0].view(-1, H) @ exact[1].t(), labels.view(-1), reduction=reduction, ignore_index=-100)
        (right * outer.double()).sum().backward()
        own = hidden.chunk(world)[rank] if sequence_parallel else hidden
        mine = [own.contiguous().requires_grad_(), weight.chunk(world)[rank].contiguous().requires_grad_()]
        with as_if((9, 0)), Largest() as watch:
            loss = fused.linear_cross_entropy(*mine, labels, group, reduction, -100, sequence_parallel)
            (loss * outer).sum().backward()
            _, _, accumulator, count, *_ = fused._get_platform().forward_func(
                *mine, labels, group, reduction, -100, sequence_parallel
            )
        largest = max(largest, watch.elements)
        want_hidden = exact[0].grad.chunk(world)[rank] if sequence_parallel else exact[0].grad
        for name, got, want in (
            ("loss", loss.detach(), right.detach()),
            ("dH", mine[0].grad, want_hidden),
            ("dW", mine[1].grad, exact[1].grad.chunk(world)[rank]),
        ):
            error = ((got.double() - want).norm() / want.norm()).item()
            worst[name] = (
                torch.tensor([worst.get(name, 0.0), error], dtype=torch.float64).max().item()
            )  # Python's max drops NaN
    # Every rank holds the sum of exponentials of all ranks, and divides by the valid tokens of all labels, which every rank has.
    owner = {"accumulator": str(accumulator.dtype), "divides by": int(count), "valid labels": int((labels != -100).sum())}
    return {"errors": worst, "largest": largest, "logits": S * B * V // world, **owner}


warnings.filterwarnings("ignore")
release = distribution("megatron-core")
facts["version"] = release.version
if not Path(release.locate_file("megatron/core/fusions/fused_linear_cross_entropy.py")).exists():
    print("No release has fused linear cross entropy: nox -s pack10 -- --variant d48bd6be0a runs a commit that has it.")
    finish("UNTESTABLE", "no-api")
if not on_cpu:
    print("On a CPU: nox -s pack10 -- --lane triton-interpreter --variant d48bd6be0a. A GPU is not needed, and not used.")
    finish("UNTESTABLE", "no-device")
fused = importlib.import_module(FUSED)
facts["file"] = fused.__file__
torch.cuda.nvtx.range = lambda *_: contextlib.nullcontext()  # marks for a profiler, which a CPU build of torch does not have
if options.ranks:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {way: parity(torch.distributed.group.WORLD, rank, world, way == "SP=2") for way in ("TP=2", "SP=2")}
    Path(f"{options.ranks}.{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.exit()
print(f"megatron-core {release.version}, torch {torch.__version__}, {facts['evidence']}")
answers = metrics["answers"] = {f"{a}.{b}": answer((a, b)) for a, b in CAPABILITIES}
for capability, what in answers.items():
    print(f"         compute capability {capability}: {what}")
    raises = "Error" in what
    state("trigger", f"compute capability {capability}: no way to compute the loss", raises)
metrics["epilogues"] = {}
for shift, role in ((0.0, "control"), (-128.0, "trigger")):
    found = metrics["epilogues"][f"{shift:g}"] = {
        n: e if e == e and e != float("inf") else None for n, e in epilogues(shift).items()
    }
    for kernel, error in found.items():
        state(role, f"{kernel}, logits around {shift:g}: error of the loss", None, error=error, limit=1e-4)
if patched:
    metrics["parity"] = {"one rank": parity(), "one rank, bf16": parity(dtype=torch.bfloat16)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            __file__,
            "--ranks",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        for rank in range(2):
            for way, found in json.loads(file.with_name(f"found.{rank}").read_text()).items():
                metrics["parity"][f"{way}, rank {rank}"] = found
    for way, found in metrics["parity"].items():
        worst = max(found["errors"], key=lambda name: (math.isnan(found["errors"][name]), found["errors"][name]))
        error, name = found["errors"][worst], f"{way}: loss, dH and dW against fp64, worst {worst}"
        if "bf16" in way:  # as far off as bf16 is, which says nothing about the margin of what is fp32
            state("control", f"{name}, within 1e-2", error < 1e-2)
        else:
            state("control", name, None, error=error, limit=1e-5)
        state(
            "control",
            f"{way}: no tensor has the logits' {found['logits']} elements; the largest {found['largest']}",
            found["largest"] < found["logits"],
        )
        every = found["divides by"] == found["valid labels"] and found["accumulator"] == "torch.float32"
        state("control", f"{way}: accumulates in fp32, divides by the {found['valid labels']} valid labels of all ranks", every)
bad = [
    c["name"]
    for c in facts["comparisons"]
    if c["role"] == "control" and not c.get("holds", c.get("error") is not None and c["error"] <= c.get("limit", 0))
]
if bad:
    finish("CHANGED", bad[0])
broken = [
    c
    for c in facts["comparisons"]
    if c["role"] == "trigger" and c.get("holds", c.get("error", 0) is None or c.get("error", 0) > 1e-4)
]
finish("REPRODUCED" if broken else "ABSENT")
