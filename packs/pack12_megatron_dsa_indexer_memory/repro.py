# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: the loss of the DSA indexer makes [B, heads, S, S] tensors, where what it needs is [B, S, S].

Twice, and again in the backward: scores of all indexer heads, and of all attention heads, whose sum is the target. Without a GPU
bytes alive are counted under fake tensors. Exits with 10 (BUG_REPRODUCED: a peak is over 8 GiB), 0 (BUG_ABSENT) or 125 (neither).
"""

import types
from importlib import import_module, metadata, util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

S, B, HEADS, H, D_ATTENTION, D = 4096, 8, 128, 32, 192, 128  # HEADS of attention as in DeepSeek-V3.2, H of the indexer
DSA = "transformer/experimental_attention_variant/dsa"
GIB, LIMIT, device = 2**30, 8, "cuda" if torch.cuda.is_available() else "cpu"  # 8 GiB: 16 tensors [B, S, S] in fp32
causal = lambda S: torch.full((S, S), float("-inf"), device=device).triu_(1)  # noqa: E731
alone = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))  # tensor-parallel group of one rank


def release():
    """The release's module of DeepSeek sparse attention."""
    FACTS["version"], core = metadata.version("megatron-core"), getattr(util.find_spec("megatron.core"), "origin", None)
    if not core or not Path(core).parent.joinpath(f"{DSA}.py").exists():
        finish("UNTESTABLE", "no-api")
    dsa = import_module("megatron.core." + DSA.replace("/", "."))
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=dsa.__file__, evidence=gpu, claims={"MEMORY_SAVE_VERIFIED": "peak of"})
    return dsa


def inputs(S, B, heads, H, d, D, dtype=torch.float32, size=1.0):
    """q [S, B, H, D], weights [S, B, H], k [S, B, D], which get gradients; query, key [S, B, heads, d]."""
    torch.manual_seed(0)
    shapes = (S, B, H, D), (S, B, H), (S, B, D), (S, B, heads, d), (S, B, heads, d)
    return [torch.randn(s, device=device, dtype=dtype).mul_(size).requires_grad_(i < 3) for i, s in enumerate(shapes)]


def loss_of(dsa, q, weights, k, query, key, mask=None, scale=None, topk=8, coefficient=1.0, sparse=False, group=alone, more=()):
    """The indexer's loss and its top-k indices, by the release's own entry; causal as its attention asks for it, if no mask is given."""
    scale, rows = scale or query.shape[-1] ** -0.5, torch.arange(q.shape[0], device=q.device)
    if mask is None and not more:  # from 0.19 on the bounds of each row's keys
        mask, more = (None, (0 * rows, rows + 1)) if hasattr(dsa, "dsa_masking") else (causal(len(rows)), ())
    if entry := getattr(dsa, "FusedDSAIndexerLoss", None):
        return entry.apply(q, weights, k, query, key, scale, topk, coefficient, mask, sparse, group, *more)[::-1]
    picked = (scores := dsa.DSAIndexer._compute_index_scores(None, q, weights, k) + mask).topk(topk, -1)[1]
    return dsa.compute_dsa_indexer_loss(scores, picked, query, key, scale, coefficient, sparse, group), picked


def definition(q, weights, k, query, key):
    """KL of the indexer's distribution from the attention's, [B, S, S] both; the mean over rows."""
    mask, scores = causal(len(q)), torch.einsum("sbhd,tbd->bhst", q, k).relu() * weights.permute(1, 2, 0)[..., None]
    target = (torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5 + mask).softmax(-1).mean(1)
    log_index = (scores.sum(1) + mask).log_softmax(-1).masked_fill(mask.isinf(), 0)
    return F.kl_div(log_index, target, reduction="sum") / (q.shape[0] * q.shape[1])


def peaks(dsa, options=dict):
    """GiB above the inputs at the peak of the forward and of the backward; as far as memory suffices."""
    given, found, fake, tracker = [], [], FakeTensorMode(), MemTracker()
    draw = lambda: given.extend(inputs(S, B, HEADS, H, D_ATTENTION, D, dtype=torch.bfloat16))  # noqa: E731
    for step in (draw, lambda: given.append(loss_of(dsa, *given, **options())[0]), lambda: given[-1].backward()):
        if device == "cpu":
            with fake, tracker:
                step()
            found.append(next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] / GIB)
        elif "out of memory" not in FACTS["metrics"]:
            torch.cuda.reset_peak_memory_stats()
            try:
                step()
            except torch.cuda.OutOfMemoryError:
                FACTS["metrics"]["out of memory"] = True
            found.append(torch.cuda.max_memory_allocated() / GIB)
    return [peak - found[0] for peak in found[1:]]


def main():
    dsa, given = release(), inputs(48, 2, 8, 5, 16, 16, size=0.3)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    losses = (loss_of(dsa, *given)[0], given), (definition(*exact), exact)
    pairs = zip(*([loss, *torch.autograd.grad(loss, leaves[:3])] for loss, leaves in losses), strict=True)
    for name, (a, b) in zip(("loss", "dq", "dweights", "dk"), pairs, strict=True):
        check("control", f"{name} in fp32 against fp64", error=((a - b).norm() / b.norm()).item(), limit=1e-5)
    for name, peak in zip(("forward", "backward"), peaks(dsa), strict=False):
        FACTS["metrics"][f"{name} peak GiB"] = peak
        check("trigger", f"{name}: peak of {peak:.2f} GiB, {LIMIT} at most", peak <= LIMIT)
    if "out of memory" in FACTS["metrics"] and all(row["ok"] for row in CHECKS):
        finish("UNTESTABLE", "oom")
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    main()
