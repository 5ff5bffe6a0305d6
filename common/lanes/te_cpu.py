"""Lane ``te-cpu``: transformer-engine's own Python runs on CPU tensors, without its compiled libraries. Evidence: ``source``.

What it replaces, none of which a pack measures:

* the compiled module ``transformer_engine_torch``: quantization to FP8 with the quantizer's scale, amax, dequantization, transposition and
  GEMM are torch operations here; all else that the release's Python names in it raises `NotImplementedError` when called;
* the core library, which is not loaded;
* the GPU: ``cuda`` as a device is the CPU, tensors say that they are on CUDA, and the generator is the CPU's;
* the fused update of scales, by the one in Python that transformer-engine has beside it (``NVTE_UNFUSED_FP8_UPDATE``).
"""

import contextlib
import enum
import importlib.util
import os
import re
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
MEMBERS = {
    "DType": DTYPES,
    "FP8FwdTensors": [f"GEMM{gemm}_{name}" for gemm in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{name}{gemm}" for gemm in (1, 2, 3) for name in ("OUTPUT", "INPUT")],
}

_LIBRARIES: list[Any] = []


def prepare() -> None:
    os.environ.update(NVTE_PROJECT_BUILDING="1", NVTE_UNFUSED_FP8_UPDATE="1", TORCHDYNAMO_DISABLE="1")
    found = importlib.util.find_spec("transformer_engine")
    if found is None or found.origin is None:
        return  # the script meets that itself
    root = Path(found.origin).parent
    if not (root / "pytorch" / "tensor" / "float8_tensor.py").is_file():
        return  # releases before 1.11
    # transformer_engine warns that it finds no compiled libraries, which this lane is for.
    warnings.filterwarnings("ignore", message="Detected a (PyTorch|Jax) installation")
    _as_on_cuda()
    if "class Float8Quantizer" not in (root / "pytorch" / "tensor" / "float8_tensor.py").read_text():
        _tensors_alone(extension(root), root / "pytorch")
        return
    _without_libraries(extension(root))
    import torch
    from transformer_engine.pytorch import distributed

    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _as_on_cuda() -> None:
    import torch

    class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def moved(value: Any) -> Any:
                return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value

            return function(*map(moved, args), **{name: moved(value) for name, value in (kwargs or {}).items()})

    OnCpu().__enter__()
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.cuda = lambda self, *_, **__: self
    hopper = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none")
    for name, answer in {
        "is_available": True,
        "current_device": torch.device("cpu"),
        "get_device_capability": (9, 0),
        "get_device_properties": hopper,
        "is_current_stream_capturing": False,
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.cuda.device = type("device", (contextlib.nullcontext,), {})
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None


def _without_libraries(tex: types.ModuleType) -> None:
    """Import ``transformer_engine.pytorch`` with ``tex`` for its compiled module, which up to 2.3 it looks for as a file."""
    import transformer_engine.common as common

    sys.modules[tex.__name__] = tex
    common.load_framework_extension = lambda framework: None
    if not hasattr(common, "get_te_path"):
        import transformer_engine.pytorch

        return
    original = importlib.util.spec_from_file_location

    class Loader:
        def create_module(self, spec: Any) -> types.ModuleType:
            return tex

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    def spec_of(name: str, location: Any = None, **how: Any) -> Any:
        if name == tex.__name__:
            return importlib.util.spec_from_loader(name, Loader())  # type: ignore[arg-type]
        return original(name, location, **how)

    path, importlib.util.spec_from_file_location = common.get_te_path, spec_of
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "transformer_engine").mkdir()
        (Path(folder) / "transformer_engine" / f"{tex.__name__}.none.so").touch()
        common.get_te_path = lambda: Path(folder)
        import transformer_engine.pytorch  # noqa: F401

        common.get_te_path, importlib.util.spec_from_file_location = path, original


def _tensors_alone(tex: types.ModuleType, folder: Path) -> None:
    """1.11 to 1.13 import what torch has no more: their modules can be imported one by one, the tensors' among them."""
    sys.modules[tex.__name__] = tex
    package = types.ModuleType("transformer_engine.pytorch")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    import torch

    def cast_from_fp8_ts(data: torch.Tensor, scale_inv: torch.Tensor, at: int, fp8_dtype: int, dtype: int) -> torch.Tensor:
        return tex.dequantized(data, scale_inv[at], fp8_dtype, dtype)

    operations = torch.library.Library("tex_ts", "DEF")
    operations.define("cast_from_fp8_ts(Tensor data, Tensor scale_inv, int at, int fp8_dtype, int dtype) -> Tensor")
    operations.impl("cast_from_fp8_ts", cast_from_fp8_ts, "CompositeExplicitAutograd")
    _LIBRARIES.append(operations)  # without it they are gone


def extension(root: Path) -> types.ModuleType:
    """The compiled module: all names that the release's Python takes from it, enumerations with the members that it names."""
    tex = types.ModuleType("transformer_engine_torch")
    source = "".join(path.read_text() for path in (root / "pytorch").rglob("*.py"))
    names = {*MEMBERS, *re.findall(r"\btex\.(\w+)", source)}
    for taken in re.findall(r"from transformer_engine_torch import (\([^)]*\)|[^\n(]+)", source):
        names |= set(re.findall(r"\w+", re.sub(r"#.*", "", taken)))
    used: dict[str, set[str]] = {}
    for name, member in re.findall(r"\b([A-Z]\w*)\.([A-Z]\w*)", source):
        used.setdefault(name, set()).add(member)
    for name in names - {"as"}:
        members = MEMBERS.get(name) or sorted(used.get(name, ()))
        if members:
            setattr(tex, name, enum.IntEnum(name, list(members), start=0, module=tex.__name__))
        else:
            setattr(tex, name, _Open(name, (), {}) if name[0].isupper() else _on_a_gpu_alone(name))
    for function in _operations(tex):
        setattr(tex, function.__name__, function)
    versions = {"get_cublasLt_version": 120900, "get_cudnn_version": 90500, "get_num_cublas_streams": 4}
    for name, answer in versions.items():
        setattr(tex, name, lambda answer=answer: answer)
    return tex


class _Open(type):
    """Of a class of the compiled module: it has any member in capitals, as an enumeration known by another name has."""

    def __getattr__(cls, name: str) -> int:
        if not name.isupper():
            raise AttributeError(name)
        setattr(cls, name, sum(member.isupper() for member in vars(cls)))
        return int(getattr(cls, name))


def _on_a_gpu_alone(name: str) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"transformer_engine_torch.{name} runs on a GPU alone")

    return call


def _operations(tex: Any) -> list[Any]:
    import torch

    torch_dtypes = dict(
        zip(
            DTYPES,
            (torch.uint8, torch.int32, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
            strict=False,
        )
    )

    def torch_dtype(dtype: Any) -> torch.dtype:
        return dtype if isinstance(dtype, torch.dtype) else torch_dtypes[tex.DType(int(dtype)).name]

    def plain(tensor: Any) -> torch.Tensor:
        """Values in fp32 of a tensor, or of the rows or columns that an FP8 tensor has."""
        if not hasattr(tensor, "_scale_inv"):
            return tensor.float()
        fp8 = torch_dtype(tensor._fp8_dtype)
        if tensor._data is not None:
            return tensor._data.view(fp8).float() * tensor._scale_inv
        return tensor._transpose.view(fp8).float().movedim(0, -1) * tensor._scale_inv

    def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: Any, device: Any, pin_memory: bool = False) -> Any:
        data = torch.zeros(tuple(shape), dtype=torch.uint8)
        out = quantizer.create_tensor_from_data(data, fake_dtype=torch_dtype(dtype), internal=quantizer.internal)
        if quantizer.columnwise_usage:
            out._transpose = torch.zeros(shape[-1], *shape[:-1], dtype=torch.uint8)
            out._transpose_invalid = False
        return out

    def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        if output is None:
            # Not the quantizer's make_empty: up to 2.15 that is Python's, and gives a tensor also where the compiled module gives its storage.
            output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device)
        if noop is not None and noop.item():
            return output
        fp8, values = torch_dtype(quantizer.dtype), tensor.detach().float()
        quantizer.amax.copy_(torch.maximum(quantizer.amax, values.abs().max()))  # as the kernel does: the update zeroes it
        largest = torch.finfo(fp8).max
        data = (values * quantizer.scale).clamp(-largest, largest).to(fp8).view(torch.uint8)
        output._scale_inv.copy_(1 / quantizer.scale)
        if output._data is not None:
            output._data.copy_(data)
        if output._transpose is not None:
            output._transpose.copy_(data.movedim(-1, 0))
            output._transpose_invalid = False
        return output

    def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
        return plain(tensor).to(torch_dtype(dtype))

    def dequantized(data: torch.Tensor, scale_inv: torch.Tensor, fp8_dtype: Any, dtype: Any) -> torch.Tensor:
        return (data.view(torch_dtype(fp8_dtype)).float() * scale_inv).to(torch_dtype(dtype))

    def bgrad_quantize(gradient: Any, quantizer: Any) -> Any:
        return gradient.reshape(-1, gradient.shape[-1]).float().sum(0).to(gradient.dtype), quantize(gradient, quantizer)

    def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: Any = None) -> torch.Tensor:
        turned = data.movedim(-1, 0).contiguous()
        return turned if out is None else out.copy_(turned.reshape(out.shape))

    def generic_gemm(
        A: Any, transa: Any, B: Any, transb: Any, D: Any, quantizer: Any, out_dtype: Any, bias: Any, *rest: Any, **how: Any
    ) -> Any:
        """cuBLAS reads columns first: D = op(B) @ op(A). ``rest``: bias_type, gelu, gelu_in, grad, workspace, its size, accumulate …"""
        values_a, values_b = plain(A), plain(B)
        a, b = values_a.reshape(-1, values_a.shape[-1]), values_b.reshape(-1, values_b.shape[-1])
        out = (b.t() if transb else b) @ (a.t() if transa else a)
        grad, accumulate, bias_grad = rest[3], rest[6], None
        if bias is not None and grad:
            bias_grad = b.sum(0).to(bias.dtype)
        elif bias is not None:
            out = out + bias.float()
        out = out.to(torch_dtype(out_dtype))
        if not transb:
            out = out.reshape(*values_b.shape[:-1], out.shape[-1])
        if quantizer is not None:
            out = quantizer(out)
        if D is not None:
            out = D.copy_(D + out if accumulate else out)
        return out, bias_grad, rest[2], how.get("extra_output")

    return [create_empty_quantized_tensor, quantize, dequantize, dequantized, bgrad_quantize, fp8_transpose, generic_gemm]
