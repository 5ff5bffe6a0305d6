# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0"]
# ///
"""torchao: load_state_dict(assign=True) on a Float8Linear under FSDP2 loses its FP8 all-gather, in silence.

convert_to_float8_training wraps each weight in a subclass, through which FSDP2 gathers FP8. With assign=True, the usual way from the meta device, the checkpoint's
plain tensor takes its place: four times the bytes are gathered (twice with bf16 parameters), the output is the same, and nothing says so. No report was found.
Two ranks run the release's own code: NCCL on two GPUs, or gloo on a CPU. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import tempfile
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

SIZE, LAYERS, ROWS = 256, 4, 32
FULL, FP8 = (2 * LAYERS * SIZE * SIZE * size for size in (4, 1))  # bytes gathered, forward and backward
device, gathered = "cuda" if torch.cuda.device_count() > 1 else "cpu", []


def release():
    """The release's torchao.float8, as ``ao``."""
    global ao
    FACTS["version"] = metadata.version("torchao")
    file = Path(util.find_spec("torchao").origin).with_name("float8") / "fsdp_utils.py"
    file.exists() or finish("UNTESTABLE", "no-api")  # no training in FP8 yet
    ao = import_module("torchao.float8")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=str(file), evidence=gpu)


class Gather:
    """FSDP2's all-gather, its bytes noted; FP8, which gloo does not know, goes as uint8."""

    allocate = staticmethod(lambda size, *, dtype, device: torch.empty(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        gathered.append(output_tensor.nbytes)
        pair = [t.view(torch.uint8) if t.element_size() == 1 else t for t in (output_tensor, input_tensor)]
        return dist.all_gather_into_tensor(*pair, group=group, async_op=async_op)


def model(where=device, fp8=True, shard=True, gather=True):
    """Linear layers of fp32 weights [SIZE, SIZE]."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, False, where) for _ in range(LAYERS)))
    config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=gather)
    layers = ao.convert_to_float8_training(layers, config=config) if fp8 else layers
    for part in (*layers, layers) if shard else ():
        fully_shard(part).set_custom_all_gather(Gather())
    return layers


def cases():
    """Bytes gathered in a forward and a backward, and whether the output [ROWS, SIZE] is bitwise that of layers that are not sharded."""
    alone, checkpoint = model(shard=False), model(fp8=False).state_dict()
    (copied := model("meta").to_empty(device=device)).load_state_dict(checkpoint)
    (assigned := model("meta")).load_state_dict(checkpoint, assign=True)
    for name, layers in (("no FP8 all-gather", model(gather=False)), ("assign=False", copied), ("assign=True", assigned)):
        torch.manual_seed(2 + dist.get_rank())
        x, gathered[:] = torch.randn(ROWS, SIZE, device=device), ()
        (y := layers(x)).square().mean().backward()
        yield name, {"bytes": sum(gathered), "same": torch.equal(y, alone(x))}


def rank(cases, count, store, number):
    release()
    torch.cuda.set_device(number) if device == "cuda" else None
    dist.init_process_group(init_method=f"file://{store}", rank=number, world_size=count)
    return number, dict(cases())


def in_ranks(cases, count=2):
    """What ``count`` processes find: case -> a row a rank."""
    context = torch.multiprocessing.get_context("fork" if device == "cpu" else "spawn")  # a fork has torch imported already
    with tempfile.TemporaryDirectory() as folder, context.Pool(count) as pool:
        found = sorted(pool.imap_unordered(partial(rank, cases, count, f"{folder}/store"), range(count)))
    return {name: [rows[name] for _, rows in found] for name in found[0][1]}


def main():
    release()
    for name, rows in in_ranks(cases).items():
        bytes, want = [row["bytes"] for row in rows], FULL if name == "no FP8 all-gather" else FP8
        role, FACTS["metrics"][name] = "trigger" if name == "assign=True" else "control", {"bytes": bytes[0]}
        check(role, f"{name}: ranks gather {bytes} bytes, of {want}", bytes == [want] * len(rows))
        check("control", f"{name}: outputs are bitwise those without sharding", all(row["same"] for row in rows))
        if bytes[0] != want:
            check("signature", f"{name}: it is what fp32 weights take", bytes == [FULL] * len(rows))
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
