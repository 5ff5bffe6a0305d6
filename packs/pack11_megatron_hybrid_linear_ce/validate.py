"""The deep check of the fixes of packs 10 and 11: the fused loss and the models that call it, against fp64, on one rank and on two.

Runs after repro.py on the patched side. Where the release has no such loss, what its configuration refuses is all that is checked.
Two ranks talk through NCCL where there are two GPUs, else through gloo on CPU tensors.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from repro import FACTS, Made, check, finish, model, release, start

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", metavar="FILE", help=argparse.SUPPRESS)
FUSED = "megatron.core.fusions.fused_linear_cross_entropy"
S, B, H, V, PADDED = 6, 4, 64, 20000, 100  # two and a half of the fallback's chunks for each of two ranks
BIG = {"cpu": (64, 256, 151936), "cuda": (4096, 4096, 151936)}  # tokens, hidden size, vocabulary
LIMIT = 1e-5
gpu = torch.cuda.is_available()


def ready():
    """The dispatcher's answer for this GPU, or for a Hopper where there is none, is made once, and kept."""
    if not gpu:
        # Marks for a profiler, which a CPU build of torch does not have.
        torch.cuda.nvtx = mock.MagicMock()
        given = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_capability": lambda *_: (9, 0)}
        with mock.patch.multiple(torch.cuda, **given):
            importlib.import_module(FUSED)._get_platform()
    return importlib.import_module(FUSED).linear_cross_entropy


def inputs(device, shift=0.0, dtype=torch.float32, sizes=(S * B, H, V)):
    """Hidden states [S, B, H] (or [tokens, 1, H]), weight [V, H] with rows that pad it, labels [S, B]; logits around ``shift``."""
    torch.manual_seed(0)
    tokens, hidden_size, vocabulary = sizes
    shape = (S, B) if tokens == S * B else (tokens, 1)
    hidden = torch.randn(*shape, hidden_size, device=device)
    weight = torch.randn(vocabulary, hidden_size, device=device).mul_(hidden_size**-0.5)
    weight[-PADDED:] = 0  # logits of 0, as Megatron pads a vocabulary
    hidden[..., 0], weight[:, 0] = 1.0, shift
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, vocabulary - PADDED, shape, device=device)


def off(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def exact(hidden, weight, labels, outer, reduction="none", ignore=-100, scale=1.0):
    """Loss, dH and dW in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = scale * (leaves[0].flatten(0, 1) @ leaves[1].t())
    loss = F.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=ignore)
    (loss * outer.double().flatten()).sum().backward()
    return loss.detach(), *(t.grad for t in leaves)


def function(name, device, group=None, rank=0, world=1, parallel=False, reduction="none", ignore=-100, **given):
    """linear_cross_entropy itself: errors, tensors of the logits' size; bf16 in multiples of what rounding logits, or the result, costs."""
    hidden, weight, labels = inputs(device, **given)
    labels[0, :2] = ignore
    outer = torch.rand(labels.shape if reduction == "none" else (), device=device) + 0.5
    right = exact(hidden, weight, labels, outer, reduction, ignore)
    own = hidden.chunk(world)[rank] if parallel else hidden
    leaves = [own.contiguous().requires_grad_(), weight.chunk(world)[rank].contiguous().requires_grad_()]
    with Made(labels.numel() * weight.shape[0] // world) as watch:
        loss = importlib.import_module(FUSED).linear_cross_entropy(*leaves, labels, group, reduction, ignore, parallel)
        (loss * outer.flatten()).sum().backward()
    want = right[0], right[1].chunk(world)[rank] if parallel else right[1], right[2].chunk(world)[rank]
    errors = [off(a, b) for a, b in zip((loss.detach(), *(t.grad for t in leaves)), want, strict=True)]
    if hidden.dtype != torch.float32:
        logits = (hidden.flatten(0, 1) @ weight.t()).double()
        rounded = [F.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=ignore)]
        rounded += [b.to(hidden.dtype) for b in want[1:]]
        errors = [e / off(a, b) for e, a, b in zip(errors, rounded, want, strict=True)]
    logits = watch.count if weight.shape[0] > 5000 else 0  # else one chunk is all of them
    return {"name": name, "errors": errors, "logits": logits, "dtype": str(hidden.dtype), "shift": given.get("shift", 0.0)}


def of_model(name, kind, device, rank=0, world=1, share=False, ignored=False, mtp=False, **more):
    """A model's loss and gradients: errors against fp64, or, with MTP, against the model whose loss is not fused."""
    hidden, weight, labels = inputs(device)
    labels, outer = labels.t().contiguous(), torch.rand(B, S, device=device) + 0.5
    if ignored:
        labels[:2, 1] = -100

    def outcome(impl):
        made = model(kind, impl, (H, V), share=share, **more).to(device)
        leaf = made.embedding.word_embeddings.weight if share else made.output_layer.weight
        leaf.data.copy_(weight.chunk(world)[rank])
        if mtp:  # one more head, whose layer hands on what it is given, doubled
            made.mtp_process = True
            made.mtp = lambda hidden_states, **_: torch.cat([hidden_states, 2 * hidden_states])
        own = (hidden.chunk(world)[rank] if more.get("sequence_parallel") else hidden).clone().requires_grad_()
        with Made(S * B * V // world) as watch:
            loss = made(torch.zeros_like(labels) if mtp else None, None, None, decoder_input=own, labels=labels)
            (loss * outer).sum().backward()
        return (loss.detach().t().flatten(), own.grad, leaf.grad), watch.count

    got, logits = outcome("linear")
    if mtp:
        want = [t.double() for t in outcome(None)[0]]
    else:
        right = exact(hidden, weight, labels.t(), outer.t(), scale=more.get("mup_output_mult", 1.0))
        dH = right[1].chunk(world)[rank] if more.get("sequence_parallel") else right[1]
        want = right[0], dH, right[2].chunk(world)[rank]
    return {"name": f"{kind}, {name}", "errors": list(map(off, got, want)), "logits": logits, "dtype": "torch.float32"}


def peak(kind, impl):
    """GB at the peak of forward and backward above what is there before: S=4096 B=4 H=1024 V=151936, bf16; fake tensors without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    s, b, h, v = 4096, 4, 1024, 151936

    def loss(device):
        made = model(kind, impl, sizes=(h, v), dtype=torch.bfloat16, bf16=True)
        made = made.to(device) if gpu else made
        made.embedding = None
        hidden = torch.zeros(s, b, h, dtype=torch.bfloat16, device=device, requires_grad=True)
        labels = torch.zeros(b, s, dtype=torch.int64, device=device)
        return lambda: made(None, None, None, decoder_input=hidden, labels=labels).sum().backward()

    if gpu:
        run = loss("cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 1e9
    with FakeTensorMode(allow_non_fake_inputs=True):
        run, tracker = loss("cpu"), MemTracker()
        with tracker:
            run()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] / 1e9


def usable(hybrid):
    """The models whose "linear" loss can be asked for: GPTModel, and (which repro.py of pack11 demands) the hybrid one."""
    try:
        of_model("", hybrid, "cuda" if gpu else "cpu")
    except (TypeError, UnboundLocalError):
        return ["GPTModel"]
    return ["GPTModel", hybrid]


def of_ranks(file, kinds):
    """What each of two ranks found."""
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = "cuda"
    start(backend, 2)
    ready()
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    found = []
    for way in ("TP=2", "SP=2"):
        given = {"rank": rank, "world": 2}
        for reduction in ("none", "sum", "mean"):
            found += [function(f"{way}, {reduction}", device, group, parallel=way == "SP=2", reduction=reduction, **given)]
        found += [function(f"{way}, none, logits around -128", device, group, parallel=way == "SP=2", shift=-128.0, **given)]
        more = {"tensor_model_parallel_size": 2, "sequence_parallel": way == "SP=2", **given}
        for kind in kinds:
            found += [of_model(way, kind, device, **more), of_model(f"{way}, tied", kind, device, share=True, **more)]
    Path(f"{file}.{rank}").write_text(json.dumps([backend, found]))
    torch.distributed.destroy_process_group()


def launched(kinds):
    """Two processes of this script, in the lane that it is in."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        words = [sys.executable, *sys.orig_argv[1:], "--ranks", f"{folder}/found"]
        done = subprocess.run([*run, *words], capture_output=True, text=True, env={**os.environ, "KINDS": " ".join(kinds)})
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        return [json.loads(Path(folder, f"found.{rank}").read_text()) for rank in range(2)]


def judge(found, where):
    """Checks of what one case found: errors, and that there is no tensor of the logits' size."""
    # Sums of gradients that cancel out are off by as many roundings of the logits.
    limit = LIMIT * max(1, abs(found.get("shift", 0)))
    for what, error in zip(("loss", "dH", "dW"), found["errors"], strict=True):
        name = f"{where}: {found['name']}: {what}"
        if found["dtype"] != "torch.float32":
            check("trigger", f"{name} in {found['dtype'][6:]} is off by {error:.1f} roundings, at most 2", error <= 2)
        else:
            check("trigger", f"{name}, against fp64", error=error, limit=limit)
    check("trigger", f"{where}: {found['name']}: makes no tensor of its logits' size", not found["logits"])


def refused(impl, fusion=True):
    """Whether the configuration refuses an implementation by name."""
    core = importlib.import_module("megatron.core.transformer")
    given = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 4}
    try:
        core.TransformerConfig(**given, cross_entropy_loss_fusion=fusion, cross_entropy_fusion_impl=impl)
    except ValueError as error:
        return repr(impl) in str(error)
    return False


def main():
    hybrid, linear = release()
    if not linear:
        for impl in ("linear", "Native", "", None):
            check("trigger", f"cross_entropy_fusion_impl={impl!r} is refused by name", refused(impl))
        for impl, fusion in (("native", True), ("te", True), ("linear", False)):
            check("control", f"{impl!r} with cross_entropy_loss_fusion={fusion} is not refused", not refused(impl, fusion))
        finish()
    start()
    ready()
    device, kinds = "cuda" if gpu else "cpu", usable(hybrid)
    FACTS["metrics"]["models"] = kinds
    check("control", "fp64 rounded to bf16 is not fp64", off(torch.tensor([0.1]).bfloat16(), torch.tensor([0.1]).double()) > 0)
    for reduction in ("none", "sum", "mean"):
        judge(function(reduction, device, reduction=reduction), "one rank")
    judge(function("label 7 ignored", device, ignore=7), "one rank")
    for shift in (-128.0, 1000.0):
        judge(function(f"logits around {shift:g}", device, shift=shift), "one rank")
    judge(function("V=1000", device, sizes=(S * B, H, 1000)), "one rank")
    fields = importlib.import_module("megatron.core.transformer").TransformerConfig.__dataclass_fields__
    sizes = BIG[device]
    for dtype in (torch.float32, torch.bfloat16):
        judge(function("{} tokens, H={} V={} {}".format(*sizes, dtype), device, sizes=sizes, dtype=dtype), "one rank")
    for kind in kinds:
        for name, more in (
            ("plain", {}),
            ("tied embeddings", {"share": True}),
            ("labels -100", {"ignored": True}),
            ("one MTP head, not fused beside it", {"mtp": True, "mtp_num_layers": 1}),
            ("muP", {"use_mup": True, "mup_output_mult": 0.5}),
        ):
            if name != "muP" or ("use_mup" in fields and kind != "GPTModel"):  # which raises with it at d48bd6be0a
                judge(of_model(name, kind, device, **more), "one rank")
    for rank, (backend, found) in enumerate(launched(kinds)):
        for case in found:
            judge(case, f"rank {rank} of 2, {backend}")
    logits = FACTS["metrics"]["logits, GB"] = 4 * 4096 * 151936 * 2 / 1e9
    for kind in kinds:
        peaks = FACTS["metrics"][f"{kind}, GB"] = {impl or "not fused": peak(kind, impl) for impl in (None, "native", "linear")}
        said = ", ".join(f"{impl} {gb:.2f}" for impl, gb in peaks.items())
        name = f"{kind}, S=4096 B=4 V=151936, bf16 logits of {logits:.2f} GB: peaks {said}"
        check("trigger", name, peaks["linear"] < logits < min(peaks["not fused"], peaks["native"]))
    finish()


if __name__ == "__main__":
    options = parser.parse_args()
    if options.ranks:
        release()
        of_ranks(options.ranks, os.environ["KINDS"].split())
    else:
        main()
