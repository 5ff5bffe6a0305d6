"""The deep check of a fix of pack44: what the main kernels are handed in more ways to call the function, then its outputs, final states and gradients.

The second part is against the definition in fp64. Triton's interpreter cannot compute in bf16: there bf16 is fp32 by then, so the release itself is right, and a fix
has to give what it gives, bit for bit. On a GPU no error against the definition may be larger than the release's.
"""

import importlib
import math
import sys
from collections import namedtuple
from pathlib import Path

import repro
import steps
import torch
import torch.nn.functional as F
from repro import FACTS, NAMES, check, device, finish, handed, release, turn

STATES = ("angle state", "SSM state", "K state", "V state")
interpreted = device == "cpu"
LIMIT = 1e-5 if interpreted else 0.1  # a GPU multiplies in bf16
Shape = namedtuple("Shape", "B S G H N P A chunk")  # batch, tokens, groups, heads, d_state, headdim, angles, tokens a chunk
SMALL, LARGE = Shape(1, 37, 2, 4, 32, 64, 16, 16), Shape(1, 1024, 1, 24, 128, 64, 32, 64)
BASE = SMALL if interpreted else LARGE
CASES = {
    "one sequence": {},
    "two sequences, each head its own q and k": {"shape": BASE._replace(B=2, S=32, G=4, H=4)},
    "angles for a quarter of q and k": {"shape": BASE._replace(A=BASE.N // 8)},
    "one token": {"shape": BASE._replace(S=1)},
    "three sequences in one": {"lengths": (1, 20, BASE.S - 21)},
    "without D and Z": {"without": ("D", "Z")},
    "angles in fp16": {"dtype": torch.float16},
    "angles of the heads are one tensor": {"expanded": True},
    "a state before and after": {"states": True},
    "states before and after, three sequences in one": {"states": True, "lengths": (1, 20, BASE.S - 21)},
}


def dispatch(module, released):
    """The angles that the main kernels are handed, and the one that is returned, against those of the release's angle_dt_fwd in fp32; all else as it is given."""
    S, H, N, P, A = 192, repro.H, repro.N, repro.P, repro.A
    states = tuple(torch.rand(1, H, *size, device=device) for size in ((A,), (P, N), (N,), (P,)))
    both, ends = tuple(torch.cat((t, t / 2)) for t in states), torch.tensor([0, S // 3, S], device=device, dtype=torch.int32)
    one, two, final = repro.inputs(S), repro.inputs(S // 2, B=2), {"return_final_states": True}
    for name, given, train, more in (
        ("a forward", one, False, {}),
        ("training, a batch of two", two, True, {}),
        ("training, Angles in bf16", {**one, "Angles": one["Angles"].bfloat16()}, True, {}),
        ("prefill, Angles in bf16", {**one, "Angles": one["Angles"].bfloat16()}, False, final),
        ("training, a token", repro.inputs(1), True, final),
        ("training, a chunk", repro.inputs(64), True, final),
        ("prefill, less than a chunk", repro.inputs(48), False, final),
        ("prefill, a batch of two", two, False, final),
        ("prefill in inference mode", one, False, final),
        ("prefill, chunks of 32", one, False, {**final, "chunk_size": 32}),
        ("after a segment", one, True, {**final, "Input_States": states}),
        ("two sequences in one", one, True, {**final, "Input_States": both, "cu_seqlens": ends}),
    ):
        own = {"init_state": more.get("Input_States", [None])[0], "chunk_size": more.get("chunk_size", 64)}
        own |= {"cu_seqlens": more.get("cu_seqlens"), "return_output_state": True}
        want, last = released.angle_dt_fwd(given["Angles"].float(), given["DT"], **own)
        with torch.inference_mode(name.endswith("inference mode")):
            angles, others = handed(module, given, train, more)
        off = {what: turn(got, last if what == "state" else want) for what, got in angles.items()}
        for what, error in off.items():
            check("trigger", f"{name}: angles of the {what}, rad", error=error, limit=1e-4)
        same = [torch.equal(t, given[n]) and t.dtype == given[n].dtype for n, t in others.items() if n != "states"]
        same += [torch.equal(*pair) for pair in zip(others["states"] or (), more.get("Input_States", ())[1:], strict=True)]
        check("trigger", f"{name}: all {len(same)} other tensors are handed on as they are given", all(same))
        check("control", f"{name}: {', '.join(off)} are seen", len(off) == 1 + train + ("return_final_states" in more))
    given = {**repro.inputs(80), "sizes": ((P, N), (N,), (P,))}
    steps.compared(module, released, given, states)
    steps.launches(module, released, given, states)
    steps.constants(module, released)
    steps.one_after_the_other(module, given)
    steps.angles(module, released, given, states)
    steps.callers(module)


def original():
    """The release's own modules: what the patched ones hide on sys.path is imported for once in their place."""
    file = FACTS["file"]
    overlay = str(Path(file).parents[4])
    patched = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "mamba_ssm"}
    sys.path.remove(overlay)
    importlib.invalidate_caches()
    own = release()
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(patched)
    FACTS["file"] = file
    return own


def inputs(shape=BASE, lengths=(), without=(), dtype=torch.float32, expanded=False, states=False):
    """The function's arguments by their names, and the states that a sequence begins with; random, their gradients wanted."""
    torch.manual_seed(0)
    B, S, G, H, N, P, A, _ = shape
    wide = {"Q": (B, S, G, N), "K": (B, S, G, N), "V": (B, S, H, P), "Trap": (B, H, S), "Z": (B, S, H, P)}
    given = {name: torch.randn(*size, device=device).to(torch.bfloat16) for name, size in wide.items()}
    given["Angles"] = torch.randn(B, S, 1 if expanded else H, A, device=device).to(torch.bfloat16).to(dtype).expand(B, S, H, A)
    given["DT"] = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    given["ADT"] = -2 * given["DT"] * torch.rand(B, H, S, device=device)
    given |= {
        name: 0.1 * torch.randn(*size, device=device) for name, size in (("Q_bias", (H, N)), ("K_bias", (H, N)), ("D", (H,)))
    }
    sizes = {"angle state": (A,), "SSM state": (P, N), "K state": (N,), "V state": (P,)} if states else {}
    given |= {name: torch.rand(len(lengths) or B, H, *size, device=device) for name, size in sizes.items()}
    return {name: given[name] for name in (*NAMES, *sizes) if name not in without}


def outcome(function, given, states, factors):
    """Output, final states, and the gradient of each input; ``factors`` are those of the output and the states."""
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    arguments = {name: t for name, t in leaves.items() if name in NAMES}
    before = tuple(leaves[name] for name in STATES) if states else None
    outs = function(arguments, before)
    torch.autograd.backward(outs[: len(factors)], [factor.to(out.dtype) for factor, out in zip(factors, outs, strict=False)])
    found = dict(zip(("output", *STATES), (out.detach() for out in outs), strict=True))
    return found | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def of_kernel(module, chunk, lengths):
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int() if lengths else None
    return lambda given, before: module.mamba3_siso_combined(
        **given, Input_States=before, chunk_size=chunk, return_final_states=True, cu_seqlens=ends
    )


def rotated(x, angle):
    """x [B, S, H, N], whose first pairs are turned by angle [B, S, H, A]."""
    x0, x1 = x.unflatten(-1, (-1, 2)).unbind(-1)
    angle = F.pad(angle, (0, x0.shape[-1] - angle.shape[-1]))
    return torch.stack((x0 * angle.cos() - x1 * angle.sin(), x0 * angle.sin() + x1 * angle.cos()), -1).flatten(-2)


def definition(given, before, turned_by=lambda angle: angle, kept=lambda t: t):
    """Mamba-3 SISO by its definition, quadratic in S: output and final states.

    ``turned_by`` is what becomes of the angles [B, S, H, A], ``kept`` of q and k [B, S, H, N] after they are turned.
    """
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles = (given[name] for name in NAMES[:9])
    groups = V.shape[2] // Q.shape[2]
    first, state, k_before, v_before = before or (0, 0, 0, 0)
    q, k = (x.repeat_interleave(groups, 2) + bias for x, bias in ((Q, Q_bias), (K, K_bias)))
    angle = (torch.tanh(Angles) * math.pi * DT.transpose(1, 2)[..., None]).cumsum(1) + (first[:, None] if before else 0)
    angle = turned_by(angle)
    rq, rk = kept(rotated(q, angle)), kept(rotated(k, angle))
    now, late = DT * torch.sigmoid(Trap), DT * torch.sigmoid(-Trap)  # of a token's v k^T, taken at once and with the next token
    scale, decayed = now + F.pad(late[..., 1:], (0, 1)), ADT.cumsum(-1)
    decay = (decayed[..., :, None] - decayed[..., None, :]).tril(-1).exp().tril(-1)
    out = torch.einsum("bhts,bshp->bthp", torch.einsum("bthn,bshn->bhts", rq, rk) * decay * scale[:, :, None, :], V)
    of_itself = now * torch.einsum("bshn,bshn->bhs", q, k) + (given["D"][:, None] if "D" in given else 0)
    out = out + of_itself.transpose(1, 2)[..., None] * V
    left = (decayed[..., -1:] - decayed).exp() * torch.cat(
        (scale[..., :-1], now[..., -1:]), -1
    )  # what is left of each at the end
    last = torch.einsum("bhs,bshp,bshn->bhpn", left, V, rk)
    if before:
        state = state + late[:, :, 0, None, None] * v_before[..., :, None] * k_before[..., None, :]
        out = out + torch.einsum("bhs,bhpn,bshn->bshp", decayed.exp(), state, rq)
        last = last + decayed[..., -1].exp()[..., None, None] * state
    if "Z" in given:
        out = out * F.silu(given["Z"])
    return out, torch.remainder(angle[:, -1], 2 * math.pi), last, rk[:, -1], V[:, -1]


def by_definition(lengths):
    """One sequence after the other."""

    def function(given, before):
        parts, start = [], 0
        for i, length in enumerate(lengths or [given["V"].shape[1]]):
            cut = slice(start, start + length)
            own = {n: t[..., cut] if n in ("ADT", "DT", "Trap") else t if t.dim() < 3 else t[:, cut] for n, t in given.items()}
            parts.append(definition(own, before and [t[i : i + 1] if lengths else t for t in before]))
            start += length
        return tuple(torch.cat(t, 1 if i == 0 else 0) for i, t in enumerate(zip(*parts, strict=True)))

    return function


def relative(name, got, want):
    """||got - want|| / ||want||, of the angle state in rad."""
    far = got.double() - want
    if name == "angle state":
        return (torch.remainder(far + math.pi, 2 * math.pi) - math.pi).abs().max().item()
    return (far.norm() / want.norm().clamp(min=1e-3 * want.numel() ** 0.5)).item()


def main():
    fixed, released = release(), original()
    dispatch(fixed, released)
    if interpreted:
        torch.bfloat16 = torch.float32
    for name, case in CASES.items():
        given, lengths, states = inputs(**case), case.get("lengths", ()), case.get("states", False)
        B, S, _, H, N, P, A, chunk = case.get("shape", BASE)
        sizes = [(B, S, H, P), *((len(lengths) or B, H, *size) for size in ((A,), (P, N), (N,), (P,)))]
        factors = [torch.randn(*size, device=device) for size in sizes[: 5 if states else 1]]
        found, before = (outcome(of_kernel(m, chunk, lengths), given, states, factors) for m in (fixed, released))
        wide = {n: t.double() for n, t in given.items()}
        right = outcome(by_definition(lengths), wide, states, [f.to(found["output"].dtype).double() for f in factors])
        of_fp32 = case.get("dtype") is None  # of another, and where it rounds, the release's cast is the bug
        if interpreted and of_fp32:
            same = [n for n in found if torch.equal(found[n], before[n])]
            check("trigger", f"{name}: all {len(found)} are the release's, bit for bit", len(same) == len(found))
        FACTS["metrics"][name], its = {}, {}
        for n, want in right.items():
            error, its[n] = relative(n, found[n], want), relative(n, before[n], want)
            FACTS["metrics"][name][n] = {"fixed": error, "released": its[n]}
            if n == "gradient of Angles" and not of_fp32 and interpreted:
                check("trigger", f"{name}: {n} is that of fp64, rounded to fp16", error < 2**-11)
            else:
                check("trigger", f"{name}: {n} against fp64", error=error, limit=LIMIT)
            if not interpreted:
                check("trigger", f"{name}: {n}, no further off than the release's", error <= 1.1 * its[n] + 1e-4)
        if of_fp32 or not interpreted:
            check("control", f"{name}: the release's are within {LIMIT:g} of fp64", max(its.values()) <= LIMIT)
        cloned = {n: t.clone() for n, t in given.items()}
        with torch.no_grad():
            outs = of_kernel(fixed, chunk, lengths)(
                {n: t for n, t in given.items() if n in NAMES}, tuple(given[n] for n in STATES) if states else None
            )
        alike = all(map(torch.equal, given.values(), cloned.values()))
        check("trigger", f"{name}: without gradients, inputs are left as they are", alike)
        for n, out in zip(("output", *STATES), outs, strict=True):
            check("trigger", f"{name}: {n} without gradients", error=relative(n, out, found[n].double()), limit=LIMIT)
        kinds = all(found[f"gradient of {n}"].dtype == t.dtype for n, t in given.items())
        check("trigger", f"{name}: each gradient has its input's dtype", kinds)
    finish()


if __name__ == "__main__":
    main()
