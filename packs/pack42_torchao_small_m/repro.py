# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0"]
# ///
"""torchao: how long Float8Linear takes beside a linear layer in bf16, by the number of tokens M.

An article says that small or ragged M loses to casts and padding. Eight layers [N, K], one after the other so that no weight stays in the GPU's cache, are
timed forward and backward for each M: torch's own in bf16, and torchao's Float8Linear, tensorwise and rowwise, compiled layer by layer; all as one
CUDA graph. Beside them the product of the forward alone. Reports times in ratios to bf16's. A measurement, and no bug.
Needs an NVIDIA GPU with FP8 (sm_89 or newer). Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

import argparse
import dataclasses
import importlib.util
import statistics
import unittest.mock
from importlib.metadata import version

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS, TOKENS, RAGGED = 8, (16, 128, 1024, 8192), 1000
RECIPES = ("bf16", "tensorwise", "rowwise")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(4096, 4096), type=lambda text: tuple(map(int, text.split(","))), metavar="N,K")


def release():
    """torchao's module of FP8 training; what was run, and on what, goes into the report."""
    if importlib.util.find_spec("torchao") is None or importlib.util.find_spec("torchao.float8") is None:
        finish("UNTESTABLE", "no-api")
    from torchao import float8

    if not hasattr(float8.Float8LinearConfig, "from_recipe_name"):
        finish("UNTESTABLE", "no-api")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print(
            "This needs an NVIDIA GPU with FP8 (sm_89 or newer), and torch sees none; nothing can be timed without one: nox -s pack42 there."
        )
        finish("UNTESTABLE", "no-device")
    FACTS.update(file=float8.__file__, version=version("torchao"))
    FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    return float8


class Casts(TorchDispatchMode):
    """Counts casts to FP8."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.count += op is torch.ops.aten._to_copy.default and out.dtype.itemsize == 1
        return out


def layers(float8, recipe, N, K, **options):
    """Layers [N, K] and [K, N] in turn, in bf16 or as Float8Linear."""
    torch.manual_seed(0)
    made = [torch.nn.Linear(*((K, N) if i % 2 == 0 else (N, K)), bias=False) for i in range(LAYERS)]
    model = torch.nn.Sequential(*made).to("cuda", torch.bfloat16)
    if recipe == "bf16":
        return model
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=dataclasses.replace(config, **options))


def step(model, x, given):
    """Forward and backward; the output and the gradient of x."""
    x.grad = None
    model.zero_grad(set_to_none=True)
    out = model(x)
    out.backward(given)
    return out.detach(), x.grad


def timed(function):
    """Milliseconds of a replay of what ``function`` launches: the median of nine times eight."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    found = []
    for _ in range(9):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(8):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 8)
    return statistics.median(found)


def products(M, N, K):
    """Milliseconds of the forward's products alone: in bf16, and in FP8 of tensors that are FP8 already."""
    x, weights = (
        torch.randn(M, K, device="cuda").bfloat16(),
        [torch.randn(N, K, device="cuda").bfloat16() for _ in range(LAYERS)],
    )
    one, to = torch.ones((), device="cuda"), torch.float8_e4m3fn
    x8, weights8 = x.to(to), [w.to(to) for w in weights]
    plain = timed(lambda: [x @ w.t() for w in weights])
    return plain, timed(
        lambda: [torch._scaled_mm(x8, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True) for w in weights8]
    )


def main(options):
    float8, (N, K) = release(), options.shape
    times = {}
    for M in TOKENS:
        torch.manual_seed(M)
        x, given = (torch.randn(M, K, device="cuda").bfloat16() for _ in range(2))
        x.requires_grad_()
        outs = {}
        for recipe in RECIPES:
            model = layers(float8, recipe, N, K)
            if TOKENS[0] == M and recipe != "bf16":
                with Casts() as casts, unittest.mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as product:
                    step(model, x, given)
                check("control", f"{recipe}: three products in FP8 a layer", product.call_count == 3 * LAYERS)
                FACTS["metrics"][f"{recipe}: casts to FP8 a layer and step"] = casts.count / LAYERS
            torch._dynamo.reset()  # it keeps eight variants of a function, and runs what comes after them uncompiled
            torch._dynamo.utils.counters.clear()
            for layer in model if recipe != "bf16" else ():
                layer.compile(dynamic=False)
            outs[recipe] = [t.clone() for t in step(model, x, given)]
            if recipe != "bf16":
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                check(
                    "control", f"M={M}, {recipe}: each shape of layer is compiled, as a whole", graphs == len({(N, K), (K, N)})
                )
            times[recipe, M] = timed(lambda model=model, x=x, given=given: step(model, x, given)) / LAYERS
            del model
        for recipe in RECIPES[1:]:
            far = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(outs[recipe], outs["bf16"], strict=True)]
            check("control", f"M={M}, {recipe}: off bf16's by 1 to 50 %, so it is FP8", all(0.01 < f < 0.5 for f in far))
        times["product", M], times["product in FP8", M] = (each / LAYERS for each in products(M, N, K))
        found = {"bf16, µs a layer": round(1e3 * times["bf16", M], 1)}
        found |= {f"{recipe} / bf16": round(times[recipe, M] / times["bf16", M], 3) for recipe in RECIPES[1:]}
        found["product in FP8 / in bf16"] = round(times["product in FP8", M] / times["product", M], 3)
        FACTS["metrics"][f"M={M}"] = found
        print(f"M={M}", *(f"  {name}: {figure}" for name, figure in found.items()), sep="\n", flush=True)
    x, given = (torch.randn(RAGGED, K, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()
    for name, more in (("as it is", {}), ("pad_inner_dim", {"pad_inner_dim": True})):
        model = layers(float8, "tensorwise", N, K, **more)
        try:
            step(model, x, given)
            torch.cuda.synchronize()
            said = "runs"
        except RuntimeError as raised:
            said = f"{type(raised).__name__}: {str(raised).splitlines()[0][:120]}"
        FACTS["metrics"][f"M={RAGGED}, tensorwise, {name}"] = said
        print(f"M={RAGGED}, tensorwise, {name}: {said}", flush=True)
    largest = TOKENS[-1]
    check(
        "control",
        "64 times as many tokens take at least 16 times as long in bf16",
        times["bf16", largest] > 16 * times["bf16", largest // 64],
    )
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
