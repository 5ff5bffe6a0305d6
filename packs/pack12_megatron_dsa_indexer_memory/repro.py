# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: the loss of the DSA indexer makes tensors [S, B, H, S] in fp32, where its result is [B, S, S].

q @ k^T of all H indexer heads is computed in one einsum, kept through ReLU and weights, then summed over heads; in the backward again.
At S=4096 B=8 H=32 that is 16 GiB a tensor.

Without a GPU the release's Python runs under fake tensors, which have shapes and no data, and the bytes that are alive are counted; with
one it runs, and torch.cuda.max_memory_allocated is read. Gradients are checked at a small shape with real numbers either way.
Exits 10 (BUG_REPRODUCED: a peak holds such a tensor), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import statistics
import sys
import types
import warnings
from importlib.metadata import distribution

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default="4096,8,32,128", metavar="S,B,H,D", help="of the indexer's q (default: 4096,8,32,128)")
parser.add_argument(
    "--measure", action="store_true", help="also time it, as released, forward-only and fixed in turns (needs a GPU)"
)
options = parser.parse_args()
try:
    S, B, H, D = (int(n) for n in options.shape.split(","))
except ValueError:
    parser.error(f"--shape must be four whole numbers S,B,H,D, not {options.shape!r}")
if options.measure and not torch.cuda.is_available():
    parser.error("--measure needs a GPU")

GIB = 2**30
NAME = "megatron.core.transformer.experimental_attention_variant.dsa"
device = "cuda" if torch.cuda.is_available() else "cpu"
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "comparisons": [], "claims": [], "metrics": {"shape": {"S": S, "B": B, "H": H, "D": D}}}
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
metrics = facts["metrics"]
torch.backends.cuda.matmul.allow_tf32 = False


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<84} {measured.get('error', holds)}")


alone = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))  # a tensor-parallel group of one rank


def loss_of(dsa, q, weights, k, query, key, mask):
    """The indexer's loss, dense (no top-k in it), by the release's own entry."""
    scale, topk = query.shape[-1] ** -0.5, 8
    if hasattr(dsa, "FusedDSAIndexerLoss"):
        return dsa.FusedDSAIndexerLoss.apply(q, weights, k, query, key, scale, topk, 1.0, mask, False, alone)[1]
    scores = dsa.DSAIndexer._compute_index_scores(None, q, weights, k) + mask
    return dsa.compute_dsa_indexer_loss(scores, scores.topk(topk, -1)[1], query, key, scale, 1.0, False, alone)


def definition(q, weights, k, query, key, mask):
    """KL of the indexer's distribution from the attention's, [B, S, S] both, in fp64; mean over rows."""
    scores = torch.einsum("sbhd,tbd->bhst", q, k).relu() * weights.permute(1, 2, 0)[..., None]
    log_index = (scores.sum(1) + mask).log_softmax(-1)
    target = torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5 + mask
    target = target.softmax(-1).mean(1)
    return F.kl_div(log_index.masked_fill(mask.isinf(), 0), target, reduction="sum") / (q.shape[0] * q.shape[1])


def inputs(S, B, H, D, dtype, size=1.0):
    """q [S, B, H, D], weights [S, B, H], k [S, B, D], which have gradients; query, key [S, B, 1, D]; the causal mask [S, S]."""
    q, weights, k, query, key = (
        (size * torch.randn(*shape, device=device, dtype=torch.float32)).to(dtype)
        for shape in ((S, B, H, D), (S, B, H), (S, B, D), (S, B, 1, D), (S, B, 1, D))
    )
    mask = torch.full((S, S), float("-inf"), device=device).triu(1)
    return [t.requires_grad_() for t in (q, weights, k)] + [query, key, mask]


def peaks(dsa):
    """GiB above the inputs at the peak of the forward and of the backward."""
    if device == "cuda":
        given = inputs(S, B, H, D, torch.bfloat16)
        before, found = torch.cuda.memory_allocated(), {}
        for name in ("forward", "backward"):
            torch.cuda.reset_peak_memory_stats()
            if name == "forward":
                loss = loss_of(dsa, *given)
            else:
                loss.backward()
            found[name] = (torch.cuda.max_memory_allocated() - before) / GIB
        return found
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        given = inputs(S, B, H, D, torch.bfloat16)
        tracker, found = MemTracker(), {}
        with tracker:
            loss = loss_of(dsa, *given)
        found["forward"] = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] / GIB
        with tracker:
            loss.backward()
        found["backward"] = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] / GIB
    return found


def errors(dsa, dtype=torch.float32):
    """Relative errors of loss and gradients against fp64, at S=48 B=2 H=5 D=16."""
    torch.manual_seed(0)
    given = inputs(48, 2, 5, 16, dtype, size=0.3)
    loss = loss_of(dsa, *given)
    loss.backward()
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    right = definition(*exact)
    right.backward()
    pairs = [
        ("loss", loss.detach(), right.detach()),
        *((f"d{n}", g.grad, e.grad) for n, g, e in zip(("q", "w", "k"), given, exact, strict=False)),
    ]
    return {name: ((got.double() - want).norm() / want.norm()).item() for name, got, want in pairs}


def checked(dsa):
    """torch.autograd.gradcheck of the index scores in fp64: where the source says .float(), nothing is cast."""
    q, weights, k = (t.detach().double().requires_grad_() for t in inputs(5, 2, 3, 4, torch.float32)[:3])
    scores = dsa._compute_index_scores if hasattr(dsa, "_compute_index_scores") else None
    call = scores or (lambda *given: dsa.DSAIndexer._compute_index_scores(None, *given))
    cast, torch.Tensor.float = torch.Tensor.float, lambda self: self
    try:
        return torch.autograd.gradcheck(call, (q, weights, k), raise_exception=False)
    finally:
        torch.Tensor.float = cast


def original():
    spec = importlib.util.spec_from_file_location("original_dsa", release.locate_file(f"{NAME.replace('.', '/')}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(modules, runs=10):
    """ms of forward and backward, the modules in turns: medians and quartiles."""
    times = {name: [] for name in modules}
    for i in range(runs + 2):
        for name, module in modules.items():
            given = inputs(S, B, H, D, torch.bfloat16)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            loss_of(module, *given).backward()
            end.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end)] if i >= 2 else []
    return {name: dict(zip(("q1", "median", "q3"), statistics.quantiles(ms, n=4), strict=True)) for name, ms in times.items()}


warnings.filterwarnings("ignore")
release = distribution("megatron-core")
facts["version"] = release.version
try:
    found = importlib.util.find_spec(NAME)
except ModuleNotFoundError:
    found = None
if found is None:
    print("This release has no DSA.")
    finish("UNTESTABLE", "no-api")
dsa = importlib.import_module(NAME)
facts["file"] = dsa.__file__
print(f"megatron-core {release.version}, torch {torch.__version__}, {facts['evidence']}, S={S} B={B} H={H} D={D}")

tensor = S * B * H * S * 4 / GIB
metrics.update(tensor_gib=tensor, peak_gib=peaks(dsa))
for name, peak in metrics["peak_gib"].items():
    state("trigger", f"{name}: peak {peak:.2f} GiB, room for a [S, B, H, S] tensor of {tensor:.2f} GiB", peak >= tensor)
limit = 1e-5
metrics["errors"] = errors(dsa)
print("         " + "  ".join(f"{n} {e:.1e}" for n, e in metrics["errors"].items()))
worst = max(metrics["errors"], key=lambda name: (math.isnan(metrics["errors"][name]), metrics["errors"][name]))
state("control", f"loss and gradients in fp32 against fp64, worst {worst}", None, error=metrics["errors"][worst], limit=limit)
state("control", "gradcheck of the index scores in fp64", checked(dsa))
if options.measure and patched:
    seed = original()
    if hasattr(seed, "_compute_index_scores"):
        seed._compute_index_scores = dsa._compute_index_scores
        torch.cuda.empty_cache()
        metrics["forward_only_peak_gib"] = peaks(seed)
        print(f"         forward fixed alone: peaks {metrics['forward_only_peak_gib']}")
    modules = {
        "as released": original(),
        **({"forward fixed alone": seed} if "forward_only_peak_gib" in metrics else {}),
        "fixed": dsa,
    }
    metrics["ms"] = timed(modules)
    for name, ms in metrics["ms"].items():
        print(f"         {name}: {ms}")
if not metrics["errors"][worst] <= limit or not facts["comparisons"][-1]["holds"]:
    finish("CHANGED", "wrong gradients")
broken = any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger")
if patched and not broken:
    facts["claims"] = ["MEMORY_SAVE_VERIFIED"]
finish("REPRODUCED" if broken else "ABSENT")
