# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "mamba-ssm==2.3.2.post1", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""megatron-core: Float16Module casts the parameters that Mamba layers keep in fp32 on purpose.

MambaMixer makes A_log and D in fp32 ("Keep in fp32") though params_dtype is bf16; mamba-ssm's Mamba3(dtype=bf16) does so with dt_bias,
D, the biases of B and C and, for MIMO, mimo_x, mimo_z and mimo_o. Float16Module calls module.bfloat16() on all of it. Here Mamba3's have
the mark that upstream's main branch honours since 86e928a97f, keep_in_fp32. Runs on a GPU, for megatron-core makes its modules there.
Exits with 10 (BUG_REPRODUCED: they are cast), 0 (BUG_ABSENT) or 125 (neither).
"""

import argparse
import importlib
import importlib.util
import inspect
import warnings
from importlib.metadata import distribution

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--half", action="store_true", help="fp16 in place of bf16")
device = "cuda" if torch.cuda.is_available() else "cpu"
MAMBA3 = ["dt_bias", "B_bias", "C_bias", "D"]
KEPT = {"MambaMixer": ["A_log", "D"], "Mamba3": MAMBA3, "Mamba3 MIMO": [*MAMBA3[:-1], "mimo_x", "mimo_z", "mimo_o", "D"]}


def release():
    """The module of Float16Module, that of MambaMixer, and mamba-ssm's of Mamba3."""
    warnings.filterwarnings("ignore")
    found = distribution("megatron-core")
    # Past mamba_ssm/__init__.py, which loads CUDA extensions that these layers do not use.
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
    if not any(found.locate_file("megatron/core/ssm").glob("mamba_mixer.py")):
        finish("UNTESTABLE", "no-api")
    names = "megatron.core.transformer.module", "megatron.core.ssm.mamba_mixer", "mamba_ssm.modules.mamba3"
    modules = [importlib.import_module(name) for name in names]
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=modules[0].__file__, version=found.version, evidence=gpu)
    return modules


def config_of(dtype):
    """A configuration of one rank."""
    parallel_state, tensor_parallel = (
        importlib.import_module(f"megatron.core.{n}") for n in ("parallel_state", "tensor_parallel")
    )
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(123)
    half = {"fp16" if dtype == torch.float16 else "bf16": True}
    return importlib.import_module("megatron.core.transformer").TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, params_dtype=dtype, use_cpu_initialization=device == "cpu", **half
    )


def layers(mamba_mixer, mamba3, config):
    """Three Mamba layers built for half precision, and a linear one in fp32. What is kept in fp32 has no round values."""
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    linear = {"in_proj": tensor_parallel.ColumnParallelLinear, "out_proj": tensor_parallel.RowParallelLinear}
    given = {"layer_number": 1}
    for name, kind in (("pg_collection", "ProcessGroupCollection"), ("model_comm_pgs", "ModelCommProcessGroups")):
        if name in inspect.signature(mamba_mixer.MambaMixer).parameters:
            groups = importlib.import_module("megatron.core.process_groups_config")
            given[name] = getattr(groups, kind).use_mpu_process_groups(required_pgs=["tp", "cp"])
    mixer = mamba_mixer.MambaMixer(config, mamba_mixer.MambaMixerSubmodules(**linear), config.hidden_size, **given)
    sizes = {"d_state": 128, "headdim": 64, "device": device, "dtype": config.params_dtype}
    built = {"MambaMixer": mixer.to(device), "Mamba3": mamba3.Mamba3(256, chunk_size=64, **sizes)}
    built["Mamba3 MIMO"] = mamba3.Mamba3(256, chunk_size=16, is_mimo=True, **sizes)
    built["Linear in fp32"] = torch.nn.Linear(16, 16, device=device)
    for name, layer in built.items():
        for parameter in (p for n, p in layer.named_parameters() if n in KEPT.get(name, ())):
            parameter.data += 1e-3 * torch.rand_like(parameter)
            if name != "MambaMixer":  # megatron-core does not build these: who does marks them
                parameter.keep_in_fp32 = True
    return built


def main(dtype):
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack16 has megatron-core make its modules on the CPU.")
        finish("UNTESTABLE", "no-device")
    module, mamba_mixer, mamba3 = release()
    built = layers(mamba_mixer, mamba3, config := config_of(dtype))
    before = {name: {n: p.detach().clone() for n, p in layer.named_parameters()} for name, layer in built.items()}
    module.Float16Module(config, torch.nn.ModuleDict({name.replace(" ", "_"): layer for name, layer in built.items()}))
    for name, was in before.items():
        now, kept = dict(built[name].named_parameters()), KEPT.get(name, [])
        others = [n for n in was if n not in kept]
        if kept:
            found = [n for n, p in was.items() if p.dtype == torch.float32]
            check("control", f"{name} keeps in fp32 what its source says: {', '.join(kept)}", found == kept)
        right = all(now[n].dtype == dtype and torch.equal(now[n], was[n].to(dtype)) for n in others)
        check("control", f"{name}: its {len(others)} other parameters are cast to {dtype}", right)
        cast = [n for n in kept if now[n].dtype != torch.float32 or not torch.equal(now[n], was[n])]
        if kept:
            check("trigger", f"{name}: cast or changed: {', '.join(cast) or 'none'}", not cast)
            off = {n: ((now[n].double() - was[n].double()).abs() / was[n].double().abs()).max().item() for n in kept}
            FACTS["metrics"][name] = {"cast": cast, "largest relative change": off}
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row = {"role": role, "name": name}
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and error <= limit
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {
        role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ("control", "trigger", "signature")
    }
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    absent = "FIX_VALIDATED" if os.environ.get("REPRODUCER_SIDE") == "patched" else "BUG_ABSENT"
    word = {"REPRODUCED": "BUG_REPRODUCED", "ABSENT": absent}.get(verdict, verdict)
    facts = json.dumps({**FACTS, "checks": CHECKS, "verdict": verdict})
    print(json.dumps(json.loads(facts, parse_constant=lambda _: None)))  # NaN is no JSON.
    print(f"{word}: {reason}" if reason else word)
    sys.exit({"REPRODUCED": 10, "ABSENT": 0, "MEASURED": 0}.get(verdict, 125))


def unexpected(kind, error, trace):
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, ImportError):
        finish("UNTESTABLE", "import")
    if kind.__name__ in ("MemoryError", "OutOfMemoryError"):
        finish("UNTESTABLE", "oom")
    if issubclass(kind, Exception):
        finish("CHANGED", kind.__name__)


sys.excepthook = unexpected
# --- end of report/1 ---

if __name__ == "__main__":
    main(torch.float16 if parser.parse_args().half else torch.bfloat16)
