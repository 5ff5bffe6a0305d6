"""What the rounded angles cost: the angles that the release hands its kernel, put into the definition of Mamba-3 SISO in fp64.

Output, states and gradients, against the definition with its own angles; beside them what it costs to round q and k to bf16 after they
are turned, as the kernel does before it multiplies. No kernel is run but the one of the angles; no verdict.
"""

import repro
import torch
import validate
from repro import FACTS, check, finish, handed, inputs, release
from validate import definition, off, outcome, rotated


def main(options):
    module, given = release(), inputs(options.tokens)
    fp32, angles = module.angle_dt_fwd(given["Angles"], given["DT"]), handed(module, given)[0]["Angles"]
    wide = {name: t.double() for name, t in given.items()}
    factors = [torch.randn_like(wide["V"])]

    def by(angles=None):
        """With these angles in forward and backward; the definition's own where there are none."""
        turned_by = (lambda own: own + (angles.double() - own).detach()) if angles is not None else (lambda own: own)
        return outcome(lambda leaves, before: definition(leaves, before, turned_by), wide, False, factors)

    exact, found = by(), {"the release's angles": by(angles), "its own kernel's angles in fp32": by(fp32)}
    validate.rotated = lambda x, angle: (turned := rotated(x, angle)) + (turned.bfloat16() - turned).detach()
    found["exact angles, q and k rounded to bf16"] = by()
    for name, want in exact.items():
        if name not in ("angle state", "V state") and want is not None:
            FACTS["metrics"][name] = {what: off(name, other[name], want) for what, other in found.items()}
            print(name, *(f"  {what}: {error:.1e}" for what, error in FACTS["metrics"][name].items()), sep="\n")
    small = max(figures["its own kernel's angles in fp32"] for figures in FACTS["metrics"].values())
    check("control", f"angles in fp32 cost {small:.0e}", small < 1e-4)
    finish("MEASURED")


if __name__ == "__main__":
    main(repro.parser.parse_args())
