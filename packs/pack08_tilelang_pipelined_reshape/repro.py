# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "cloudpickle", "ml-dtypes", "numpy", "psutil", "tilelang==0.1.15", "torch==2.13.0", "tqdm", "z3-solver==4.15.4.0"]
# ///
"""tilelang: T.reshape of a shared buffer in a pipelined loop gives no kernel, one that hangs, or silently wrong results.

A GEMM in a loop of two stages, for sm_90a: T.copy(Q[...], q); T.gemm(T.reshape(q, [64, 64]), ...). Two stages need two buffers for q.
With T.reshape or T.view, releases from 0.1.9 on keep one, so the next tile is loaded over the one that is multiplied, or wait for a
signal that nobody gives; older and some newer ones do not compile q of rank 3. https://github.com/tile-ai/tilelang/pull/1798
Runs on a Hopper GPU; without one it compiles, and reads the kernel. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import re
import subprocess
from importlib.metadata import version

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--form", help=argparse.SUPPRESS)
BLOCKS, STEPS, LIMIT = 132, 64, 1e-5  # thread blocks, tiles that each multiplies
FLAT, RANK3, RANK4 = (64, 64), (16, 4, 64), (4, 4, 4, 64)
# What a tile is in global memory, in shared memory, and what T.reshape makes of it for T.gemm.
FORMS = {
    "2-D": (FLAT, FLAT, None),
    "2-D, reshaped": (FLAT, FLAT, FLAT),
    "3-D": (RANK3, RANK3, FLAT),
    "4-D": (RANK4, RANK4, FLAT),
}
FORMS["2-D, filled as 3-D"] = (RANK3, FLAT, None)  # as Mamba-3's kernels do
KNOWN = r"InputDim\(\) == 2|stride % 8 == 0|cannot fall back to normal copy|nobody signals|one buffer"


def release():
    try:
        import tilelang
    except Exception as error:  # some releases stop at a library that is not there, with errors of many kinds
        print(f"{type(error).__name__}: {error}")
        finish("UNTESTABLE", "import")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    FACTS.update(file=tilelang.__file__, version=version("tilelang"), evidence="device:sm_90" if hopper else "codegen")
    return tilelang


def kernel(T, given, tile, multiplied):
    """Out [BLOCKS * 64, 64] fp32: for each block the sum over its tiles of Q_tile @ K_tile^T, tiles [64, 64] bf16 in any rank."""
    shape = (given[0] * BLOCKS * STEPS, *given[1:])
    start = lambda step: (step * given[0], *(0 for _ in given[1:]))  # noqa: E731
    filled = lambda buffer: buffer if given == tile else T.view(buffer, given)  # noqa: E731
    operand = lambda buffer: T.reshape(buffer, multiplied) if multiplied else buffer  # noqa: E731

    @T.prim_func
    def main(Q: T.Tensor(shape, "bfloat16"), K: T.Tensor(shape, "bfloat16"), Out: T.Tensor((BLOCKS * 64, 64), "float32")):
        with T.Kernel(BLOCKS, threads=128) as b:
            q = T.alloc_shared(tile, "bfloat16")
            k = T.alloc_shared(tile, "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(Q[start(b * STEPS + i)], filled(q))
                T.copy(K[start(b * STEPS + i)], filled(k))
                T.gemm(operand(q), operand(k), acc, transpose_B=True)
            T.copy(acc, Out[b * 64, 0])

    return main, shape


def run(form):
    """Print the kernel that the release makes, and on a GPU how far its result is from the definition's."""
    tilelang = release()
    func, shape = kernel(tilelang.language, *FORMS[form])
    if FACTS["evidence"] == "codegen":
        with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
            return print(tilelang.lower(func, target=target).kernel_source)
    compiled = tilelang.compile(func, out_idx=[2], target="cuda")
    print(compiled.get_kernel_source(), flush=True)
    torch.manual_seed(0)
    q, k = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    want = torch.einsum("bsmc,bsnc->bmn", *(t.double().view(BLOCKS, STEPS, 64, 64) for t in (q, k)))
    print(f"error {((compiled(q, k).view(BLOCKS, 64, 64) - want).norm() / want.norm()).item()}")


def outcome(form):
    """What is wrong with the kernel of a form as it reads, and its relative error. In a process that may crash or hang."""
    try:
        done = subprocess.run([sys.executable, __file__, "--form", form], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as late:
        done = subprocess.CompletedProcess((), 0, f"{(late.stdout or b'').decode()}\nerror inf")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if re.search(r"Error|Check failed", line)]
        return f"it does not compile: {(said or [done.returncode])[-1]}"[:300], None
    error = re.search("^error (.*)$", done.stdout, re.MULTILINE)
    calls = [(re.sub(r"\bi_\d+\b", "i", at), call) for at, call in re.findall(r"mbarrier\[(.+?)\]\.(\w+)", done.stdout)]
    silent = {at for at, call in calls if call == "wait"} - {at for at, call in calls if call.startswith("arrive")}
    loads = re.findall(r"tma_load\(\w+, mbarrier\[(.+?)\], \(&\(.*?\[(.*?)\]", done.stdout)
    shared = any("& 1" in barrier and "& 1" not in to for barrier, to in loads)
    fault = "it waits for a barrier that nobody signals" if silent else "two stages load into one buffer" if shared else ""
    return fault, error and float(error[1])


def main():
    release()
    found = FACTS["metrics"]["forms"] = {form: outcome(form) for form in FORMS}
    for form, (fault, error) in found.items():
        role = "control" if form == "2-D" else "trigger"
        check(role, f"{form}: {fault or 'compiles; each stage has its buffer, each barrier its signal'}", not fault)
        if error is not None:
            check(role, f"{form}: product of tiles", error=error, limit=LIMIT)
    check("signature", "every fault is one of the known", all(re.search(KNOWN, fault) for fault, _ in found.values() if fault))
    ran = [(fault, error) for fault, error in found.values() if error is not None]
    check("signature", "kernels that read wrong, and no others, run wrong", all(bool(f) != (e <= LIMIT) for f, e in ran))
    finish()


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
    form = parser.parse_args().form
    run(form) if form else main()
