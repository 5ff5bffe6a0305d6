"""The deep check of a fix of pack02: what it admits can be built, what it cannot build stays unfused, and 576/512 is the release's.

Runs after repro.py on the patched side. Without a GPU the kernels of every admitted shape are lowered for sm_90a, and their shared memory has to
be what a block of an H100 can have; with one they run at several numbers of heads and keys.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import torch
from repro import DSA, FACTS, check, device, finish, inputs, judge, launched, release

LIMIT = 232_448  # bytes of shared memory that a block can have on sm_90; CUDA C++ Programming Guide, compute capabilities
ADMITTED = ((128, 64), (192, 128), (320, 256), (576, 512))
#: Total and value channels: too large for shared memory, no powers of two (which the forward asserts), and tails under a tile of 64.
REFUSED = ((640, 512), (768, 512), (1024, 512), (1088, 1024), (160, 96), (208, 128), (80, 64), (144, 128), (128, 80), (64, 64))


def lower(folder, kernel, total, value):
    """A hash of one kernel's source for 64 heads and top-k of 64, and its shared memory in bytes."""
    import tilelang
    from tilelang import tvm

    spec = importlib.util.spec_from_file_location(f"{DSA}.ops.lowered", f"{folder}/tilelang_sparse_mla_{kernel}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = module.sparse_mla_fwd if kernel == "fwd" else module.bwd
    function = built.get_tir(64, value, total - value, 64, 1, 0.1)
    passes = {getattr(key, "value", key): setting for key, setting in (built.pass_configs or {}).items()}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        artifact = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    shared = [
        f.attrs["dyn_shared_memory_buf"] for f in artifact.device_mod.functions.values() if "dyn_shared_memory_buf" in f.attrs
    ]
    return {"sha256": hashlib.sha256(artifact.kernel_source.encode()).hexdigest(), "shared": max(map(int, shared))}


def in_its_own_process(job):
    done = subprocess.run([sys.executable, __file__, *map(str, job)], capture_output=True, text=True)
    said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": said[:200]}


def main():
    dispatcher = release()
    if device == "cuda":
        for total, value in ADMITTED:
            for sizes in (
                {"heads": 8},
                {"heads": 16},
                {"heads": 128},
                {"S": 300, "topk": 128, "B": 1},
                {"S": 2048, "B": 1, "topk": 1024},
            ):
                judge(dispatcher, "control" if total == 576 else "trigger", total, value, **sizes)
    else:
        for heads in (8, 16, 128):
            for total, value in ADMITTED:
                judge(dispatcher, "trigger", total, value, heads=heads)
    for total, value in REFUSED:
        launched.clear()
        query, key, indices = inputs(total)
        out = dispatcher.fused_sparse_mla_absorbed(query, key, indices, total**-0.5, value)
        check("trigger", f"{total} channels, {value} of value: stays unfused", out is None and not launched)
    if device == "cpu":
        here = Path(FACTS["file"]).parent
        there = distribution("megatron-core").locate_file(f"{DSA.replace('.', '/')}/ops")
        jobs = {
            (f"{total}/{value}", kernel): (here, kernel, total, value) for total, value in ADMITTED for kernel in ("fwd", "bwd")
        }
        jobs |= {("as released", kernel): (there, kernel, 576, 512) for kernel in ("fwd", "bwd")}
        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(jobs, pool.map(in_its_own_process, jobs.values()), strict=True))
        FACTS["metrics"]["shared memory, bytes"] = {" ".join(job): what.get("shared") for job, what in found.items()}
        for (shape, kernel), what in found.items():
            role, fits = "control" if shape == "as released" else "trigger", what.get("shared", LIMIT + 1) <= LIMIT
            detail = what.get("error") or f"{what['shared']:,} bytes of shared memory, {LIMIT:,} at most"
            check(role, f"{shape}, {kernel}: lowered for sm_90a, {detail}", fits)
        same = all(found["576/512", kernel] == found["as released", kernel] for kernel in ("fwd", "bwd"))
        check("trigger", "576/512: the kernels' source and shared memory are the release's", same)
    else:
        torch.cuda.synchronize()
    finish()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(lower(*sys.argv[1:3], *map(int, sys.argv[3:5]))))
    else:
        main()
