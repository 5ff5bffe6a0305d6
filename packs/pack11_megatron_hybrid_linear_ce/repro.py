# /// script
# requires-python = ">=3.12"
# dependencies = ["einops", "megatron-core==0.19.2", "numpy>=1.26", "packaging", "torch==2.13.0", "triton==3.7.1"]
# ///
"""megatron-core: a configuration takes any cross_entropy_fusion_impl, and the first loss ends in an error; on dev hybrid models lost "linear".

In releases "linear" is no loss, and the configuration does not say so: compute_language_model_loss has no branch for it. On the dev branch GPTModel hands
hidden states, weight and labels to linear_cross_entropy and makes no logits [S, B, V]; MambaModel, now HybridModel, lost this in a merge.
The release's own models run, each with a decoder that hands its input on. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

import importlib
import types
import warnings
from importlib.metadata import distribution
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

S, B, H, V = 6, 4, 16, 16384
FUSED = "megatron.core.transformer.linear_cross_entropy"
# What follows in compute_language_model_loss, and in the one commit that kept the call and lost the layer.
LOST = "UnboundLocalError in compute_language_model_loss", "TypeError in _call_impl, module.py: ColumnParallelLinear.forward()"


class Through(torch.nn.Module):
    """A decoder, or the layer of one, that hands its input on."""

    layer_number = 1

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, hidden_states, **_):
        return hidden_states


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts tensors of so many elements that are made, views among them."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.count += isinstance(tensor, torch.Tensor) and tensor.numel() == self.elements
        return out


def release():
    """The hybrid model's name, and whether the release has the fused loss; one rank of tensor parallelism."""
    warnings.filterwarnings("ignore")
    found = distribution("megatron-core")
    FACTS["version"] = found.version
    models = found.locate_file("megatron/core/models")
    kind = "HybridModel" if (models / "hybrid").exists() else "MambaModel"
    config = found.locate_file("megatron/core/model_parallel_config.py")
    if not config.exists() or "cross_entropy_fusion_impl" not in config.read_text():
        finish("UNTESTABLE", "no-api")
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        print("This needs an NVIDIA GPU, and torch sees none; nox -s pack11 has megatron-core make its modules on the CPU.")
        finish("UNTESTABLE", "no-device")
    gpu = "device:sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "source"
    FACTS.update(file=sys.modules[of_hybrid(kind).__module__].__file__, evidence=gpu)
    return kind, found.locate_file(f"{FUSED.replace('.', '/')}.py").exists()


def of_hybrid(kind):
    """The class MambaModel or HybridModel."""
    name = "hybrid.hybrid_model" if kind == "HybridModel" else "mamba.mamba_model"
    return getattr(importlib.import_module(f"megatron.core.models.{name}"), kind)


def model(kind, impl, sizes=(H, V), dtype=torch.float32, share=False, **more):
    """GPTModel, MambaModel or HybridModel with hidden size and vocabulary ``sizes``; ``impl`` None is the loss that is not fused."""
    core = importlib.import_module("megatron.core.transformer")
    fusion = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": impl} if impl else {}
    given = {"num_layers": 1, "hidden_size": sizes[0], "num_attention_heads": 4, "use_cpu_initialization": True}
    config = core.TransformerConfig(**given, **fusion, params_dtype=dtype, **more)
    spec, tied = core.ModuleSpec(module=Through), {"share_embeddings_and_output_weights": share}
    if kind != "GPTModel":
        return of_hybrid(kind)(config, spec, sizes[1], 16, **tied)
    block = importlib.import_module("megatron.core.transformer.transformer_block")
    layers = block.TransformerBlockSubmodules(layer_specs=[spec], layer_norm=None)
    gpt = importlib.import_module("megatron.core.models.gpt")
    made = gpt.GPTModel(config, layers, sizes[1], 16, position_embedding_type="none", **tied)
    made.decoder = Through()
    return made


def start(backend="gloo", world=1, parallel=1):
    alone = {} if world > 1 else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group(backend, **alone)
    sys.excepthook = unexpected  # torch's own, set there, would swallow the traceback
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(tensor_model_parallel_size=parallel)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(123)


def training(kind, impl, linear):
    """What a model does with hidden states and labels: the call of the fused loss, [S, B, V] tensors made, the loss, what it raises."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(S, B, H), torch.randn(V, H), torch.randint(0, V, (B, S))
    found, device = types.SimpleNamespace(call=None, logits=0, error=None, said="a loss"), torch.cuda.current_device()

    def spy(hidden, weight, labels, **options):
        options.pop("tp_group")
        found.call = *(list(t.shape) for t in (hidden, weight, labels)), options
        return torch.zeros_like(labels, dtype=torch.float32)

    fused = mock.patch.object(importlib.import_module(FUSED), "linear_cross_entropy", spy) if linear else mock.MagicMock()
    try:
        made = model(kind, impl).to(device)
        made.output_layer.weight.data.copy_(weight)
        with fused, Made(S * B * V) as watch:
            loss = made(None, None, None, decoder_input=hidden.to(device), labels=labels.to(device))
        found.logits = watch.count
        right = F.cross_entropy((hidden.double() @ weight.double().t()).permute(1, 2, 0), labels, reduction="none")
        found.error = ((loss.double().cpu() - right).norm() / right.norm()).item()
    except Exception as error:  # what it raises is the finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found.said = f"{type(error).__name__} in {frame.name}, {Path(frame.filename).name}: {str(error).splitlines()[0]}"
    return found


def in_a_release(hybrid):
    """There is no such loss: the configuration, or whatever is asked first, has to refuse it by its name."""
    for kind in ("GPTModel", hybrid):
        said = training(kind, "linear", False).said
        refused = "linear" in said.partition(": ")[2] and said.startswith(
            ("ValueError", "AssertionError", "NotImplementedError")
        )
        check("trigger", f"{kind}, 'linear': {said}", refused)
        check("signature", f"{kind}: nothing is said before the loss", said.startswith(LOST))


def on_dev(hybrid):
    """What GPTModel hands to the fused loss the hybrid model has to hand to it, too."""
    gpt, found = training("GPTModel", "linear", True), training(hybrid, "linear", True)
    whole = [(each.call and each.said == "a loss" and not each.logits) for each in (gpt, found)]
    check("control", f"GPTModel hands the fused loss {gpt.call}, returns it, and makes no [S, B, V] tensor", whole[0])
    check("trigger", f"{hybrid}, 'linear': {found.said}", whole[1] and found.call == gpt.call)
    check("signature", f"{hybrid}: the loss is not reached", found.said.startswith(LOST))


def main():
    hybrid, linear = release()
    start()
    for kind in ("GPTModel", hybrid):
        for impl in (None, "native"):
            found = training(kind, impl, linear)
            check("control", f"{kind}, {impl or 'not fused'}: error of the loss", error=found.error, limit=1e-5)
            check("control", f"{kind}, {impl or 'not fused'}: makes [S, B, V] tensors, which are seen", found.logits > 0)
    (on_dev if linear else in_a_release)(hybrid)
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
    main()
