"""The fix: where the graph is kept, the backward works on copies of the saved gradients.

Where it is not kept, as in most training, nothing else can read them any more: they are multiplied in place, as today, and no memory is needed. Torch says which
(torch 2.5 or newer; with an older one copies are made always).
"""

import re

from common.transforms import replace


def _copies(match: re.Match[str]) -> str:
    indent, names = match[1], re.findall(r"\w+", match[2])
    copied = "".join(f"{indent}    {name} = {name} if {name} is None else {name}.clone()\n" for name in names)
    return f"""{match[0]}{indent}# Saved gradients must not change, nor be handed out, where they are needed again.
{indent}if getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)():
{copied}"""


def _copied(name: str, names: str) -> tuple:
    return (replace(name, rf"^( +)\(({names})\) = ctx\.saved_tensors\n", _copies),)


FIX = {
    "liger_kernel/ops/cross_entropy.py": _copied("cross-entropy", "_input,"),
    "liger_kernel/ops/fused_linear_cross_entropy.py": _copied("fused-linear", r"grad_input, grad_\w+(?:, grad_bias)?"),
}
