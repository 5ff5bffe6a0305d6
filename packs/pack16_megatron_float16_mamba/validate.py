"""The deep check of a fix of pack16: the wrapped module is what it would be without the marks, but for what is marked.

Runs after repro.py on the patched side, in bf16 and fp16: every parameter and buffer, which stay the objects that they were (tied, frozen, not
saved), attributes that other parts of Megatron read, mixers that were built in fp32, what the wrapper does with inputs and outputs, and the
marks taken off again. Other code is the release's, word for word.
"""

import ast
import functools
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from unittest import mock

import torch
from repro import FACTS, KEPT, check, config_of, device, finish, layers, release


def model(mamba_mixer, mamba3, config):
    """The layers of repro.py with buffers, one of them not saved, tied and frozen parameters, and integers."""
    built = torch.nn.ModuleDict({name.replace(" ", "_"): layer for name, layer in layers(mamba_mixer, mamba3, config).items()})
    linear = built["Linear_in_fp32"]
    linear.tied, linear.twin = built["MambaMixer"].D, linear.weight
    for name in ("frozen", "kept"):
        setattr(linear, name, torch.nn.Parameter(torch.rand(5, device=device), requires_grad=False))
    linear.register_buffer("unsaved", torch.rand(7, device=device), persistent=False)
    linear.register_buffer("plain", torch.rand(7, device=device))
    linear.register_buffer("marked", torch.rand(7, device=device))
    for kind in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64):
        linear.register_buffer(str(kind).rpartition(".")[2], torch.arange(3, device=device).to(kind))
    linear.register_buffer("fp64", torch.rand(3, device=device, dtype=torch.float64))
    halves = [torch.rand(3, device=device).to(dtype) for dtype in (torch.bfloat16, torch.float16)]
    linear.halves = torch.nn.ParameterList(halves)
    linear.marked.keep_in_fp32 = linear.kept.keep_in_fp32 = True
    linear.frozen.keep_in_fp32 = False
    return built


def state(module):
    """Every parameter and buffer by name."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


def changed(inherited):
    """What is not the release's, but for ``__init__`` of the two classes, and plain functions that are new by names that nothing else has."""
    own, released = Path(FACTS["file"]).parents[1], Path(distribution("megatron-core").locate_file("megatron/core"))
    made = {"transformer/module.py": "Float16Module", "ssm/mamba_mixer.py": "MambaMixer"}
    words = "name", "id", "attr", "asname"  # where the syntax tree has names

    def parts(file, owner):
        """The file's statements; of ``owner`` its head, and its own but for ``__init__``."""
        for part in ast.parse(file.read_text()).body:
            if getattr(part, "name", "") == owner:
                yield from (inner for inner in part.body if getattr(inner, "name", "") != "__init__")
                part.body = []
            yield part

    files = [{str(file.relative_to(root)) for file in root.rglob("*.py")} for root in (released, own)]
    for name in sorted(files[0] | files[1]):
        if name in files[0] & files[1] and (own / name).read_bytes() == (released / name).read_bytes():
            continue
        if name not in made or name not in files[0] & files[1]:
            yield name
            continue
        was = [ast.dump(part) for part in parts(released / name, made[name])]
        now = [*parts(own / name, made[name])]
        new = [part for part in now if isinstance(part, ast.FunctionDef) and ast.dump(part) not in was]
        taken = {getattr(node, word, None) for node in ast.walk(ast.parse((released / name).read_text())) for word in words}
        odd = any(part.decorator_list or part.name.startswith("__") for part in new)
        if (
            [ast.dump(part) for part in now if part not in new] != was
            or odd
            or (taken | inherited) & {part.name for part in new}
        ):
            yield name


def made(module, mamba_mixer, mamba3, config):
    """A mixer's parameters as it is built, their attributes, and what a Float16Module says of itself."""
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)
    with mock.patch.object(torch, "rand_like", torch.zeros_like):  # layers() adds such numbers
        mixer = layers(mamba_mixer, mamba3, config)["MambaMixer"]
    inner = Seen()
    inner.vp_stage, inner.pg_collection = 3, "groups"
    told = {"Float16Module": module.Float16Module(config, inner), **dict(mixer.named_parameters())}
    plain = lambda value: value if isinstance(value, (bool, int, float, str)) else type(value).__name__  # noqa: E731
    about = {n: {k: plain(v) for k, v in vars(of).items() if k != "keep_in_fp32"} for n, of in told.items()}
    return {n: p.detach().cpu().clone() for n, p in mixer.named_parameters()}, about


def released():
    """What made() gives of the release, for both dtypes: in a process of its own, which does not see what hides it on sys.path."""
    overlay, seen = FACTS["file"].split("/megatron/core/")[0], os.environ["PYTHONPATH"].split(os.pathsep)
    assert overlay in seen
    with tempfile.NamedTemporaryFile() as file:
        path = os.pathsep.join(each for each in seen if each != overlay)
        subprocess.run([*sys.orig_argv, "--made", file.name], env={**os.environ, "PYTHONPATH": path}, check=True)
        found = torch.load(file.name)
    assert found.pop("file") != FACTS["file"]
    return found


def decides(root):
    """How often MambaMixer.__init__ decides something."""
    tree = ast.parse((root / "ssm/mamba_mixer.py").read_text())
    own = next(each for each in tree.body if getattr(each, "name", "") == "MambaMixer")
    body = next(each for each in own.body if getattr(each, "name", "") == "__init__")
    return sum(isinstance(each, (ast.If, ast.IfExp, ast.BoolOp, ast.Compare, ast.Try)) for each in ast.walk(body))


class Seen(torch.nn.Module):
    """Hands its input on, and keeps its dtype."""

    def forward(self, hidden):
        self.dtype = hidden.dtype
        return hidden


def main():
    module, mamba_mixer, mamba3 = release()
    bases = *inspect.getmro(module.Float16Module)[1:], *inspect.getmro(mamba_mixer.MambaMixer)[1:]
    other = [*changed({name for base in bases for name in dir(base)})]
    check("trigger", f"nothing else is changed: {', '.join(other) or 'nothing'}", not other)
    theirs = released()
    roots = Path(FACTS["file"]).parents[1], Path(distribution("megatron-core").locate_file("megatron/core"))
    counts = [decides(root) for root in roots]
    check("trigger", f"the mixer is made with {counts[0]} decisions, of {counts[1]} in the release", counts[0] <= counts[1])
    marked = {f"{layer.replace(' ', '_')}.{n}" for layer, names in KEPT.items() for n in names}
    marked |= {f"Linear_in_fp32.{n}" for n in ("tied", "marked", "kept")}
    for dtype in (torch.bfloat16, torch.float16):
        config = config_of(dtype)
        built = model(mamba_mixer, mamba3, config)
        was = {n: (t.detach().clone(), {k: v for k, v in vars(t).items() if k != "grad"}) for n, t in state(built).items()}
        objects, saved = dict(built.named_parameters(remove_duplicate=False)), list(built.state_dict())
        ours = made(module, mamba_mixer, mamba3, config)
        values, about = theirs[str(dtype)]
        same = ours[0].keys() == values.keys() and all(torch.equal(ours[0][n], v) for n, v in values.items())
        check("trigger", f"{dtype}: a mixer has the parameters that the release makes, of the same dtypes and values", same)
        what = "their attributes (tensor_model_parallel, partition_dim, …) and those of Float16Module"
        check("trigger", f"{dtype}: {what} are the release's", ours[1] == about)
        parts = [
            v for v in vars(getattr(built["MambaMixer"], "cp", None) or built).values() if isinstance(v, torch.nn.Parameter)
        ]
        known = {id(parameter) for parameter in built["MambaMixer"].parameters()}
        check("trigger", f"{dtype}: what its context parallelism holds are its own", {id(each) for each in parts} <= known)
        wrapped = module.Float16Module(config, built)
        now = state(wrapped.module)
        check("control", f"{dtype}: {len(was)} tensors, {len(marked)} of them marked", marked < set(was) == set(now))
        kept = {n for n in marked if now[n].dtype == torch.float32 and torch.equal(now[n], was[n][0])}
        check("trigger", f"{dtype}: all {len(marked)} marked are as they were, bit for bit", kept == marked)
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, (t, _) in was.items() if n not in marked}
        right = all(now[n].dtype == t.dtype and torch.equal(now[n], t) for n, t in cast.items())
        check("trigger", f"{dtype}: the other {len(cast)} are cast, and nothing else", right)
        same = all(vars(now[n]) == attributes for n, (_, attributes) in was.items())
        check("trigger", f"{dtype}: attributes are kept (tensor_model_parallel, partition_dim, …)", same)
        same = all(now[n] is parameter for n, parameter in objects.items())
        check("trigger", f"{dtype}: parameters are the objects that they were: tied ones still are, optimizers know them", same)
        trained = [n for n in objects if now[n].requires_grad]
        frozen = "Linear_in_fp32.frozen", "Linear_in_fp32.kept"
        check("trigger", f"{dtype}: all but two are trained", trained == [n for n in objects if n not in frozen])
        check("trigger", f"{dtype}: state_dict() has the names that it had", list(wrapped.module.state_dict()) == saved)

        config.params_dtype = torch.float32
        if "D_has_hdim" in inspect.signature(mamba_mixer.MambaMixer).parameters:
            config.perform_initialization = False  # values are what the memory held
            wide = functools.partial(mamba_mixer.MambaMixer, D_has_hdim=True)
            with mock.patch.object(mamba_mixer, "MambaMixer", wide):
                mixer = layers(mamba_mixer, mamba3, config)["MambaMixer"]
            config.perform_initialization = True
            module.Float16Module(config, mixer)
            found = {n for n, p in mixer.named_parameters() if p.dtype == torch.float32}
            check("trigger", f"{dtype}: also with D_has_hdim and without initialization", found == set(KEPT["MambaMixer"]))
        own, unlike = mamba_mixer.MambaMixer, {"layer_number": 2, "rmsnorm": False}
        if not hasattr(config, "use_mamba_mem_eff_path"):
            unlike["use_mem_eff_path"] = False
        config.use_mamba_mem_eff_path = False
        with mock.patch.object(mamba_mixer, "MambaMixer", functools.wraps(own)(lambda *a, **k: own(*a, **k | unlike))):  # noqa: B023
            second = layers(mamba_mixer, mamba3, config)["MambaMixer"]
        module.Float16Module(config, second)
        found = {n for n, p in second.named_parameters() if p.dtype == torch.float32}
        case = f"{dtype}: also in a second layer, without RMSNorm and the memory-efficient path"
        check("trigger", case, found == set(KEPT["MambaMixer"]))
        config.use_mamba_mem_eff_path = True
        mixer = torch.nn.ModuleDict({"mixer": layers(mamba_mixer, mamba3, config)["MambaMixer"]})
        values = {n: p.detach().clone() for n, p in mixer.named_parameters()}
        module.Float16Module(config, mixer)
        config.params_dtype = dtype
        found = {n.removeprefix("mixer.") for n, p in mixer.named_parameters() if p.dtype == torch.float32}
        check("trigger", f"{dtype}: of a mixer built in fp32 A_log and D alone stay so", found == set(KEPT["MambaMixer"]))
        right = all(torch.equal(p, values[n].to(p.dtype)) for n, p in mixer.named_parameters())
        check("trigger", f"{dtype}: its values are as they were, or cast", right)

        seen, x = Seen(), torch.rand(2, 3, device=device, requires_grad=True)
        out = module.Float16Module(config, seen)(x)
        check("trigger", f"{dtype}: inputs get that dtype, outputs are fp32", (seen.dtype, out.dtype) == (dtype, torch.float32))
        check("trigger", f"{dtype}: an output is what the input is in that dtype", torch.equal(out, x.to(dtype).float()))
        (slope,) = torch.autograd.grad(out, x, gradient := torch.rand_like(out)) if out.requires_grad else (None,)
        right = slope is not None and torch.equal(slope, gradient.to(dtype).float())
        check("trigger", f"{dtype}: and has its gradient", right)

        for tensor in state(wrapped.module).values():
            if hasattr(tensor, "keep_in_fp32"):
                del tensor.keep_in_fp32
        again = state(module.Float16Module(config, wrapped.module).module)
        right = all(torch.equal(again[n], t.to(dtype) if t.is_floating_point() else t) for n, (t, _) in was.items())
        check("trigger", f"{dtype}: without marks all are cast", right)
    finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--made"]:
        modules = release()
        given = {str(dtype): made(*modules, config_of(dtype)) for dtype in (torch.bfloat16, torch.float16)}
        torch.save({**given, "file": FACTS["file"]}, sys.argv[2])
    else:
        main()
