"""The fix: a gradient for each token, whatever its strides; a mean over the tokens that are not ignored; rows where the logits have them; and the
label's 1 taken from its probability in fp32, before that is rounded to the dtype of the logits.

Releases differ in what they need, and from 2.10 the kernels are in a file of their own: all edits are optional.
"""

from common.transforms import replace

_COUNT = """\
    n_counted = (
        {count} if reduce_loss else target.new_ones(())
    )
"""


def _count(expression):
    return lambda found: (
        _COUNT.format(count=expression)
        + found[0].replace("n_non_ignore=n_rows,", "n_rows=n_rows,\n        n_non_ignore=n_counted,")
    )


_SUBTRACTED = """\
        X_block = tl.exp(X_block - m) / d - eps
        X_block -= tl.where(X_offsets == y - rank * n_cols, 1 - label_smoothing, 0.0)
"""
_STORED = r"(^        tl\.store\(X_ptr \+ X_offsets, X_block\.to\(grad_dtype\), mask=X_offsets < n_cols\)\n)"
_FOUND = r"tl\.exp\(X_block - m\) / d - eps"


def _kernels(where):
    return (
        replace(
            f"{where}-label",
            rf"^        if reduce_loss:\n            X_block = \({_FOUND}\) / \(n_non_ignore\)\n        else:\n            X_block = {_FOUND}\n{_STORED}",
            lambda found: f"{_SUBTRACTED}        if reduce_loss:\n            X_block /= n_non_ignore\n{found[1]}",
            optional=True,
        ),
        replace(
            f"{where}-label-always-divided",
            rf"^        X_block = \({_FOUND}\) / \(n_non_ignore\)\n{_STORED}",
            lambda found: f"{_SUBTRACTED}        X_block /= n_non_ignore\n{found[1]}",
            optional=True,
        ),
        replace(
            f"{where}-label-once",
            r"^    vocab_start_idx = .*\n    vocab_end_idx = .*\n    if y >= vocab_start_idx:\n        if y < vocab_end_idx:\n"
            r"(?:            .*\n)+?            tl\.store\(X_ptr \+ y - vocab_start_idx, X_y\)\n",
            "",
            optional=True,
        ),
        replace(
            f"{where}-rows",
            r"^    n_cols,\n    n_non_ignore,\n",
            "    n_cols,\n    n_rows,\n    n_non_ignore,\n",
            optional=True,
        ),
        replace(
            f"{where}-count",
            r"^    m_d_X_y_ptr \+= program_id \* 3 \* m_d_X_y_stride\n([\s\S]*?offset = i \* 3 \* )n_non_ignore",
            lambda found: (
                "    m_d_X_y_ptr += program_id * 3 * m_d_X_y_stride\n    n_non_ignore = tl.load(n_non_ignore)\n"
                + found[1]
                + "n_rows"
            ),
            optional=True,
        ),
        replace(
            f"{where}-gradient",
            r"^    grad_output_ptr,\n    n_cols,\n([\s\S]*?)tl\.load\(grad_output_ptr\)",
            r"    grad_output_ptr,\n    grad_output_stride,\n    n_cols,\n\1tl.load(grad_output_ptr + program_id * grad_output_stride)",
            optional=True,
        ),
    )


FIX = {
    "transformer_engine/pytorch/triton/cross_entropy.py": (
        replace(
            "layout",
            r"if _input\.stride\(-1\) != 1(?: or _input\.stride\(-2\) != _input\.shape\[-1\])?:",
            "if not _input.is_contiguous():",
            optional=True,
        ),
        replace("labels", r"if target\.stride\(-1\) != 1:", "if not target.is_contiguous():", optional=True),
        replace(
            "gradient",
            r"^            grad_output,\n(?:            1 if grad_output\.numel\(\) > 1 else 0,\n)?            V,\n",
            "            grad_output.contiguous(),\n            1 if grad_output.numel() > 1 else 0,\n            V,\n",
            optional=True,
        ),
        replace(
            "count",
            r"^    cross_entropy_kernel\[\(n_rows,\)\]\(\n(?:        .*\n)*?        ignore_idx=ignore_idx,\n(?:        .*\n)*?        n_non_ignore=n_rows,\n",
            _count("(target != ignore_idx).sum().clamp(min=1)"),
            optional=True,
        ),
        replace(
            "count-without-ignored",
            r"^    cross_entropy_kernel\[\(n_rows,\)\]\(\n(?:        .*\n)*?        world_size=world_size,\n        n_cols=V,\n        n_non_ignore=n_rows,\n",
            _count("target.new_full((), n_rows)"),
            optional=True,
        ),
        replace("mean", r"torch\.sum\(loss_1d\) / n_rows", "torch.sum(loss_1d) / n_counted", optional=True),
        *_kernels("pytorch"),
    ),
    "transformer_engine/common/triton/cross_entropy.py": _kernels("common"),
}
