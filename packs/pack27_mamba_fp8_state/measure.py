"""The error over the length of a sequence, of e5m2, of a state that is thrown away, and of operands in e4m3. No verdict on a bug."""

import argparse
from functools import partial

import torch
from repro import FACTS, HEADS, SEGMENT, check, device, finish, fp8, inputs, off, release, scan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--segment", type=int, default=SEGMENT, metavar="TOKENS", help=f"tokens between two handovers (default {SEGMENT})"
)
length = 2048 if device == "cpu" else 65536
parser.add_argument("--length", type=int, default=length, metavar="S", help=f"tokens in all (default {length})")
CASTS = {
    "bf16": lambda state: state.bfloat16().float(),
    "e4m3": fp8,
    "e5m2": partial(fp8, dtype=torch.float8_e5m2),
    "thrown away": torch.zeros_like,
}


def main(options):
    release()
    given, S = inputs(options.length), options.length
    exact = scan(given, options.segment)[0]
    whole = max(off(scan(given, S)[0], exact))
    check("control", "a state in fp32: as in one call", error=whole, limit=1e-5 if device == "cpu" else 1e-2)
    outs = {name: scan(given, options.segment, between)[0] for name, between in CASTS.items()}
    e4m3 = {name: fp8(given[name].float()).bfloat16() for name in "QKV"}  # with a scale: 0.1 % by rounding
    outs["Q, K and V in e4m3"] = scan(given | e4m3, options.segment)[0]
    found = {name: off(out, exact) for name, out in outs.items()}
    least = 8 if device == "cpu" else 4  # a GPU rounds the output to bf16
    for name, times, than in (("e4m3", least, "bf16"), ("e5m2", 1.5, "e4m3"), ("thrown away", 10, "bf16")):
        seen = all(a > times * b for a, b in zip(found[name], found[than], strict=True))
        check("control", f"{name} costs more than {times} times what {than} costs", seen)
    check("control", "Q, K and V in e4m3 cost 2 to 8 %", all(0.02 < each < 0.08 for each in found["Q, K and V in e4m3"]))
    eighths = [slice(i * S // 8, (i + 1) * S // 8) for i in range(8)]
    for i, head in enumerate(HEADS):
        by = {name: [round(off(out[part], exact[part])[i], 6) for part in eighths] for name, out in outs.items()}
        FACTS["metrics"][head] = {name: {"all": round(found[name][i], 6), "by eighth": by[name]} for name in outs}
        print(head, *(f"  {name}: {figure}" for name, figure in FACTS["metrics"][head].items()), sep="\n")
    finish("MEASURED")


if __name__ == "__main__":
    main(parser.parse_args())
