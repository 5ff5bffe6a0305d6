# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: context-parallel DeepSeek sparse attention waits for the GPU in every forward, so a CUDA graph cannot be captured around it.

A boolean index, .item() and torch.tensor(5, device="cuda") need the GPU's answer, or the CPU's memory: an error while a stream is captured.
torch.cuda.graph captures each helper as dsa.py calls it; what can be captured is replayed on the second cu_seqlens and compared with eager.
Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import inspect
from importlib import import_module, metadata, util
from pathlib import Path

import torch

DSA = "megatron.core.transformer.experimental_attention_variant"
#: cu_seqlens while a graph is captured, and when it is replayed, and whether dsa.py says that they cover all of 64 rows.
LENGTHS = {
    "one sequence": ([0, 64], [0, 64], True),
    "zeros first": ([0, 0], [0, 64], True),
    "three and padding": ([0, 16, 16, 48], [0, 32, 40, 48], False),
}


def release():
    """The modules dsa, dsa_layout and dsa_masking; one rank's process group."""
    FACTS["version"] = metadata.version("megatron-core")
    core = Path(util.find_spec("megatron.core").origin).parent
    if not core.joinpath("transformer/experimental_attention_variant/dsa_layout.py").exists():
        finish("UNTESTABLE", "no-api")
    if not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack01 runs it in the lane fake-cuda, without one.")
        finish("UNTESTABLE", "no-device")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        sys.excepthook = unexpected  # torch's own, set there, would swallow the traceback
    modules = [import_module(f"{DSA}.{name}") for name in ("dsa", "dsa_layout", "dsa_masking")]
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.version.cuda else "source"
    FACTS.update(file=modules[1].__file__, evidence=gpu)
    return modules


def helpers(dsa, layout, _):
    """Name -> a call of one helper on cu_seqlens, as dsa.py calls it, and these; without those that the release does not have."""
    local, calls = layout.build_packed_allgather_cp_local_positions, {}
    pads = "cu_seqlens_cover_output" in inspect.signature(local).parameters  # rows of padding are known of

    def positions(**more):
        return lambda cu: torch.cat([local(cu, 2, rank, cu.device, output_size=32, **more) for rank in (0, 1)])  # of two

    for name, lengths in LENGTHS.items():
        if pads or (lengths[2] and any(lengths[0])):
            more = {"cu_seqlens_cover_output": lengths[2]} if pads else {}
            calls[f"{local.__name__}, {name}"] = positions(**more), lengths
    uniform, group = dsa._validate_nonpacked_cp_uniform_length, torch.distributed.group.WORLD
    # One rank: what is asked of the GPU does not depend on how many there are.
    return calls | {uniform.__name__: (lambda cu: uniform(8, 8, 1, group, cu.device), LENGTHS["one sequence"])}


def captured(call, lengths=LENGTHS["three and padding"], eager=None):
    """What a CUDA graph of ``call`` is refused for: file, line and code; None where it can be captured and replays as ``eager`` gives."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call(cu := torch.tensor(lengths[0], dtype=torch.int32, device="cuda:0"))
    try:
        with torch.cuda.graph(graph, stream=side):
            out = call(cu)
    except Exception as error:  # the driver's refusal comes in several classes
        while error.__context__:  # the first: what follows is of the graph that could not be ended
            error = error.__context__
        frame = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename][-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}: "
        return ("" if FACTS["evidence"] == "source" else where) + str(error).partition("\n")[0]
    if out is None or FACTS["evidence"] == "source":  # no values
        return None
    cu.copy_(torch.tensor(lengths[1], dtype=torch.int32))
    graph.replay()
    return None if torch.equal(out, (eager or call)(cu)) else "the replay is not what eager gives"


def judge(calls):
    """A check for each call, after those of what a graph has to be refused for and what not."""
    for name, call in {"tensor[0].item()": lambda cu: cu[0].item(), "tensor[tensor > 3]": lambda cu: cu[cu > 3]}.items():
        check("control", f"a graph of {name} is refused", captured(call) is not None)
    check("control", "a graph of tensor.cumsum(0) is not", captured(lambda cu: cu.cumsum(0)) is None)
    for name, (call, lengths) in calls.items():
        said = captured(call, lengths)
        check("trigger", f"{name}: {said or 'captured'}", said is None)
        known = "stream is capturing", "CUDA graph capture", "during capture"
        if said:
            check("signature", f"{name}: it is the graph that is refused", any(words in said for words in known))
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
    judge(helpers(*release()))
