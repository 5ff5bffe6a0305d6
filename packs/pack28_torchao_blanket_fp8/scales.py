"""What FP8 scales of each size cost a linear layer with outliers: torchao's recipes by their names, and its blocks of 1 x 128 and 128 x 128.

The same product is written with and without outliers, so that the exact result is the same: one token in 128 is multiplied by 100 or 10,000 and
its gradient divided by it, or one channel in 128 is and its column of weights. Relative errors (Frobenius) against fp64 of the output and of both
gradients, of the tokens and channels that are no outliers. Float8Linear is emulated; blocks are torchao's own reference functions, multiplied in fp64.
"""

import dataclasses

import torch
from repro import FACTS, check, finish, release

M, K, N = 1024, 2048, 2048  # tokens, channels in and out
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def float8_linear(recipe):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def run(x, w, g):
        model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False, dtype=x.dtype))
        model[0].weight.data.copy_(w)
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(model, config=config)
        check("control", f"{recipe} makes a Float8Linear", type(model[0]).__name__ == "Float8Linear")
        x = x.detach().requires_grad_()
        y = model(x)
        y.backward(g)
        return y.detach(), x.grad, model[0].weight.grad

    return run


def blocks(x, w, g):
    from torchao.prototype.blockwise_fp8_training import kernels

    def rows(t):
        values, scales = kernels.torch_blockwise_scale_act_quant_lhs(t.contiguous())
        return values.double() * scales.double().repeat_interleave(128, 1)

    values, scales = kernels.torch_blockwise_scale_weight_quant(w.contiguous())
    weight = values.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return rows(x) @ weight.T, rows(g) @ weight, rows(g.T) @ rows(x.T).T


def bf16(x, w, g):
    return (x.bfloat16() @ w.bfloat16().T, g.bfloat16() @ w.bfloat16(), g.bfloat16().T @ x.bfloat16())


def planted(x, w, g, where, ratio):
    """The same product with outliers, and the tokens and channels that are none."""
    x, w, g, token, channel = x.clone(), w.clone(), g.clone(), torch.arange(M) % 128 != 5, torch.arange(K) % 128 != 5
    if where == "tokens":
        x[~token] *= ratio
        g[~token] /= ratio
    elif where == "channels":
        x[:, ~channel] *= ratio
        w[:, ~channel] /= ratio
    return x, w, g, token, channel


def exact(x, w, g, token, channel):
    """Output and gradients of x and w in fp64, of the tokens and channels that are no outliers."""
    x, w, g = x.double(), w.double(), g.double()
    return (x @ w.T)[token], (g @ w)[token][:, channel], (g.T @ x)[:, channel]


def main():
    release()
    torch.manual_seed(0)
    plain = torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(M, N)
    ways = {"bf16": bf16, **{name: float8_linear(name) for name in RECIPES}, "blocks": blocks}
    for where, ratio in [("nowhere", 1)] + [(where, ratio) for where in ("tokens", "channels") for ratio in (100, 10_000)]:
        x, w, g, token, channel = planted(*plain, where, ratio)
        cut, same = exact(x, w, g, token, channel), exact(*plain, token, channel)
        moved = max(((a - b).norm() / b.norm()).item() for a, b in zip(cut, same, strict=True))
        check("control", f"outliers in {where} x {ratio} leave the exact results of the others", error=moved, limit=1e-5)
        if where != "nowhere":
            check("control", f"outliers in {where} x {ratio} are there", x.abs().max() > ratio)
        for name, way in ways.items():
            y, dx, dw = (t.double() for t in way(x, w, g))
            off = [
                ((mine - true).norm() / true.norm()).item()
                for mine, true in zip((y[token], dx[token][:, channel], dw[:, channel]), cut, strict=True)
            ]
            FACTS["metrics"][f"{name}, outliers in {where} x {ratio}"] = {
                "output": round(off[0], 5),
                "gradient of x": round(off[1], 5),
                "gradient of w": round(off[2], 5),
            }
            print(f"{name:<20} {where:<9} x {ratio:<6}", *(f"{each:.5f}" for each in off), flush=True)
            check("control", f"{name}, outliers in {where} x {ratio}: finite", all(map(torch.isfinite, map(torch.tensor, off))))
            if where == "nowhere":  # what rounding to 8 and to 4 bits makes
                least, most = (0.002, 0.004) if name == "bf16" else (0.03, 0.08)
                for what, error in zip(("output", "gradient of x"), off[:2], strict=True):
                    check("control", f"{name}: the {what} is off by {100 * error:.2g} %", least < error < most)
            if name == "rowwise_with_gw_hp":
                check("control", f"{name}, outliers in {where} x {ratio}: the gradient of w is not quantized", off[2] < 1e-5)
    finish("MEASURED")


if __name__ == "__main__":
    main()
