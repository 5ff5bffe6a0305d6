"""The fix: the gradient is cast to the dtype of the logits, where it was cast to bf16."""

from common.transforms import insert_before, replace

FIX = {
    "megatron/core/fusions/fused_cross_entropy.py": (
        insert_before(
            "kept",
            r"^        vocab_parallel_logits, logits_max = calculate_logits_max\(vocab_parallel_logits\)\n",
            "        ctx.logits_dtype = vocab_parallel_logits.dtype\n",
        ),
        replace(
            "argument", r"^(    masked_target_1d: torch\.Tensor,\n)(\) -> torch\.Tensor:)", r"\1    dtype: torch.dtype,\n\2"
        ),
        replace("cast", r"grad_input\.to\(torch\.bfloat16\)", "grad_input.to(dtype)"),
        replace(
            "given",
            r"calculate_gradients\(softmax, grad_output, target_mask, masked_target_1d\)\n",
            "calculate_gradients(\n            softmax, grad_output, target_mask, masked_target_1d, ctx.logits_dtype\n        )\n",
        ),
    ),
}
