"""The deep check of a fix of pack45: losses, their sum and mean, and the maxima and sums that the backward reads, against fp64.

Runs after repro.py on the patched side: few and many parts, tokens that fill no block, another ignore_index, tokens whose logits are far
apart from one another, parts that are within a token, and logits so large that fp32 has no digits for a loss: their maxima alone.
"""

import torch
from repro import above_own, check, device, epilogues, finish, release

REDUCTIONS = "losses", "their sum", "their mean"
#: tokens, vocabulary, parts, ignore_index
SIZES = ((40, 143360, 70, -100), (16, 1024, 1, -100), (3, 2048, 64, 5), (37, 8256, 129, 3))


def main():
    release()
    for size in SIZES:
        given = dict(zip(("T", "V", "splits", "ignored"), size, strict=True))
        torch.manual_seed(1)
        apart = {"300 apart": 300 * torch.randn(given["T"], 1, device=device)}
        parts = 50 * torch.randn(given["splits"], device=device)
        apart["50 apart from part to part"] = parts.repeat_interleave(given["V"] // given["splits"])
        for name, shift in ({f"{x:g}": x for x in (0.0, -128.0, 128.0, -1e4, -1e6, -1e30, -3e38)} | apart).items():
            role = "control" if name == "0" else "trigger"
            large = isinstance(shift, float) and shift < -1e5
            for reduction, what in enumerate(REDUCTIONS):
                found, right, logits, labels = epilogues(shift, reduction, **given)
                where = "T={T} V={V} in {splits} parts, {ignored} ignored".format(**given) + f", logits around {name}"
                if reduction == 2 and not (labels != given["ignored"]).any():
                    continue  # 0 / 0
                for kernel, (loss, top, sums) in found.items():
                    if not large:
                        off = ((loss.double() - right).norm() / right.norm().clamp_min(1e-30)).item()
                        check(role, f"{kernel}, {where}: {what}", error=off, limit=1e-4)
                    if reduction == 0:
                        exact = logits.double().logsumexp(-1)
                        off = (top.double() + sums.double().log() - exact).abs().max().item() / exact.abs().max().item()
                        check(role, f"{kernel}, {where}: maximum and sum of exponentials", error=off, limit=1e-6)
                        above = above_own(given["splits"]) * (kernel == "forward_tp_epilogue")
                        same = torch.equal(top, (logits.view(given["T"], given["splits"], -1).amax(-1) + above).amax(-1))
                        check(role, f"{kernel}, {where}: the maximum is that of all parts", same)
    finish()


if __name__ == "__main__":
    main()
