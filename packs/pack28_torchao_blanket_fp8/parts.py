"""Which parts of the model are sensitive: each alone in FP8, then all. No verdict on a bug.

A part is its linear layers, or what is cast beside them by torchao's own tensorwise dynamic scaling, e4m3 forward and e5m2 backward: the table of embeddings,
inputs and weights of norms, q, k and v, the router's logits, and the scan's input and its state at each token.
"""

import multiprocessing
import multiprocessing.dummy
from collections import Counter
from functools import partial
from importlib import import_module, util
from unittest import mock

import torch
import torch.nn.functional as F
from repro import (
    EXPERTS,
    FACTS,
    FLOOR,
    HEADS,
    HELD,
    LENGTH,
    LINEARS,
    SEEDS,
    STEPS,
    D,
    Model,
    check,
    compared,
    finish,
    kernels,
    release,
    trained,
)

#: Casts of each in a forward; "state" is the scan's input and state.
CASTS = {"embeddings": 1, "norms": 8, "state": LENGTH + 1, "attention": 3, "router": 1}
seen = Counter()  # casts by part


def caster():
    """torchao's cast of a tensor to FP8 and back."""
    scaling = import_module("torchao.float8.float8_scaling_utils")
    moved = util.find_spec("torchao.float8.float8_training_tensor")  # from 0.13 on
    config = import_module(f"torchao.float8.float8_{'training_' if moved else ''}tensor").LinearMMConfig()
    return lambda x, dtype: scaling.hp_tensor_to_float8_dynamic(x, dtype, config).to_original_precision()


class Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part):
        ctx.part, seen[part] = part, seen[part] + 1
        return cast(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, gradient):
        seen[f"{ctx.part}, backward"] += 1
        return cast(gradient.contiguous(), torch.float8_e5m2), None


class Parts(Model):
    """The same layers, with the casts of the parts that are ``on``."""

    def __init__(self, on):
        super().__init__()
        self.on = on

    def fp8(self, part, x):
        return Fp8.apply(x, part) if part in self.on else x

    def norm(self, i, x):
        return F.rms_norm(self.fp8("norms", x), (D,), self.fp8("norms", self.norms[i]))

    def forward(self, tokens):
        x = self.fp8("embeddings", self.table)[tokens]
        decay, b, c = self.scan[0](y := self.norm(0, x)).chunk(3, -1)
        a, b, h, states = torch.sigmoid(decay + 3), self.fp8("state", b * y), 0, []
        for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
            states.append(h := self.fp8("state", a_t * h + b_t))
        x = x + self.scan[1](torch.stack(states, 1) * c)
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attention[0](self.norm(1, x)).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*(self.fp8("attention", t) for t in heads), is_causal=True)
        x = x + self.attention[1](y.transpose(1, 2).flatten(-2))
        chosen = self.fp8("router", self.router[0](y := self.norm(2, x))).softmax(-1)
        y = F.silu(self.experts[0](y)).unflatten(-1, (EXPERTS, -1)) * chosen[..., None]
        return self.head[0](self.norm(3, x + self.experts[1](y.flatten(-2))))


def run(parts, seed, emulate):
    """The loss; forwards of Float8Linears, products by FP8 kernels, casts by part."""
    seen.clear()
    linear = import_module("torchao.float8.float8_linear").Float8Linear
    products = mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm)
    with products as products, mock.patch.object(linear, "forward", autospec=True, side_effect=linear.forward) as forwards:
        loss = trained(float8, data, [part for part in parts if part in LINEARS], seed, emulate, partial(Parts, parts))
    return loss, forwards.call_count, products.call_count, dict(seen)


def measure(pool, name, parts, emulate, plain):
    """Train with some parts in FP8 and each seed, and check that all was cast that should be."""
    runs = pool.starmap(run, [(parts, seed, emulate) for seed in range(SEEDS)])
    casts = {part: (STEPS + HELD) * CASTS[part] for part in parts if part in CASTS}
    casts |= {f"{part}, backward": STEPS * CASTS[part] for part in casts}
    layers = sum(len(LINEARS.get(part, ())) for part in parts)
    products = 0 if emulate else (layers - ("router" in parts)) * (3 * STEPS + HELD)
    forwards = layers * (STEPS + HELD)
    what = (
        f"{name}: {sum(casts.values())} casts, {forwards} forwards of Float8Linears, {products} products by FP8 kernels a run"
    )
    check("control", what, all(each[1:] == (forwards, products, casts) for each in runs))
    compared(name, [each[0] for each in runs], plain)


def main():
    global float8, data, cast
    float8, data = release()
    cast = caster()
    torch.set_num_threads(1)  # these tensors are too small for more
    fixed = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to("cuda" if kernels else "cpu")
    for dtype, least in ((torch.float8_e4m3fn, 0.02), (torch.float8_e5m2, 0.04)):
        for size in (1, 2**20, 2**-20):  # it has a scale
            error = ((cast(fixed * size, dtype) / size - fixed).norm() / fixed.norm()).item()
            check(
                "control", f"a cast of {size:g} x to {str(dtype)[6:]} is off by {100 * error:.2g} %", least < error < 2 * least
            )
    # A fork has torch imported already, and what it is given; it must not have CUDA in use.
    pool = multiprocessing.dummy.Pool(1) if kernels else multiprocessing.get_context("fork").Pool(2)
    plain = [each[0] for each in pool.starmap(run, [((), seed, True) for seed in range(SEEDS)])]
    FACTS["metrics"]["fp32"] = plain
    same = abs(trained(float8, data, (), 0) - plain[0])
    check("control", "without casts the loss is that of repro.py's model", error=same, limit=FLOOR)
    cases = {part: [part] for part in CASTS | LINEARS} | {"all": [*(CASTS | LINEARS)]}
    for name, parts in cases.items():
        measure(pool, name, parts, not kernels, plain)
    if kernels:
        measure(pool, "all, emulated", cases["all"], True, plain)
        FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    finish("MEASURED")


if __name__ == "__main__":
    main()
