# /// script
# requires-python = ">=3.10"
# dependencies = ["einops", "mamba-ssm==2.3.2.post1", "megatron-core==0.16.1", "numpy>=1.26", "packaging", "tilelang==0.1.8", "torch==2.13.0", "triton==3.7.1"]
# tool.uv.extra-build-dependencies.mamba-ssm = ["ninja", "packaging", "setuptools", "torch==2.13.0", "wheel"]
# tool.uv.extra-build-variables.mamba-ssm = { MAMBA_SKIP_CUDA_BUILD = "TRUE", MAMBA_FORCE_BUILD = "TRUE" }
# ///
"""megatron-core: Float16Module casts the parameters that Mamba layers keep in fp32 on purpose.

MambaMixer and mamba-ssm's Mamba3 make the parameters in KEPT in fp32 though their dtype is bf16 or fp16; Float16Module calls
module.bfloat16() or .half() on all. Here Mamba3's have the mark that upstream's main branch honours since 86e928a97f, keep_in_fp32.
Exits with 10 (BUG_REPRODUCED: they are cast), 0 (BUG_ABSENT) or 125 (neither).
"""

import inspect
from importlib import import_module, metadata, util
from pathlib import Path

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
MAMBA3 = ["dt_bias", "B_bias", "C_bias", "D"]
KEPT = {"MambaMixer": ["A_log", "D"], "Mamba3": MAMBA3, "Mamba3 MIMO": [*MAMBA3[:-1], "mimo_x", "mimo_z", "mimo_o", "D"]}


def release():
    """The module of Float16Module, that of MambaMixer, and mamba-ssm's of Mamba3."""
    FACTS["version"], core = metadata.version("megatron-core"), getattr(util.find_spec("megatron.core"), "origin", None)
    if not core or not Path(core).parent.joinpath("ssm/mamba_mixer.py").exists():
        finish("UNTESTABLE", "no-api")
    mamba = util.find_spec("mamba_ssm") or import_module("mamba_ssm")  # which raises
    sys.modules["mamba_ssm"] = util.module_from_spec(mamba)  # no CUDA extension
    names = "megatron.core.transformer.module", "megatron.core.ssm.mamba_mixer", "mamba_ssm.modules.mamba3"
    modules = [import_module(name) for name in names]
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "source"
    FACTS.update(file=modules[0].__file__, evidence=gpu)
    return modules


def config_of(dtype):
    """A configuration of one rank."""
    core = {n: import_module(f"megatron.core.{n}") for n in ("parallel_state", "tensor_parallel", "transformer")}
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        core["parallel_state"].initialize_model_parallel()
        core["tensor_parallel"].model_parallel_cuda_manual_seed(123)
    given = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "use_cpu_initialization": device == "cpu"}
    given["fp16" if dtype == torch.float16 else "bf16"] = True
    return core["transformer"].TransformerConfig(**given, params_dtype=dtype)


def layers(mamba_mixer, mamba3, config):
    """Three Mamba layers built for half precision, and a linear one in fp32. What is kept in fp32 has no round values."""
    parallel, given = import_module("megatron.core.tensor_parallel"), {"layer_number": 1}
    for name, kind in (("pg_collection", "ProcessGroupCollection"), ("model_comm_pgs", "ModelCommProcessGroups")):
        if name in inspect.signature(mamba_mixer.MambaMixer).parameters:
            groups = import_module("megatron.core.process_groups_config")
            given[name] = getattr(groups, kind).use_mpu_process_groups(required_pgs=["tp", "cp"])
    parts = mamba_mixer.MambaMixerSubmodules(in_proj=parallel.ColumnParallelLinear, out_proj=parallel.RowParallelLinear)
    mixer = mamba_mixer.MambaMixer(config, parts, config.hidden_size, **given)
    sizes = {"d_state": 128, "headdim": 64, "device": device, "dtype": config.params_dtype}
    built = {"MambaMixer": mixer.to(device), "Mamba3": mamba3.Mamba3(256, chunk_size=64, **sizes)}
    built["Mamba3 MIMO"] = mamba3.Mamba3(256, chunk_size=16, is_mimo=True, **sizes)
    built["Linear in fp32"] = torch.nn.Linear(16, 16, device=device)
    for name, kept in KEPT.items():
        for parameter in (p for n, p in built[name].named_parameters() if n in kept):
            parameter.data += 1e-3 * torch.rand_like(parameter)
            if name != "MambaMixer":  # megatron-core does not build these: who does marks them
                parameter.keep_in_fp32 = True
    return built


def main():
    try:
        torch.cuda.current_device()  # where megatron-core makes its modules
    except (AssertionError, RuntimeError):
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack16 has megatron-core make its modules on the CPU.")
        finish("UNTESTABLE", "no-device")
    module, *mambas = release()
    honoured = "keep_in_fp32" in inspect.getsource(module)  # else nothing that Mamba3 could do keeps its own in fp32
    for dtype in (torch.bfloat16, torch.float16):
        built = layers(*mambas, config := config_of(dtype))
        before = {name: {n: p.detach().clone() for n, p in layer.named_parameters()} for name, layer in built.items()}
        module.Float16Module(config, torch.nn.ModuleDict({name.replace(" ", "_"): layer for name, layer in built.items()}))
        for name, was in before.items():
            now, kept, case = dict(built[name].named_parameters()), KEPT.get(name, []), f"{name}, {dtype}"
            found = [n for n, p in was.items() if p.dtype == torch.float32]
            check("control", f"{case}: in fp32 are {', '.join(kept) or 'all'}", found == (kept or list(was)))
            right = [now[n].dtype == dtype and torch.equal(now[n], p.to(dtype)) for n, p in was.items() if n not in kept]
            check("control", f"{case}: the {len(right)} others are cast to it", right and all(right))
            cast = [n for n in kept if now[n].dtype != torch.float32 or not torch.equal(now[n], was[n])]
            FACTS["metrics"][case] = {"cast": cast}
            if kept and (name == "MambaMixer" or honoured):
                check("trigger", f"{case}: cast or changed: {', '.join(cast) or 'none'}", not cast)
                check("signature", f"{case}: cast, and no more", all(torch.equal(now[n], was[n].to(dtype)) for n in cast))
    finish()


# --- report/1: the same in every script, kept so by `python -m common tables`; docs/scripts.md says what the words mean ---
import json
import math
import os
import sys
import threading
import traceback

CHECKS, FACTS = [], {"report": 1, "evidence": "none", "metrics": {}}
ROLES = ("control", "trigger", "signature")


def check(role, name, ok=None, *, error=None, limit=None):
    """Record whether the release behaves as a correct one: ``ok``, or ``error <= limit``. What is no finite number has failed."""
    row, unclear = {"role": role, "name": name}, (error if limit is None else ok) is not None
    if limit is not None:
        error = float(error) if error is not None and math.isfinite(error) else None
        row |= {"error": error, "limit": limit}
        ok = error is not None and 0 <= error <= limit
    number = type(ok) in (int, float) or str(getattr(ok, "dtype", "bool")) not in ("bool", "torch.bool")
    answer = not (number or unclear or callable(ok) or isinstance(ok, (str, complex)) or hasattr(ok, "__next__"))
    if role not in ROLES or not name or not answer or (limit is not None and not 0 < limit < math.inf):
        raise TypeError(f"this check cannot be judged: {role!r}, {name!r}, ok={ok!r}, limit={limit!r}")
    CHECKS.append({**row, "ok": bool(ok)})
    shown = "" if limit is None else "  not finite" if error is None else f"  {error:.2e} (limit {limit:.0e})"
    words = ("seen", "not seen") if role == "signature" else ("ok", "FAIL")
    print(f"{role:<9} {words[not ok]:<8} {name}{shown}", flush=True)


def finish(verdict=None, reason=""):
    """Print the verdict that the checks give, or CHANGED, UNTESTABLE or MEASURED; exit with 10, 0 or 125."""
    failed = {role: [c["name"] for c in CHECKS if c["role"] == role and not c["ok"]] for role in ROLES}
    if verdict not in (None, "CHANGED", "UNTESTABLE", "MEASURED"):
        raise ValueError(f"the checks give the verdict, not {verdict!r}")
    if verdict is None:
        if not {"control", "trigger"} <= {c["role"] for c in CHECKS}:
            verdict, reason = "CHANGED", "nothing was checked"
        elif bad := failed["control"] or (failed["trigger"] and failed["signature"]):
            verdict, reason = "CHANGED", bad[0]
        else:
            verdict = "REPRODUCED" if failed["trigger"] else "ABSENT"
    if verdict == "MEASURED" and (bad := [name for names in failed.values() for name in names]):
        verdict, reason = "CHANGED", bad[0]
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


def in_a_thread(given):
    traceback.print_exception(*given[:3])
    CHECKS.append({"role": "control", "name": f"no thread ends with {given.exc_type.__name__}", "ok": False})


sys.excepthook, threading.excepthook = unexpected, in_a_thread
# --- end of report/1 ---

if __name__ == "__main__":
    main()
