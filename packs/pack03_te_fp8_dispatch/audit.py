"""What a function of yours does to FP8 tensors: where it dequantizes them, and where it takes their address, which is 0.

    nox -s pack03 -- --audit mymodule:attention --shapes 128x64

gives it a Float8Tensor for each argument that it requires. Exits with 10 if something was found, 0 if all tensors were used and nothing was found, 1 where
that cannot be said (it raised, forked or ended the process, left a tensor alone or only asked for its shape or dtype, returned what is run later, or read FP8 bytes
without their scale), 2 for a target that cannot be called so. Calls of compiled code, as TileLang's kernels are, and the backward are not seen: an exit with 0 says
nothing of them.
"""

import argparse
import importlib
import inspect
import linecache
import math
import os
import re
import sys
import warnings
from pathlib import Path

import repro
import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--audit", metavar="MODULE:FUNCTION", required=True, help="the function")
parser.add_argument(
    "--shapes", default="128x128", metavar="SxH,…", help="of its arguments; the last one is that of all that follow"
)
AWAY = (
    "/torch/",
    "/transformer_engine/",
    "/tvm_ffi/",
    "/lanes/",
    "runpy",
    "/importlib/",
    "/inspect.py",
    __file__,
    repro.__file__,
)
#: What says nothing of the numbers in a tensor, and what hands out their bytes.
ASKED = {
    "dtype",
    "shape",
    "size",
    "device",
    "ndim",
    "dim",
    "numel",
    "layout",
    "requires_grad",
    "is_cuda",
    "is_leaf",
    "__class__",
}
BYTES = {
    "_data",
    "_transpose",
    "_rowwise_data",
    "_columnwise_data",
    "_scale_inv",
    "__dict__",
    "get_metadata",
    "prepare_for_saving",
}
found = {"dequantized": [], "address taken": []}
touched, notes, depth, raw, forks = set(), [], [], [], []


def caller():
    """The line outside of torch, transformer-engine and this script that a call comes from, and the operator that it is."""
    operator, frame = "", sys._getframe()
    while frame := frame.f_back:
        code = frame.f_code
        if code.co_name == "__torch_dispatch__":
            operator = f" ({frame.f_locals.get('func')})"
        if not any(part in code.co_filename for part in AWAY) and not code.co_filename.startswith("<"):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{Path(code.co_filename).name}:{frame.f_lineno} {line}{operator}"
    return ""


def watch(owner, name, what):
    """Note calls of ``owner.name`` on an FP8 tensor, but those that another watched call makes."""
    method = getattr(owner, name, None)
    if method is None:
        return

    def noted(*given, **named):
        place = caller() if not depth and any(isinstance(each, QuantizedTensor) for each in given) else ""
        if place:
            found[what].append(place)
        depth.append(1)
        try:
            return method(*given, **named)
        finally:
            depth.pop()

    setattr(owner, name, noted)


def watched():
    """Watch before the user's module is imported, which may take names from others."""
    for kind in repro.tensors.Float8Tensor.__mro__:
        if "dequantize" in vars(kind) and kind.__module__.startswith("transformer_engine."):
            watch(kind, "dequantize", "dequantized")
    for name in ("data_ptr", "__dlpack__", "untyped_storage", "storage", "__cuda_array_interface__"):
        watch(torch.Tensor, name, "address taken") if callable(getattr(torch.Tensor, name, None)) else None
    if "untyped_storage" in vars(QuantizedTensor):
        watch(QuantizedTensor, "untyped_storage", "address taken")
    watch(sys.modules.get("transformer_engine_torch"), "dequantize", "dequantized")
    watch(torch.utils.dlpack, "to_dlpack", "address taken")
    watch(torch, "to_dlpack", "address taken")
    watch(torch._C, "_to_dlpack", "address taken")
    try:
        tvm_ffi = importlib.import_module("tvm_ffi")
    except ImportError:
        notes.append("tvm_ffi is not installed here, and was not watched")
    else:
        watch(tvm_ffi, "from_dlpack", "address taken")
        watch(tvm_ffi, "convert", "address taken")
    reading = repro.tensors.Float8Tensor.__getattribute__

    def noting(tensor, name):
        if not depth and (place := caller()):
            asks = sys._getframe(1).f_code.co_filename
            own = not any(part in asks for part in AWAY)
            if own and name in ASKED:  # what that takes in its turn is no use of the tensor either
                depth.append(1)
                try:
                    return reading(tensor, name)
                finally:
                    depth.pop()
            touched.add(id(tensor))
            if own and name in BYTES:
                raw.append(place)
        return reading(tensor, name)

    repro.tensors.Float8Tensor.__getattribute__ = noting
    compiling = torch.compile

    def compiled(*given, **named):
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            notes.append("torch.compile does nothing in this lane: what it would have compiled was run eagerly")
        return compiling(*given, **named)

    torch.compile = compiled

    def ended(code=0):
        raise SystemExit(f"os._exit({code})")

    os._exit = ended
    os.register_at_fork(before=lambda: forks.append(caller()))


def target(name):
    """The function that is named, and its required arguments."""
    module, _, attribute = name.rpartition(":")
    if not module:
        parser.error(f"--audit {name}: give MODULE:FUNCTION")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = importlib.import_module(module.removesuffix(".py").replace("/", "."))
        for part in attribute.split("."):
            function = getattr(function, part)
    except BaseException as error:  # of the user's module, which may also end the process
        parser.error(
            f"--audit {name} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    if inspect.isclass(function) or not callable(function):
        parser.error(
            f"--audit {name} is {'a class' if inspect.isclass(function) else type(function).__name__}: name a function or an object that can be called"
        )
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        parser.error(
            f"--audit {name} does not say which arguments it takes, as functions of C do: give a Python function that calls it"
        )
    return function, [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def sizes(text):
    if not re.fullmatch(r"\d+(x\d+)*(,\d+(x\d+)*)*", text):
        parser.error(f"--shapes {text}: give sizes as in 128x64, one for each argument, with a comma between")
    found = [[int(n) for n in shape.split("x")] for shape in text.split(",")]
    if any(not 0 < math.prod(shape) <= 2**28 for shape in found):
        parser.error(f"--shapes {text}: give each tensor between 1 and {2**28:,} elements")
    return found


def main(options):
    shapes = sizes(options.shapes)
    watched()
    function, required = target(options.audit)
    if not required:
        parser.error(f"--audit {options.audit} requires no argument, so that there is nothing to give FP8 tensors to")
    if required[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        required = required[:-1] + [required[-1]] * max(1, len(shapes) - len(required) + 1)
    if len(shapes) > len(required):
        parser.error(f"--shapes has {len(shapes)} shapes for {len(required)} argument(s)")
    shapes += shapes[-1:] * (len(required) - len(shapes))
    torch.manual_seed(0)
    tensors = [repro.fp8(torch.randn(*size, device=repro.device)) for size in shapes]
    named = {p.name: t for p, t in zip(required, tensors, strict=True) if p.kind is p.KEYWORD_ONLY}
    plain = [t for p, t in zip(required, tensors, strict=True) if p.kind is not p.KEYWORD_ONLY]
    raised = None
    try:
        result = function(*plain, **named)
        depth.append(1)
        told = f"returned {type(result).__name__}" + (
            f" {str(result.dtype).removeprefix('torch.')}" if isinstance(result, torch.Tensor) else ""
        )
        later = inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result)
        if later or callable(result) or hasattr(result, "add_done_callback"):
            raised = result
            notes.append("what it returned runs later, and was not run: give a function that runs it")
    except BaseException as error:  # it may be what FP8 does to the function, or its end
        raised, told = error, f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    print(f"{options.audit} {told}")
    for what, places in found.items():
        for place in dict.fromkeys(places):
            print(f"{what:<14} {places.count(place)} ×  {place}")
    left = sum(id(tensor) not in touched for tensor in tensors)
    total = ", ".join(f"{what} {len(places)} ×" for what, places in found.items())
    print(f"{len(tensors)} FP8 tensor(s), {options.shapes}: {total}")
    if left:
        notes.append(
            f"{left} of {len(tensors)} tensors were not looked at by any Python code, or only asked for their shape, dtype or device"
        )
    if forks:
        notes.append("it forked: what the other process does is not seen")
    for place in dict.fromkeys(raw):
        notes.append(f"FP8 bytes are read, which are nothing without their scale: {place}")
    for note in dict.fromkeys(
        [*notes, "its backward, and compiled code that is handed a tensor, are not seen, but where they make the calls above"]
    ):
        print(f"note: {note}")
    sys.exit(10 if any(found.values()) else 1 if raised is not None or left or raw or forks else 0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    options = parser.parse_args()
    repro.release()
    QuantizedTensor = importlib.import_module("transformer_engine.pytorch.tensor").QuantizedTensor
    main(options)
