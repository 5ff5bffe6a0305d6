"""The fix: a configuration that refuses names of losses that it does not know; the output layer that GPTModel has; pack10's fallback.

MambaModel became HybridModel, which also lost the call: a commit has one file or the other, so the edits of both are optional. The factor of
muP is applied to the hidden states, where HybridModel applies it to the logits: the layer between is linear. "linear" is known where there is
such a loss, which no release has.
"""

import dataclasses
from pathlib import Path

from common.transforms import load_fix, replace

_LOSS = "megatron/core/transformer/linear_cross_entropy.py"  # which no release has
_DISPATCHER = "megatron/core/fusions/fused_linear_cross_entropy.py"
_PACK10 = next(Path(__file__).parent.parent.glob("pack10_*/fix.py"))


def _layer(model):
    return (
        replace(
            f"{model}-import",
            r"^from megatron\.core\.transformer\.enums import .*ModelType\n",
            lambda found: f"{found[0]}from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule\n",
            optional=True,
            needs=_LOSS,
        ),
        replace(
            f"{model}-class",
            r"tensor_parallel\.ColumnParallelLinear\(",
            "LinearCrossEntropyModule(",
            optional=True,
            needs=_LOSS,
        ),
    )


_CALL = """\
        loss = None
        if (
            labels is not None
            and self.config.cross_entropy_loss_fusion
            and self.config.cross_entropy_fusion_impl == "linear"
        ):
            logits = None
            loss = self.output_layer(
                self._scale_logits(hidden_states),
                weight=output_weight,
                runtime_gather_output=runtime_gather_output,
                output_cross_entropy_loss=True,
                labels=labels,
            )
        else:
            logits, _ = self.output_layer(
                hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
            )
            logits = self._scale_logits(logits)
"""

_REFUSAL = """\
        known = ('native', 'te')
        if importlib.util.find_spec("megatron.core.transformer.linear_cross_entropy"):
            known += ('linear',)
        if self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl not in known:
            raise ValueError(f"cross_entropy_fusion_impl must be one of {known}, not {self.cross_entropy_fusion_impl!r}.")

"""

FIX = {
    _DISPATCHER: [dataclasses.replace(transform, needs=_LOSS) for transform in load_fix(_PACK10)[_DISPATCHER]],
    "megatron/core/model_parallel_config.py": (
        replace("find-spec", r"^from dataclasses import .*\n", lambda found: f"import importlib.util\n{found[0]}"),
        replace("refusal", r"^        if self\.autocast_dtype is None:\n", lambda found: f"{_REFUSAL}{found[0]}"),
    ),
    "megatron/core/models/mamba/mamba_model.py": _layer("mamba"),
    "megatron/core/models/hybrid/hybrid_model.py": (
        *_layer("hybrid"),
        replace(
            "hybrid-call",
            r"^        logits, _ = self\.output_layer\(\n            hidden_states, .*\n        \)\n        logits = self\._scale_logits\(logits\)\n",
            lambda _: _CALL,
            optional=True,
            needs=_LOSS,
        ),
        replace(
            "hybrid-loss",
            r"^        loss = self\.compute_language_model_loss\(labels, logits\)\n",
            "        if loss is None:\n            loss = self.compute_language_model_loss(labels, logits)\n",
            optional=True,
            needs=_LOSS,
        ),
    ),
}
