"""The deep check of a fix of pack29: the release's gradient but for its rounding, for bf16 logits the release's bit for bit.

Runs after repro.py on the patched side: labels at the ends of the vocabulary, gradients of every sign, two tensor-parallel ranks, which group is
reduced over, the raw gradient before autograd casts it, and what forward and backward make and keep in memory.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import torch
from repro import FACTS, check, definition, error, finish, inputs, outcome, release
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def as_released():
    """The release's own functions with all that they import: what hides them on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = file.split("/megatron/core/")[0]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(overlay).resolve()]
    importlib.invalidate_caches()
    own = release()
    loaded = [m.__file__ for n, m in sys.modules.items() if n.startswith("megatron.core.") and getattr(m, "__file__", None)]
    assert loaded and not [file for file in loaded if file.startswith(overlay)]
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(hidden)
    FACTS["file"] = file
    return own


class Bytes(TorchDispatchMode):
    """Bytes of what the operations give."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.made += out.nbytes if isinstance(out, torch.Tensor) else 0
        return out


def memory(function, logits, labels, gradient):
    """Bytes made by forward and by backward, and kept in between; whether the logits are; reductions over ranks; the raw gradient's dtype."""
    kept, calls, leaf = [], [], logits.clone().requires_grad_()
    own = torch.distributed.all_reduce

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, **more):
        calls.append(f"{op}, {'of all ranks' if group is None else 'of a group'}")
        return own(tensor, op, group, **more)

    torch.distributed.all_reduce = all_reduce
    given = leaf + 0
    with Bytes() as forward, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        loss = function(given, labels)
    torch.distributed.all_reduce = own
    known = weakref.ref(given)
    del given
    with Bytes() as backward:
        raw = loss.grad_fn.apply(gradient)[0]
    return {
        "forward": forward.made,
        "backward": backward.made,
        "kept": sum(kept),
        "logits are kept": known() is not None,
        "reductions": calls,
        "raw": raw.dtype,
    }


def of_two_ranks():
    """In each of two processes: worst errors against fp64, over the least that the dtype allows, of the loss and of this rank's gradient."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=rank, world_size=2)
    fusion = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    grouped = "tp_group" in inspect.signature(fusion.fused_vocab_parallel_cross_entropy).parameters
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    # Where a group is handed over it is that one which counts, and not the default one.
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1 if grouped else 2)
    (fused, _), found = release(), {}
    for name, dtype in DTYPES.items():
        logits, labels, gradient = inputs(dtype, 16, 3, 1000)
        loss, got = outcome(fused, logits.chunk(2, -1)[rank].contiguous(), labels, gradient)
        right, want = outcome(definition, logits.double(), labels, gradient)
        least = max(error(want.to(dtype), want), 1e-6)
        found[name] = error(loss, right), error(got, want.chunk(2, -1)[rank]) / least
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found))
    torch.distributed.barrier()


def main():
    (fixed, plain), (released, as_was) = release(), as_released()
    for name, dtype in DTYPES.items():
        logits, labels, gradient = inputs(dtype, 16, 3, 1001)
        labels[0], labels[1] = 0, 1000
        cases = {
            "ends of the vocabulary": (logits, labels, gradient),
            "gradients of both signs": (logits, labels, torch.randn_like(gradient)),
            "a gradient of zeros": (logits, labels, torch.zeros_like(gradient)),
            "expanded gradient": (logits, labels, torch.ones(1, 1, device=logits.device).expand_as(gradient)),
            "one token": (logits[:1, :1], labels[:1, :1], gradient[:1, :1]),
            "labels of another rank": (logits, torch.where(labels % 2 == 0, -1, 1001), gradient),
        }
        for what, given in cases.items():
            (loss, got), (same, want) = (outcome(function, *given) for function in (fixed, released))
            check("trigger", f"{name}, {what}: the release's losses, bit for bit", torch.equal(loss, same))
            full = outcome(fixed, given[0].float(), *given[1:])[1]
            check("trigger", f"{name}, {what}: what fp32 logits get, rounded to {name}", torch.equal(got, full.to(dtype)))
            check(
                "trigger",
                f"{name}, {what}: rounded to bf16 the release's, bit for bit",
                torch.equal(full.bfloat16().to(dtype), want),
            )
            if given[2].any() and what != "labels of another rank":
                right = outcome(definition, given[0].double(), *given[1:])[1]
                least = max(error(right.to(dtype), right), 1e-6)
                check("trigger", f"{name}, {what}: as near fp64 as {name} can be", error(got, right) <= 1.5 * least)
        now, was = (memory(function, logits, labels, gradient) for function in (fixed, released))
        FACTS["metrics"][f"{name}: bytes"] = {what: [now[what], was[what]] for what in ("forward", "backward", "kept")}
        for what in ("forward", "backward", "kept"):
            check("trigger", f"{name}: {what} takes no more memory than the release's", now[what] <= was[what])
        check(
            "trigger",
            f"{name}: the logits are kept as little as by the release",
            now["logits are kept"] <= was["logits are kept"],
        )
        check("trigger", f"{name}: the release's reductions, over the same ranks", now["reductions"] == was["reductions"])
        check("trigger", f"{name}: the raw gradient has the logits' dtype", now["raw"] == dtype)
        for smoothing in (0.0, 0.1):
            both = [outcome(lambda *given, f=f, by=smoothing: f(*given, by), logits, labels, gradient) for f in (plain, as_was)]
            same = all(torch.equal(a, b) for a, b in zip(*both, strict=True))
            check("trigger", f"{name}: the unfused one with label smoothing of {smoothing} is the release's, bit for bit", same)
    given = {name: inputs(dtype, 16, 3, 1001) for name, dtype in DTYPES.items()}
    leaves = {name: logits.clone().requires_grad_() for name, (logits, *_) in given.items()}
    losses = {name: fixed(leaf + 0, given[name][1]) for name, leaf in leaves.items()}
    for name, loss in losses.items():
        loss.backward(given[name][2].to(loss.dtype))
        same = torch.equal(leaves[name].grad, outcome(fixed, *given[name])[1])
        check("trigger", f"{name}: the same gradient where other dtypes go forward in between", same)
    right = outcome(definition, *inputs(torch.float32, 16, 3, 1001))[1]
    off = error(outcome(released, *inputs(torch.float32, 16, 3, 1001))[1], right)
    check("control", "as released the gradient of fp32 logits is wrong: what is compared with is the release", off > 1e-4)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.orig_argv[1:], str(Path(folder, "found"))]  # in the lane that this process is in
        ranks = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stdout=subprocess.DEVNULL) for rank in range(2)
        ]
        ended = [process.wait() for process in ranks]
        check("control", "two tensor-parallel ranks ran", ended == [0, 0])
        for rank in range(2) if ended == [0, 0] else ():
            for name, (loss, ratio) in json.loads(Path(folder, f"found.{rank}").read_text()).items():
                check("trigger", f"two ranks, rank {rank}, {name}: losses against fp64", error=loss, limit=1e-5)
                check("trigger", f"two ranks, rank {rank}, {name}: gradient as near fp64 as {name} can be", ratio <= 1.5)
    finish()


if __name__ == "__main__":
    of_two_ranks() if "RANK" in os.environ else main()
