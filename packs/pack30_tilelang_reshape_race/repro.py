# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "ml-dtypes", "numpy", "psutil", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "z3-solver==4.15.4.0"]
# ///
"""tilelang: T.reshape of a shared buffer in a pipelined loop gives silently wrong results, or a kernel that hangs.

From 0.1.9 on, T.copy(Q[...], q); T.gemm(T.reshape(q, [64, 64]), ...) in a loop of two stages has one buffer for q in place of two: the next tile is loaded over
the one that is multiplied. https://github.com/tile-ai/tilelang/pull/2823. Runs on a Hopper GPU; elsewhere it compiles and reads the kernel. Exits with 10, 0 or 125.
"""

import argparse
import re
import subprocess
from importlib.metadata import version

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--form", help=argparse.SUPPRESS)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BLOCKS, STEPS, FLAT, RANK3 = 132, 64, (64, 64), (16, 4, 64)  # thread blocks, the tiles of each, a tile in shared memory
FORMS = {"2-D": (FLAT, None, None), "2-D, reshaped": (FLAT, None, FLAT)}  # allocated, reshaped to be filled, to be multiplied
FORMS |= {"2-D, filled as 3-D": (FLAT, RANK3, None), "3-D": (RANK3, None, FLAT)}


def release():
    try:
        import tilelang
    except Exception as error:  # some releases stop at a library that is not there, with errors of many kinds
        print(f"{type(error).__name__}: {error}")
        finish("UNTESTABLE", "import")
    FACTS.update(file=tilelang.__file__, version=version("tilelang"), evidence="device:sm_90" if HOPPER else "codegen")
    return tilelang


def run(form):
    """Out [BLOCKS * 64, 64] fp32: for each block the sum over its tiles of Q_tile @ K_tile^T, tiles bf16."""
    tilelang, (tile, filled, multiplied) = release(), FORMS[form]
    T, (first, *rest) = tilelang.language, filled or tile
    shape, zeros = (first * BLOCKS * STEPS, *rest), [0] * len(rest)
    seen = lambda buffer, shape: T.reshape(buffer, shape) if shape else buffer  # noqa: E731

    @T.prim_func
    def main(Q: T.Tensor(shape, "bfloat16"), K: T.Tensor(shape, "bfloat16"), Out: T.Tensor((BLOCKS * 64, 64), "float32")):
        with T.Kernel(BLOCKS, threads=128) as b:
            q, k = T.alloc_shared(tile, "bfloat16"), T.alloc_shared(tile, "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(Q[((b * STEPS + i) * first, *zeros)], seen(q, filled))
                T.copy(K[((b * STEPS + i) * first, *zeros)], seen(k, filled))
                T.gemm(seen(q, multiplied), seen(k, multiplied), acc, transpose_B=True)
            T.copy(acc, Out[b * 64, 0])

    if not HOPPER:
        with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
            return print(tilelang.lower(main, target=target).kernel_source)
    compiled = tilelang.compile(main, out_idx=[2], target="cuda")
    print(compiled.get_kernel_source(), flush=True)
    q, k = torch.randn(2, *shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    want = torch.einsum("bsmc,bsnc->bmn", *(t.double().view(BLOCKS, STEPS, 64, 64) for t in (q, k)))
    print(f"error {((compiled(q, k).view(BLOCKS, 64, 64) - want).norm() / want.norm()).item()}")


def fault(text):
    """What is wrong with a kernel as TileLang writes it, "" if nothing is: each stage has its signal, and its addresses in shared memory."""
    text = re.sub(r"\bi_\d+\b", "i", text)  # the loop has another name in the warps that multiply
    find = lambda call, what: [x for line in re.findall(f".*(?:{call}).*", text) for x in re.findall(what, line)]  # noqa: E731
    if {*find(r"\.wait", r"mbarrier\[[^][]+")} - {*find("arrive", r"mbarrier\[[^][]+")}:
        return "nobody gives the signal"
    moves = lambda index: eval(index, {"i": 0}) != eval(index, {"i": 1})  # noqa: E731 - Python and C mean the same by it
    load, read = ([*map(moves, find(at, r"\*\)\w+\)\[([^][]*)\]"))] for at in ("tma_load", "gemm_ss|initialize_wgmma"))
    read = [*map(moves, find("", r"descriptor_offset<int>\(\w+, (.*)\);"))] or read
    if len(load) != 2 or len(read) != 2:
        finish("CHANGED", "a kernel that is not understood")
    return "" if all(load + read) else "one buffer"


def main():
    release()
    for form in FORMS:  # each in a process of its own, since it may hang
        done = subprocess.run(["timeout", "60", sys.executable, __file__, "--form", form], capture_output=True, text=True)
        compiled, error = "__global__" in done.stdout, (*re.findall("^error (.*)$", done.stdout, re.MULTILINE), math.nan)[0]
        if not compiled and re.search(r"InputDim\(\) == 2|stride % 8 == 0|cannot fall back", done.stderr):
            print(f"{form}: does not compile, which is pack08's bug")
            continue
        if done.returncode not in (0, 124) or not compiled:
            print(done.stderr)
            finish(*(("UNTESTABLE", "timeout") if done.returncode == 124 else ("CHANGED", f"{form}: no kernel")))
        found, role = fault(done.stdout), "control" if form == "2-D" else "trigger"
        check(role, f"{form}: {found or 'each stage has its buffer and its signal'}", not found)
        if HOPPER:
            check(role, f"{form}: ends within 60 s with the sum of the products", error=float(error), limit=1e-3)
            check("signature", f"{form}: it runs as it reads", CHECKS[-2]["ok"] == CHECKS[-1]["ok"])
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
    run(form) if (form := parser.parse_args().form) else main()
