"""Products of experts: torchao's grouped FP8 (rowwise) beside bf16's, forward and backward, by the tokens that an expert sees. No verdict.

Eight experts [N, K] of one kind of layer; each sees as many tokens as the others, and once half of all go to one. Beside them the forward's
product alone, of tensors that are in FP8 already. As one CUDA graph each, as in repro.py; times in ratios to bf16's.
"""

import importlib
import unittest.mock

import torch
from repro import FACTS, check, finish, parser, release, timed

EXPERTS, TOKENS = 8, (16, 128, 512, 2048)
K, N = 7168, 2048  # channels of a token and of an expert, as in DeepSeek-V3


def fp8():
    """The release's grouped product, which asks for whole sixteens of tokens an expert."""
    release()
    try:
        module = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    except ImportError:
        finish("UNTESTABLE", "no-api")
    FACTS["file"] = module.__file__
    return module._to_fp8_rowwise_then_scaled_grouped_mm


def step(function, x, w, ends, given):
    """Output [M, N], and gradients of x [M, K] and w [experts, N, K]; expert i sees the rows of x up to ends[i]."""
    x.grad = w.grad = None
    out = function(x, w.transpose(-2, -1), ends)
    out.backward(given)
    return out.detach(), x.grad, w.grad


def products(x, w, ends):
    """Milliseconds of the forward's product alone: in bf16, and in FP8 of tensors that are FP8 already."""
    x8, w8 = (t.detach().to(torch.float8_e4m3fn) for t in (x, w))
    ones = torch.ones(len(x), device="cuda"), torch.ones(EXPERTS, N, device="cuda")
    plain = timed(lambda: torch._grouped_mm(x.detach(), w.detach().transpose(-2, -1), ends))
    more = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return plain, timed(lambda: torch._scaled_grouped_mm(x8, w8.transpose(-2, -1), *ones, ends, **more))


def main():
    in_fp8 = fp8()
    ours = lambda x, w, ends: in_fp8(x, w, ends, pad_token_groups_for_grouped_mm=False)  # noqa: E731
    plain = lambda x, w, ends: torch._grouped_mm(x, w, ends)  # noqa: E731
    w = (torch.randn(EXPERTS, N, K, device="cuda") / K**0.5).bfloat16().requires_grad_()
    times = {}
    even = {f"{tokens} tokens an expert": [tokens] * EXPERTS for tokens in TOKENS}
    half = TOKENS[1] * EXPERTS // 2
    for name, counts in {**even, f"{2 * half} tokens, half of them to one expert": [half] + [64] * 6 + [128]}.items():
        torch.manual_seed(0)
        M, ends = sum(counts), torch.tensor(counts, device="cuda").cumsum(0).int()
        x, given = torch.randn(M, K, device="cuda").bfloat16().requires_grad_(), torch.randn(M, N, device="cuda").bfloat16()
        with unittest.mock.patch.object(torch, "_scaled_grouped_mm", wraps=torch._scaled_grouped_mm) as product:
            got = [t.clone() for t in step(ours, x, w, ends, given)]
        check("control", f"{name}: three products in FP8", product.call_count == 3)
        right, rows = step(plain, x, w, ends, given), torch.tensor_split(torch.arange(M), ends.cpu().long()[:-1])
        errors = {"output": [], "dx": [], "dw": []}
        for expert, own in enumerate(rows):
            for (what, found), part in zip(errors.items(), (own, own, expert), strict=True):
                a, b = (t[list(errors).index(what)][part].float() for t in (got, right))
                found.append(round(((a - b).norm() / b.norm()).item(), 4))
        for what, found in errors.items():
            said = f"{name}: {what} of each expert off bf16's by 1 to 10 %, so it is FP8"
            check("control", said, all(0.01 < far < 0.1 for far in found))
        for way, function in (("bf16", plain), ("rowwise", ours)):
            times[way, M] = timed(lambda function=function, x=x, ends=ends, given=given: step(function, x, w, ends, given))
        alone = products(x, w, ends)
        found = {
            "bf16, µs": round(1e3 * times["bf16", M], 1),
            "rowwise / bf16": round(times["rowwise", M] / times["bf16", M], 3),
            "product in FP8 / in bf16": round(alone[1] / alone[0], 3),
            "off bf16's, by expert": errors,
        }
        FACTS["metrics"][name] = found
        print(name, *(f"  {word}: {figure}" for word, figure in found.items()), sep="\n", flush=True)
    most, fewest = TOKENS[-1] * EXPERTS, TOKENS[0] * EXPERTS
    check(
        "control",
        "128 times as many tokens take at least 4 times as long in bf16",
        times["bf16", most] > 4 * times["bf16", fewest],
    )
    for counts in ([128] * EXPERTS, [125] * EXPERTS, [120, 136] * (EXPERTS // 2)):
        M, ends = sum(counts), torch.tensor(counts, device="cuda").cumsum(0).int()
        x, given = torch.randn(M, K, device="cuda").bfloat16().requires_grad_(), torch.ones(M, N, device="cuda").bfloat16()
        outs = {}
        for name, function in (("in bf16", plain), ("as it is called without options", in_fp8), ("without padding", ours)):
            try:
                outs[name] = [t.float() for t in step(function, x, w, ends, given)]
                torch.cuda.synchronize()
                far = [round(((a - b).norm() / b.norm()).item(), 4) for a, b in zip(outs[name], outs["in bf16"], strict=True)]
                said = "runs" if name == "in bf16" else f"runs, output, dx and dw off bf16's by {far}"
            except (AssertionError, RuntimeError) as raised:
                if isinstance(raised, torch.cuda.OutOfMemoryError):
                    raise
                said = f"{type(raised).__name__}: {str(raised).splitlines()[0][:120]}"
            words = f"{M} tokens, {counts[0]} and {counts[1]} an expert in turn, {name}"
            FACTS["metrics"][words] = said
            print(f"{words}: {said}", flush=True)
            if "device-side assert" in said:  # this process has no GPU any more
                finish("MEASURED")
    finish("MEASURED")


if __name__ == "__main__":
    parser.parse_args()
    main()
