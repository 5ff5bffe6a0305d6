"""Which parts of the model are sensitive: each alone in FP8, then all. No verdict on a bug.

A part is its linear layers, or what is cast beside them by torchao's own tensorwise dynamic scaling, e4m3 forward and e5m2 backward: the table of embeddings,
inputs and weights of norms, q, k and v, the router's logits, and the scan's input and its state at each token.
"""

import multiprocessing
import multiprocessing.dummy
from collections import Counter
from importlib import import_module, util
from unittest import mock

import torch
from repro import FACTS, FLOOR, HELD, LENGTH, LINEARS, SEEDS, STEPS, check, device, finish, kernels, release, trained

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


def run(parts, seed, emulate):
    """The loss; forwards of Float8Linears, products by FP8 kernels, casts by part."""
    seen.clear()
    linear = import_module("torchao.float8.float8_linear").Float8Linear
    products = mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm)
    with products as products, mock.patch.object(linear, "forward", autospec=True, side_effect=linear.forward) as forwards:
        loss = trained(float8, data, parts, seed, emulate, lambda part, x: Fp8.apply(x, part) if part in parts else x)
    return loss, forwards.call_count, products.call_count, dict(seen)


def measure(pool, name, parts, emulate, plain):
    """Train with some parts in FP8 and each seed, and check that all was cast that should be."""
    runs = pool.starmap(run, [(parts, seed, emulate) for seed in range(SEEDS)])
    casts = {part: (STEPS + HELD) * CASTS[part] for part in parts if part in CASTS}
    casts |= {f"{part}, backward": STEPS * CASTS[part] for part in casts}
    layers = sum(len(LINEARS.get(part, ())) for part in parts)
    products = 0 if emulate else layers * (3 * STEPS + HELD)
    forwards = layers * (STEPS + HELD)
    what = (
        f"{name}: {sum(casts.values())} casts, {forwards} forwards of Float8Linears, {products} products by FP8 kernels a run"
    )
    check("control", what, all(each[1:] == (forwards, products, casts) for each in runs))
    off = torch.tensor([each[0] for each in runs]).double() - torch.tensor(plain).double()
    check("control", f"{name}: the loss is another than in fp32", off.abs().max() > FLOOR)
    mean, error = off.mean().item(), off.std().item() / SEEDS**0.5
    FACTS["metrics"][name] = {"by seed": off.tolist(), "mean": mean, "standard error": error}
    print(f"{name:<17} {mean:.4f} ± {error:.4f} nats a byte more than in fp32", flush=True)


def main():
    global float8, data, cast
    float8, data = release()
    cast = caster()
    torch.set_num_threads(1)  # these tensors are too small for more
    fixed = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
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
    cases = {part: [part] for part in CASTS | LINEARS} | {"all": [*(CASTS | LINEARS)]}
    for name, parts in cases.items():
        measure(pool, name, parts, not kernels, plain)
    if kernels:
        measure(pool, "all, emulated", cases["all"], True, plain)
        FACTS["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability())
    finish("MEASURED")


if __name__ == "__main__":
    main()
