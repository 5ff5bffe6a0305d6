# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0"]
# ///
"""torchao: what a small hybrid model loses when all its linear layers train in FP8.

An article says that blanket FP8 is too coarse for a hybrid model. A byte-level model of a state-space scan, attention and a mixture of experts is trained on
the release's own source files, with several seeds, in fp32 and with all linear layers torchao's Float8Linear, emulated where no GPU has FP8 kernels.
Reports the loss of held-out text. A measurement, and no bug. Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

from importlib import import_module, metadata, util
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

D, HEADS, EXPERTS, LENGTH = 64, 4, 16, 32  # channels, of attention, of the mixture, tokens
BATCH, STEPS, HELD, SEEDS = 16, 40, 16, 8  # sequences, batches trained on and held out
FLOOR = 1e-5  # a seed's loss twice differs by less, in FP8 by more
LINEARS = {"scan": [(D, 3 * D), (D, D)], "attention": [(D, 3 * D), (D, D)], "router": [(D, EXPERTS)]}  # inputs and outputs
LINEARS |= {"experts": [(D, EXPERTS * D // 2), (EXPERTS * D // 2, D)], "head": [(D, 256)]}
kernels = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 9)  # of FP8
device = "cuda" if kernels else "cpu"


def release():
    """torchao's module of FP8 training, and its source files [bytes]."""
    FACTS["version"] = metadata.version("torchao")
    util.find_spec("torchao.float8") or finish("UNTESTABLE", "no-api")
    float8 = import_module("torchao.float8")
    FACTS.update(file=float8.__file__, evidence="source")
    text = b"".join(f.read_bytes() for f in sorted(Path(float8.__file__).parent.rglob("*.py")))
    return float8, torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def loss(model, rows, fp8):
    """Of the next tokens [nats]: a scan, h = a h + b x for each channel with its decay from the input; attention; a mixture of experts."""
    table, norms, scan, attention, router, experts, head = model.values()
    norm = [lambda x, of=of: F.rms_norm(fp8("norms", x), (D,), fp8("norms", of.weight)) for of in norms]
    x = fp8("embeddings", table.weight)[rows[:, :-1]]
    decay, b, c = scan[0](y := norm[0](x)).chunk(3, -1)
    a, b, h, states = torch.sigmoid(decay + 3), fp8("state", b * y), 0, []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        states.append(h := fp8("state", a_t * h + b_t))
    x = x + scan[1](torch.stack(states, 1) * c)
    qkv = [fp8("attention", t.unflatten(-1, (HEADS, -1)).transpose(1, 2)) for t in attention[0](norm[1](x)).chunk(3, -1)]
    x = x + attention[1](F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(-2))
    chosen = fp8("router", router[0](y := norm[2](x))).softmax(-1)
    y = F.silu(experts[0](y)).unflatten(-1, (EXPERTS, -1)) * chosen[..., None]
    return F.cross_entropy(head[0](norm[3](x + experts[1](y.flatten(-2)))).flatten(0, 1), rows[:, 1:].flatten())


def trained(float8, data, parts, seed, emulate=not kernels, fp8=lambda part, x: x):
    """The loss of held-out text, in nats a byte, after training with the linear layers of ``parts`` in FP8, and what ``fp8`` casts."""
    torch.manual_seed(seed)
    table, norms = nn.Embedding.from_pretrained(torch.randn(256, D) / 10, freeze=False), (nn.RMSNorm(D) for _ in range(4))
    model = nn.ModuleDict({"table": table, "norms": nn.ModuleList(norms)})
    for part, shapes in LINEARS.items():
        model[part] = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)
        config = float8.Float8LinearConfig(emulate=emulate)
        float8.convert_to_float8_training(model[part], config=config) if part in parts else None
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=3e-3)
    known, drawn = len(data) * 9 // 10, torch.Generator().manual_seed(seed)
    some = lambda text: text[torch.randint(len(text) - LENGTH, (BATCH, 1), generator=drawn) + torch.arange(LENGTH + 1)]  # noqa: E731
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model, some(data[:known]).to(device), fp8).backward()
        optimizer.step()
    drawn.manual_seed(1234)  # the same of each model
    return sum(loss(model, some(data[known:]).to(device), fp8).item() for _ in range(HELD)) / HELD


def main():
    float8, data = release()
    torch.set_num_threads(1)  # these tensors are too small for more, and sums are then in one order
    plain = [trained(float8, data, (), seed) for seed in range(SEEDS)]
    frequencies = torch.special.entr(torch.bincount(data).double() / len(data)).sum()
    check("control", "the model learns more than how often each byte stands", max(plain) < 0.95 * frequencies)
    linear = import_module("torchao.float8.float8_linear").Float8Linear
    products = mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm)
    with products as products, mock.patch.object(linear, "forward", autospec=True, side_effect=linear.forward) as forwards:
        *losses, again = [trained(float8, data, LINEARS, seed) for seed in (*range(SEEDS), 0)]
    check("control", "in FP8 the same seed again gives the same loss", error=abs(again - losses[0]), limit=FLOOR)
    ran, called = forwards.call_count, products.call_count / 8 / (SEEDS + 1)  # three products a step, and one after it
    check("control", f"{ran} forwards of 8 Float8Linears, in training and after it", ran == 8 * (SEEDS + 1) * (STEPS + HELD))
    check("control", f"each does {called:g} products by FP8 kernels", called == kernels * (3 * STEPS + HELD))
    off = [loss - of for loss, of in zip(losses, plain, strict=True)]
    check("control", "in FP8 the loss is another than in fp32", max(map(abs, off)) > FLOOR)
    FACTS["metrics"] = {"fp32": plain, "all linear layers": off}
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if kernels else "source"
    print(f"{sum(off) / SEEDS:.4f} nats a byte more than in fp32")
    finish("MEASURED")


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
