# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0", "triton==3.7.1"]
# ///
"""torchao: how long Float8Linear takes beside a linear layer in bf16, by the number of tokens M.

An article says that small M loses to casts. Eight layers [N, K], one after the other so that no weight stays in the GPU's cache, are timed forward and
backward: torch's own in bf16, and torchao's Float8Linear, tensorwise and rowwise, compiled layer by layer; all as one CUDA graph. Reports times in ratios
to bf16's. A measurement, and no bug. Needs an NVIDIA GPU with FP8 (sm_89 or newer). Exits with 0 (MEASURED) or 125 (CHANGED, UNTESTABLE).
"""

import argparse
from importlib import import_module, metadata, util
from unittest import mock

import torch
from triton.testing import do_bench_cudagraph

LAYERS, TOKENS, RECIPES = 8, (16, 128, 1024, 8192), ("tensorwise", "rowwise")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default=(4096, 4096), type=lambda text: tuple(map(int, text.split(","))), metavar="N,K")


def release():
    """torchao's module of FP8 training; what was run, and on what, goes into the report."""
    FACTS["version"], names = metadata.version("torchao"), ("torchao", "torchao.float8")
    float8 = import_module(names[1]) if all(map(util.find_spec, names)) else None
    if not hasattr(getattr(float8, "Float8LinearConfig", None), "from_recipe_name"):
        print("This release has no recipes for Float8Linear by their names.")
        finish("UNTESTABLE", "no-api")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print(
            "This needs an NVIDIA GPU with FP8 (sm_89 or newer) and torch sees none, so nothing is timed: nox -s pack42 there."
        )
        finish("UNTESTABLE", "no-device")
    FACTS.update(file=float8.__file__, evidence="device:sm_{}{}".format(*torch.cuda.get_device_capability()))
    return float8


def timed(function):
    """Milliseconds of what ``function`` launches, as one CUDA graph: the median."""
    return do_bench_cudagraph(function, rep=100, return_mode="median")


def layers(float8, config, N, K):
    """Layers [N, K] and [K, N] in turn, in bf16, or as Float8Linear."""
    torch.manual_seed(0)
    made = [torch.nn.Linear(*((K, N) if i % 2 == 0 else (N, K)), bias=False) for i in range(LAYERS)]
    model = torch.nn.Sequential(*made).to("cuda", torch.bfloat16)
    return float8.convert_to_float8_training(model, config=config) if config else model


def inputs(M, K):
    """Tokens [M, K], and the gradient of what comes of them."""
    torch.manual_seed(M)
    x, given = (torch.randn(M, K, device="cuda").bfloat16() for _ in range(2))
    return x.requires_grad_(), given


def step(model, x, given):
    """Forward and backward; the output and the gradient of x."""
    x.grad = None
    model.zero_grad(set_to_none=True)
    (out := model(x)).backward(given)
    return out.detach(), x.grad


def main():
    float8, (N, K), plain = release(), parser.parse_args().shape, {}
    for M in TOKENS:
        x, given = inputs(M, K)
        model = layers(float8, None, N, K)
        right = [t.clone() for t in step(model, x, given)]
        plain[M] = timed(lambda model=model, x=x, given=given: step(model, x, given))
        FACTS["metrics"][f"M={M}"] = found = {"bf16, µs a layer": round(1e3 * plain[M] / LAYERS, 1)}
        for recipe in RECIPES:
            model = layers(float8, float8.Float8LinearConfig.from_recipe_name(recipe), N, K)
            with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as product:
                step(model, x, given)
            check("control", f"M={M}, {recipe}: three products in FP8 a layer", product.call_count == 3 * LAYERS)
            torch._dynamo.reset()  # it keeps eight variants of a function, and runs what comes after them uncompiled
            torch._dynamo.utils.counters.clear()
            for layer in model:
                layer.compile(dynamic=False)
            pairs = list(zip(step(model, x, given), right, strict=True))
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            check("control", f"M={M}, {recipe}: each shape of layer is compiled, as a whole", graphs == len({(N, K), (K, N)}))
            far = [((a - b).float().norm() / b.float().norm()).item() for a, b in pairs]
            check("control", f"M={M}, {recipe}: off bf16's by 1 to 50 %, so it is FP8", all(0.01 < f < 0.5 for f in far))
            took = timed(lambda model=model, x=x, given=given: step(model, x, given))
            found[f"{recipe} / bf16"] = round(took / plain[M], 3)
        print(f"M={M}", *(f"  {name}: {figure}" for name, figure in found.items()), sep="\n", flush=True)
    most = TOKENS[-1]
    check("control", "64 times as many tokens take at least 16 times as long in bf16", plain[most] > 16 * plain[most // 64])
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
