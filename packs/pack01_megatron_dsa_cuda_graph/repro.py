# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: context-parallel DeepSeek sparse attention waits for the GPU in every forward, so a CUDA graph cannot be captured around it.

A boolean index, .item(), `if tensor.all()` and torch.tensor(5, device="cuda") need the GPU's answer, or the CPU's memory. Eagerly that costs
time; while a stream is captured it is an error. torch.cuda.graph captures each helper as dsa.py calls it; where it can be captured, it is
replayed with other inputs and compared with eager. nox -s pack01 runs it without a GPU too, where more of what waits is found at once.
Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import importlib
import importlib.util
import inspect
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch

DSA = "megatron.core.transformer.experimental_attention_variant"
CP = 2  # ranks of context parallelism
ROWS = 64  # of the packed tensors, on all ranks
#: cu_seqlens while a graph is captured, and when it is replayed, and whether dsa.py says that they cover all rows.
LENGTHS = {
    "one sequence": ([0, 64], [0, 64], True),
    "zeros first": ([0, 0], [0, 64], True),
    "three and padding": ([0, 16, 16, 48], [0, 32, 40, 48], False),
}


def release():
    """The modules dsa, dsa_layout and dsa_masking; one rank's process group."""
    warnings.filterwarnings("ignore")
    found = distribution("megatron-core")
    FACTS["version"] = found.version
    if not found.locate_file(f"{DSA.replace('.', '/')}/dsa_layout.py").exists():
        print("This release has no packed or context-parallel DSA.")
        finish("UNTESTABLE", "no-api")
    if not torch.cuda.is_available():
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack01 runs it in the lane fake-cuda, without one.")
        finish("UNTESTABLE", "no-device")
    real = bool(torch.version.cuda)
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        if not real:
            from torch.testing._internal.distributed import fake_pg

            store = fake_pg.FakeStore()
        torch.distributed.init_process_group("nccl" if real else "fake", store=store, rank=0, world_size=1)
        sys.excepthook = unexpected  # torch's own, set there, would swallow the traceback
    modules = [importlib.import_module(f"{DSA}.{name}") for name in ("dsa", "dsa_layout", "dsa_masking")]
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if real else "source"
    FACTS.update(file=modules[1].__file__, evidence=gpu)
    return modules


def helpers(dsa, layout, masking):
    """Name -> a call of one helper on cu_seqlens, as dsa.py calls it; without those that the release does not have."""
    local, gpu, calls = layout.build_packed_allgather_cp_local_positions, torch.device("cuda:0"), {}
    pads = "cu_seqlens_cover_output" in inspect.signature(local).parameters  # rows of padding are known of

    def positions(covers):
        more = {"cu_seqlens_cover_output": covers} if pads else {}
        return lambda cu: torch.cat([local(cu, CP, rank, cu.device, output_size=ROWS // CP, **more) for rank in range(CP)])

    for name, (first, _, covers) in LENGTHS.items():
        if pads or (covers and any(first)):
            calls[f"{local.__name__}, {name}"] = positions(covers)
    if hasattr(dsa, "_validate_nonpacked_cp_uniform_length"):
        # A group of one rank: what is asked of the GPU does not depend on how many there are.
        group = torch.distributed.group.WORLD
        calls["_validate_nonpacked_cp_uniform_length"] = lambda cu: dsa._validate_nonpacked_cp_uniform_length(
            8, 8, 1, group, gpu
        )

    # What was first reported, at da482cf5c8, and the bounds that a packed forward computes.
    def scattered(cu):
        mask = torch.full((2, 8, 16), float("-inf"), device=cu.device)
        masking.scatter_topk_into_index_mask(mask, (torch.arange(4, device=cu.device) - 1).expand(2, 8, 4))
        return mask

    def bounds(cu):
        at, none = torch.arange(8, device=cu.device), dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions"))
        for way in {"mask": at.new_zeros(2, 8, 8).float()}, {"varlen_starts": 0 * at, "varlen_ends": at, "key_positions": at}:
            masking.build_fused_indexer_varlen_bounds(sq=8, skv=8, device=cu.device, **{**none, **way})

    calls["scatter_topk_into_index_mask"], calls["build_fused_indexer_varlen_bounds"] = scattered, bounds
    calls["extract_query_positions_from_position_ids"] = lambda cu: layout.extract_query_positions_from_position_ids(
        torch.zeros(2, 8, dtype=torch.int64, device=cu.device), 8, cu.device
    )
    calls["generate_varlen_mask_params_for_positions"] = lambda cu: torch.cat(
        masking.generate_varlen_mask_params_for_positions(cu, torch.arange(24, device=cu.device))
    )
    return calls


def lengths_of(name):
    return LENGTHS.get(name.rpartition(", ")[2], LENGTHS["three and padding"])


def captured(call, lengths=LENGTHS["three and padding"], eager=None):
    """What a CUDA graph of ``call`` is refused for: file, line and code; None where it can be captured and replays as ``eager`` gives."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        cu = torch.tensor(lengths[0], dtype=torch.int32, device="cuda:0")
        call(cu)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=side):
            out = call(cu)
    except Exception as error:  # the driver's refusal comes in several classes
        while error.__context__:  # the first: what follows is of the graph that could not be ended
            error = error.__context__
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in Path(f.filename).parts]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}: "
        return ("" if FACTS["evidence"] == "source" else where) + str(error).partition("\n")[0]
    if out is not None and FACTS["evidence"] != "source":
        cu.copy_(torch.tensor(lengths[1], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        return None if torch.equal(out, (eager or call)(cu)) else "the replay is not what eager gives"
    return None


def main():
    calls = helpers(*release())
    for name, call in {"tensor[0].item()": lambda cu: cu[0].item(), "tensor[tensor > 3]": lambda cu: cu[cu > 3]}.items():
        check("control", f"a graph of {name} is refused", captured(call))
    check("control", "a graph of tensor.cumsum(0) is not", captured(lambda cu: cu.cumsum(0)) is None)
    for name, call in calls.items():
        said = captured(call, lengths_of(name))
        check("trigger", f"{name}: {said or 'captured'}", said is None)
        if said:
            known = "stream is capturing", "CUDA graph capture", "during capture"
            check("signature", f"{name}: it is the graph that is refused", any(words in said for words in known))
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
    main()
