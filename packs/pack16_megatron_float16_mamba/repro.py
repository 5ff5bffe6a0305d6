# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "mamba-ssm==2.3.2.post1", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: Float16Module casts the parameters that Mamba layers keep in fp32 on purpose.

MambaMixer makes A_log and D in fp32 ("Keep in fp32") though params_dtype is bf16; mamba-ssm's Mamba3(dtype=bf16) does so with dt_bias,
D, the biases of B and C and, for MIMO, mimo_x, mimo_z and mimo_o. Float16Module calls module.bfloat16() on all of it.

The contract is read off the modules: what is fp32 in a module that was built for bf16. Such parameters get the mark that upstream's main
branch honours since 86e928a97f, keep_in_fp32. Exits 10 (BUG_REPRODUCED: they are cast), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
import warnings
from importlib.metadata import distribution, version

import torch
import triton

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--half", action="store_true", help="fp16 in place of bf16")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype, short = (torch.float16, "fp16") if options.half else (torch.bfloat16, "bf16")
patched = os.environ.get("REPRODUCER_SIDE") == "patched"
facts = {"reproducer": 1, "comparisons": [], "claims": [], "metrics": {}}
facts["evidence"] = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
metrics = facts["metrics"]


def finish(verdict, reason=""):
    absent = "FIX_VALIDATED" if patched else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    print(json.dumps({**facts, "verdict": verdict}))
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0}.get(verdict, 125))


def state(role, name, holds, **measured):
    facts["comparisons"].append({"role": role, "name": name, **(measured or {"holds": bool(holds)})})
    print(f"{role:<8} {name:<96} {measured.get('error', holds)}")


def mixer_of_megatron(mamba_mixer, core):
    """A MambaMixer of one rank, built for bf16."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    core.parallel_state.initialize_model_parallel()
    core.tensor_parallel.model_parallel_cuda_manual_seed(123)
    config = core.transformer.TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, params_dtype=dtype, use_cpu_initialization=device == "cpu",
        **{"fp16" if options.half else "bf16": True},
    )  # fmt: skip
    linear = core.tensor_parallel
    submodules = mamba_mixer.MambaMixerSubmodules(in_proj=linear.ColumnParallelLinear, out_proj=linear.RowParallelLinear)
    takes = inspect.signature(mamba_mixer.MambaMixer).parameters
    given = {"layer_number": 1}
    for name, module, kind in (
        ("pg_collection", "process_groups_config", "ProcessGroupCollection"),
        ("model_comm_pgs", "process_groups_config", "ModelCommProcessGroups"),
    ):
        if name in takes:
            groups = getattr(importlib.import_module(f"megatron.core.{module}"), kind)
            given[name] = groups.use_mpu_process_groups(required_pgs=["tp", "cp"])
    return config, mamba_mixer.MambaMixer(config, submodules, config.hidden_size, **given)


class Reached(Exception):
    """Mamba3 called its kernel."""


def handed_over(mamba3, layer):
    """The dtypes that Mamba3 hands its kernel, by name. On a CPU the kernel is not run."""
    seen = {}

    def spy(kernel):
        def call(**given):
            seen.update({name: str(t.dtype).removeprefix("torch.") for name, t in given.items() if isinstance(t, torch.Tensor)})
            if device == "cpu":
                raise Reached
            return kernel(**given)

        return call

    names = ("mamba3_siso_combined", "mamba3_mimo_combined")
    kernels = {name: getattr(mamba3, name) for name in names}
    norm = mamba3.RMSNormGated.forward
    for name in names:
        setattr(mamba3, name, spy(kernels[name]))
    if device == "cpu":  # a Triton kernel, which has no part in this
        mamba3.RMSNormGated.forward = lambda self, x, z=None: x
    problem = None
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            out = layer(torch.randn(1, 256, 256, device=device, dtype=dtype))
        problem = None if torch.isfinite(out).all() else "its output is not finite"
    except Reached:
        pass
    except Exception as error:  # a kernel's refusal has no class of its own
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    mamba3.RMSNormGated.forward = norm
    for name in names:
        setattr(mamba3, name, kernels[name])
    return seen, problem


warnings.filterwarnings("ignore")
release = distribution("megatron-core")
facts["version"] = release.version
package = types.ModuleType("mamba_ssm")  # its __init__ loads CUDA extensions that these layers do not use: import past it
package.__path__ = list(importlib.util.find_spec("mamba_ssm").submodule_search_locations)
sys.modules["mamba_ssm"] = package
try:
    torch.cuda.current_device()
except (RuntimeError, AssertionError):
    print("Without a GPU: nox -s pack16 runs it in the lane megatron-cpu, which has megatron-core make its modules on the CPU.")
    finish("UNTESTABLE", "no-device")
folder = release.locate_file("megatron/core/ssm")  # not find_spec, which imports what is around it, and hides what fails there
found = any(folder.glob("mamba_mixer.py"))
if not found:
    print("This release has no MambaMixer.")
    finish("UNTESTABLE", "no-api")
core = types.SimpleNamespace(
    **{name: importlib.import_module(f"megatron.core.{name}") for name in ("parallel_state", "tensor_parallel", "transformer")}
)
module = importlib.import_module("megatron.core.transformer.module")
mamba_mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
mamba3 = importlib.import_module("mamba_ssm.modules.mamba3")
facts["file"] = module.__file__
for kernels in [m for n, m in sys.modules.items() if n.startswith("mamba_ssm.ops.triton")]:
    for kernel in vars(kernels).values():  # Triton's autotuning has no part in this, and takes minutes on a GPU.
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel.configs = kernel.configs[:1]
print(f"megatron-core {release.version}, mamba-ssm {version('mamba-ssm')}, torch {torch.__version__}, {facts['evidence']}")

config, mixer = mixer_of_megatron(mamba_mixer, core)
sizes = {"d_state": 128, "headdim": 64, "device": device, "dtype": dtype}
layers = {
    "MambaMixer": mixer.to(device),
    "Mamba3": mamba3.Mamba3(256, chunk_size=64, **sizes),
    "Mamba3 MIMO": mamba3.Mamba3(256, chunk_size=16, is_mimo=True, **sizes),
}
contract = {
    layer: {n: p.detach().clone() for n, p in built.named_parameters() if p.dtype == torch.float32}
    for layer, built in layers.items()
}
for layer, built in layers.items():
    print(f"         {layer}, built for {short}, has in fp32: {', '.join(contract[layer])}")
    if layer != "MambaMixer":  # megatron-core does not build these: who does, marks them
        for name in contract[layer]:
            built.get_parameter(name).keep_in_fp32 = True
expected = {"MambaMixer": ["A_log", "D"], "Mamba3": ["dt_bias", "B_bias", "C_bias", "D"]}
expected["Mamba3 MIMO"] = [*expected["Mamba3"][:-1], "mimo_x", "mimo_z", "mimo_o", "D"]
state(
    "control",
    "these are the parameters that the sources say are kept in fp32",
    {k: list(v) for k, v in contract.items()} == expected,
)
native = {layer: handed_over(mamba3, built) for layer, built in layers.items() if layer != "MambaMixer"}

module.Float16Module(config, torch.nn.ModuleDict({name.replace(" ", "_"): built for name, built in layers.items()}))

metrics["cast"], metrics["error"] = {}, {}
for layer, built in layers.items():
    for name, before in contract[layer].items():
        after = built.get_parameter(name).detach()
        if after.dtype == dtype:
            metrics["cast"].setdefault(layer, []).append(name)
        value = torch.exp if name == "A_log" else torch.nn.functional.softplus if name == "dt_bias" else torch.clone
        error = ((value(after.double()) - value(before.double())).abs() / value(before.double()).abs()).max().item()
        metrics["error"].setdefault(layer, {})[name] = error
    state(
        "trigger", f"{layer}: cast to {short}: {', '.join(metrics['cast'].get(layer, ())) or 'none'}", layer in metrics["cast"]
    )
    others = [p for n, p in built.named_parameters() if n not in contract[layer]]
    state(
        "control", f"{layer}: its {len(others)} other parameters are {short}", others and all(p.dtype == dtype for p in others)
    )
for layer, found in metrics["error"].items():
    print(f"         {layer}: " + "  ".join(f"{n} {e:.1e}" for n, e in found.items()))
metrics["handed over"] = {}
for layer, (was, problem) in native.items():
    runs = ", and runs" if device == "cuda" else ""
    state("control", f"{layer} by itself hands its kernel DT in fp32{runs}", was["DT"] == "float32" and problem is None)
    now, problem = handed_over(mamba3, layers[layer])
    metrics["handed over"][layer] = {"as built": was, "wrapped": now, "refused": problem}
    state("trigger", f"{layer} wrapped hands its kernel DT in {now['DT']}", now["DT"] != "float32")
    if device == "cuda":
        print(f"         {layer} wrapped, on the GPU: {problem or 'runs'}")
        state("note", f"{layer} wrapped: its kernel refuses", problem is not None)
torch.distributed.destroy_process_group()
if bad := [c["name"] for c in facts["comparisons"] if c["role"] == "control" and not c["holds"]]:
    finish("CHANGED", bad[0])
finish("REPRODUCED" if any(c["holds"] for c in facts["comparisons"] if c["role"] == "trigger") else "ABSENT")
