"""What each call makes of a Float8Tensor [4, 8, 16]: a wrapper or a plain tensor, and where that says it lies.

Moving to another device and saving are not tried: without a GPU a release answers otherwise than with one.
"""

from importlib import import_module

import repro
import torch
from repro import FACTS, finish


def kind(result):
    result = result[0] if isinstance(result, (tuple, list)) else result
    quantized = import_module("transformer_engine.pytorch.tensor").QuantizedTensor
    what = "wrapped" if isinstance(result, quantized) else f"plain {str(result.dtype).removeprefix('torch.')}"
    return f"{what}, pointer 0" if result.data_ptr() == 0 else what


class Look(torch.autograd.Function):
    seen = ""

    @staticmethod
    def forward(ctx, x):
        Look.seen = kind(x)
        return torch.zeros(1)


@torch.library.custom_op("pack03::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    Look.seen = kind(x)
    return torch.zeros(1)


def rows(q):
    bf16 = torch.bfloat16
    yield "dtype", lambda: str(q.dtype)
    yield "element_size", q.element_size
    yield "data_ptr()", q.data_ptr
    yield "untyped_storage().nbytes()", lambda: q.untyped_storage().nbytes()
    for name, call in {
        "to(bfloat16)": lambda: q.to(bf16),
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
        "to(float16)": lambda: q.to(torch.float16),
        "mul": lambda: q * 2,
        "matmul": lambda: torch.matmul(q, torch.ones(16, 4, dtype=bf16, device=q.device)),
        "cat": lambda: torch.cat([q, q]),
        "dequantize()": q.dequantize,
        "torch.from_dlpack": lambda: torch.from_dlpack(q.__dlpack__()),
    }.items():
        yield name, lambda call=call: kind(call())
    for name, call in (("torch.library operator", look), ("autograd.Function.forward", Look.apply)):
        yield name, lambda call=call: (call(q), Look.seen)[1]


def main():
    torch.manual_seed(0)
    found = {}
    for name, call in rows(repro.fp8(torch.randn(4, 8, 16, device=repro.device))):
        try:
            found[name] = call()
        except Exception as error:  # what it raises is the finding
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        print(f"{name:<28} {found[name]}")
    FACTS["metrics"] = {"contract": found, "wrapped": sum(str(what).startswith("wrapped") for what in found.values())}
    finish("MEASURED")


if __name__ == "__main__":
    repro.release()
    main()
