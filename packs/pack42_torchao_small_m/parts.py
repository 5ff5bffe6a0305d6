"""What Float8Linear's time is made of: casts to FP8 a layer, the forward's product alone, and tokens that are no multiple of 16. No verdict.

The product alone is of tensors that are in FP8 already, with one scale, beside bf16's; as one CUDA graph of all layers, as in repro.py.
"""

import dataclasses

import torch
from repro import FACTS, LAYERS, RECIPES, TOKENS, finish, inputs, layers, parser, release, step, timed
from torch.utils._python_dispatch import TorchDispatchMode

RAGGED = 1000


class Casts(TorchDispatchMode):
    """Counts casts to FP8."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.count += op is torch.ops.aten._to_copy.default and out.dtype.itemsize == 1
        return out


def products(M, N, K):
    """Milliseconds of the forward's products alone: in bf16, and in FP8 of tensors that are FP8 already."""
    x, weights = inputs(M, K)[1], [torch.randn(N, K, device="cuda").bfloat16() for _ in range(LAYERS)]
    one, to = torch.ones((), device="cuda"), torch.float8_e4m3fn
    x8, weights8 = x.to(to), [w.to(to) for w in weights]
    more = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    plain = timed(lambda: [x @ w.t() for w in weights])
    return plain, timed(lambda: [torch._scaled_mm(x8, w.t(), one, one, **more) for w in weights8])


def main(options):
    float8, (N, K) = release(), options.shape
    metrics, named = FACTS["metrics"], float8.Float8LinearConfig.from_recipe_name
    for recipe in RECIPES:
        with Casts() as casts:
            step(layers(float8, named(recipe), N, K), *inputs(TOKENS[0], K))
        metrics[f"{recipe}: casts to FP8 a layer and step"] = casts.count / LAYERS
    for M in TOKENS:
        plain, fp8 = products(M, N, K)
        metrics[f"M={M}: product in FP8 / in bf16"] = round(fp8 / plain, 3)
    for name, more in (("as it is", {}), ("pad_inner_dim", {"pad_inner_dim": True})):
        try:
            step(layers(float8, dataclasses.replace(named("tensorwise"), **more), N, K), *inputs(RAGGED, K))
            torch.cuda.synchronize()
            metrics[f"M={RAGGED}, tensorwise, {name}"] = "runs"
        except RuntimeError as raised:
            metrics[f"M={RAGGED}, tensorwise, {name}"] = f"{type(raised).__name__}: {str(raised).splitlines()[0][:120]}"
    for name, figure in metrics.items():
        print(f"{name}: {figure}")
    finish("MEASURED")


if __name__ == "__main__":
    main(parser.parse_args())
