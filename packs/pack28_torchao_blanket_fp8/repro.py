# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0"]
# ///
"""torchao: which parts of a small hybrid model are sensitive to FP8, and what all parts in FP8 cost together.

An article says that blanket FP8 is too coarse for a hybrid model. A byte-level model of attention, a state-space scan and a mixture of experts is
trained on the release's own source files: in fp32 with several seeds, with one part in FP8 at a time, and with all parts.
Linear layers are torchao's Float8Linear, emulated where no GPU has FP8 kernels, and the router's everywhere; embeddings, norms, q, k and v, the router's logits and the scan's
state are cast by torchao's own tensorwise dynamic scaling, e4m3 forward and e5m2 backward. Reports the loss of held-out text. A measurement, and no bug. Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

import argparse
import collections
import importlib.util
import statistics
from importlib.metadata import files, version
from unittest import mock

import torch
import torch.nn.functional as F

D, HEADS, EXPERTS, LENGTH, BATCH, HELD = (
    64,
    4,
    4,
    32,
    16,
    16,
)  # channels, of attention, of the mixture, tokens; batches of held-out text
#: Each part's casts in a forward, and its linear layers; "scan" is the scan's linear layers, "state" the rest of it.
PARTS = {"embeddings": (1, 0), "norms": (8, 0), "attention": (3, 2), "scan": (0, 2), "state": (LENGTH + 1, 0)}
PARTS |= {"router": (1, 1), "experts": (0, 2), "head": (0, 1)}
SEEDS, FLOOR = 8, 1e-5  # a seed's loss twice differs by less, each part's in FP8 by more
own = torch.cuda.get_device_capability() if torch.cuda.is_available() and torch.version.hip is None else (0, 0)
kernels = own >= (8, 9)  # of FP8
device = "cuda" if kernels else "cpu"
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of training (default 40)")


def release():
    """torchao's conversion of linear layers, and its cast of a tensor to FP8 and back."""
    if importlib.util.find_spec("torchao") is None or importlib.util.find_spec("torchao.float8") is None:
        finish("UNTESTABLE", "no-api")
    from torchao import float8
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    moved = importlib.util.find_spec("torchao.float8.float8_training_tensor")  # from 0.13 on
    tensors = importlib.import_module(f"torchao.float8.float8_{'training_' if moved else ''}tensor")

    FACTS.update(file=float8.__file__, version=version("torchao"), evidence="source")

    def cast(x, dtype):
        return hp_tensor_to_float8_dynamic(x, dtype, tensors.LinearMMConfig()).to_original_precision()

    def convert(model, parts, emulate):
        for part in parts:  # kernels take multiples of 16 channels: the router has 4
            config = float8.Float8LinearConfig(emulate=emulate or part == "router")
            float8.convert_to_float8_training(
                model, config=config, module_filter_fn=lambda _, name, part=part: name.split(".")[-2] == part
            )
        return model.to(device)

    return convert, cast


class Part(torch.nn.Module):
    """A part of the model; what is no linear layer goes through ``self.fp8``."""

    cast, parts, casts = None, frozenset(), collections.Counter()  # casts forward, by name, and backward

    def fp8(self, x):
        class Through(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return Part.cast(x, torch.float8_e4m3fn)

            @staticmethod
            def backward(ctx, gradient):
                Part.casts[f"{self.name}, backward"] += 1
                return Part.cast(gradient.contiguous(), torch.float8_e5m2)

        if self.name not in Part.parts:
            return x
        Part.casts[self.name] += 1
        return Through.apply(x)

    def __init__(self, name, **linears):
        super().__init__()
        self.name = name
        for label, (inner, outer) in linears.items():
            setattr(self, label, torch.nn.Linear(inner, outer, bias=False))


class Norm(Part):
    def __init__(self):
        super().__init__("norms")
        self.weight = torch.nn.Parameter(torch.ones(D))

    def forward(self, x):
        return F.rms_norm(self.fp8(x), (D,), self.fp8(self.weight))


class Attention(Part):
    def forward(self, x):
        q, k, v = (self.fp8(t.unflatten(-1, (HEADS, -1)).transpose(1, 2)) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Scan(Part):
    """A diagonal state-space layer: h = a h + b x for each channel, its decay from the input; its input and its state are cast."""

    def forward(self, x):
        decay, b, c = self.abc(x).chunk(3, -1)
        decay, b, h, out = torch.sigmoid(decay + 3), self.fp8(b * x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.fp8(decay[:, t] * h + b[:, t])
            out.append(h)
        return self.out(torch.stack(out, 1) * c)


class Experts(Part):
    def __init__(self):
        super().__init__("experts", up=(D, EXPERTS * 2 * D), down=(EXPERTS * 2 * D, D))
        self.router = Part("router", gate=(D, EXPERTS))

    def forward(self, x):
        chosen = torch.softmax(self.router.fp8(self.router.gate(x)), -1)
        return self.down((F.silu(self.up(x)).unflatten(-1, (EXPERTS, -1)) * chosen[..., None]).flatten(-2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Part("embeddings")
        self.embeddings.weight = torch.nn.Parameter(torch.randn(256, D) * 0.1)
        self.attention = Attention("attention", qkv=(D, 3 * D), out=(D, D))
        self.scan = Scan("state", abc=(D, 3 * D), out=(D, D))
        self.experts = Experts()
        self.norms = torch.nn.ModuleList(Norm() for _ in range(4))
        self.head = Part("head", out=(D, 256))

    def forward(self, tokens):
        x = self.embeddings.fp8(self.embeddings.weight)[tokens]
        for norm, layer in zip(self.norms[:3], (self.scan, self.attention, self.experts), strict=True):
            x = x + layer(norm(x))
        return self.head.out(self.norms[-1](x))


def text():
    """Bytes of the release's own Python files; the last tenth is held out."""
    found = sorted(str(f) for f in files("torchao") if str(f).startswith("torchao/float8/") and f.suffix == ".py")
    return torch.frombuffer(
        bytearray(b"".join((files("torchao")[0].locate().parent.parent / f).read_bytes() for f in found)), dtype=torch.uint8
    ).long()


def loss_of(model, data, generator):
    at = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
    tokens = torch.stack([data[i : i + LENGTH + 1] for i in at]).to(device)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(convert, cast, data, parts, seed, steps, emulate=not kernels):
    """The loss of held-out text, in nats a byte, after training with some parts in FP8; Float8Linears, and products by FP8 kernels."""
    torch.manual_seed(seed)
    Part.cast, Part.parts = staticmethod(cast), frozenset(parts)
    model = convert(Model(), parts, emulate)
    known, held = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as products:
        for _ in range(steps):
            loss_of(model, known, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
        generator.manual_seed(1234)
        with torch.no_grad():
            losses = [loss_of(model, held, generator).item() for _ in range(HELD)]
    layers = sum(type(m).__name__ == "Float8Linear" for m in model.modules())
    return sum(losses) / len(losses), layers, products.call_count


def main(options):
    torch.set_num_threads(1)  # these tensors are too small for more
    convert, cast = release()
    steps, data = options.steps, text()
    fixed = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    for dtype, least in ((torch.float8_e4m3fn, 0.02), (torch.float8_e5m2, 0.04)):
        error = ((cast(fixed, dtype) - fixed).norm() / fixed.norm()).item()
        check("control", f"a cast to {str(dtype)[6:]} is off by {100 * error:.2g} %", least < error < 2 * least)
    plain = [trained(convert, cast, data, (), seed, steps)[0] for seed in range(SEEDS)]
    again = trained(convert, cast, data, (), 0, steps)[0]
    check("control", "the same seed again gives the same loss", error=abs(again - plain[0]), limit=FLOOR)
    counts = torch.bincount(data, minlength=256).double() / len(data)
    unigram = -(counts * counts.clamp(min=1e-12).log()).sum().item()
    check("control", "the model learns more than how often each byte stands", max(plain) < 0.9 * unigram)
    FACTS["metrics"] |= {"fp32": [round(loss, 4) for loss in plain]}
    print("fp32", FACTS["metrics"]["fp32"], "unigrams", round(unigram, 4))
    cases = {part: ([part], not kernels) for part in PARTS} | {"all": (list(PARTS), not kernels)}
    for name, (parts, emulate) in (cases | ({"all, emulated": (list(PARTS), True)} if kernels else {})).items():
        Part.casts.clear()
        runs = [trained(convert, cast, data, parts, seed, steps, emulate) for seed in range(SEEDS)]
        casts = {part: SEEDS * (steps + HELD) * PARTS[part][0] for part in parts if PARTS[part][0]}
        casts |= {f"{part}, backward": SEEDS * steps * PARTS[part][0] for part in casts}
        layers = sum(PARTS[part][1] for part in parts)
        products = 0 if emulate else (layers - ("router" in parts)) * (3 * steps + HELD)
        what = f"{name}: {sum(casts.values())} casts, {layers} Float8Linears, {products} products by FP8 kernels a run"
        check("control", what, casts == Part.casts and all(run[1:] == (layers, products) for run in runs))
        off = [run[0] - before for run, before in zip(runs, plain, strict=True)]
        check("control", f"{name}: the loss is another by {max(map(abs, off)):.1g}", max(map(abs, off)) > FLOOR)
        mean, error = statistics.mean(off), statistics.stdev(off) / SEEDS**0.5
        row = {"loss more than fp32, by seed": [round(each, 4) for each in off]}
        FACTS["metrics"][name] = row | {"mean": round(mean, 5), "standard error": round(error, 5)}
        print(f"{name:<13} {mean:.4f} ± {error:.4f}", *row.values(), flush=True)
    if kernels and all(row["ok"] for row in CHECKS):
        FACTS["evidence"] = "device:sm_{}{}".format(*own)
    finish("MEASURED")


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and error <= limit
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {
        role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ("control", "trigger", "signature")
    }
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


sys.excepthook = unexpected
# --- end of report/1 ---

if __name__ == "__main__":
    main(parser.parse_args())
