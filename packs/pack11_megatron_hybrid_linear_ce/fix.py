"""The fix: the output layer that GPTModel has, called as GPTModel calls it, and pack10's fallback for GPUs that have no fused kernels.

MambaModel became HybridModel, which also lost the call: a commit has one file or the other, so the edits of both are optional. The factor of
muP is applied to the hidden states, where HybridModel applies it to the logits: the layer between is linear. A release has no such loss: its
configuration then refuses it, and whatever else it does not know.
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
        if (
            labels is not None
            and self.config.cross_entropy_loss_fusion
            and self.config.cross_entropy_fusion_impl == "linear"
        ):
            return self.output_layer(
                self._scale_logits(hidden_states),
                weight=output_weight,
                output_cross_entropy_loss=True,
                labels=labels,
            )

"""

_REFUSAL = """\
        known = ('native', 'te')
        if self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl not in known:
            raise ValueError(f"cross_entropy_fusion_impl must be one of {known}, not {self.cross_entropy_fusion_impl!r}.")

"""

FIX = {
    _DISPATCHER: [dataclasses.replace(transform, needs=_LOSS) for transform in load_fix(_PACK10)[_DISPATCHER]],
    "megatron/core/model_parallel_config.py": (
        replace(
            "refusal",
            r"(cross_entropy_fusion_impl: (?:str|Literal\['native', 'te'\]) = [\s\S]*?)(^        if self\.autocast_dtype is None:\n)",
            lambda found: f"{found[1]}{_REFUSAL}{found[2]}",
            optional=True,
        ),
    ),
    "megatron/core/models/mamba/mamba_model.py": _layer("mamba"),
    "megatron/core/models/hybrid/hybrid_model.py": (
        *_layer("hybrid"),
        replace(
            "hybrid-call",
            r"^        logits, _ = self\.output_layer\(\n",
            lambda found: _CALL + found[0],
            optional=True,
            needs=_LOSS,
        ),
    ),
}
