"""dQ and dKV with keys that have a common mean in the channels beside the values: emulated, on any machine. No verdict."""

import argparse

from repro import FACTS, FORMS, TAIL, D, H, error, finish, inputs, release

S, TOPK = 512, 256


def main():
    kernels = release()
    for mean in (0, 4, 8, 16):
        q, kv, do, indices = inputs(S, min(H, 8), D, TAIL, TOPK, 1.0)
        kv[..., D:] += mean
        right = kernels.attention(q, kv, do, indices)
        found = FACTS["metrics"][f"mean {mean}"] = {}
        for form in FORMS:
            dq, _, dkv = kernels.emulated(form, q, kv, do, indices)
            found[form] = {"dq": error(dq, right[0]), "dkv": error(dkv, right[1])}
        print(f"mean {mean}: {found}", flush=True)
    finish("MEASURED")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
