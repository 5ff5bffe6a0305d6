"""What each step of the forward and the backward is handed, of the fixed function beside the release's own; no kernel but those of the angles is run.

Each step gives back random numbers, the same of both. All that the next ones are handed has to be the same bit for bit, but for the angles.
"""

import ast
import inspect
from pathlib import Path
from unittest import mock

import torch
from repro import FACTS, check, turn

STEPS = (
    "mamba3_siso_fwd",
    "compute_dzdo",
    "compute_dqkv",
    "compute_dqktheta",
    "compute_ddt_dtrap_dinput_states",
    "angle_dt_bwd",
)
# Which the bug is in: the gradient of the angle state takes its dtype.
OWN = {"mamba3_siso_fwd": ("Angles",), "compute_dqktheta": ("angles",), "angle_dt_bwd": ("angle", "grad_output_state")}


def passed(module, given, states=(), final=False):
    """The arguments of each step, by its name, and the gradient of each input."""
    taken, (B, _, H, _) = {}, given["V"].shape
    generator = torch.Generator().manual_seed(0)

    def some(like=None, dtype=None):
        like = given["DT"] if like is None else like
        return torch.rand(like.shape, generator=generator).to(like.device, dtype or like.dtype)

    def forward(a):
        kept = [some(given[n], torch.bfloat16) for n in "VV"] + [some(), some(), some(), *(some(given["Q"]) for _ in "QK")]
        return *kept, some(), some(), some(), tuple(some(t) for t in ends) if final else None

    ends = [torch.empty(B, H, *size, device=given["V"].device) for size in given["sizes"]]
    like = {n: t for n, t in given.items() if torch.is_tensor(t)}
    biases = [like["Q_bias"], like["K_bias"]]
    gives = {
        "mamba3_siso_fwd": forward,
        "compute_dzdo": lambda a: (some(like["Z"]), some(like["V"])),
        "compute_dqkv": lambda a: (
            *map(some, (like["Q"], like["K"], like["V"], like["ADT"], like["DT"], like["D"])),
            some(ends[0]),
        ),
        "compute_dqktheta": lambda a: (
            *map(some, (like["Q"], like["K"], *biases)),
            some(like["Angles"], torch.float32),
            some(),
            some(),
        ),
        "compute_ddt_dtrap_dinput_states": lambda a: (some(), some(like["Trap"]), *map(some, ends)),
        "angle_dt_bwd": lambda a: module_bwd(**a),
    }
    module_bwd = module.angle_dt_bwd

    def stub(name):
        signature = inspect.signature(getattr(module, name))

        def call(*args, **options):
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            taken[name] = {n: t.clone() if torch.is_tensor(t) else t for n, t in bound.arguments.items()}
            return gives[name](dict(bound.arguments))

        return call

    leaves = {n: t.detach().clone().requires_grad_() for n, t in like.items()}
    before = tuple(t.detach().clone().requires_grad_() for t in states)
    with mock.patch.multiple(module, **{name: stub(name) for name in STEPS}):
        outs = module.mamba3_siso_combined(**leaves, Input_States=before or None, return_final_states=final)
        outs = outs if final else (outs,)
        torch.autograd.backward(outs, [some(out) for out in outs])
    return taken, {**{n: t.grad for n, t in leaves.items()}, **{f"state {i}": t.grad for i, t in enumerate(before)}}


def unlike(got, want):
    """The arguments of one step that are another step's in value, dtype or device."""
    flat = lambda a: {f"{n}[{i}]": t for n, v in a.items() for i, t in enumerate(v if isinstance(v, tuple) else (v,))}  # noqa: E731
    got, want, found = flat(got), flat(want), []
    for name in want.keys() | got.keys():
        a, b = got.get(name), want.get(name)
        if torch.is_tensor(a) and torch.is_tensor(b):
            same = a.dtype == b.dtype and a.device == b.device and (a.is_meta or torch.equal(a, b))
        else:
            same = name in got and name in want and type(a) is type(b) and a == b
        found += [] if same else [name]
    return sorted(found)


def compared(fixed, released, given, states):
    for name, more in (("training", {}), ("a segment", {"states": states, "final": True})):
        (got, grads), (want, own) = (passed(module, given, **more) for module in (fixed, released))
        check("control", f"{name}: {len(want)} steps of the release are seen", [*want] == [*STEPS])
        for step in STEPS:
            others = [{n: v for n, v in a[step].items() if n not in OWN.get(step, ())} for a in (got, want)]
            off = unlike(*others)
            told = f" ({', '.join(off)})" if off else ""
            check("trigger", f"{name}: {step} is handed what the release hands it, but for the angles{told}", not off)
        angle = got["angle_dt_bwd"]["angle"]
        check(
            "trigger",
            f"{name}: the backward of the angles gets them as they are given",
            torch.equal(angle.float(), given["Angles"].float()),
        )
        off = [n for n in own if n not in ("Angles", "DT", "state 0") and not torch.equal(grads[n], own[n])]
        check(
            "trigger",
            f"{name}: {len(own) - 2 - bool(states)} gradients are what the steps give{' (not ' * bool(off)}{', '.join(off)}",
            not off,
        )


def elsewhere(fixed, given):
    """On a device that is not the default one nothing is made on another; no kernel is run."""
    kernels = {}
    for name in ("angle_dt_fwd", "angle_dt_bwd"):
        space = vars(inspect.getmodule(getattr(fixed, name)))
        kernels |= {n: (space, each) for n, each in space.items() if type(each).__module__.startswith("triton.runtime")}
    launched = [space.__setitem__(n, kernel := mock.MagicMock()) or kernel for n, (space, _) in kernels.items()]
    try:
        taken, grads = passed(fixed, {n: t.to("meta") if torch.is_tensor(t) else t for n, t in given.items()})
    finally:
        for n, (space, each) in kernels.items():
            space[n] = each
    there = [t for a in taken.values() for t in a.values() if torch.is_tensor(t)] + [*grads.values()]
    there += [t for kernel in launched for call in kernel.mock_calls for t in call.args if torch.is_tensor(t)]
    check("trigger", f"all {len(there)} tensors are on the device of the inputs", all(t.is_meta for t in there))


def angles(fixed, released, given, states):
    """angle_dt_fwd and angle_dt_bwd, which the MIMO kernels call, too: fp32 angles are turned as in the release."""
    ends = torch.tensor([0, 20, given["V"].shape[1]], device=given["V"].device, dtype=torch.int32)
    Angles, DT = given["Angles"].float(), given["DT"]
    for name, more, both in (
        ("one sequence", {}, states),
        ("two", {"cu_seqlens": ends}, tuple(torch.cat((t, t / 2)) for t in states)),
    ):
        got, want = (m.angle_dt_fwd(Angles, DT, both[0], return_output_state=True, **more) for m in (fixed, released))
        for what, a, b in zip(("angles", "state"), got, want, strict=True):
            check("trigger", f"angle_dt_fwd, {name}: {what} of fp32, rad", error=turn(a, b), limit=1e-4)
        options = {"has_init_state": True, "grad_output_state": both[0], **more}
        got, want = (m.angle_dt_bwd(torch.cos(Angles), Angles, DT, **options) for m in (fixed, released))
        for what, a, b in zip(("angles", "DT", "state"), got, want, strict=True):
            check(
                "trigger", f"angle_dt_bwd, {name}: gradient of the {what}", error=((a - b).norm() / b.norm()).item(), limit=1e-5
            )


def callers(fixed):
    """The release's other callers of these functions, the MIMO kernels among them, can call them still."""
    functions = {
        name: inspect.signature(getattr(fixed, name)) for name in ("angle_dt_fwd", "angle_dt_bwd", "mamba3_siso_combined")
    }
    package = Path(FACTS["file"]).parents[3]
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in functions:
                try:
                    functions[node.func.id].bind(*node.args, **{k.arg: k.value for k in node.keywords})
                    fits = True
                except TypeError:
                    fits = False
                check("trigger", f"{file.name} can call {node.func.id}, line {node.lineno}", fits)
