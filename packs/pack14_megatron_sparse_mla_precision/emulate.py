"""What the rounding of P and dP alone does to dQ and dKV: redone in fp64, on any machine. No verdict, and no kernel is run.

For keys with a common mean in the channels beside the values, and for queries scaled to flat and peaked scores.
"""

import argparse
from pathlib import Path

import torch
from alternatives import article
from repro import FACTS, TAIL, D, attention, error, finish, inputs, release

S, H, TOPK = 512, 8, 256
FORMS = {"bf16": lambda t: t.bfloat16().double()}
FORMS["bf16 high + low"] = lambda t: t.bfloat16().double() + (t - t.bfloat16().double()).bfloat16().double()


def backward(rounded, q, kv, do, indices):
    """dq and dkv, shaped like q and kv, in bf16; ``rounded`` is what P and dP go through before they are multiplied."""
    C, at = q.shape[3], indices[0, :, 0].long()
    x, d, keys = q[0].double(), do[0].double(), kv[0, at.clamp(min=0), 0].double()
    p = (x @ keys.mT * C**-0.5).masked_fill((at < 0)[:, None], float("-inf")).softmax(-1)
    dp = d @ keys[..., :D].mT
    ds = rounded(p * (dp - (p * dp).sum(-1, keepdim=True)) * C**-0.5)
    each = ds.mT @ x
    each[..., :D] += rounded(p).mT @ d
    dkv = torch.zeros_like(kv, dtype=torch.float64)
    dkv[0, :, 0].index_add_(0, at.clamp(min=0).flatten(), each.masked_fill((at < 0)[..., None], 0).flatten(0, 1))
    return (ds @ keys)[None].bfloat16(), dkv.bfloat16()


def main():
    _, bwd = release()
    article(Path(bwd.__file__).read_text())  # which stops if the release does not keep P and dP in bf16
    FACTS["evidence"] = "source"
    cases = [("flat", 0.3, 0), ("peaked", 4.0, 0), *((f"mean {mean}", 1.0, mean) for mean in (0, 4, 8, 16))]
    for name, sharpness, mean in cases:
        given = [t.cpu() for t in inputs(S, H, D, TAIL, TOPK, sharpness, mean)]
        right = attention(*given)
        found = FACTS["metrics"][name] = {}
        for form, rounded in FORMS.items():
            dq, dkv = backward(rounded, *given)
            found[form] = {"dq": error(dq, right[0]), "dkv": error(dkv, right[1])}
        print(f"{name}: {found}", flush=True)
    finish("MEASURED")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
