"""The fix: parameters that are marked keep_in_fp32 stay fp32 in Float16Module, and MambaMixer marks A_log and D.

The mark has the name that upstream's main branch gave it in 86e928a97f (#5929), where Float16Module honours it and no SSM parameter has
it: there the two marks are the fix.
"""

from common.transforms import insert_after, insert_before, replace

_CAST = '''\
def _cast_except_marked(module, dtype):
    """Cast floating-point parameters and buffers of ``module``, in place, except those marked ``keep_in_fp32``."""
    return module._apply(
        lambda t: t.to(dtype) if t.is_floating_point() and not getattr(t, 'keep_in_fp32', False) else t
    )


'''

FIX = {
    "megatron/core/transformer/module.py": (
        # main has it, by another name
        replace(
            "cast",
            r"\A(?![\s\S]*keep_in_fp32)[\s\S]*?(?=^class Float16Module\()",
            lambda found: found[0] + _CAST,
            optional=True,
        ),
        replace("half", r"\bmodule\.half\(\)", "_cast_except_marked(module, torch.half)", optional=True),
        replace("bfloat16", r"\bmodule\.bfloat16\(\)", "_cast_except_marked(module, torch.bfloat16)", optional=True),
    ),
    "megatron/core/ssm/mamba_mixer.py": (
        insert_after("mark-a", r"^ +self\.A_log = nn\.Parameter\(A_log\)\n", "            self.A_log.keep_in_fp32 = True\n"),
        insert_before(
            "mark-d", r"^ +setattr\(self\.D, ['\"]tensor_model_parallel['\"], True\)\n", "        self.D.keep_in_fp32 = True\n"
        ),
    ),
}
