"""The fix: with reduction="none", compute only the loss in forward, and the gradients in backward, where their weights are known.

grad_weight is a sum over tokens, so it cannot be repaired after that sum: the chunks' logits are computed once more, and each
row of their gradient is multiplied by its token's grad_output before both projections. mean and sum run as before.
"""

import re

from common.transforms import insert_after, replace

TENSORS = ("_input", "weight", "target", "bias", "ce_weight")


def _options(match: re.Match[str]) -> str:
    """Before forward's call: what this release hands over beside tensors, for backward to hand over again."""
    names = [name for name in re.findall(r"(\w+)=\1,", match[0]) if name not in TENSORS]
    return "        options = {\n" + "".join(f'            "{name}": {name},\n' for name in names) + f"        }}\n{match[0]}"


def _allocate(match: re.Match[str]) -> str:
    """A forward that leaves the gradients to backward needs no memory for them."""
    return f"""    if reduction == "none" and token_grad is None:
        grad_input = grad_weight = grad_bias = None
    else:
{_indented(match[0])}"""


def _save(match: re.Match[str]) -> str:
    """In forward, keep the inputs instead of gradients: detached, so that ``weight.data = other`` cannot change them later.

    Autograd saves no tensor that was made under inference_mode: a copy of it is none.
    """
    return f"""        ctx.options = options if reduction == "none" else None
        if reduction == "none":
            ctx.save_for_backward(*(
                t if t is None else t.clone() if t.is_inference() else t.detach() for t in ({", ".join(TENSORS)})
            ))
        else:
{_indented(match[0])}"""


def _recompute(match: re.Match[str]) -> str:
    """In backward, call the forward function again, now with the gradient of each token's loss."""
    return f"""        if ctx.options is not None:
            {", ".join(TENSORS)} = ctx.saved_tensors
            # The function below computes no gradient at all for an input that needs none.
            _input = _input.detach().requires_grad_()
            weight = weight.detach().requires_grad_(ctx.needs_input_grad[1])
            with torch.no_grad():
                grad_input, grad_weight, grad_bias = fused_linear_cross_entropy_forward(
                    {", ".join(f"{name}={name}" for name in TENSORS)}, token_grad=grad_output, **ctx.options
                )[-3:]
        else:
{_indented(match[0])}"""


def _indented(code: str) -> str:
    return re.sub(r"^(?=.)", "    ", code, flags=re.MULTILINE)


FIX = {
    "liger_kernel/ops/fused_linear_cross_entropy.py": (
        replace("parameter", r"(def fused_linear_cross_entropy_forward\([^)]*)\):", r"\1    token_grad=None,\n):"),
        replace("allocate", r"^    grad_(?:weight|input) = torch\.zeros_like(?:.*\n)+?(?=    loss_1d = )", _allocate),
        insert_after(
            "weigh",
            r"^        grad_logits_chunk = logits_chunk\b.*\n",
            """        if reduction == "none":
            if token_grad is None:
                continue  # forward: the loss is all that is needed
            logits_chunk.mul_(token_grad[start_idx:end_idx, None])
""",
        ),
        # Spares the forward a pass over the logits. Releases before 0.6.3 compute the gradient always.
        replace(
            "loss-only",
            r"HAS_GRADIENTS=input_requires_grad,",
            'HAS_GRADIENTS=input_requires_grad and not (reduction == "none" and token_grad is None),',
            optional=True,
        ),
        replace("options", r"^        loss, z_loss\b[^=\n]*= \(?\s*fused_linear_cross_entropy_forward\([^)]*\)", _options),
        replace("save", r"^        ctx\.save_for_backward\((?:\n            .*)+\n        \)\n", _save),
        replace(
            "recompute",
            r"^        \(grad_input, grad_weight, grad_bias\) = ctx\.saved_tensors\n"
            r"        grad_input, grad_weight, grad_bias = .*\n(?:            .*\n)*        \)\n",
            _recompute,
        ),
    ),
}
