# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.11", "cloudpickle", "ml-dtypes", "numpy", "psutil", "tilelang==0.1.11", "torch==2.13.0", "tqdm", "z3-solver==4.15.4.0"]
# ///
"""tilelang: LayoutInference divides by zero on a fragment whose columns are not a power of two.

Broadcasting a row over a [64, 24] fragment is enough. LayoutInference inverts the layout of the row's replication and asks for a
FloorMod whose divisor has become 0: "Divide by zero", at compile time. 32 columns compile.
https://github.com/tile-ai/tilelang/issues/2394, cured by https://github.com/tile-ai/tilelang/pull/2469

Compiles for sm_90a and runs nothing, so it needs no GPU. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from importlib.metadata import version

ROWS, WRONG, RIGHT = 64, (24, 40, 96), (32, 64)
#: What a failure is called, by what the compiler says.
KINDS = {"divide by zero": "divide-by-zero", "bijective|injective": "not-bijective", "layout": "no-layout"}


def broadcast(columns):
    @T.prim_func
    def main(D: T.Tensor((columns,), "float32"), X: T.Tensor((ROWS, columns), "float32")):
        with T.Kernel(1, threads=128) as _:
            d = T.alloc_fragment((columns,), "float32")
            x = T.alloc_fragment((ROWS, columns), "float32")
            T.copy(D, d)
            for i, j in T.Parallel(ROWS, columns):
                x[i, j] = d[j] * 2.0
            T.copy(x, X)

    return main


def lower(columns):
    given = {"enable_host_codegen": False, "enable_device_compile": False}
    given = {name: value for name, value in given.items() if name in inspect.signature(tilelang.lower).parameters}
    with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        tilelang.lower(broadcast(columns), target=target, **given)


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def outcome(columns):
    """What becomes of it, in a process of its own: a crash ends no more than that, and older releases lower only once."""
    done = subprocess.run([sys.executable, __file__, str(columns)], capture_output=True, text=True)
    if done.returncode == 0:
        return "ok"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    print(f"{columns} columns: {last[:300]}")
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    return next((kind for words, kind in KINDS.items() if re.search(words, last, re.IGNORECASE)), last.partition(":")[0])


facts = {"reproducer": 1, "evidence": "codegen", "comparisons": [], "metrics": {}}
try:
    import tilelang
    import tilelang.language as T
    from tilelang import tvm
except Exception:
    traceback.print_exc()
    finish("UNTESTABLE", "import")
if len(sys.argv) > 1:
    lower(int(sys.argv[1]))
    sys.exit()
facts.update(file=tilelang.__file__, version=version("tilelang"))
print(f"tilelang {facts['version']}, {facts['evidence']}, sm_90a")
found = {columns: outcome(columns) for columns in (*RIGHT, *WRONG)}
facts["metrics"]["columns"] = found
for columns, what in found.items():
    role, name = ("control", "compiles") if columns in RIGHT else ("trigger", "divides by zero")
    holds = what == ("ok" if role == "control" else "divide-by-zero")
    facts["comparisons"].append({"role": role, "name": f"[{ROWS}, {columns}] {name}", "holds": holds})
    print(f"{role:<8} [{ROWS}, {columns}] {name:<16} {holds!s:<6} {what}")
broken = [what for columns, what in found.items() if what != "ok"]
if any(found[columns] != "ok" for columns in RIGHT):
    finish("CHANGED", broken[0])
if "divide-by-zero" in broken:
    finish("REPRODUCED")
finish("CHANGED", broken[0]) if broken else finish("ABSENT")
