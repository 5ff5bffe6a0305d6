# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0"]
# ///
"""torchao: which parts of a small hybrid model are sensitive to FP8, and what all parts in FP8 cost together.

An article says that blanket FP8 is too coarse for a hybrid model. A byte-level model of attention, a state-space scan and a mixture of experts is trained on
the release's own source files: in fp32 with several seeds, with one part in FP8 at a time, and with all. Linear layers are torchao's Float8Linear, emulated where
no GPU has FP8 kernels, and the router's everywhere; all else is cast by torchao's tensorwise dynamic scaling. Reports the loss of held-out text.
A measurement, and no bug. Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

import multiprocessing.dummy
from collections import Counter
from importlib import import_module, metadata, util
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

D, HEADS, EXPERTS, LENGTH = 64, 4, 4, 32  # channels, of attention, of the mixture, tokens
BATCH, STEPS, HELD, SEEDS = 16, 40, 16, 8  # sequences, batches trained on and held out
LINEARS = {"scan": [(D, 3 * D), (D, D)], "attention": [(D, 3 * D), (D, D)], "router": [(D, EXPERTS)]}  # inputs and outputs
LINEARS |= {"experts": [(D, EXPERTS * 2 * D), (EXPERTS * 2 * D, D)], "head": [(D, 256)]}
#: Casts of each in a forward; "state" is the scan's input and state.
CASTS = {"embeddings": 1, "norms": 8, "state": LENGTH + 1, "attention": 3, "router": 1}
FLOOR = 1e-5  # a seed's loss twice differs by less, each part's in FP8 by more
own = torch.cuda.get_device_capability() if torch.cuda.is_available() and torch.version.hip is None else (0, 0)
kernels = own >= (8, 9)  # of FP8
device, seen, on = "cuda" if kernels else "cpu", Counter(), set()  # casts by part, and parts that are in FP8


def release():
    """torchao's module of FP8 training, and its cast of a tensor to FP8 and back."""
    global float8, cast
    FACTS["version"] = metadata.version("torchao")
    if util.find_spec("torchao.float8") is None:
        print("This release has no training in FP8 (torchao.float8).")
        finish("UNTESTABLE", "no-api")
    float8, scaling = import_module("torchao.float8"), import_module("torchao.float8.float8_scaling_utils")
    moved = util.find_spec("torchao.float8.float8_training_tensor")  # from 0.13 on
    config = import_module(f"torchao.float8.float8_{'training_' if moved else ''}tensor").LinearMMConfig()
    cast = lambda x, dtype: scaling.hp_tensor_to_float8_dynamic(x, dtype, config).to_original_precision()  # noqa: E731
    FACTS.update(file=float8.__file__, evidence="source")


class Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part):
        ctx.part, seen[part] = part, seen[part] + 1
        return cast(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, gradient):
        seen[f"{ctx.part}, backward"] += 1
        return cast(gradient.contiguous(), torch.float8_e5m2), None


def fp8(part, x):
    return Fp8.apply(x, part) if part in on else x


class Model(torch.nn.Module):
    """A layer each of a scan, h = a h + b x for each channel with its decay from the input; of attention; and of a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.table, self.norms = torch.nn.Parameter(torch.randn(256, D) * 0.1), torch.nn.Parameter(torch.ones(4, D))
        for part, shapes in LINEARS.items():
            setattr(self, part, torch.nn.ModuleList(torch.nn.Linear(*shape, bias=False) for shape in shapes))

    def norm(self, i, x):
        return F.rms_norm(fp8("norms", x), (D,), fp8("norms", self.norms[i]))

    def forward(self, tokens):
        x = fp8("embeddings", self.table)[tokens]
        decay, b, c = self.scan[0](y := self.norm(0, x)).chunk(3, -1)
        a, b, h, states = torch.sigmoid(decay + 3), fp8("state", b * y), 0, []
        for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
            states.append(h := fp8("state", a_t * h + b_t))
        x = x + self.scan[1](torch.stack(states, 1) * c)
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attention[0](self.norm(1, x)).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*(fp8("attention", t) for t in heads), is_causal=True)
        x = x + self.attention[1](y.transpose(1, 2).flatten(-2))
        chosen = fp8("router", self.router[0](y := self.norm(2, x))).softmax(-1)
        y = F.silu(self.experts[0](y)).unflatten(-1, (EXPERTS, -1)) * chosen[..., None]
        return self.head[0](self.norm(3, x + self.experts[1](y.flatten(-2))))


def trained(data, parts, seed, emulate=not kernels):
    """The loss of held-out text, in nats a byte, after training with ``parts`` in FP8; Float8Linears, products by FP8 kernels, casts by part."""
    torch.manual_seed(seed)
    seen.clear(), on.clear(), on.update(parts)
    model, known = Model(), len(data) * 9 // 10
    for part in on & LINEARS.keys():  # kernels take multiples of 16 channels: the router has 4
        config = float8.Float8LinearConfig(emulate=emulate or part == "router")
        float8.convert_to_float8_training(getattr(model, part), config=config)
    optimizer, drawn = torch.optim.AdamW(model.to(device).parameters(), lr=3e-3), torch.Generator().manual_seed(seed)

    def loss(data):
        rows = data[torch.randint(len(data) - LENGTH, (BATCH, 1), generator=drawn) + torch.arange(LENGTH + 1)].to(device)
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as products:
        for _ in range(STEPS):
            loss(data[:known]).backward()
            optimizer.step()
            optimizer.zero_grad()
        drawn.manual_seed(1234)
        with torch.no_grad():
            held = sum(loss(data[known:]).item() for _ in range(HELD)) / HELD
    return held, sum(type(m).__name__ == "Float8Linear" for m in model.modules()), products.call_count, dict(seen)


def measure(pool, name, parts, emulate, data, plain):
    """Train with some parts in FP8 and each seed; note how much more each loss is than in fp32, and check that all was cast that should be."""
    runs = pool.starmap(trained, [(data, parts, seed, emulate) for seed in range(SEEDS)])
    casts = {part: (STEPS + HELD) * CASTS[part] for part in parts if part in CASTS}
    casts |= {f"{part}, backward": STEPS * CASTS[part] for part in casts}
    layers = sum(len(LINEARS.get(part, ())) for part in parts)
    products = 0 if emulate else (layers - ("router" in parts)) * (3 * STEPS + HELD)
    what = f"{name}: {sum(casts.values())} casts, {layers} Float8Linears, {products} products by FP8 kernels a run"
    check("control", what, all(run[1:] == (layers, products, casts) for run in runs))
    off = torch.tensor([run[0] for run in runs]).double() - plain
    check("control", f"{name}: the loss is another by {off.abs().max():.1g}", off.abs().max() > FLOOR)
    mean, error = off.mean().item(), off.std().item() / SEEDS**0.5
    row = {"loss more than fp32, by seed": [round(each, 4) for each in off.tolist()]}
    FACTS["metrics"][name] = row | {"mean": round(mean, 5), "standard error": round(error, 5)}
    print(f"{name:<13} {mean:.4f} ± {error:.4f}", *row.values(), flush=True)


def main():
    release()
    torch.set_num_threads(1)  # these tensors are too small for more
    files = sorted(Path(float8.__file__).parent.rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    fixed = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    for dtype, least in ((torch.float8_e4m3fn, 0.02), (torch.float8_e5m2, 0.04)):
        error = ((cast(fixed, dtype) - fixed).norm() / fixed.norm()).item()
        check("control", f"a cast to {str(dtype)[6:]} is off by {100 * error:.2g} %", least < error < 2 * least)
    # A fork has torch imported already, and what it is given; it must not have CUDA in use.
    pool = multiprocessing.dummy.Pool(1) if kernels else multiprocessing.get_context("fork").Pool(2)
    plain = torch.tensor([run[0] for run in pool.starmap(trained, [(data, (), seed) for seed in range(SEEDS)])]).double()
    check("control", "the same seed again gives the same loss", error=abs(trained(data, (), 0)[0] - plain[0]), limit=FLOOR)
    share = torch.bincount(data).double() / len(data)
    frequencies = torch.special.entr(share).sum()
    check("control", "the model learns more than how often each byte stands", plain.max() < 0.95 * frequencies)
    FACTS["metrics"]["fp32"] = [round(loss, 4) for loss in plain.tolist()]
    print("fp32", FACTS["metrics"]["fp32"], flush=True)
    cases = {part: [part] for part in CASTS | LINEARS} | {"all": [*(CASTS | LINEARS)]}
    for name, parts in cases.items():
        measure(pool, name, parts, not kernels, data, plain)
    if kernels:
        measure(pool, "all, emulated", cases["all"], True, data, plain)
        FACTS["evidence"] = "device:sm_{}{}".format(*own) if all(row["ok"] for row in CHECKS) else "source"
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
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    if role not in ROLES or not name or number or (limit is not None and not 0 < limit < math.inf):
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
