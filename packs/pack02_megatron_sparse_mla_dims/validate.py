"""The deep check of a fix of pack02: what it admits can be built, what it cannot build stays unfused, and 576/512 is the release's.

Runs after repro.py on the patched side. Without a GPU the kernels of every admitted shape are lowered for sm_90a, and their shared memory has to
be what a block of an H100 can have; with one they run at several numbers of heads and keys.
"""

import hashlib
import importlib
import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import torch
from repro import CHECKS, DSA, FACTS, SCALE, check, device, finish, inputs, judge, launched, mark, release

LIMIT = 232_448  # bytes of shared memory that a block can have on sm_90; CUDA C++ Programming Guide, compute capabilities
ADMITTED = ((128, 64), (192, 128), (320, 256), (576, 512))
#: Total and value channels: too large for shared memory, no powers of two (which the forward asserts), and tails other than MLA's.
REFUSED = (
    (640, 512),
    (768, 512),
    (1024, 512),
    (1088, 1024),
    (160, 96),
    (208, 128),
    (80, 64),
    (256, 192),
    (128, 80),
    (64, 64),
    (256, 128),
)
KERNELS = {"forward": "sparse_mla_fwd", "backward": "bwd", "delta": "preprocess", "dkv": "postprocess"}


@cache
def module(path):
    """A file of the release's kernels, as part of their package."""
    spec = importlib.util.spec_from_file_location(f"{DSA}.ops.lowered", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def lower(folder, total, value, kernel):
    """Of a kernel for 64 heads and top-k of 2048: a hash of its source, and its shared memory in bytes."""
    import tilelang
    from tilelang import tvm

    sizes = {"delta": (64, value), "dkv": (value, total - value, 1)}.get(kernel, (64, value, total - value, 2048, 1, 0.1))
    built = getattr(module(f"{folder}/tilelang_sparse_mla_{'fwd' if kernel == 'forward' else 'bwd'}.py"), KERNELS[kernel])
    passes = {getattr(key, "value", key): setting for key, setting in (built.pass_configs or {}).items()}
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    function = built.get_tir(*sizes)
    with tvm.transform.PassContext(opt_level=3, config=passes), target:
        artifact = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    attributes = [f.attrs for f in artifact.device_mod.functions.values()]
    shared = [int(a["dyn_shared_memory_buf"]) for a in attributes if "dyn_shared_memory_buf" in a]
    return {"sha256": hashlib.sha256(artifact.kernel_source.encode()).hexdigest(), "shared": max(shared, default=0)}


def of_process(jobs):
    """What ``lower`` gives for each of them, in a process of its own; an error is its last line."""
    done = subprocess.run([sys.executable, __file__, json.dumps(jobs)], capture_output=True, text=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ended = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]
    return said + [{"error": ended}] * (len(jobs) - len(said))


def refused(dispatcher, name, query, key, indices, value):
    launched.clear()
    out = dispatcher.fused_sparse_mla_absorbed(query, key, indices, SCALE, value)
    check("trigger", f"{name}: stays unfused", out is None and not launched)


def admitted_on(limit, dispatcher, total, value):
    """Whether a shape is fused on a device whose blocks can have so much shared memory: CPU tensors that say they are there, and its properties replaced."""
    query, key, indices = inputs(total)

    def properties(which=None):
        asked = which in (query.device, query.get_device())
        return SimpleNamespace(shared_memory_per_block_optin=limit if asked else 0)

    known, torch.cuda.get_device_properties = torch.cuda.get_device_properties, properties
    torch.Tensor.is_cuda = True
    out = dispatcher.fused_sparse_mla_absorbed(query, key, indices, SCALE, value)
    torch.cuda.get_device_properties = known
    del torch.Tensor.is_cuda
    return out is not None


def arrives(dispatcher, shapes, rows, **sizes):
    """Whether kernels are built for each shape, and outputs and gradients are what their replaced launches give; all shapes go forward first.

    They have nothing of what the kernels' inputs are padded with, and are zero where a row has no key.
    """
    launched.clear()
    given = [inputs(total, rows=rows, **sizes) for total, _ in shapes]
    outs = [dispatcher.fused_sparse_mla_absorbed(*each, SCALE, value) for each, (_, value) in zip(given, shapes, strict=True)]
    if any(out is None for out in outs):
        return False
    for out in outs:
        out.backward(torch.randn_like(out))
    heads = max(given[0][0].shape[2], 16)
    sizes = [(heads, value, total - value, 64, 1, SCALE) for total, value in shapes]
    forward = [("forward", *each) for each in sizes]
    backward = [row for n in sizes for row in (("forward", *n), ("backward", *n), ("delta", *n[:2]), ("dkv", *n[1:3], 1))]
    found = [launched[: len(shapes)] == forward, sorted(launched[len(shapes) :]) == sorted(backward)]
    for (query, key, _), out, (total, value) in zip(given, outs, shapes, strict=True):
        for got, n, width in ((out, heads, value), (query.grad, heads, total), (key.grad, 1, total)):
            want = mark(got.shape[1], -(-len(got) // 256) * 256, n, width)[:, : len(got), : got.shape[2]].transpose(0, 1)
            want[5] *= n == 1
            found.append(torch.equal(got, want))
    return all(found)


def four_arguments(total, value):
    """Whether SparseMLA.apply can be called as in the release: [B, S, heads, total] bf16, int32 indices [B, S, 1, topk], and the scale."""
    query, key, indices = inputs(total)
    sparse_mla = importlib.import_module(f"{DSA}.ops.sparse_mla").SparseMLA
    launched.clear()
    query, key = (t.detach().transpose(0, 1).contiguous().requires_grad_() for t in (query, key))
    out = sparse_mla.apply(query, key, indices[:, :, None].int().contiguous(), SCALE)[0]
    out.sum().backward()
    built = {row[2:4] for row in launched if row[0] in ("forward", "backward")}
    return out.shape[-1] == value and built == {(value, total - value)} and query.grad is not None


def main():
    dispatcher = release()
    if device == "cuda":
        # each size is compiled: half a minute
        for total, value in ADMITTED:
            judge(dispatcher, "control" if total == 576 else "trigger", total, value, heads=8, S=300, B=1, topk=128)
        judge(dispatcher, "trigger", 192, 128, heads=128, S=2048, B=1, topk=1024)
        judge(dispatcher, "trigger", 192, 128, heads=8, S=300, B=1, topk=128, rows=100)
    else:
        for heads in (8, 16, 128):
            for total, value in ADMITTED:
                for rows in (256, 100) if heads < 16 else (100,):
                    said = f"{total} channels, {value} of value, {heads} heads, {rows} rows: the kernels are its, and what they give arrives"
                    check("trigger", said, arrives(dispatcher, [(total, value)], rows, heads=heads))
        said = "all shapes forward, then all backward: the kernels are theirs, and what they give arrives"
        check("trigger", said, arrives(dispatcher, ADMITTED, 256, heads=16))
        check("trigger", "SparseMLA.apply without a number of value channels has 512 of 576", four_arguments(576, 512))
    for total, value in REFUSED:
        refused(dispatcher, f"{total} channels, {value} of value", *inputs(total), value)
    for total, value in ((192, 128), (576, 512)):
        name = f"{total} channels, {value} of value"
        for heads in (24, 48, 192):
            refused(dispatcher, f"{name}, {heads} heads", *inputs(total, heads=heads), value)
        for topk in (32, 96):
            refused(dispatcher, f"{name}, top-k of {topk}", *inputs(total, topk=topk), value)
        query, key, indices = inputs(total)
        refused(dispatcher, f"{name}, fp16", query.half(), key.half(), indices, value)
        refused(dispatcher, f"{name}, two groups of keys", query, key.expand(-1, -1, 2, -1), indices, value)
    if device == "cpu":
        here = Path(FACTS["file"]).parent
        there = distribution("megatron-core").locate_file(f"{DSA.replace('.', '/')}/ops")
        shapes = {f"{total}/{value}": (str(here), total, value) for total, value in ADMITTED}
        shapes["as released"] = str(there), 576, 512
        jobs = {(shape, kernel): (*given, kernel) for shape, given in shapes.items() for kernel in KERNELS}
        names, given, found = [*jobs], [*jobs.values()], {}
        with ThreadPoolExecutor(2) as pool:
            halves = pool.map(of_process, (given[::2], given[1::2]))
            for part, half in zip((names[::2], names[1::2]), halves, strict=True):
                found |= zip(part, half, strict=True)
        FACTS["metrics"]["shared memory, bytes"] = {" ".join(job): what.get("shared") for job, what in found.items()}
        for (shape, kernel), what in found.items():
            role, fits = "control" if shape == "as released" else "trigger", what.get("shared", LIMIT + 1) <= LIMIT
            detail = what.get("error") or f"{what['shared']:,} bytes of shared memory, {LIMIT:,} at most"
            check(role, f"{shape}, {kernel}: lowered for sm_90a, {detail}", fits)
        same = all(found["576/512", kernel] == found["as released", kernel] for kernel in KERNELS)
        check("trigger", "576/512: the kernels' source and shared memory are the release's", same)
        for total, value in ADMITTED:
            needed = found[f"{total}/{value}", "forward"].get("shared", LIMIT)
            devices = {
                "an RTX 4090": 101_376,
                "an A100": 166_912,
                "an H100": LIMIT,
                "a byte less than the forward needs": needed - 1,
            }
            for name, limit in devices.items():
                fused = needed <= limit or total == 576  # which the release admits unasked
                said = f"{total}/{value}: {'fused' if fused else 'unfused'} with {limit:,} bytes, {name}"
                check("trigger", said, admitted_on(limit, dispatcher, total, value) == fused)
    else:
        torch.cuda.synchronize()
        found = [(row["role"], row["error"] or float("nan")) for row in CHECKS if "error" in row]
        trigger, control = (
            torch.tensor([error for role, error in found if role == name]).max() for name in ("trigger", "control")
        )
        check("trigger", f"errors of {trigger:.1e} at most, not twice those of 576/512", bool(trigger <= 2 * control))
    finish()


if __name__ == "__main__":
    if sys.argv[1:]:
        for job in json.loads(sys.argv[1]):
            try:
                print(json.dumps(lower(*job)), flush=True)
            except Exception as error:
                print(json.dumps({"error": (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]}), flush=True)
    else:
        main()
