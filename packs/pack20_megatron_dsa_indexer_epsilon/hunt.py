"""What `nox -s hunt` varies of the DSA indexer's loss, and whether one case is right. The first value of each option is the plainest."""

import torch
from repro import NAMES, definition, inputs, loss_of, outcome

SPACE = {
    "S": [64, 16, 33, 200],
    "B": [1, 2],
    "heads": [4, 1, 16],
    "H": [8, 1, 64],
    "d": [32, 192],
    "D": [32, 128],
    "gain": [1, 0.1, 8, 32, 128],
    "sparse": [False, True],
    "topk": [8, 1, 16],
    "coefficient": [1.0, 0.01],
}
#: Finds that a pack shows already, as in pack32's hunt.py.
#: How many probabilities fall under 1e-10 depends on all sizes, so that any may stand beside a large gain.
KNOWN = [
    {
        "pack": "pack20",
        "package": "megatron-core",
        "how": "is off",
        "options": {**dict.fromkeys(SPACE), "gain": [8, 32, 128]},
    }
]
eager = definition
# --- case ---
LIMIT = 1e-4


def case(function, *, S, B, heads, H, d, D, gain, coefficient, **options):
    """{"ok", "how", "error"} of the loss and the gradients, against the definition in fp64."""
    given = inputs(S, B, heads, H, d, D, gain)

    def asked(*leaves):
        if function is definition:
            return coefficient * function(*leaves, **options)
        return loss_of(function, *leaves, coefficient=coefficient, **options)[0]

    try:
        got = outcome(asked, given)
    except Exception as raised:
        words = (str(raised).splitlines() or [""])[0][:80]
        return {"ok": False, "how": f"raises {type(raised).__name__}: {words}", "error": None}
    want = outcome(lambda *leaves: coefficient * definition(*leaves, **options), given, torch.float64)
    for name, mine, right in zip(NAMES, got, want, strict=True):
        # Over one key the loss is 0, and so are its gradients.
        error = ((mine - right).norm() / right.norm().clamp(min=1e-6)).item()
        if not error <= LIMIT:
            return {"ok": False, "how": f"{name} is off", "error": error if torch.isfinite(mine).all() else None}
    return {"ok": True, "how": "", "error": None}
