"""What the rounded angles cost: the angles that the function hands its kernel, put into the definition of Mamba-3 SISO in fp64.

Output, states and gradients, against the definition with its own angles; beside them what it costs to round q and k alone to bf16 after
they are turned, which the kernel does, too. No kernel is run but the one of the angles; no verdict.
"""

import repro
import torch
from repro import FACTS, check, finish, handed, inputs, release
from validate import definition, outcome, relative


def main(options):
    module, given = release(), inputs(options.tokens)
    fp32 = module.angle_dt_fwd(given["Angles"], given["DT"])
    its = handed(module, given, False, {})[0]["forward"]
    wide = {name: t.double() for name, t in given.items()}
    factors = [torch.randn_like(wide["V"])]

    def by(angles=None, kept=lambda t: t):
        """With these angles in forward and backward; the definition's own where there are none."""
        turned_by = (lambda own: own + (angles.double() - own).detach()) if angles is not None else (lambda own: own)
        return outcome(lambda leaves, before: definition(leaves, before, turned_by, kept), wide, False, factors)

    exact, found = by(), {"its angles": by(its), "angles in fp32": by(fp32)}
    found["q and k rounded to bf16"] = by(kept=lambda t: t + (t.bfloat16() - t).detach())
    for name, want in exact.items():
        if name not in ("angle state", "V state") and want is not None:
            FACTS["metrics"][name] = {what: relative(name, other[name], want) for what, other in found.items()}
            print(name, *(f"  {what}: {error:.1e}" for what, error in FACTS["metrics"][name].items()), sep="\n")
    small = max(figures["angles in fp32"] for figures in FACTS["metrics"].values())
    check("control", f"angles in fp32 cost {small:.0e}", small < 1e-4)
    finish("MEASURED")


if __name__ == "__main__":
    main(repro.parser.parse_args())
