"""What `nox -s hunt` varies of Mamba-3 SISO, and whether one case is right. The first value of each option is the plainest."""

import math

import torch
from repro import device, interpreted

SPACE = {
    "S": [37, 1, 2, 16, 65, 130],
    "lengths": [None, "three", "one of 1", "all of 1"],
    "B": [1, 3],
    "heads": ["1 of 1", "2 of 4", "1 of 4", "4 of 4"],
    "N": [32, 16, 64],
    "P": [64, 16, 32],
    "chunk": [16, 32, 64],
    "angles": ["all", "half", "a few"],
    "D": [True, False],
    "Z": [True, False],
    "given": ["nothing", "states", "states of 0"],
    "asked": ["out", "out and states", "states alone"],
    "trained": ["all", "Q K V", "the parameters", "ADT DT", "the states"],
    "layout": ["rows", "slices of one tensor", "transposed"],
    "gradient": ["its own", "stride 0"],
    "backward": ["once", "twice"],
    "decay": [1, 0, 20],
}
#: Finds that a pack shows already, as in pack32's hunt.py: none.
KNOWN = []
# --- case ---
NAMES = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
STATES = ("angle state", "SSM state", "K state", "V state")
TRAINED = {
    "all": NAMES + STATES,
    "Q K V": NAMES[:3],
    "the parameters": ("Q_bias", "K_bias", "D"),
    "ADT DT": ("ADT", "DT"),
    "the states": STATES,
}
LIMIT = (
    1e-3 if interpreted else 0.1
)  # bf16 on a GPU, fp32 in its place on the interpreter, where sums over tokens round by 1e-4


def rotated(x, angle):
    """x [B, H, N], of which the first pairs turn by angle [B, H, A], A <= N / 2."""
    x0, x1 = x.unflatten(-1, (-1, 2)).unbind(-1)
    angle = torch.nn.functional.pad(angle, (0, x0.shape[-1] - angle.shape[-1]))
    return torch.stack((x0 * angle.cos() - x1 * angle.sin(), x0 * angle.sin() + x1 * angle.cos()), -1).flatten(-2)


def eager(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, *, Input_States=None, **options):
    """Mamba-3 SISO token by token: the state h [B, H, P, N] takes half a step of the last k and v, and half of the new ones."""
    if (ends := options.get("cu_seqlens")) is not None:
        parts = []
        for i, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            cut = [
                t[..., start:end]
                if n in ("ADT", "DT", "Trap")
                else t[:, start:end]
                if n in ("Q", "K", "V", "Angles", "Z") and t is not None
                else t
                for n, t in zip(NAMES, (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z), strict=True)
            ]
            parts.append(
                eager(*cut, Input_States=Input_States and [t[i : i + 1] for t in Input_States], return_final_states=True)
            )
        joined = [torch.cat(t, 1 if j == 0 else 0) for j, t in enumerate(zip(*parts, strict=True))]
        return tuple(joined) if options["return_final_states"] else joined[0]
    (B, S, H, P), N = V.shape, Q.shape[-1]
    groups = H // Q.shape[2]
    angle, h, k, v = Input_States or [V.new_zeros(B, H, *rest) for rest in ((Angles.shape[-1],), (P, N), (N,), (P,))]
    outs = []
    for t in range(S):
        angle = angle + torch.tanh(Angles[:, t]) * math.pi * DT[:, :, t, None]
        q, new = (x[:, t].repeat_interleave(groups, 1) + bias for x, bias in ((Q, Q_bias), (K, K_bias)))
        q, new = rotated(q, angle), rotated(new, angle)
        decay, here = torch.exp(ADT[:, :, t, None, None]), torch.sigmoid(Trap[:, :, t, None, None])
        step = DT[:, :, t, None, None]
        h = decay * (h + step * (1 - here) * v[..., :, None] * k[..., None, :])
        h = h + step * here * V[:, t, :, :, None] * new[..., None, :]
        k, v = new, V[:, t]
        out = (h * q[..., None, :]).sum(-1) + (0 if D is None else D[:, None] * v)
        outs.append(out if Z is None else out * torch.nn.functional.silu(Z[:, t]))
    out = torch.stack(outs, 1)
    return (out, angle % (2 * math.pi), h, k, v) if options.get("return_final_states") else out


def arranged(t, layout):
    """The same numbers, in memory as part of a larger tensor or with two dimensions exchanged."""
    if layout == "slices of one tensor":
        return torch.cat([t, t], -1)[..., : t.shape[-1]]
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "transposed" and t.dim() > 1 else t


def run(function, tensors, states, trained, factors, asked, backward, **options):
    """What is asked for, and the gradients of what is trained; of the second of two backwards over one graph."""
    leaves = {n: t.detach().requires_grad_(n in trained) for n, t in {**tensors, **states}.items()}
    if states:
        options["Input_States"] = tuple(leaves[n] for n in STATES)
    given = [leaves.get(n) for n in NAMES]
    outs = function(*given, return_final_states=asked != "out", **options)
    outs = dict(zip(("out", *STATES), outs if isinstance(outs, tuple) else [outs], strict=False))
    used = {n: t for n, t in outs.items() if n != "angle state" and (n != "out" or asked != "states alone") and t.requires_grad}
    found = {n: t.detach() for n, t in outs.items()}
    for left in reversed(range(1 + (backward == "twice"))):
        for leaf in leaves.values():
            leaf.grad = None
        if used:
            torch.autograd.backward(
                list(used.values()), [factors[n].to(t.dtype) for n, t in used.items()], retain_graph=left > 0
            )
    return {**found, **{f"gradient of {n}": leaves[n].grad for n in leaves if n in trained and used}}


def case(
    function, *, S, lengths, B, heads, N, P, chunk, angles, D, Z, given, asked, trained, layout, gradient, backward, decay
):
    """{"ok", "how", "error"}: ok is None where the function refuses what is asked."""
    torch.manual_seed(0)
    call = function if function is eager else function.mamba3_siso_combined
    G, H = map(int, heads.split(" of "))
    ends = {"three": [S // 3, S // 3, S - 2 * (S // 3)], "one of 1": [1, S - 1], "all of 1": [1] * S}.get(lengths)
    if ends and (S < 3 or B > 1):
        return {"ok": None, "how": "lengths take one batch, and three tokens", "error": None}
    options = {"chunk_size": chunk}
    if ends:
        options["cu_seqlens"] = torch.tensor([0, *ends], device=device).cumsum(0).int()
    A = {"all": N // 2, "half": N // 4, "a few": 4}[angles]
    shapes = {
        "Q": (B, S, G, N),
        "K": (B, S, G, N),
        "V": (B, S, H, P),
        "Trap": (B, H, S),
        "Angles": (B, S, H, A),
        "Z": (B, S, H, P),
    }
    tensors = {n: torch.randn(*shape) for n, shape in shapes.items() if n != "Z" or Z}
    tensors |= {
        n: 0.3 * torch.randn(*shape) for n, shape in (("Q_bias", (H, N)), ("K_bias", (H, N)), ("D", (H,))) if n != "D" or D
    }
    tensors["DT"] = 0.05 + 0.2 * torch.rand(B, H, S)
    tensors["ADT"] = -2 * decay * tensors["DT"] * torch.rand(B, H, S)
    sequences = len(ends) if ends else B
    shapes = {"angle state": (A,), "SSM state": (P, N), "K state": (N,), "V state": (P,)}
    states = (
        {n: (given == "states") * torch.randn(sequences, H, *shape) for n, shape in shapes.items()}
        if given != "nothing"
        else {}
    )
    outs = {"out": (B, S, H, P), **{n: (sequences, H, *shape) for n, shape in shapes.items()}}
    factors = {n: torch.randn((1,) * len(shape) if gradient == "stride 0" else shape) for n, shape in outs.items()}
    low = () if interpreted else ("Q", "K", "V", "Trap", "Angles", "Z")
    every = {n: t.to(device, torch.bfloat16 if n in low else torch.float32) for n, t in {**tensors, **states}.items()}
    every = {n: arranged(t, layout) for n, t in every.items()}
    tensors, states = {n: every[n] for n in tensors}, {n: every[n] for n in states}
    # As the output's dtype has them: the gradient of D is a sum over all tokens that may cancel, and would show their rounding.
    kinds = {n: torch.bfloat16 if n == "out" and low else torch.float32 for n in outs}
    factors = {n: t.to(device, kinds[n]).expand(outs[n]) for n, t in factors.items()}
    before = {n: t.clone() for n, t in every.items()}
    wide = [{n: t.double() for n, t in part.items()} for part in (tensors, states)]
    want = run(eager, *wide, TRAINED[trained], factors, asked, "once", **options)
    try:
        got = run(call, tensors, states, TRAINED[trained], factors, asked, backward, **options)
    except Exception as raised:
        refused = (backward == "twice" and type(raised) is RuntimeError) or "InterpreterError" in type(raised).__name__
        words = (str(raised).splitlines() or [""])[0][:80]
        return {"ok": None if refused else False, "how": f"raises {type(raised).__name__}: {words}", "error": None}
    if changed := [n for n, t in every.items() if not torch.equal(t, before[n])]:
        return {"ok": False, "how": f"{changed[0]} is changed", "error": None}
    for n, right in want.items():
        mine = got.get(n)
        if right is None or (mine is None and not right.any()):
            continue
        if mine is None or mine.shape != right.shape:
            return {"ok": False, "how": f"the {n} is missing, or of another shape", "error": None}
        far = mine.double() - right
        if n == "angle state":  # of two angles, the turn between them
            far = torch.remainder(far + math.pi, 2 * math.pi) - math.pi
        # Some are 0 but for rounding: that of the angles that a state of 0 begins with, which in bf16 is not small.
        if n == "gradient of angle state" and given == "states of 0" and not interpreted:
            continue
        error = (far.norm() / right.norm().clamp(min=0.1 * right.numel() ** 0.5)).item()
        if not error <= LIMIT:
            return {"ok": False, "how": f"the {n} is off", "error": error if math.isfinite(error) else None}
    return {"ok": True, "how": "", "error": None}
