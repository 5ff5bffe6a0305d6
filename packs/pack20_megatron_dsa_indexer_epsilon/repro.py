# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: the loss of the DSA indexer adds 1e-10 to probabilities, and loses the gradients of those that are smaller.

KL(target || index) is computed from log(index + 1e-10). The gradient of a key's score is its probability p minus its target; what comes out
has the target times p / (p + 1e-10): half of it at p = 1e-10, a hundredth at 1e-12. So the indexer is not taught to look there. The scores
here are those of normal inputs in the module's own scaling, and the same ones 8 times as far apart, over all keys and over the indexer's top half. Runs on a CPU or a GPU.
Exits with 10 (BUG_REPRODUCED: gradients are wrong), 0 (BUG_ABSENT) or 125 (neither).
"""

import importlib
import types
import warnings
from importlib.metadata import version

import torch
import torch.nn.functional as F

S, B, HEADS, H, D_ATTENTION, D = 512, 1, 128, 64, 192, 128  # tokens, sequences; heads and their channels as in DeepSeek-V3.2
NAMES = "loss", "dq", "dweights", "dk"
device = "cuda" if torch.cuda.is_available() else "cpu"
alone = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))  # tensor-parallel group of one rank


def release():
    """The release's module of DeepSeek sparse attention."""
    warnings.filterwarnings("ignore")
    try:
        dsa = importlib.import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("megatron.core."):
            raise
        finish("UNTESTABLE", "no-api")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=dsa.__file__, version=version("megatron-core"), evidence=gpu)
    return dsa


def inputs(S, B, heads, H, d, D, gain, dtype=torch.float32):
    """q [S, B, H, D], weights [S, B, H] scaled as DSAIndexer does, times ``gain``, and k [S, B, D]; query, key [S, B, heads, d]."""
    torch.manual_seed(0)
    shapes = (S, B, H, D), (S, B, H), (S, B, D), (S, B, heads, d), (S, B, heads, d)
    made = [torch.randn(shape, device=device) for shape in shapes]
    made[1] *= gain * (H * D) ** -0.5
    mask = torch.full((S, S), float("-inf"), device=device).triu_(1)  # causal
    return [*(t.to(dtype).requires_grad_(i < 3) for i, t in enumerate(made)), mask]


def loss_of(dsa, q, weights, k, query, key, mask, sparse=False, coefficient=1.0, group=alone, topk=8):
    """The indexer's loss and its top-k indices, by the release's own entry. 0.16 makes the scores in a method of its indexer."""
    scale = query.shape[-1] ** -0.5
    if entry := getattr(dsa, "FusedDSAIndexerLoss", None):
        return entry.apply(q, weights, k, query, key, scale, topk, coefficient, mask, sparse, group)[::-1]
    scores = dsa.DSAIndexer._compute_index_scores(None, q, weights, k) + mask
    picked = scores.topk(topk, -1)[1]
    return dsa.compute_dsa_indexer_loss(scores, picked, query, key, scale, coefficient, sparse, group), picked


def definition(q, weights, k, query, key, mask, sparse=False, topk=8):
    """KL of the indexer's distribution from the attention's, [B, S, S] both, over all keys or over the indexer's top k; row mean."""
    scores = (torch.einsum("sbhd,tbd->bhst", q, k).relu() * weights.permute(1, 2, 0)[..., None]).sum(1) + mask
    if sparse:
        mask = mask + torch.full_like(scores, float("-inf")).scatter_(-1, scores.topk(topk, -1)[1], 0)
    log_index = (scores + mask).log_softmax(-1)
    target = torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5
    target = (target + (mask if mask.ndim == 2 else mask[:, None])).softmax(-1).mean(1)
    FACTS["metrics"]["probabilities under 1e-10"] = (log_index[~log_index.isinf()] < -23.03).double().mean().item()
    return F.kl_div(log_index.masked_fill(log_index.isinf(), 0), target, reduction="sum") / (q.shape[0] * q.shape[1])


def outcome(function, given, dtype=None):
    """The loss and the gradients of q, weights and k, in fp64 if asked for."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad) for t in given]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves[:3])]


def errors(dsa, given, **options):
    """Relative errors of loss, dq, dweights and dk against fp64."""
    got = outcome(lambda *leaves: loss_of(dsa, *leaves, **options)[0], given)
    want = outcome(lambda *leaves: definition(*leaves, **options), given, torch.float64)
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


def main():
    dsa = release()
    for role, gain, topk in (("control", 1, 0), ("trigger", 8, 0), ("trigger", 8, S // 2)):
        found = errors(dsa, inputs(S, B, HEADS, H, D_ATTENTION, D, gain), **({"sparse": True, "topk": topk} if topk else {}))
        share, keys = FACTS["metrics"].pop("probabilities under 1e-10"), f", top {topk} alone" if topk else ""
        FACTS["metrics"][f"scores times {gain}{keys}"] = {"under 1e-10": share, **dict(zip(NAMES, found, strict=True))}
        for name, error in zip(NAMES, found, strict=True):
            check(role, f"scores times {gain}{keys}, {share:.0%} of probabilities under 1e-10: {name}", error=error, limit=1e-4)
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
