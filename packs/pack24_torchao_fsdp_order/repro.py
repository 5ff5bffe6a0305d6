# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.26", "torch==2.13.0", "torchao==0.18.0"]
# ///
"""torchao: Float8Linear's FP8 all-gather is lost in silence by load_state_dict(assign=True), and its precomputed scales go stale.

convert_to_float8_training wraps each weight in a subclass, through which FSDP2 gathers FP8 in place of the weight's dtype. The order that keeps it is convert,
fully_shard, load; other orders are tried too, each loud or silent, with the bytes that they gather.

Two ranks run the release's own code: NCCL on two GPUs, or gloo on a CPU; four Linear(256, 256), fp32. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", metavar="FILE", help=argparse.SUPPRESS)
options = parser.parse_args()
SIZE, LAYERS, ROWS = 256, 4, 32
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
on_gpus = torch.cuda.device_count() > 1
device, backend = ("cuda", "nccl") if on_gpus else ("cpu", "gloo")
evidence = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpus else "source"
facts = {"reproducer": 1, "evidence": evidence, "comparisons": [], "metrics": {}}
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds):
    facts["comparisons"].append({"role": role, "name": name, "holds": bool(holds)})
    print(f"{role:<8} {name:<112} {bool(holds)}", flush=True)


class Gather:
    """FSDP2's all-gather, its bytes counted; FP8, which gloo does not know, as uint8."""

    bytes = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        Gather.bytes += output_tensor.nbytes
        if output_tensor.element_size() == 1:
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def layers(device=device):
    torch.manual_seed(0)
    with torch.device(device):
        return torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)])


def shard(model):
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    for part in model:
        part.set_custom_all_gather(Gather())


def step(model, before=lambda model: None):
    """Output, bytes gathered and all-reduces of ``before``, a forward and a backward."""
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(ROWS, SIZE, device=device)
    Gather.bytes = 0
    with CommDebugMode() as comms:
        before(model)
        y = model(x)
        y.square().mean().backward()
    counts = {str(op).split(".")[-1]: n for op, n in comms.get_comm_counts().items()}
    return y.detach(), {
        "bytes": Gather.bytes,
        "all_reduce": sum(n for op, n in counts.items() if "all_reduce" in op or "allreduce" in op),
    }


def float8(**how):
    return ao.Float8LinearConfig(**{"enable_fsdp_float8_all_gather": True, **how})


def usual(**how):
    model = layers()
    ao.convert_to_float8_training(model, config=float8(**how))
    shard(model)
    return model


def loaded(assign):
    """As from a checkpoint: made on meta, converted, sharded, then given its weights."""
    weights = layers().state_dict()
    model = layers("meta")
    ao.convert_to_float8_training(model, config=float8())
    shard(model)
    if not assign:
        model.to_empty(device=device)
    model.load_state_dict(
        {n: distribute_tensor(w, mesh, [torch.distributed.tensor.Shard(0)]) for n, w in weights.items()}, assign=assign
    )
    return model


def right(factor=1.0):
    """The layers in fp32, to compare with."""
    model = layers()
    torch.manual_seed(1 + dist.get_rank())
    for part in model:
        part.weight.data.mul_(factor)
    return model(torch.randn(ROWS, SIZE, device=device)).detach()


def error(y, factor=1.0):
    want = right(factor)
    return ((y - want).norm() / want.norm()).item()


def attempt(name, make, use=step):
    try:
        model = make()
        y, found = use(model)
        found["error"] = error(y)
        found["subclass"] = type(model[0].weight._local_tensor).__name__
    except Exception as wrong:  # what it raises is the finding
        found = {"raises": f"{type(wrong).__name__}: {str(wrong).splitlines()[0]}"[:160]}
    cases[name] = found


def scaled(model, again):
    """Precomputed scales, then weights eight times as large, and scales precomputed again or not."""
    ao.precompute_float8_dynamic_scale_for_fsdp(model)
    with torch.no_grad():
        for part in model:
            part.weight._local_tensor._tensor.mul_(8)
    if again:
        ao.precompute_float8_dynamic_scale_for_fsdp(model)
    y, found = step(model)
    return {**found, "error": error(y, 8.0)}


def late():
    model = layers()
    shard(model)
    ao.convert_to_float8_training(model, config=float8())
    return model


def precomputed(model):
    return step(model, ao.precompute_float8_dynamic_scale_for_fsdp)


warnings.filterwarnings("ignore")
release = distribution("torchao")
facts["version"] = release.version
if not Path(release.locate_file("torchao/float8/fsdp_utils.py")).exists():
    print("This release has no Float8Linear.")
    finish("UNTESTABLE", "no-api")
ao = importlib.import_module("torchao.float8")
facts["file"] = importlib.import_module("torchao.float8.fsdp_utils").__file__
if options.ranks:
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    mesh = torch.distributed.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    cases = {}
    attempt("convert, shard", usual)
    attempt("convert, shard, precompute", usual, precomputed)
    attempt("convert without FP8 all-gather, shard", lambda: usual(enable_fsdp_float8_all_gather=False))
    attempt("shard, convert", late)
    attempt("meta, convert, shard, load", lambda: loaded(False))
    attempt("meta, convert, shard, load with assign", lambda: loaded(True))
    for name, again in (("scales precomputed again", True), ("scales gone stale", False)):
        cases[name] = scaled(usual(), again)
    compiled = layers()
    compiled[0].compile(backend="eager")
    ao.convert_to_float8_training(compiled, config=float8())
    cases["compile, convert"] = {"compiled": compiled[0]._compiled_call_impl is not None}
    Path(f"{options.ranks}.{dist.get_rank()}").write_text(json.dumps(cases))
    dist.destroy_process_group()
    sys.exit()
print(
    f"torchao {release.version}, torch {torch.__version__}, {facts['evidence']}, two {backend} ranks, {LAYERS} Linear({SIZE}, {SIZE})"
)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "found")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*run, __file__, "--ranks", str(file)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    cases = metrics["cases"] = json.loads(Path(f"{file}.0").read_text())
for name, found in cases.items():
    print(
        f"         {name}: "
        + ", ".join(f"{key} {value:.2g}" if key == "error" else f"{key} {value}" for key, value in found.items())
    )
full, fp8 = 2 * LAYERS * SIZE * SIZE * 4, 2 * LAYERS * SIZE * SIZE  # gathered in forward and backward
usual_order, stale = cases["convert, shard"], cases["scales gone stale"]
state("control", f"convert, shard gathers {fp8} bytes of FP8", usual_order.get("bytes") == fp8)
state("control", "convert, shard gives what fp32 gives, within 0.15", usual_order.get("error", 1) < 0.15)
state(
    "control",
    f"without FP8 all-gather {full} bytes are gathered",
    cases["convert without FP8 all-gather, shard"].get("bytes") == full,
)
state("control", "loading without assign gathers FP8", cases["meta, convert, shard, load"].get("bytes") == fp8)
state("control", "scales precomputed again are right", cases["scales precomputed again"]["error"] < 0.15)
assigned = cases["meta, convert, shard, load with assign"]
if "raises" in assigned:
    finish("CHANGED", assigned["raises"])
quick = cases["convert, shard, precompute"]
state("control", "scales that are precomputed take fewer all-reduces", quick["all_reduce"] < usual_order["all_reduce"])
state("trigger", f"loading with assign gathers {assigned['bytes']} bytes, and says nothing", assigned["bytes"] != fp8)
state(
    "trigger", f"weights times 8, scales of before: output off by {stale['error']:.2g}, and says nothing", stale["error"] > 0.15
)
bad = [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]]
if bad:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
