# /// script
# requires-python = ">=3.10"
# dependencies = ["apache-tvm-ffi==0.1.12", "einops", "megatron-core==0.19.2", "numpy>=1.26,<3", "onnx", "onnxscript", "packaging", "pydantic", "tilelang==0.1.15", "torch==2.13.0", "transformer-engine==2.20.2", "triton==3.7.1", "z3-solver==4.15.4.0"]
# ///
"""transformer-engine: an FP8 tensor says that it is bf16 and that its data is at 0; SparseMLA of megatron-core believes it.

Its dispatcher passes Float8Tensors through the gate for bf16, and permute dequantizes them in silence. SparseMLA called directly with more than one batch hands a
kernel the wrapper itself, whose pointer is 0. The wrapper's contract is tried call by call.

The release's own tensor classes and megatron-core's own dispatcher run. Without a GPU launches are replaced, and the lane te-cpu stands in for the compiled
libraries, of which only the values of dequantize matter here, which nothing is made of. With --audit MODULE:FUNCTION a function of yours is given FP8 tensors, and
what dequantizes them, or takes their pointer, is listed. Exits 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import inspect
import io
import json
import linecache
import os
import subprocess
import sys
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--fp8", action="store_true", help="also error, time and bytes of FP8 and bf16 (needs a GPU and the fix)")
parser.add_argument("--audit", metavar="MODULE:FUNCTION", help="list what a function does to FP8 tensors")
parser.add_argument(
    "--shapes", default="128x128", metavar="SxH,…", help="of the function's arguments (default: 128x128 for each)"
)
parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
options = parser.parse_args()
DSA = "megatron.core.transformer.experimental_attention_variant"
S, TOPK, TOTAL, VALUE = 256, 64, 576, 512  # 256 rows are a bucket of SparseMLA: fewer are padded, which dequantizes
on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
device, H = ("cuda", 64) if on_gpu else ("cpu", 16)  # heads
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "comparisons": [], "metrics": {}}
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "source"
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<100} {measured.get('error', holds)}", flush=True)


def fp8(values, dtype=torch.bfloat16, requires_grad=False):
    """A Float8Tensor of e4m3 with one scale, made of its parts: bytes, and the scale's inverse."""
    scale_inv = (values.float().abs().max() / 448).reshape(1)
    data = (values.float() / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
    parts = {"data": data, "fp8_scale_inv": scale_inv, "fp8_dtype": tex.DType.kFloat8E4M3, "dtype": dtype}
    shape = {"shape": data.shape} if hasattr(tensors, "Float8Quantizer") else {}  # from 2.0
    return Float8Tensor(**shape, **parts).requires_grad_(requires_grad)


class Watched:
    """While it is entered: where FP8 tensors are dequantized, and where the pointer of one is taken."""

    has_warned = False  # once is enough

    def __enter__(self):
        self.dequantized, self.pointers, self.warned = [], [], warnings.catch_warnings(record=True)
        self.kept = {(owner, name): getattr(owner, name) for owner, name in self.watched()}
        for (owner, name), method in self.kept.items():
            setattr(owner, name, self.noting(method, self.dequantized if name == "dequantize" else self.pointers))
        self.warnings = self.warned.__enter__()
        warnings.simplefilter("always")
        return self

    def watched(self):
        return (Float8Tensor, "dequantize"), (torch.Tensor, "data_ptr"), (torch.Tensor, "__dlpack__")

    def noting(self, method, places):
        inside = []

        def noted(tensor, *given, **named):
            if isinstance(tensor, QuantizedTensor) and not inside:
                places.append(caller())
            inside.append(1)
            try:
                return method(tensor, *given, **named)
            finally:
                inside.pop()

        return noted

    def __exit__(self, *error):
        self.warned.__exit__(*error)
        for (owner, name), method in self.kept.items():
            setattr(owner, name, method)

    @property
    def in_silence(self):
        Watched.has_warned |= any("dequantizes" in str(w.message) for w in self.warnings)
        return 0 if Watched.has_warned else len(self.dequantized)


def caller():
    """The line outside of torch, transformer-engine and this script that a call comes from, and the operator that it is."""
    operator, found = "", sys._getframe()
    while found := found.f_back:
        code = found.f_code
        if code.co_name == "__torch_dispatch__":
            operator = f" ({found.f_locals.get('func')})"
        away = ("/torch/", "/transformer_engine/", "/lanes/", "runpy", __file__)
        if not any(part in code.co_filename for part in away) and not code.co_filename.startswith("<"):
            return f"{Path(code.co_filename).name}:{found.f_lineno} {linecache.getline(code.co_filename, found.f_lineno).strip()}{operator}"
    return f"this script{operator}"


def kind(result):
    """What a call gives: wrapped or plain, and its pointer."""
    result = result[0] if isinstance(result, (tuple, list)) else result
    what = "wrapped" if isinstance(result, QuantizedTensor) else f"plain {str(result.dtype).removeprefix('torch.')}"
    return f"{what}, pointer 0" if result.data_ptr() == 0 else what


def contract():
    """One row a hazard: what each call makes of a Float8Tensor [4, 8, 16]."""
    torch.manual_seed(0)
    q, seen = fp8(torch.randn(4, 8, 16, device=device)), {}
    bf16, half = torch.bfloat16, torch.float16

    @torch.library.custom_op("pack03::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        seen["torch.library operator"] = kind(x)
        return torch.zeros(1)

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen["autograd.Function.forward"] = kind(x)
            return torch.zeros(1)

    def saved():
        torch.save(q, buffer := io.BytesIO())
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    calls = {
        "to(bfloat16)": lambda: q.to(bf16),
        "to('cpu')": lambda: q.to("cpu"),
        "cpu()": q.cpu,
        "contiguous()": q.contiguous,
        "reshape": lambda: q.reshape(32, 16),
        "view": lambda: q.view(32, 16),
        "flatten": lambda: q.flatten(0, 1),
        "detach": q.detach,
        "clone": q.clone,
        "slice": lambda: q[1:3],
        "select": lambda: q[1],
        "split": lambda: q.split(2),
        "chunk": lambda: q.chunk(2),
        "permute": lambda: q.permute(1, 0, 2),
        "transpose": lambda: q.transpose(0, 1),
        "unsqueeze": lambda: q.unsqueeze(0),
        "float()": q.float,
        "bfloat16()": q.bfloat16,
        "to(float16)": lambda: q.to(half),
        "mul": lambda: q * 2,
        "matmul": lambda: torch.matmul(q, torch.ones(16, 4, dtype=bf16, device=device)),
        "cat": lambda: torch.cat([q, q]),
        "dequantize()": q.dequantize,
        "torch.from_dlpack": lambda: torch.from_dlpack(q.__dlpack__()),
        "torch.save and load": saved,
    }
    rows = {
        "dtype": str(q.dtype),
        "element_size": q.element_size(),
        "pointer": q.data_ptr(),
        "pointer of _data": q._data.data_ptr() and "not 0",
    }
    for name, call in calls.items():
        try:
            rows[name] = kind(call())
        except Exception as error:  # what it raises is the finding
            rows[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    try:
        rows["untyped_storage().nbytes()"] = q.untyped_storage().nbytes()
    except Exception as error:
        rows["untyped_storage().nbytes()"] = type(error).__name__
    for name, call in (("torch.library operator", look), ("autograd.Function.forward", Look.apply)):
        try:
            call(q)
            rows[name] = seen[name]
        except Exception as error:
            rows[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return rows


def inputs(B, S=S, S_kv=None, topk=TOPK):
    """query [S, B, H, 576] and key [S_kv, B, 1, 576], unit normal, in bf16; causal top-k indices [B, S, topk], -1 for none."""
    torch.manual_seed(0)
    query, key = (torch.randn(s, B, h, TOTAL, device=device).to(torch.bfloat16) for s, h in ((S, H), (S_kv or S, 1)))
    rows = torch.arange(S, device=device)[:, None]
    indices = rows - torch.arange(topk, device=device) if S_kv is None else torch.randint(0, S_kv, (S, topk), device=device)
    return query, key, indices.clamp_min(-1).expand(B, -1, -1)


launched = []


def launches_watched():
    """Note what a kernel is handed; without a GPU it is not launched, and gives zeros of the right shape."""
    build = fwd._get_sparse_mla_fwd_kernel

    def building(**given):
        kernel = build(**given) if on_gpu else None

        def launch(q, kv, indices, *scales):
            told = ["wrapper" if isinstance(t, QuantizedTensor) else str(t.dtype).removeprefix("torch.") for t in (q, kv)]
            launched.append({"tensors": told, "pointer 0": 0 in (q.data_ptr(), kv.data_ptr()), "scales": len(scales)})
            if on_gpu:
                return kernel(q, kv, indices, *scales)
            return torch.zeros(*q.shape[:3], given["dim"], dtype=torch.bfloat16), torch.zeros(q.shape[:3])

        return launch

    fwd._get_sparse_mla_fwd_kernel = building


def used(name, call, *given):
    """Run a call of the consumer; what was launched, dequantized, and warned of."""
    launched.clear()
    with Watched() as watched:
        try:
            out = call(*given)
            raised = None if out is not None else "returned None"
        except Exception as error:  # what it raises is the finding
            out, raised = None, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    found = {
        "launched": list(launched),
        "dequantized": len(watched.dequantized),
        "in silence": watched.in_silence,
        "raises": raised,
    }
    metrics.setdefault("calls", {})[name] = found
    print(f"         {name}: {found}")
    return out, found


def lost(found):
    """FP8 is lost in silence, or a kernel is handed pointer 0."""
    return bool(found["in silence"]) or any(each["pointer 0"] for each in found["launched"])


def definition(query, key, indices, scale):
    """Attention of each row over its keys in fp64, [S, B, H, 512]; a row at a time, for memory."""
    out = query.new_zeros(*query.shape[:3], VALUE, dtype=torch.float64)
    for b in range(query.shape[1]):
        for start in range(0, query.shape[0], 64):
            chosen = indices[b, start : start + 64].long()
            keys = key[chosen.clamp_min(0), b, 0].double()
            scores = torch.einsum("shd,skd->shk", query[start : start + 64, b].double(), keys) * scale
            weights = scores.masked_fill((chosen < 0)[:, None], float("-inf")).softmax(-1)
            out[start : start + 64, b] = torch.einsum("shk,skd->shd", weights, keys[..., :VALUE])
    return out


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def measured(call, runs=20):
    """Median milliseconds of a call after three others."""
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[runs // 2]


def shared_memory(build):
    """Bytes of shared memory of a kernel as SparseMLA builds it, H=64, top-k of 2048."""
    import tilelang
    from tilelang import tvm

    function = build.get_tir(64, VALUE, TOTAL - VALUE, 2048, 1, TOTAL**-0.5)
    passes = {getattr(key, "value", key): setting for key, setting in (build.pass_configs or {}).items()}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        lowered = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    functions = lowered.device_mod.functions.values()
    return sum(int(f.attrs["dyn_shared_memory_buf"]) for f in functions if "dyn_shared_memory_buf" in f.attrs)


def fp8_against_bf16():
    """The two kernels alone, S=4096, H=64, 8192 keys, top-k of 2048: error against fp64, time, shared memory, bytes of query and gathered keys."""
    query, key, indices = inputs(1, 4096, 8192, 2048)
    scale = TOTAL**-0.5
    rows = slice(0, 256)
    want = definition(query[rows], key, indices[:, rows], scale)
    q8, k8 = fp8(query), fp8(key)
    quantized = definition(q8.dequantize()[rows], k8.dequantize(), indices[:, rows], scale)
    bshd = [t.permute(1, 0, 2, 3).contiguous() for t in (query, key)]
    parts = [t._data.permute(1, 0, 2, 3).contiguous().view(torch.float8_e4m3fn) for t in (q8, k8)]
    index, scales = indices[:, :, None].int().contiguous(), torch.cat([q8._scale_inv, k8._scale_inv])
    calls = {
        "bf16": lambda: fwd.sparse_mla_fwd_interface(*bshd, index, sm_scale=scale)[0],
        "fp8": lambda: fwd.sparse_mla_fwd_interface(*parts, index, sm_scale=scale, scales=scales)[0],
    }
    flop = 2 * 4096 * H * 2048 * (TOTAL + VALUE)
    for name, call in calls.items():
        out = call().permute(1, 0, 2, 3)[rows]
        ms = measured(call)
        row = {
            "ms": ms,
            "TFLOP/s": flop / ms / 1e9,
            "error": error(out, want),
            "error for its inputs": error(out, quantized if name == "fp8" else want),
        }
        row["shared memory"] = shared_memory(fwd.sparse_mla_fwd_fp8 if name == "fp8" else fwd.sparse_mla_fwd)
        row["bytes read"] = (query.numel() + 4096 * 2048 * TOTAL) * (1 if name == "fp8" else 2)
        metrics.setdefault("kernels", {})[name] = row
        print(f"         {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in row.items()))


def copies():
    """A TileLang kernel that copies 128 numbers is given what a Float8Tensor dequantizes to, then the Float8Tensor."""
    import tilelang
    import tilelang.language as T

    @T.prim_func
    def copy(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(128) if on_gpu else T.serial(128):
                B[i] = A[i]

    kernel = tilelang.compile(copy, target="cuda" if on_gpu else "c", execution_backend="cython")
    x, out = fp8(torch.arange(128.0, device=device), torch.float32), torch.zeros(128, device=device)
    kernel(x.dequantize(), out)
    print("dequantized:", "right" if torch.equal(out, x.dequantize()) else "wrong", flush=True)
    kernel(x, out)
    print("wrapper: right" if torch.equal(out, x.dequantize()) else "wrapper: wrong", flush=True)


def audit(target, shapes):
    """Give a function FP8 tensors, one a required argument, and list what it does to them."""
    module, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module.removesuffix(".py").replace("/", ".")), name)
    except (ImportError, AttributeError, ValueError) as problem:
        parser.error(f"--audit {target}: {problem}")
    required = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    sizes = [[int(n) for n in shape.split("x")] for shape in shapes.split(",")]
    sizes += sizes[-1:] * (len(required) - len(sizes))
    torch.manual_seed(0)
    given = [fp8(torch.randn(*size, device=device)) for size in sizes[: len(required)]]
    with Watched() as watched:
        try:
            result, raised = function(*given), None
        except Exception as problem:  # it may be what FP8 does to the function
            result, raised = None, problem
    told = (
        f"raised {type(raised).__name__}: {raised}"
        if raised
        else "returned " + (kind(result) if isinstance(result, torch.Tensor) else type(result).__name__)
    )
    print(f"{target} {told.splitlines()[0]}")
    for what, places in (("dequantized", watched.dequantized), ("pointer 0 taken", watched.pointers)):
        for place in dict.fromkeys(places):
            print(f"{what:<16} {places.count(place)} ×  {place}")
    given = f"{len(given)} FP8 tensor(s), {shapes}"
    print(f"{given}: dequantized {len(watched.dequantized)} ×, pointer 0 taken {len(watched.pointers)} ×")
    sys.exit(10 if watched.dequantized or watched.pointers else 1 if raised else 0)


warnings.filterwarnings("ignore")
release = distribution("transformer-engine")
facts["version"] = release.version
if (
    not Path(release.locate_file("transformer_engine/pytorch/tensor/quantized_tensor.py")).exists()
    and not Path(release.locate_file("transformer_engine/pytorch/quantized_tensor.py")).exists()
):
    print("This release has no QuantizedTensor.")
    finish("UNTESTABLE", "no-api")
try:
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
except (OSError, AssertionError, RuntimeError, ImportError) as problem:
    if "transformer_engine_torch" in sys.modules:
        raise
    print(
        f"Without transformer-engine's compiled libraries ({str(problem).splitlines()[0][:80]}): nox -s pack03 runs it in the lane te-cpu."
    )
    finish("UNTESTABLE", "no-device")
tex = sys.modules["transformer_engine_torch"]
Float8Tensor = tensors.Float8Tensor
QuantizedTensor = importlib.import_module("transformer_engine.pytorch.tensor").QuantizedTensor
if options.launch:
    sys.exit(copies())
if options.audit:
    audit(options.audit, options.shapes)
loaded = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
if release.version.startswith("1."):  # megatron-core wants layers of newer ones for its own; SparseMLA wants none
    sys.modules.update(dict.fromkeys(loaded))
fwd, mla, dsa = (
    importlib.import_module(f"{DSA}.ops.{name}") for name in ("tilelang_sparse_mla_fwd", "sparse_mla", "tilelang_dsa")
)
sys.modules.update(loaded)
core = distribution("megatron-core").version
facts["file"] = dsa.__file__
print(f"transformer-engine {release.version}, megatron-core {core}, torch {torch.__version__}, {facts['evidence']}")
rows = metrics["contract"] = contract()
for name, what in rows.items():
    print(f"         {name:<28} {what}")
state(
    "control",
    "an FP8 tensor's dtype is bfloat16, and its pointer 0, while that of its data is not",
    rows["dtype"] == "torch.bfloat16" and rows["pointer"] == 0 and rows["pointer of _data"] == "not 0",
)
in_lane = [sys.orig_argv[1], "te-cpu"] if Path(sys.orig_argv[1]).name == "launch.py" else []
done = subprocess.run([sys.executable, *in_lane, __file__, "--launch"], capture_output=True, text=True)
last = (done.stderr.strip().splitlines() or [""])[-1][:200]
prints = [line for line in done.stdout.splitlines() if line.startswith(("dequantized:", "wrapper:"))]
metrics["a TileLang kernel"] = {"prints": prints, "exit": done.returncode, "says": last}
print(f"         a TileLang kernel of its own: {metrics['a TileLang kernel']}")
launches_watched()
scale = TOTAL**-0.5
for B in (1, 2):
    query, key, indices = inputs(B)
    q8, k8 = fp8(query), fp8(key)
    bshd = [t.permute(1, 0, 2, 3).contiguous() for t in (query, key)]
    wrapped = [fp8(t) for t in bshd]
    index = indices[:, :, None].int().contiguous()
    with torch.no_grad():
        plain, found = used(f"B={B}, bf16, dispatched", dsa.fused_sparse_mla_absorbed, query, key, indices, scale, VALUE)
        fine = found["launched"] and not found["launched"][0]["pointer 0"] and not found["dequantized"]
        state("control", f"B={B}: bf16 reaches the kernel as it is", fine)
        out, found = used(f"B={B}, FP8, dispatched", dsa.fused_sparse_mla_absorbed, q8, k8, indices, scale, VALUE)
        state("trigger", f"B={B}, dispatched: dequantized {found['in silence']} times in silence, or pointer 0", lost(found))
        if patched:
            kernel = {"tensors": ["float8_e4m3fn"] * 2, "pointer 0": False, "scales": 1}
            state(
                "control",
                f"B={B}: FP8 data and scales reach the kernel, nothing is dequantized",
                (found["launched"], found["dequantized"]) == ([kernel], 0),
            )
        if on_gpu:
            exact = definition(q8.dequantize(), k8.dequantize(), indices, scale)
            state(
                "control",
                f"B={B}, dispatched: output against fp64 of the same FP8 values",
                None,
                error=error(out, exact),
                limit=5e-2,
            )
        if not on_gpu or B == 1 or done.returncode >= 0:  # a kernel that reads at 0 would end the process
            _, found = used(f"B={B}, FP8, SparseMLA", mla.SparseMLA.apply, *wrapped, index, scale)
            state("trigger", f"B={B}, SparseMLA: dequantized {found['in silence']} times in silence, or pointer 0", lost(found))
if patched:
    q8 = fp8(inputs(1)[0], requires_grad=True)
    _, found = used(
        "B=1, FP8 that trains, dispatched",
        dsa.fused_sparse_mla_absorbed,
        q8,
        fp8(inputs(1)[1]),
        inputs(1)[2],
        scale,
        VALUE,
    )
    state(
        "control",
        "with gradients both are dequantized, with a warning or after one",
        found["dequantized"] == 2 and found["launched"][0]["tensors"] == ["bfloat16"] * 2,
    )
if options.fp8:
    if not (on_gpu and patched):
        print("         --fp8: only on the patched side, and on a GPU")
    else:
        fp8_against_bf16()
bad = [
    c["name"]
    for c in facts["comparisons"]
    if c["role"] == "control" and not c.get("holds", c.get("error", 1) <= c.get("limit", 0))
]
if bad:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
