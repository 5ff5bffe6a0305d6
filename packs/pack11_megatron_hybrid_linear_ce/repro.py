# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core (dev branch): HybridModel and MambaModel lost the fused linear cross entropy that GPTModel has.

With cross_entropy_fusion_impl="linear" GPTModel hands hidden states, weight and labels to linear_cross_entropy and never makes logits [S, B, V].
MambaModel did too from #3226; a sync of branches put its plain output layer back.

The commit's own models run on a CPU, each with a decoder that hands its input on: what follows it, from hidden states to loss, is measured. On the
patched side, where GPUs without fused kernels have a fallback (pack10), so are the loss and its gradients, on one rank and on two.
Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import contextlib
import importlib
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

S, B, H, V, PADDED = 6, 4, 16, 16384, 100
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "evidence": "source", "comparisons": [], "claims": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<104} {measured.get('error', holds)}", flush=True)


def compare(name, found):
    """The worst error of loss, dH and dW; 1 where there is none because it raised."""
    errors = found.get("errors", {found.get("raises"): 1.0})
    worst = max(errors, key=lambda part: (math.isnan(errors[part]), errors[part]))  # Python's max drops NaN
    state("control", f"{name}: loss, dH and dW against fp64, worst {worst}", None, error=errors[worst], limit=1e-5)


class Through(torch.nn.Module):
    """A decoder that hands its input on."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, hidden_states, **_):
        return hidden_states


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Tensors made with so many elements, views of one storage counted once."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.kept = elements, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.elements:
                self.kept.append(tensor.detach())  # kept, so that no other tensor gets its address
        return out

    def count(self):
        return len({tensor.untyped_storage().data_ptr() for tensor in self.kept})


def model(kind, impl, world=1, sequence_parallel=False, sizes=(H, V), dtype=torch.float32):
    """GPTModel, or what the commit calls its hybrid, of one rank."""
    core = importlib.import_module("megatron.core.transformer")
    config = core.TransformerConfig(
        num_layers=1, hidden_size=sizes[0], num_attention_heads=4, use_cpu_initialization=True, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=world, sequence_parallel=sequence_parallel,
        cross_entropy_loss_fusion=impl != "unfused", cross_entropy_fusion_impl="native" if impl == "unfused" else impl,
    )  # fmt: skip
    if kind == "GPTModel":
        gpt = importlib.import_module("megatron.core.models.gpt")
        block = importlib.import_module("megatron.core.transformer.transformer_block")
        layers = block.TransformerBlockSubmodules(layer_specs=[core.ModuleSpec(module=Through)], layer_norm=None)
        made = gpt.GPTModel(config, layers, sizes[1], 16, position_embedding_type="none")
        made.decoder = Through()
    else:
        through = core.ModuleSpec(module=Through)
        made = getattr(hybrid, kind)(config, through, sizes[1], 16)
    return made


def inputs(dtype=torch.float32, ignored=()):
    torch.manual_seed(0)
    hidden, weight = torch.randn(S, B, H).to(dtype), (0.3 * torch.randn(V, H)).to(dtype)
    weight[-PADDED:] = 0  # rows that pad the vocabulary: logits of 0
    labels = torch.randint(0, V - PADDED, (B, S))
    for place in ignored:
        labels[place] = -100
    return hidden, weight, labels, torch.rand(B, S)


@contextlib.contextmanager
def as_if_hopper():
    """Compute capability 9.0, for the dispatcher of the fused loss alone: nothing runs on it."""
    names = {"is_available": lambda: True, "get_device_capability": lambda *_: (9, 0)}
    before = {name: getattr(torch.cuda, name) for name in names}
    for name, function in names.items():
        setattr(torch.cuda, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


def loss_of(kind, impl, rank=0, world=1, sequence_parallel=False, ignored=(), mine=None):
    """What a model does with hidden states and labels: the call of the fused loss, [S, B, V] tensors made, errors against fp64, what it raises.

    ``mine`` makes it an average: of all tokens, or (True) of those whose hidden states this rank holds.
    """
    hidden, weight, labels, outer = inputs(ignored=ignored)
    made = model(kind, impl, world, sequence_parallel)
    layer = made.output_layer
    layer.weight.data.copy_(weight.chunk(world)[rank])
    own = (hidden.chunk(world)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    if mine is not None:
        outer = torch.full((B, S), 1 / (B * S))
    given = outer
    if mine:
        given = torch.zeros(B, S)
        given[:, rank * S // world : (rank + 1) * S // world] = world / (B * S)
    found = {"class": type(layer).__name__}
    fused = importlib.import_module("megatron.core.transformer.linear_cross_entropy")
    original = fused.linear_cross_entropy

    def spy(hidden, weight, labels, **kwargs):
        shapes = {"hidden": list(hidden.shape), "weight": list(weight.shape), "labels": list(labels.shape)}
        found["call"] = {**shapes, **{k: v if isinstance(v, (str, int, bool)) else type(v).__name__ for k, v in kwargs.items()}}
        with as_if_hopper():
            return original(hidden, weight, labels, **kwargs)

    fused.linear_cross_entropy = spy
    watch = Made(S * B * V // world)
    try:
        with watch:
            loss = made(None, None, None, decoder_input=own, labels=labels)
            (loss * given).sum().backward()
    except Exception as error:  # what it raises is the finding
        found["raises"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return found
    finally:
        fused.linear_cross_entropy = original
        found["logits"] = watch.count()
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0].view(-1, H) @ exact[1].t()
    right = F.cross_entropy(logits, labels.t().reshape(-1), reduction="none").view(S, B).t()
    (right * outer).sum().backward()
    want_hidden = exact[0].grad.chunk(world)[rank] if sequence_parallel else exact[0].grad
    pairs = {
        "loss": (loss.detach(), right.detach()),
        "dH": (own.grad, want_hidden),
        "dW": (layer.weight.grad, exact[1].grad.chunk(world)[rank]),
    }
    found["errors"] = {name: ((got.double() - want).norm() / want.norm()).item() for name, (got, want) in pairs.items()}
    found["size of dH"] = (own.grad.norm() / want_hidden.norm()).item()
    if ignored:
        found["loss of label -100"] = torch.stack([loss[place] for place in ignored]).max().item()
    return found


def peak(kind, impl):
    """GB at the peak of forward and backward above the weight, fake tensors at the shape of the article: S=4096 B=4 V=151936, bf16, H=1024."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    s, b, h, v = 4096, 4, 1024, 151936
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = model(kind, impl, sizes=(h, v), dtype=torch.bfloat16)
        made.embedding = None
        hidden = torch.empty(s, b, h, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(b, s, dtype=torch.int64)
        tracker = MemTracker()
        with tracker, as_if_hopper():
            made(None, None, None, decoder_input=hidden, labels=labels).sum().backward()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] / 1e9


def start(world=1):
    store = {} if world > 1 else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **store)
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(tensor_model_parallel_size=world)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(123)


warnings.filterwarnings("ignore")
release = distribution("megatron-core")
facts["version"] = release.version
models = Path(release.locate_file("megatron/core/models"))
if not Path(release.locate_file("megatron/core/transformer/linear_cross_entropy.py")).exists():
    print("No release has fused linear cross entropy: nox -s pack11 -- --variant d48bd6be0a runs a commit that has it.")
    finish("UNTESTABLE", "no-api")
try:
    torch.cuda.current_device()
except (RuntimeError, AssertionError):
    print("Without a GPU: nox -s pack11 runs it in the lane megatron-cpu, which has megatron-core make its modules on the CPU.")
    finish("UNTESTABLE", "no-device")
torch.cuda.nvtx.range = lambda *_: contextlib.nullcontext()  # marks for a profiler, which a CPU build of torch does not have
KIND, where = ("HybridModel", "hybrid.hybrid_model") if (models / "hybrid").exists() else ("MambaModel", "mamba.mamba_model")
hybrid = importlib.import_module(f"megatron.core.models.{where}")
facts["file"] = hybrid.__file__
if options.ranks:
    start(2)
    rank = torch.distributed.get_rank()
    found = {}
    for way in ("TP=2", "SP=2"):
        for kind in ("GPTModel", KIND):
            found[f"{way} {kind}"] = loss_of(kind, "linear", rank, 2, way == "SP=2")
        found[f"{way} {KIND} unfused"] = loss_of(KIND, "unfused", rank, 2, way == "SP=2")
    for mine in (False, True):
        found[f"SP=2, mean of {'own' if mine else 'all'} tokens"] = loss_of(KIND, "linear", rank, 2, True, mine=mine)
    Path(f"{options.ranks}.{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.exit()
start()
print(f"megatron-core {release.version}, torch {torch.__version__}, {facts['evidence']}, S={S} B={B} H={H} V={V}")

expected = metrics["GPTModel"] = loss_of("GPTModel", "linear")  # what the hybrid has to do
print(f"         GPTModel hands the fused loss {expected.get('call')}")
reached = "call" in expected and not expected["logits"]
state("control", "GPTModel hands hidden states, weight and labels to the fused loss, and makes no [S, B, V] tensor", reached)
if not reached:
    finish("CHANGED", expected.get("raises", "GPTModel makes logits"))
found = metrics["unfused"] = loss_of(KIND, "unfused")
compare(f"{KIND} unfused", found)
state("control", f"{KIND} unfused makes an [S, B, V] tensor, which is seen", found["logits"] > 0)
found = metrics["linear"] = loss_of(KIND, "linear")
same = found.get("call") == expected["call"] and not found["logits"]
state("trigger", f"{KIND} with fusion 'linear' does not call it so" + ("" if same else f": {found.get('raises')}"), not same)
if patched and same:
    metrics["native"] = loss_of(KIND, "native")
    metrics["label -100"] = {impl: loss_of(KIND, impl, ignored=((0, 0), (1, 3))) for impl in ("unfused", "native", "linear")}
    peaks = metrics["peak GB"] = {impl: peak(KIND, impl) for impl in ("unfused", "native", "linear")}
    logits = metrics["logits GB"] = 4 * 4096 * 151936 * 2 / 1e9
    holds = peaks["linear"] < logits < min(peaks["unfused"], peaks["native"])
    state(
        "control", f"at S=4096 B=4 V=151936 unfused and native hold logits of {logits:.2f} GB in bf16, linear does not", holds
    )
    print("         peaks: " + ", ".join(f"{impl} {gb:.2f} GB" for impl, gb in peaks.items()))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found")
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        as_this = [sys.executable, *sys.orig_argv[1:]]  # in the lane that this process is in
        done = subprocess.run([*run, *as_this, "--ranks", str(file)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        ranks = metrics["ranks"] = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(2)]
    for rank, ways in enumerate([{KIND: found}, *ranks]):
        for way, of_rank in ways.items():
            name = f"{way}, rank {rank - 1}" if rank else "one rank"
            if "own" in way:
                print(f"         {name}: dH is off by {of_rank['errors']['dH']:.0%}")
                continue
            compare(name, of_rank)
            if "unfused" not in way:
                state("control", f"{name}: makes no [S, B, V] tensor", not of_rank["logits"])
    for way in ("TP=2", "SP=2"):
        calls = [[ways[f"{way} {kind}"].get("call") for ways in ranks] for kind in ("GPTModel", KIND)]
        state("control", f"{way}: {KIND} calls the fused loss as GPTModel does", calls[0] == calls[1])
bad = [
    c["name"]
    for c in facts["comparisons"]
    if c["role"] == "control" and not c.get("holds", c.get("error") is not None and c["error"] <= c.get("limit", 0))
]
if bad:
    finish("CHANGED", bad[0])
finish("ABSENT" if same else "REPRODUCED")
