"""The fix: where the graph is kept, the backward works on copies of the saved gradients, as in pack18.

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


def _copied(name: str, names: str) -> dict[str, tuple]:
    """For the one file up to 0.5.2, and for the folder that 0.6.0 made of it; each is in some releases only."""
    anchor = rf"^( +)({names}) = ctx\.saved_tensors\n"
    files = {"file": f"fla/modules/{name}.py", "folder": f"fla/modules/{name}/ops.py"}
    return {file: (replace(f"{name}, {kind}", anchor, _copies, optional=True),) for kind, file in files.items()}


FIX = {**_copied("fused_linear_cross_entropy", "dx, dw, db"), **_copied("fused_kl_div", "dx, dw")}
