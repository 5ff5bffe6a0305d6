"""The fix: the output layer that GPTModel has, called as GPTModel calls it, and pack10's fallback for GPUs that have no fused kernels.

MambaModel became HybridModel, which also lost the call: a commit has one file or the other, so the edits of both are optional. The factor of
muP is applied to the hidden states, where HybridModel applies it to the logits: the layer between is linear.
"""

from pathlib import Path

from common.transforms import load_fix, replace

_DISPATCHER = "megatron/core/fusions/fused_linear_cross_entropy.py"
_PACK10 = next(Path(__file__).parent.parent.glob("pack10_*/fix.py"))


def _layer(model):
    return (
        replace(
            f"{model}-import",
            r"^from megatron\.core\.transformer\.enums import .*ModelType\n",
            lambda found: f"{found[0]}from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule\n",
            optional=True,
        ),
        replace(f"{model}-class", r"tensor_parallel\.ColumnParallelLinear\(", "LinearCrossEntropyModule(", optional=True),
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

FIX = {
    _DISPATCHER: load_fix(_PACK10)[_DISPATCHER],
    "megatron/core/models/mamba/mamba_model.py": _layer("mamba"),
    "megatron/core/models/hybrid/hybrid_model.py": (
        *_layer("hybrid"),
        replace("hybrid-call", r"^        logits, _ = self\.output_layer\(\n", lambda found: _CALL + found[0], optional=True),
    ),
}
