# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: helpers of DeepSeek sparse attention wait for the GPU, so a CUDA graph cannot be captured around them.

A boolean index, .item(), torch.equal and `if tensor.any()` ask the GPU for a value. Eagerly that costs time; while a stream is captured it is
an error. Without a GPU each helper runs on fake CUDA tensors, and each operation that would wait is found, with its line, on every branch;
with a GPU torch.cuda.graph captures it, replays it with other inputs, and the replay is compared with eager.
Exits 10 (BUG_REPRODUCED: a helper cannot be captured), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import ctypes
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import sys
import traceback
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options = parser.parse_args()

DSA = "megatron.core.transformer.experimental_attention_variant"
aten = torch.ops.aten
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
on_gpu = torch.cuda.is_available()
facts = {"reproducer": 1, "comparisons": [], "claims": [], "metrics": {"waits": {}}}
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "source"
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds):
    facts["comparisons"].append({"role": role, "name": name, "holds": bool(holds)})
    print(f"{role:<8} {name:<108} {bool(holds)}")


class Waits(TorchDispatchMode):
    """Finds what would wait for the GPU in operations on fake CUDA tensors, and answers in its place, as ``answers`` say.

    Values: True or False from ``answers``, in turn, and True beyond them; a whole number is ``number``. Sizes: as if all were kept.
    """

    def __init__(self, answers, number):
        super().__init__()
        self.answers, self.number, self.asked, self.found = answers, number, 0, []

    def boolean(self):
        self.asked += 1
        return self.answers[self.asked - 1] if self.asked <= len(self.answers) else True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, places = op.overloadpacket, [a.device.type for a in args if isinstance(a, torch.Tensor)]
        if "cuda" in places:
            if name is aten._local_scalar_dense:
                self.note(".item()")
                return self.boolean() if args[0].dtype == torch.bool else self.number
            if name is aten.equal:
                self.note("torch.equal")
                return self.boolean()
            if name is aten.nonzero:
                self.note("boolean index")
                return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
            if name is aten.index and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                self.note("boolean index")
                return args[0].clone()
            if name is aten.repeat_interleave and op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
                self.note("repeat_interleave without output_size")
                return args[0].new_zeros(self.number)
        if name is aten._to_copy and kwargs.get("device") and not kwargs.get("non_blocking"):
            places.append(torch.device(kwargs["device"]).type)
        if name in (aten._to_copy, aten.copy_) and set(places) == {"cpu", "cuda"}:
            self.note("copy between CPU and GPU")
        return op(*args, **kwargs)

    def note(self, what):
        frames = [f for f in traceback.extract_stack() if "experimental_attention_variant" in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "here"
        self.found.append((what, where, frames[-1].line if frames else ""))


def fake_cuda():
    """A FakeTensorMode whose CUDA tensors can be indexed on a machine with no CUDA in its torch.

    Indexing asks for a device guard, which only a CUDA build registers: the CPU's, which does nothing, stands in for it.
    """
    if not torch.version.cuda:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        registry = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        registry[1] = registry[0]
    return FakeTensorMode()


def waits(call, number):
    """What would wait, over all branches: each answer of a question is tried with True and with False."""
    found, todo, problem = {}, [[]], None
    capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    while todo:
        answers = todo.pop()
        with fake_cuda(), Waits(answers, number) as watch:
            try:
                call("cuda:0")
            except Exception as error:  # what only a wrong answer of ours can lead to is said, and not hidden
                problem = f"{type(error).__name__}: {error}"
        found |= {(what, where): line for what, where, line in watch.found}
        if len(answers) < watch.asked <= 12:
            todo += [[*answers, *[True] * (i - len(answers)), False] for i in range(len(answers), watch.asked)]
    torch.cuda.is_current_stream_capturing = capturing
    return [{"what": what, "where": where, "line": line} for (what, where), line in sorted(found.items())], problem


def captured(call):
    """Why a CUDA graph of ``call`` cannot be captured, or None and the graph with its outputs."""
    call("cuda:0")
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        with torch.cuda.graph(graph, stream=side):
            out = call("cuda:0")
    except Exception as error:  # the driver's refusal comes in several classes
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}", None, None
    return None, graph, out


warnings.filterwarnings("ignore")
release = distribution("megatron-core")
facts["version"] = release.version
try:
    there = importlib.util.find_spec(f"{DSA}.dsa_layout")
except ModuleNotFoundError:
    there = None
if there is None:
    print("This release has no packed or context-parallel DSA.")
    finish("UNTESTABLE", "no-api")
layout, masking = (importlib.import_module(f"{DSA}.{name}") for name in ("dsa_layout", "dsa_masking"))
facts["file"] = layout.__file__
print(f"megatron-core {release.version}, torch {torch.__version__}, {facts['evidence']}")

# Sequences of 16, 0 and 32 rows (zigzag CP has each a multiple of 2 * cp_size), then rows of padding, where that is supported.
CP, LENGTHS = 2, [[0, 16, 16, 48], [0, 32, 40, 48]]
PADDED = "cu_seqlens_cover_output" in inspect.signature(layout.build_packed_allgather_cp_local_positions).parameters
ROWS = 64 if PADDED else 48


CU = torch.tensor(LENGTHS[0], device="cuda") if on_gpu else None  # a graph is replayed on it


def given(device):
    if device == "cpu":
        return torch.tensor(LENGTHS[0])
    return CU if on_gpu else torch.empty(4, dtype=torch.int64, device=device)


def positions(device, cu=None, rank=1, rows=ROWS):
    return layout.build_packed_allgather_cp_local_positions(
        given(device) if cu is None else cu, CP, rank, torch.device(device), output_size=rows // CP
    )


def bounds(device, cu=None):
    takes = inspect.signature(masking.generate_varlen_mask_params).parameters
    known = {"seq_len": 48} if "seq_len" in takes else {}
    return torch.cat(masking.generate_varlen_mask_params(given(device) if cu is None else cu, **known))


def of_positions(device, cu=None):
    query = torch.arange(24, device=device)
    return torch.cat(masking.generate_varlen_mask_params_for_positions(given(device) if cu is None else cu, query))


def from_ids(device, cu=None):
    ids = torch.zeros(2, 8, dtype=torch.int64, device=device)
    return layout.extract_query_positions_from_position_ids(ids, 8, torch.device(device))


def scatter(device, cu=None):
    mask = torch.full((2, 8, 16), float("-inf"), device=device)
    index = torch.arange(-1, 3, device=device).expand(2, 8, 4)
    masking.scatter_topk_into_index_mask(mask, index)
    return mask


def fused_bounds(device, cu=None):
    rows = torch.arange(8, device=device)
    ways = (
        {"mask": torch.zeros(2, 8, 8, device=device)},
        {"varlen_starts": 0 * rows, "varlen_ends": rows, "key_positions": rows},
    )
    none = dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions"))
    found = [
        masking.build_fused_indexer_varlen_bounds(sq=8, skv=8, device=torch.device(device), **{**none, **way}) for way in ways
    ]
    return torch.cat([bound for pair in found for bound in pair or ()] or [rows])


HELPERS = {
    "build_packed_allgather_cp_local_positions": positions,
    "generate_varlen_mask_params": bounds,
    "generate_varlen_mask_params_for_positions": of_positions,
    "extract_query_positions_from_position_ids": from_ids,
    "scatter_topk_into_index_mask": scatter,
    "build_fused_indexer_varlen_bounds": fused_bounds,
}


def detector():
    """It finds what it must, and nothing where nothing waits."""
    x = lambda d: torch.arange(8, device=d)  # noqa: E731
    waiting = {
        ".item()": lambda d: x(d)[0].item(),
        "torch.equal": lambda d: torch.equal(x(d), x(d)),
        "boolean index": lambda d: x(d)[x(d) > 3],
        "repeat_interleave without output_size": lambda d: torch.repeat_interleave(x(d), x(d)),
        "copy between CPU and GPU": lambda d: torch.arange(8).to(d),
    }
    free = lambda d: x(d)[x(d)].clamp_min(1).cumsum(0) + torch.repeat_interleave(x(d), x(d), output_size=28).sum()  # noqa: E731
    found = {name: [w["what"] for w in waits(call, 8)[0]] for name, call in waiting.items()}
    return all(what == [name] for name, what in found.items()) and waits(free, 8) == ([], None)


if not on_gpu:
    state(
        "control",
        "the detector finds .item(), torch.equal, boolean index, repeat_interleave, copies; and nothing else",
        detector(),
    )
modules = {name: layout if hasattr(layout, name) else masking for name in HELPERS}
checked = [name for name in HELPERS if hasattr(modules[name], name)]
for name in checked:
    call = HELPERS[name]
    if on_gpu:
        refused, graph, out = captured(call)
        metrics["waits"][name] = refused
        state("trigger", f"{name}: a CUDA graph cannot be captured{f': {refused}' if refused else ''}", refused)
        if graph is not None:
            CU.copy_(torch.tensor(LENGTHS[1]))
            graph.replay()
            torch.cuda.synchronize()
            eager = call("cuda:0")
            state("control", f"{name}: replayed with other inputs, bitwise equal to eager", torch.equal(out, eager))
            CU.copy_(torch.tensor(LENGTHS[0]))
        continue
    found, problem = waits(call, 48)
    metrics["waits"][name] = found
    for one in found:
        print(f"         {one['where']}: {one['what']}: {one['line']}")
    state("trigger", f"{name}: {len(found)} operation(s) wait for the GPU", found)
    if problem:
        print(f"         ended by {problem}")

if (name := "build_packed_allgather_cp_local_positions") in checked:

    def zigzag(lengths, rank, rows):
        """The rows of a rank, by definition: chunk ``rank`` and its mirror of each sequence; then padding, after all of them."""
        found = []
        for start, end in itertools.pairwise(lengths):
            half = (end - start) // CP // 2
            found += [
                *range(start + rank * half, start + (rank + 1) * half),
                *range(end - (rank + 1) * half, end - rank * half),
            ]
        return found + [lengths[-1] + rank * (rows // CP) + i for i in range(rows // CP - len(found))]

    torch.manual_seed(0)
    right = 0
    for _ in range(200):
        lengths = [0, *(4 * torch.randint(0, 5, (4,))).cumsum(0).tolist()]
        rows = 80 if PADDED else lengths[-1]
        device = "cuda" if on_gpu else "cpu"
        got = [positions(device, torch.tensor(lengths, device=device), rank, rows).tolist() for rank in range(CP)]
        right += lengths[-1] == 0 or got == [zigzag(lengths, rank, rows) for rank in range(CP)]
    state(
        "control",
        f"{name}: rows as defined, for 200 cu_seqlens, with empty sequences{' and padding' if PADDED else ''}",
        right == 200,
    )
    try:
        positions("cpu", torch.tensor([0, 6]))
        refuses = False
    except ValueError:
        refuses = True
    state("control", f"{name}: outside of capture it still refuses lengths that cannot be split", refuses)
if (name := "scatter_topk_into_index_mask") in checked:

    def cleared(mask, index):
        """The branchless form first proposed: clamp, scatter, and slot 0 put back to -inf where only a clamped index hit it."""
        mask.scatter_(-1, index.clamp_min(0), 0.0)
        only_clamped = (index < 0).any(-1) & ~(index == 0).any(-1)
        mask[..., 0] = torch.where(only_clamped, float("-inf"), mask[..., 0])

    def defined(mask, index):
        for row, keys in zip(mask.flatten(0, 1), index.flatten(0, 1), strict=True):
            row[keys[keys >= 0]] = 0.0

    forms = {"as it is here": masking.scatter_topk_into_index_mask, "clamp, scatter, put slot 0 back": cleared}
    for what, fill in (
        ("-inf", lambda: torch.full((2, 4, 8), float("-inf"))),
        ("additive, <= 0", lambda: -torch.rand(2, 4, 8)),
    ):
        for form, function in forms.items():
            right = 0
            for _ in range(300):
                mask, index = fill(), torch.randint(-2, 8, (2, 4, 3))
                got, want = mask.clone(), mask.clone()
                function(got, index)
                defined(want, index)
                right += torch.equal(got, want)
            role = "control" if form == "as it is here" else "note"
            state(role, f"{name}, {form}, mask {what}: as defined in {right} of 300", right == 300)
if (name := "extract_query_positions_from_position_ids") in checked:
    try:
        layout.extract_query_positions_from_position_ids(torch.tensor([[0, 1], [1, 0]]), 2, torch.device("cpu"))
        refuses = False
    except AssertionError:
        refuses = True
    state("control", f"{name}: outside of capture it still refuses ids that differ", refuses)
if bad := [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]]:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
