"""The deep check of the fixes of packs 10 and 11: the fused loss and the models that call it, against fp64, on one rank and on two.

Runs after repro.py on the patched side. Where the release has no such loss, what its configuration refuses is all that is checked.
Two ranks talk through NCCL where there are two GPUs, else through gloo on CPU tensors.
"""

import argparse
import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from repro import FACTS, check, finish, model, release, training, unexpected

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", nargs="+", help=argparse.SUPPRESS)
FUSED = "megatron.core.fusions.fused_linear_cross_entropy"
S, B, H, V, PADDED = 8, 3, 64, 20000, 100  # two and a half of the fallback's chunks for each of two ranks
BIG = {"cpu": (64, 256, 151936), "cuda": (2048, 4096, 151936)}  # tokens, hidden size, vocabulary
LIMIT, METHODS = 1e-5, ("__init__", "__post_init__", "forward")
#: What the statements of METHODS that a fix may move or replace are about.
LOSS = "self.output_layer(", "_scale_logits(", "compute_language_model_loss("
gpu = torch.cuda.is_available()


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts tensors of so many elements that are made, views among them."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.count += isinstance(tensor, torch.Tensor) and tensor.numel() == self.elements
        return out


def start(backend="gloo", world=1, parallel=1):
    """The process group, and tensor parallelism over so many ranks."""
    alone = {} if world > 1 else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group(backend, **alone)
    sys.excepthook = unexpected  # torch's own, set there, would swallow the traceback
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(tensor_model_parallel_size=parallel)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(123)


def ready(capability=None):
    """The dispatcher's answer for that compute capability, else this GPU's, or a Hopper's where there is none; made once, and kept: what it says of it."""
    fused = importlib.import_module(FUSED)
    fused.Platform._instance = None
    fused._get_platform.cache_clear()
    given = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: capability or (9, 0),
    }
    if not gpu:
        # Marks for a profiler, which a CPU build of torch does not have.
        torch.cuda.nvtx = mock.MagicMock()
    with (
        mock.patch.multiple(torch.cuda, **{"is_available": lambda: True} if gpu and not capability else given),
        mock.patch.dict(sys.modules, {"cutlass": None} if capability else {}),  # as if it were not installed
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            fused._get_platform()
    return [str(each.message) for each in said if "cross entropy" in str(each.message)]


def fallback():
    """Told once, with its reason: on every GPU that has no fused kernels, and where what they need is not there."""
    for capability in ((7, 5), (8, 6), (11, 0), (12, 1), (10, 0), (10, 3), None):  # this machine's is what counts from then on
        name = "{}.{}".format(*capability) if capability else "this machine's"
        try:
            said = ready(capability)
        except Exception as error:  # a fix that refuses one
            said = [f"{type(error).__name__}: {error}"]
        why = "CUTLASS" if name.startswith("10.") else "compute capability"
        right = len(said) == 1 and "unfused" in said[0] and why in said[0]
        name = f"compute capability {name}: the dispatcher warns once that the loss is not fused, and why: {said}"
        check("trigger", name, right)


def inputs(device, shift=0.0, dtype=torch.float32, sizes=(S * B, H, V)):
    """Hidden states [S, B, H] (or [tokens, 1, H]), weight [V, H] with rows that pad it, labels [S, B]; logits around ``shift``."""
    torch.manual_seed(0)
    tokens, hidden_size, vocabulary = sizes
    shape = (S, B) if tokens == S * B else (tokens, 1)
    hidden = torch.randn(*shape, hidden_size, device=device)
    weight = torch.randn(vocabulary, hidden_size, device=device).mul_(hidden_size**-0.5)
    weight[-PADDED:] = 0  # logits of 0, as Megatron pads a vocabulary
    hidden[..., 0], weight[:, 0] = 1.0, shift
    labels = torch.randint(0, vocabulary - PADDED, shape, device=device)
    # The first and last rows of chunks and of ranks, after those that a case ignores.
    edges = [base + at for base in (0, vocabulary // 2) for at in (0, 4095, 4096, 8191, 8192, vocabulary // 2 - 1)]
    edges = [vocabulary - PADDED - 1, vocabulary // 4 - 1, vocabulary // 4, *edges]
    edges = torch.tensor([row for row in edges if row < vocabulary - PADDED][: labels.numel() - 6], device=device)
    labels.view(-1)[6 : 6 + len(edges)] = edges
    return hidden.to(dtype), weight.to(dtype), labels


def off(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def exact(hidden, weight, labels, outer, reduction="none", ignore=-100, scale=1.0):
    """Loss, dH and dW in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = scale * (leaves[0].flatten(0, 1) @ leaves[1].t())
    loss = F.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=ignore)
    (loss * outer.double().flatten()).sum().backward()
    return loss.detach(), *(t.grad for t in leaves)


def function(name, device, group=None, rank=0, world=1, parallel=False, reduction="none", ignore=-100, flat=False, **given):
    """linear_cross_entropy itself: errors, tensors of the logits' size; bf16 in multiples of what rounding logits, or the result, costs."""
    hidden, weight, labels = inputs(device, **given)
    labels[0, :2] = ignore
    outer = torch.rand(labels.shape if reduction == "none" else (), device=device) + 0.5
    right = exact(hidden, weight, labels, outer, reduction, ignore)
    own = hidden.chunk(world)[rank] if parallel else hidden
    own = own.flatten(0, 1) if flat else own  # [tokens, H]
    leaves = [own.contiguous().requires_grad_(), weight.chunk(world)[rank].contiguous().requires_grad_()]
    before = [t.detach().clone() for t in (*leaves, labels)]
    with Made(labels.numel() * weight.shape[0] // world) as watch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = importlib.import_module(FUSED).linear_cross_entropy(*leaves, labels, group, reduction, ignore, parallel)
        (loss * outer.flatten()).sum().backward(retain_graph=True)
    first = [t.grad.clone() for t in leaves]
    sent = outer.to(loss.dtype).view(loss.shape).clone()
    loss.backward(sent)
    again = all(off(t.grad, 2 * g.double()) < 1e-6 for t, g in zip(leaves, first, strict=True))
    again = again and torch.equal(sent, outer.to(loss.dtype).view(loss.shape))
    again = again and all(map(torch.equal, before, (*leaves, labels)))
    want = right[0], (right[1].chunk(world)[rank] if parallel else right[1]).view(own.shape), right[2].chunk(world)[rank]
    errors = [off(a, b) for a, b in zip((loss.detach(), *first), want, strict=True)]
    if hidden.dtype != torch.float32:
        logits = (hidden.flatten(0, 1) @ weight.t()).double()
        rounded = [F.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=ignore)]
        rounded += [b.to(hidden.dtype) for b in want[1:]]
        errors = [e / off(a, b) for e, a, b in zip(errors, rounded, want, strict=True)]
    logits = watch.count if weight.shape[0] > 5000 else None  # one chunk is all of them
    return {
        "name": name,
        "errors": errors,
        "logits": logits,
        "dtype": str(hidden.dtype),
        "shift": given.get("shift", 0.0),
        "again": again,
        "fp32": loss.dtype == torch.float32,
        "told": [str(each.message) for each in said if "cross entropy" in str(each.message)],
    }


def of_model(name, kind, device, rank=0, world=1, impl="linear", dtype=torch.float32, share=False, case="", **more):
    """A model's loss and gradients: errors against fp64, or, with MTP, against the model whose loss is not fused.

    ``case``: "ignored" labels, "eval" mode, "packed" sequences, or "mtp", one more head, whose layer hands on what it is given, doubled.
    """
    hidden, weight, labels = inputs(device, dtype=dtype)
    labels, outer = labels.t().contiguous(), torch.rand(B, S, device=device) + 0.5
    if case == "ignored":
        labels[:2, 1] = -100

    def outcome(impl):
        made = model(kind, impl, (H, V), dtype=dtype, share=share, bf16=dtype == torch.bfloat16, **more).to(device)
        leaf = made.embedding.word_embeddings.weight if share else made.output_layer.weight
        leaf.data.copy_(weight.chunk(world)[rank])
        made.train(case != "eval")
        if case == "mtp":
            made.mtp_process = True
            made.mtp = lambda hidden_states, **_: torch.cat([hidden_states, 2 * hidden_states])
        own = (hidden.chunk(world)[rank] if more.get("sequence_parallel") else hidden).clone().requires_grad_()
        given = {"decoder_input": own, "labels": labels}
        if case == "packed":
            cu = torch.tensor([0, S], dtype=torch.int32, device=device)
            packed = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
            given["packed_seq_params"] = packed(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
        with Made(S * B * V // world) as watch:
            loss = made(torch.zeros_like(labels) if case == "mtp" else None, None, None, **given)
            (loss * outer).sum().backward()
        if case == "eval":  # as Megatron evaluates
            with torch.no_grad():
                loss = made(None, None, None, **given)
        return (loss.detach().t().flatten(), own.grad, leaf.grad), watch.count

    got, logits = outcome(impl)
    fused = impl == "linear" and more.get("cross_entropy_loss_fusion", True)
    if case == "mtp":
        want = [t.double() for t in outcome(None)[0]]
    else:
        right = exact(hidden, weight, labels.t(), outer.t(), scale=more.get("mup_output_mult", 1.0))
        dH = right[1].chunk(world)[rank] if more.get("sequence_parallel") else right[1]
        want = right[0], dH, right[2].chunk(world)[rank]
    found = {"name": f"{kind}, {name}", "errors": list(map(off, got, want)), "logits": logits if fused else None}
    if dtype != torch.float32:
        rounded = F.cross_entropy((hidden.flatten(0, 1) @ weight.t()).double(), labels.t().flatten(), reduction="none")
        scales = [off(a, b) for a, b in zip((rounded, *(t.to(dtype) for t in want[1:])), want, strict=True)]
        found["errors"] = [error / scale for error, scale in zip(found["errors"], scales, strict=True)]
        found |= {"dtype": str(dtype), "fp32": got[0].dtype == torch.float32}
    return found | {"against": "the loss that is not fused" if case == "mtp" else "fp64"}


def unlabelled(name, kind, device, rank=0, world=1, **more):
    """Error of the logits [B, S, V] of a model that is given no labels, and is asked for those of all ranks."""
    hidden, weight, _ = inputs(device)
    made = model(kind, "linear", (H, V), **more).to(device)
    made.output_layer.weight.data.copy_(weight.chunk(world)[rank])
    own = hidden.chunk(world)[rank] if more.get("sequence_parallel") else hidden
    got = made(None, None, None, decoder_input=own, runtime_gather_output=world > 1)
    right = (hidden.double() @ weight.double().t()).transpose(0, 1)
    return {"name": f"{kind}, {name}", "errors": [off(got, right) if got.shape == right.shape else None], "logits": None}


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
        with torch._dynamo.config.patch(disable=True):  # "native", as without a GPU
            run()
        return (torch.cuda.max_memory_allocated() - before) / 1e9
    with FakeTensorMode(allow_non_fake_inputs=True):
        run, tracker = loss("cpu"), MemTracker()
        with tracker:
            run()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] / 1e9


def usable(hybrid):
    """The models whose "linear" loss is asked for: GPTModel, and the hybrid one where a stand-in for the loss is reached and returned."""
    return ["GPTModel", *[hybrid] * (training(hybrid, "linear", True)[1] == "the fused loss")]


def of_ranks(file, backend, kinds):
    """What each rank found: two tensor-parallel ranks on NCCL; on gloo twice two, which must not mix, and four."""
    device, ranks = "cpu", int(os.environ["WORLD_SIZE"])
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = "cuda"
    start(backend, ranks, 2)
    ready()
    own = importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()
    found = [function("no group, sequence parallel", device, parallel=True)]
    for world, group in ((2, own), (4, torch.distributed.group.WORLD)):
        given = {"rank": torch.distributed.get_rank(group), "world": world}
        for way in (f"TP={world}", f"SP={world}") if world <= ranks else ():
            more = {"parallel": way.startswith("SP"), **given}
            for reduction in ("none", "sum", "mean"):
                found += [function(f"{way}, {reduction}", device, group, reduction=reduction, **more)]
            found += [function(f"{way}, none, logits around -128", device, group, shift=-128.0, **more)]
            found += [function(f"{way}, none, bf16", device, group, dtype=torch.bfloat16, **more)]
            found += [function(f"{way}, mean, label 7 ignored", device, group, reduction="mean", ignore=7, **more)]
            found += [function(f"{way}, hidden states without a batch", device, group, flat=True, **more)]
            more = {"tensor_model_parallel_size": 2, "sequence_parallel": way.startswith("SP"), **given}
            for kind in kinds if world == 2 else ():
                found += [of_model(way, kind, device, **more), of_model(f"{way}, tied", kind, device, share=True, **more)]
                found += [of_model(f"{way}, bf16", kind, device, dtype=torch.bfloat16, **more)]
                if backend == "nccl" or not gpu:  # Megatron gathers them on its GPU
                    found += [unlabelled(f"{way}, no labels, logits of all ranks", kind, device, **more)]
    Path(f"{file}.{torch.distributed.get_rank()}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def launched(backend, ranks, kinds):
    """Processes of this script, in the lane that it is in."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
        words = [sys.executable, *sys.orig_argv[1:], "--ranks", f"{folder}/found", backend, *kinds]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run([*run, *words], capture_output=True, text=True, env=env)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            return []
        return [json.loads(Path(folder, f"found.{rank}").read_text()) for rank in range(ranks)]


def judge(found, where):
    """Checks of what one case found: errors, and that there is no tensor of the logits' size."""
    # Sums of gradients that cancel out are off by as many roundings of the logits.
    limit = LIMIT * max(1, abs(found.get("shift", 0)))
    for what, error in zip(("loss", "dH", "dW"), found["errors"], strict=False):
        name = f"{where}: {found['name']}: {what}"
        if "bfloat16" in found.get("dtype", ""):
            most = 2 if where == "one rank" else 2.5  # a rank may hold half of the few tokens
            check("trigger", f"{name} is off by {error:.1f} roundings, at most {most}", error <= most)
        else:
            check("trigger", f"{name}, against {found.get('against', 'fp64')}", error=error, limit=limit)
    if found["logits"] is not None:
        check("trigger", f"{where}: {found['name']}: makes no tensor of its logits' size", not found["logits"])
    if "fp32" in found:
        check("trigger", f"{where}: {found['name']}: the loss is fp32", found["fp32"])
    if "told" in found:
        check("trigger", f"{where}: {found['name']}: nothing more is said of it", not found["told"])
    if "again" in found:
        check(
            "trigger",
            f"{where}: {found['name']}: a second backward gives the same, and all that is given stays as it was",
            found["again"],
        )


def refused(impl, fusion=True, kind="TransformerConfig"):
    """Whether a configuration refuses an implementation, by a ValueError that names it and those that it knows; where not, it keeps it."""
    given = {} if kind == "ModelParallelConfig" else {"num_layers": 1, "hidden_size": H, "num_attention_heads": 4}
    core = importlib.import_module("megatron.core" if kind == "ModelParallelConfig" else "megatron.core.transformer")
    try:
        made = getattr(core, kind)(**given, cross_entropy_loss_fusion=fusion, cross_entropy_fusion_impl=impl)
    except ValueError as error:
        return all(repr(name) in str(error) for name in (impl, "native", "te"))
    return False if (made.cross_entropy_loss_fusion, made.cross_entropy_fusion_impl) == (fusion, impl) else None


def statements(body, within=""):
    """Each statement, after the first lines of those that it stands in; a fix may name another class for the output layer."""
    for part in body:
        blocks = {name: getattr(part, name) for name in ("body", "orelse", "finalbody") if getattr(part, name, None)}
        text = ast.unparse(part).replace("tensor_parallel.ColumnParallelLinear(", "LinearCrossEntropyModule(")
        if not blocks:
            yield f"{within}{text}"
        for name, inner in blocks.items():
            yield from statements(inner, f"{within}{text.splitlines()[0]} {name}: ")


def lost(ours, theirs):
    """Of the release's METHODS what is left out, but for LOSS; and returns that are new where an object is made."""
    for name in METHODS:
        own, released = (
            Counter(text for part in body if getattr(part, "name", "") == name for text in statements(part.body))
            for body in (ours, theirs)
        )
        yield from (text for text in released - own if not any(words in text for words in LOSS))
        yield from (text for text in own - released if "return" in text and name != "forward")


def changed(models):
    """What is not the release's, but for what is run here: the dispatcher; with ``models`` their layer and call, and the configuration, too."""
    own, released = Path(FACTS["file"]).parents[2], Path(distribution("megatron-core").locate_file("megatron/core"))
    run = {"fusions/fused_linear_cross_entropy.py": ""}
    if models:
        run |= {"model_parallel_config.py": "ModelParallelConfig"}
        run |= {"models/mamba/mamba_model.py": "MambaModel", "models/hybrid/hybrid_model.py": "HybridModel"}
    for file in sorted(released.rglob("*.py")):
        name = str(file.relative_to(released))
        if not (own / name).is_file() or (own / name).read_bytes() != file.read_bytes():
            if not (owner := run.get(name)):
                yield from [name] * (owner is None)
                continue
            bodies, rest = [], []
            for path in (own / name, file):
                parts = [
                    part for part in ast.parse(path.read_text()).body if not isinstance(part, (ast.Import, ast.ImportFrom))
                ]
                bodies.append([each for part in parts if getattr(part, "name", "") == owner for each in part.body])
                flat = [each for part in parts for each in (part.body if getattr(part, "name", "") == owner else [part])]
                rest.append([ast.dump(each) for each in flat if getattr(each, "name", "") not in METHODS])
            yield from [f"{name}: {text[-100:]}" for text in lost(*bodies)]
            yield from [name] * (rest[0] != rest[1])


def kept():
    """Configurations, and whether the fields or the error are what the release's own class gives."""
    file = distribution("megatron-core").locate_file("megatron/core/model_parallel_config.py")
    spec = importlib.util.spec_from_file_location("released_config", file)
    released = sys.modules["released_config"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(released)

    def said(module, given):
        try:
            return {name: str(value) for name, value in vars(module.ModelParallelConfig(**given)).items()}
        except Exception as error:  # what it refuses is compared, too
            return repr(error)

    for given in (
        {},
        {"cross_entropy_fusion_impl": "te"},
        *({name: True} for name in ("sequence_parallel", "defer_embedding_wgrad_compute", "enable_autocast")),
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "params_dtype": torch.bfloat16},
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.half, "virtual_pipeline_model_parallel_size": 2},
    ):
        for more in ({}, {"cross_entropy_loss_fusion": True}):
            ours = importlib.import_module("megatron.core.model_parallel_config")
            yield given | more, said(ours, given | more) == said(released, given | more)


def through_te(kind, device):
    """Whether a model whose loss is transformer-engine's asks for that one, and returns it."""
    language = importlib.import_module("megatron.core.models.common.language_module.language_module")
    hidden, _, labels = inputs(device)
    asked = mock.Mock(side_effect=lambda logits, labels, *_: torch.full(labels.shape, 7.0, device=device))
    made = model(kind, "te", (H, V)).to(device)
    with mock.patch.object(language, "te_parallel_cross_entropy", asked):
        loss = made(None, None, None, decoder_input=hidden, labels=labels.t().contiguous())
    return asked.call_count == 1 and bool((loss == 7).all())


def ignored(reduction, device):
    """Whether a batch of ignored labels has gradients of 0, and unless it is a mean a loss of 0."""
    hidden, weight, labels = inputs(device)
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    loss = importlib.import_module(FUSED).linear_cross_entropy(*leaves, torch.full_like(labels, -100), None, reduction)
    loss.sum().backward()
    return not (hidden.grad.any() or weight.grad.any()) and (reduction == "mean" or not loss.any())


def arguments():
    """A reduction that there is not, and fewer labels than tokens: refused, as by the fused entry points."""
    call, given = importlib.import_module(FUSED).linear_cross_entropy, inputs("cuda" if gpu else "cpu", sizes=(S * B, H, 1000))
    for name, args in (
        *((f"reduction={reduction!r}", (*given, None, reduction)) for reduction in ("Mean", "batchmean", "", None)),
        ("one label for all tokens", (*given[:2], given[2][:1, :1])),
    ):
        try:
            said = f"{call(*args)}"
        except (ValueError, AssertionError) as error:
            said = type(error).__name__
        check("trigger", f"{name} is refused: {said[:60]}", said == ("AssertionError" if "label" in name else "ValueError"))


def configurations(linear):
    known = ["native", "te", *["linear"] * linear]
    for kind in ("TransformerConfig", "MLATransformerConfig", "ModelParallelConfig"):
        for impl in ("Native", "", None, "native2", "nativ", "te ", *["linear"] * (not linear)):
            check("trigger", f"{kind}: cross_entropy_fusion_impl={impl!r} is refused by name", refused(impl, kind=kind))
        for impl in known:
            check("control", f"{kind}: {impl!r} is taken as it is", refused(impl, kind=kind) is False)
        check("control", f"{kind}: a name that is not used is not refused", refused("linear", False, kind) is False)


def main():
    hybrid, linear = release()
    if linear:
        start()
        fallback()
    device, kinds = "cuda" if gpu else "cpu", usable(hybrid) if linear else []
    models = hybrid in kinds or not linear  # pack10's fix touches neither the hybrid model nor the configuration
    other = [*changed(models)]
    check("trigger", f"nothing is changed but what is run here: {other or 'nothing'}", not other)
    if models:
        configurations(linear)
        for given, same in kept():
            check("trigger", f"ModelParallelConfig({given}) is as released", same)
    if not linear:
        finish()
    FACTS["metrics"]["models"] = kinds
    for what, error in zip(("loss", "dH", "dW"), of_model("", "GPTModel", device, impl=None)["errors"], strict=True):
        check("control", f"GPTModel, not fused: {what} against fp64", error=error, limit=LIMIT)
    for reduction in ("none", "sum", "mean"):
        judge(function(reduction, device, reduction=reduction), "one rank")
    arguments()
    judge(function("label 7 ignored", device, ignore=7), "one rank")
    judge(function("hidden states without a batch", device, flat=True), "one rank")
    for shift in (-128.0, 1000.0):
        judge(function(f"logits around {shift:g}", device, shift=shift), "one rank")
    for vocabulary in (1000, 8192):  # less than a chunk, and two of them
        judge(function(f"V={vocabulary}", device, sizes=(S * B, H, vocabulary)), "one rank")
    fields = importlib.import_module("megatron.core.transformer").TransformerConfig.__dataclass_fields__
    for dtype in (torch.float32, torch.bfloat16):
        judge(
            function("{} tokens, H={} V={} {}".format(*BIG[device], dtype), device, sizes=BIG[device], dtype=dtype), "one rank"
        )
    for reduction in ("sum", "mean"):
        sizes = 4100, H, 1000  # as many as bf16 cannot count
        judge(
            function(f"4100 tokens, {reduction}, bf16", device, reduction=reduction, dtype=torch.bfloat16, sizes=sizes),
            "one rank",
        )
    for reduction in ("none", "sum", "mean"):
        said = f"{reduction}, all labels ignored: gradients are 0, and no mean is anything"
        check("trigger", said, ignored(reduction, device))
    for kind in kinds:
        check("trigger", f"{kind}: the loss of transformer-engine is asked for, and returned", through_te(kind, device))
        judge(unlabelled("no labels: logits, not", kind, device), "one rank")
        for name, more in (
            ("plain", {}),
            ("tied embeddings", {"share": True}),
            ("labels -100", {"case": "ignored"}),
            ("eval mode", {"case": "eval"}),
            ("packed sequences", {"case": "packed"}),
            ("one MTP head", {"case": "mtp", "mtp_num_layers": 1}),
            ("bf16", {"dtype": torch.bfloat16}),
            ("no fusion", {"cross_entropy_loss_fusion": False}),
        ):
            judge(of_model(name, kind, device, **more), "one rank")
        # GPTModel raises with it at d48bd6be0a, whatever the loss is: it scales logits that it has not made.
        for impl in ("linear", "native", None) if "use_mup" in fields and kind != "GPTModel" else ():
            more = {"impl": impl, "use_mup": True, "mup_output_mult": 0.5}
            found = of_model(f"muP, {impl or 'not fused'}", kind, device, **more)
            judge(
                found | {"errors": found["errors"][: 1 if impl == "native" else 3]}, "one rank"
            )  # its gradients are bf16: pack29
    for backend, ranks in (("gloo", 4), ("nccl", 2)):
        if backend == "nccl" and torch.cuda.device_count() < 2:
            continue
        ran = launched(backend, ranks, kinds)
        check("trigger", f"{ranks} ranks, {backend}: all ran to the end", len(ran) == ranks)
        for rank, found in enumerate(ran):
            for case in found:
                judge(case, f"rank {rank} of {ranks}, {backend}")
    logits = FACTS["metrics"]["logits, GB"] = 4 * 4096 * 151936 * 2 / 1e9
    for kind in kinds:
        peaks = FACTS["metrics"][f"{kind}, GB"] = {impl or "not fused": peak(kind, impl) for impl in (None, "native", "linear")}
        said = ", ".join(f"{impl} {gb:.2f}" for impl, gb in peaks.items())
        name = f"{kind}, S=4096 B=4 V=151936, bf16 logits of {logits:.2f} GB: peaks {said}"
        check("trigger", name, peaks["linear"] < logits / 2 and logits < min(peaks["not fused"], peaks["native"]))
    finish()


if __name__ == "__main__":
    options = parser.parse_args()
    if options.ranks:
        release()
        of_ranks(options.ranks[0], options.ranks[1], options.ranks[2:])
    else:
        main()
