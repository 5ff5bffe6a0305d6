"""What each step of the forward and the backward is handed, of the fixed function beside the release's own; no kernel but those of the angles is run.

Each step gives back random numbers, the same of both. All that the next ones are handed has to be the same bit for bit, but for the angles.
"""

import ast
import contextlib
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
        others = ("Angles", "DT", "state 0")  # of which more than the dtype of the angles is the release's
        off = [n for n in own if n not in others and not torch.equal(grads[n], own[n])]
        told = f" (not {', '.join(off)})" * bool(off)
        check("trigger", f"{name}: {len(own.keys() - set(others))} gradients are what the steps give{told}", not off)
        if not more:  # the last kernel reads the same angles, in fp32
            error = ((grads["DT"] - own["DT"]).norm() / own["DT"].norm()).item()
            check("trigger", f"{name}: the gradient of DT is the release's", error=error, limit=1e-4)


class Noted:
    """A Triton kernel that is not run: what it is launched with, by its parameters' names."""

    def __init__(self, name, kernel, taken):
        self.name, self.names, self.taken = name, kernel.arg_names, taken

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        self.taken.append((self.name, {**dict(zip(self.names, args, strict=False)), **options}))


def kernels(module):
    """The names of each module of the steps, and its Triton kernels by theirs."""
    for space in {id(each): each for each in (getattr(module, name).__globals__ for name in (*STEPS, "angle_dt_fwd"))}.values():
        own = {n: each for n, each in space.items() if type(each).__module__.startswith("triton.runtime")}
        yield space, {n: each for n, each in own.items() if hasattr(each, "arg_names")}


def launched(module, given, states=(), final=False, around=contextlib.nullcontext, train=True):
    """What each kernel of forward and, where it is trained, backward is launched with, the outputs and the gradients; what kernels would fill is 0."""
    taken, empty, like = [], torch.empty, torch.empty_like
    zeros = {"empty": lambda *a, **o: empty(*a, **o).zero_(), "empty_like": lambda *a, **o: like(*a, **o).zero_()}
    with contextlib.ExitStack() as swapped:
        for space, own in kernels(module):
            swapped.enter_context(mock.patch.dict(space, {n: Noted(n, each, taken) for n, each in own.items()}))
        swapped.enter_context(mock.patch.multiple(torch, **zeros))
        leaves = {n: t.detach().clone().requires_grad_(train) for n, t in given.items() if torch.is_tensor(t)}
        before = tuple(t.detach().clone().requires_grad_(train) for t in states)
        with around():
            outs = module.mamba3_siso_combined(**leaves, Input_States=before or None, return_final_states=final)
        outs = outs if final else (outs,)
        if train:
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return taken, outs, [t.grad for t in (*leaves.values(), *before) if t.grad is not None]


@contextlib.contextmanager
def autocast(kind):
    """torch.autocast of a device, which need not be there."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def launches(fixed, released, given, states):
    """All kernels but those of the angles are launched as the release launches them, in whatever mode, and get angles in fp32."""
    wide = {n: t.float() if torch.is_tensor(t) else t for n, t in given.items()}
    of_angles = next(own for space, own in kernels(fixed) if space is fixed.angle_dt_fwd.__globals__)
    for name, inputs, more in (
        ("training", given, {}),
        ("training, all inputs in fp32", wide, {}),
        ("training in torch.autocast", given, {"around": lambda: autocast("cuda")}),
        ("training in torch.autocast of a CPU", given, {"around": lambda: autocast("cpu")}),
        ("a segment", given, {"states": states, "final": True}),
        ("without gradients", given, {"states": states, "final": True, "train": False, "around": torch.no_grad}),
        ("in inference mode", given, {"final": True, "train": False, "around": torch.inference_mode}),
    ):
        (got, outs, _), (want, own, _) = (launched(module, inputs, **more) for module in (fixed, released))
        got, want = ([each for each in taken if each[0] not in of_angles] for taken in (got, want))
        off = [] if [n for n, _ in got] == [n for n, _ in want] else ["others"]
        turned = [t for _, args in got for n, t in args.items() if "angle" in n.lower() and torch.is_tensor(t)]
        for (kernel, args), (_, its) in zip(got, want, strict=False):
            others = [{n: v for n, v in each.items() if "angle" not in n.lower()} for each in (args, its)]
            off += [f"{kernel}: {n}" for n in unlike(*others)]
        check(
            "control",
            f"{name}: {len(want)} kernels of the release, which take {len(turned)} tensors of angles",
            want and turned,
        )
        told = f" ({', '.join(off)})" * bool(off)
        check("trigger", f"{name}: all kernels are launched as in the release, but for the angles{told}", not off)
        check("trigger", f"{name}: they get angles in fp32", all(t.dtype.itemsize >= 4 for t in turned))
        same = [a.dtype == b.dtype and a.shape == b.shape for i, (a, b) in enumerate(zip(outs, own, strict=True)) if i != 1]
        check(
            "trigger",
            f"{name}: outputs have the release's dtypes, the angle state fp32",
            all(same) and all(out.dtype is torch.float32 for out in outs[1:2]),
        )
    with mock.patch.object(torch.Tensor, "is_cuda", True):  # some ask
        taken, outs, grads = launched(fixed, {n: t.to("meta") if torch.is_tensor(t) else t for n, t in given.items()})
    there = [t for _, args in taken for t in args.values() if torch.is_tensor(t)] + [*outs, *grads]
    check("trigger", f"all {len(there)} tensors are on the device of the inputs", all(t.is_meta for t in there))


def constants(fixed, released):
    """Triton compiles no kernel that reads a number of its module; its interpreter runs it."""

    def read(module):
        for space, own in kernels(module):
            for name, kernel in own.items():
                while hasattr(kernel, "fn"):
                    kernel = kernel.fn
                names = [n for n in kernel.__code__.co_names if type(space.get(n)) in (int, float, bool, str)]
                yield from (f"{name}: {n}" for n in names)

    more = sorted({*read(fixed)} - {*read(released)})
    check("trigger", f"no kernel reads a number of its module{f' ({more})' * bool(more)}", not more)


def one_after_the_other(fixed, given):
    """What is kept of one forward for its backward is left alone by the next."""
    own = {n: t for n, t in given.items() if torch.is_tensor(t)}
    first = fixed.angle_dt_fwd(own["Angles"].float(), own["DT"], return_output_state=True)
    kept = [t.clone() for t in first]
    fixed.angle_dt_fwd(-own["Angles"].float(), own["DT"], return_output_state=True)
    check("trigger", "a second sum of angles leaves the first one as it is", all(map(torch.equal, first, kept)))


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
