"""The fix: index scores one head at a time, forward and backward, so that no [sq, b, h, sk] tensor is made.

A head's scores [b, sq, sk] are weighted and added up at once. The backward computes them again head by head, in place of the release's
written-out backward (0.17 on) or of autograd's (0.16), which keep all heads. Sums over heads are in another order than the release's.
"""

from common.transforms import insert_before, replace

_STREAMED = '''\
class _StreamedIndexScores(torch.autograd.Function):
    """relu(q @ k^T) weighted and summed over heads, [b, sq, sk] in fp32; memory for a few heads, whatever their number."""

    @staticmethod
    def forward(ctx, q, weights, k, use_relu):
        ctx.save_for_backward(q, weights, k)
        ctx.use_relu = use_relu
        keys = k.float().permute(1, 2, 0)  # [b, d, sk]
        index_scores = keys.new_zeros(q.size(1), q.size(0), k.size(0))
        for h in range(q.size(2)):
            scores = torch.bmm(q[:, :, h].float().transpose(0, 1), keys)
            if use_relu:
                scores.relu_()
            index_scores.addcmul_(scores, weights[:, :, h].t().unsqueeze(-1).to(scores.dtype))
        return index_scores

    @staticmethod
    def backward(ctx, grad_index_scores):
        return *_streamed_backward(*ctx.saved_tensors, grad_index_scores, ctx.use_relu), None


def _streamed_backward(q, weights, k, grad_index_scores, use_relu):
    """Gradients of q [sq, b, h, d], weights [sq, b, h] and k [sk, b, d] from that of the index scores [b, sq, sk]."""
    keys = k.float().transpose(0, 1)  # [b, sk, d]
    grad_q, grad_weights, grad_k = torch.empty_like(q), torch.empty_like(weights), torch.zeros_like(keys)
    for h in range(q.size(2)):
        queries = q[:, :, h].float().transpose(0, 1)  # [b, sq, d]
        scores = torch.bmm(queries, keys.transpose(1, 2))
        if use_relu:
            scores.relu_()
        grad_weights[:, :, h] = (grad_index_scores * scores).sum(dim=-1).t()
        grad_scores = grad_index_scores * weights[:, :, h].t().unsqueeze(-1)
        if use_relu:
            grad_scores.masked_fill_(scores == 0, 0)
        grad_q[:, :, h] = torch.bmm(grad_scores, keys).transpose(0, 1)
        grad_k.baddbmm_(grad_scores.transpose(1, 2), queries)
    return grad_q, grad_weights, grad_k.transpose(0, 1).to(k.dtype)


'''


def _relu(matched: str) -> str:
    """0.19 has the ReLU as an option."""
    return "use_relu" if "use_relu" in matched else "True"


FIX = {
    "megatron/core/transformer/experimental_attention_variant/dsa.py": (
        insert_before("streamed", r"^def rotate_activation\(", _STREAMED),
        replace(
            "forward",
            r"^( +)index_scores = torch\.einsum\((?:.*\n)+?\1index_scores = index_scores\.transpose\(0, 1\)\n",
            lambda found: f"{found[1]}index_scores = _StreamedIndexScores.apply(q, weights, k, {_relu(found[0])})\n",
        ),
        replace(
            "backward",
            r"^    # Transpose from \[b, sq, sk\] to \[sq, b, sk\]\n(?:.*\n)+?    del grad_scores\n",
            lambda found: (
                "    grad_q, grad_weights, grad_k = _streamed_backward(\n"
                f"        q, weights, k, grad_index_scores_logits, {_relu(found[0])}\n    )\n"
            ),
            optional=True,  # 0.16 leaves the backward to autograd
        ),
    ),
}
