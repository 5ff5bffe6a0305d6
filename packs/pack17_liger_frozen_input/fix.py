"""The fix: where the input needs no gradient and the weight or the bias does, compute the gradients in the backward.

They are what the release's own function gives when it is told that the input needs one. The forward computes the loss alone, as today: in eval mode
under no_grad it cannot know better than to do the same, since autograd.Function switches gradients off around it.
"""

import re

from common.transforms import replace

TENSORS = ("_input", "weight", "target", "bias", "ce_weight")


def _options(match: re.Match[str]) -> str:
    """Before forward's call: what this release hands over beside tensors, for backward to hand over again."""
    names = [name for name in re.findall(r"(\w+)=\1,", match[0]) if name not in TENSORS]
    given = "".join(f'            "{name}": {name},\n' for name in names)
    return f"""        # Gradients of the weight and the bias alone are computed in backward, if there is one.
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        ctx.frozen_input = reduction != "none" and trained and not _input.requires_grad
        ctx.options = {{
{given}        }}
{match[0]}"""


def _save(match: re.Match[str]) -> str:
    i = match[1]
    return f"""{i}if ctx.frozen_input:
{i}    ctx.save_for_backward(*(t if t is None else t.detach() for t in ({", ".join(TENSORS)})))
{i}else:
{re.sub(r"^(?=.)", "    ", match[0], flags=re.MULTILINE)}"""


def _recompute(match: re.Match[str]) -> str:
    i = match[1]
    given = ", ".join(f"{name}={name}" for name in TENSORS)
    return f"""{i}if ctx.frozen_input:
{i}    {", ".join(TENSORS)} = ctx.saved_tensors
{i}    # The function below computes no gradient at all for an input that needs none.
{i}    _input, weight = _input.detach().requires_grad_(), weight.detach().requires_grad_(ctx.needs_input_grad[1])
{i}    with torch.no_grad():
{i}        grad_input, grad_weight, grad_bias = fused_linear_cross_entropy_forward({given}, **ctx.options)[-3:]
{i}else:
{i}    {match[0].lstrip()}"""


FIX = {
    "liger_kernel/ops/fused_linear_cross_entropy.py": (
        replace("options", r"^        loss, z_loss\b[^=\n]*= \(?\s*fused_linear_cross_entropy_forward\([^)]*\)", _options),
        replace("save", r"^( *)ctx\.save_for_backward\(\n *grad_input\.detach\(\),\n(?: {12,}.*\n)*?\1\)\n", _save),
        replace("recompute", r"^( *)\(grad_input, grad_weight, grad_bias\) = ctx\.saved_tensors\n", _recompute),
    ),
}
