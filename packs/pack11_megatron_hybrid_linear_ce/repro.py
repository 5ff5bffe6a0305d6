# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: a configuration takes any cross_entropy_fusion_impl, and the first loss ends in an error; on dev hybrid models lost "linear".

Releases have no loss of the name "linear", and should refuse it. On the dev branch GPTModel calls the loss, linear_cross_entropy; MambaModel,
now HybridModel, lost the call in a merge. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

from importlib import import_module, metadata, util
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

S, B, H, V = 6, 4, 16, 512
FUSED = "megatron.core.transformer.linear_cross_entropy"
MODELS = {"GPTModel": "gpt.gpt_model", "HybridModel": "hybrid.hybrid_model", "MambaModel": "mamba.mamba_model"}
REFUSED = "ValueError", "AssertionError", "NotImplementedError"
# What follows in compute_language_model_loss, and in the one commit that kept the call and lost the layer.
LOST = "UnboundLocalError in compute_language_model_loss", "TypeError in _call_impl: ColumnParallelLinear.forward()"


def release():
    """The hybrid model's name, and whether the release has the fused loss."""
    FACTS["version"] = metadata.version("megatron-core")
    config = Path(util.find_spec("megatron.core").origin).with_name("model_parallel_config.py")
    if not config.exists() or "cross_entropy_fusion_impl" not in config.read_text():
        finish("UNTESTABLE", "no-api")
    try:
        torch.cuda.current_device()  # where megatron-core makes its modules
    except (RuntimeError, AssertionError):
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack11 has megatron-core make its modules on the CPU.")
        finish("UNTESTABLE", "no-device")
    hybrid = "HybridModel" if config.with_name("models").joinpath("hybrid").exists() else "MambaModel"
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "source"
    FACTS.update(file=import_module(f"megatron.core.models.{MODELS[hybrid]}").__file__, evidence=gpu)
    return hybrid, config.with_name("transformer").joinpath("linear_cross_entropy.py").exists()


def model(kind, impl, sizes=(H, V), dtype=torch.float32, share=False, **more):
    """A model with hidden size and vocabulary ``sizes`` whose decoder hands its input on; ``impl`` None is the loss that is not fused."""
    core = import_module("megatron.core.transformer")
    fusion = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": impl} if impl else {}
    given = {"num_layers": 1, "hidden_size": sizes[0], "num_attention_heads": 4, "use_cpu_initialization": True}
    config, layers = core.TransformerConfig(**given, params_dtype=dtype, **(fusion | more)), core.ModuleSpec(torch.nn.Identity)
    if kind == "GPTModel":
        layers = import_module("megatron.core.transformer.transformer_block").TransformerBlockSubmodules([])
    kind = getattr(import_module(f"megatron.core.models.{MODELS[kind]}"), kind)
    made = kind(config, layers, sizes[1], 16, position_embedding_type="none", share_embeddings_and_output_weights=share)
    made.decoder.forward = lambda hidden_states, **_: hidden_states
    return made


def training(kind, impl, linear):
    """Error of a model's loss against fp64, and whether it is the fused one's; None and what is raised."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(S, B, H), torch.randn(V, H), torch.randint(0, V, (B, S))

    def fused(hidden, weight, labels, reduction="mean", **_):  # its definition, for its kernels are Blackwell's: pack10
        return F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction=reduction).view_as(labels)

    known = mock.patch(f"{FUSED}.linear_cross_entropy", side_effect=fused) if linear else mock.MagicMock()
    try:
        made, device = model(kind, impl), torch.cuda.current_device()
        made.output_layer.weight.data.copy_(weight)
        with known as asked:
            loss = made.to(device)(None, None, None, decoder_input=hidden.to(device), labels=labels.to(device))
    except Exception as error:  # what it raises is the finding
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return None, f"{type(error).__name__} in {where}: {str(error).splitlines()[0]}"
    right = F.cross_entropy((hidden.double() @ weight.double().t()).permute(1, 2, 0), labels, reduction="none")
    return float(torch.dist(loss.double().cpu(), right) / right.norm()), "the fused loss" if asked.called else "a loss"


def main():
    hybrid, linear = release()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    sys.excepthook = unexpected  # torch's own, set there, would swallow the traceback
    import_module("megatron.core.parallel_state").initialize_model_parallel()
    import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(123)
    for kind in ("GPTModel", hybrid):
        for impl in (None, "native"):
            error, said = training(kind, impl, linear)
            check("control", f"{kind}, {impl or 'not fused'}: {said}", error=error, limit=1e-5)
        for impl in ("linear", "Native"):
            error, said = training(kind, impl, linear)
            fused, refused = linear and impl == "linear", said.startswith(REFUSED) and f"{impl!r}" in said
            right = said == "the fused loss" and error <= 1e-5 if fused else refused
            check("control" if fused and kind == "GPTModel" else "trigger", f"{kind}, {impl!r}: {said}", right)
            if not right:
                check("signature", f"{kind}, {impl!r}: an error where the loss is asked for", said.startswith(LOST))
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
