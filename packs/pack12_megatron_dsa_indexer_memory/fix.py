"""The fix: with the indexer's loss, heads are added up in blocks, forward and backward, and no tensor of all heads is made where that is large.

Three sums over heads: the index scores, their gradients (0.17 on; in 0.16 autograd's), and the target, which is attention's softmax added
up over its heads. A block is as many heads as have 2^24 scores together; of larger ones four, up to 2^29 scores, or one. The release's own lines make
the masks, of one head. What computes no loss is as it was: from 0.17 on another call, in 0.16 where no gradient is asked for. Sums over heads
are in another order than the release's.
"""

from common.transforms import insert_before, replace

_BLOCKS = '''\
def _head_blocks(heads, scores_of_a_head):
    """As many heads at a time as have 2^24 scores together; of larger ones four, up to 2^29 scores, or one."""
    size = max(1, scores_of_a_head)
    step = max(1, min(4, 2**29 // size), 2**24 // size)
    return [slice(start, start + step) for start in range(0, heads, step)]


def _streamed_target(query, key, softmax_scale, mask, valid=None):
    """Attention's probabilities summed over heads, under ``mask``; both [b, 1, sq, sk] fp32. ``valid`` [b, sq, sk] says which keys count."""
    target = torch.zeros_like(mask)
    for part in _head_blocks(query.size(2), mask.numel()):
        scores = torch.einsum('sbhd,tbhd->bhst', query[:, :, part].float() * softmax_scale, key[:, :, part].float())
        scores += mask
        if valid is not None:  # what does not count may be anything, not a number too
            scores.masked_fill_(~valid.unsqueeze(1), torch.finfo(scores.dtype).min)
        scores = torch.softmax(scores, dim=-1)
        target += scores.sum(dim=1, keepdim=True)
        del scores
    return target if valid is None else target.masked_fill_(~valid.unsqueeze(1), 0)  # rows without keys


def _streamed_index_scores(q, weights, k, use_relu=True):
    """relu(q @ k^T) weighted and summed over heads, [b, sq, sk] fp32."""
    keys = k.float()
    index_scores = keys.new_zeros(q.size(1), q.size(0), k.size(0))
    for part in _head_blocks(q.size(2), index_scores.numel()):
        scores = torch.einsum('sbhd,tbd->bhst', q[:, :, part].float(), keys)
        if use_relu:
            scores = torch.relu(scores)
        scores = scores * weights[:, :, part].permute(1, 2, 0).unsqueeze(-1)  # in place it could not be differentiated twice
        index_scores += scores.sum(dim=1)
        del scores
    return index_scores


def _streamed_backward(q, weights, k, grad_index_scores, use_relu=True):
    """Gradients of q [sq, b, h, d], weights [sq, b, h] and k [sk, b, d]."""
    keys, grad = k.float(), grad_index_scores.unsqueeze(1)
    grad_q, grad_weights = torch.empty_like(q), torch.empty_like(weights)
    grad_k = torch.zeros_like(keys)
    for part in _head_blocks(q.size(2), grad_index_scores.numel()):
        queries, weight = q[:, :, part].float(), weights[:, :, part].float().unsqueeze(-1)
        kept = grad.expand(-1, queries.size(2), -1, -1)
        if use_relu:
            kept = torch.where(torch.einsum('sbhd,tbd->bhst', queries, keys) > 0, grad, 0)
        # relu(q @ k) is q @ k where it is kept, so one product with the keys gives the gradients of q and of the weights
        kept_keys = torch.einsum('bhst,tbd->sbhd', kept, keys)
        grad_q[:, :, part] = kept_keys * weight
        grad_weights[:, :, part] = (kept_keys * queries).sum(dim=-1)
        grad_k += torch.einsum('bhst,sbhd->tbd', kept, queries * weight)
        del kept
    return grad_q, grad_weights, grad_k.to(k.dtype)


'''

_AUTOGRAD = '''\
class _StreamedIndexScores(torch.autograd.Function):
    """``_streamed_index_scores`` for autograd."""

    @staticmethod
    def forward(q, weights, k):
        return _streamed_index_scores(q, weights, k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_index_scores):
        return _streamed_backward(*ctx.saved_tensors, grad_index_scores)


'''

_MASKS = (
    "    # Masks alone, of one head: they are added to the scores of each block of heads\n"
    "    attention_scores = torch.zeros((b, 1, sq, sk), dtype=torch.float32, device=query.device)\n"
)
_RESHAPED = r"^    # \[sq, b, np, hn\].*\n    {0} = query\.permute(?:.*\n)+?    attention_scores = attention_scores\.reshape\(b, np, sq, sk\)\n"


def _relu(matched: str) -> str:
    """0.19 has the ReLU as an option."""
    return ", use_relu" if "use_relu" in matched else ""


def _summed(found) -> str:
    """The softmax over [b, heads, sq, sk] becomes the sum over blocks of heads. 0.19 says by a mask which keys count."""
    valid = ", attention_valid_mask" if "attention_valid_mask" in found[0] else ""
    return f"{found[1]}_streamed_target(query, key, softmax_scale, attention_scores{valid})\n"


def _passed(found) -> str:
    """One more argument for the call."""
    return found[1].rstrip(" ,\n") + ",\n        compute=_streamed_index_scores,\n    )\n"


_SOFTMAX = r"(?:torch\.nn\.functional\.softmax|dsa_masking\.masked_softmax)\(\s*attention_scores(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\n"

FIX = {
    "megatron/core/transformer/experimental_attention_variant/dsa.py": (
        insert_before("blocks", r"^def rotate_activation\(", _BLOCKS),
        replace("target", _RESHAPED.format("query"), _MASKS),
        replace("target-sum", rf"^(    attention_scores = ){_SOFTMAX}(?=    # \[b, sq, sk\] -> \[b, sq, sk\]\n)", _summed),
        # 0.16 leaves the backward to autograd; its scores are a method, called with the loss and without
        insert_before(
            "autograd",
            r"^class DSAIndexer\(MegatronModule\):\n(?=(?:.*\n)+    def _compute_index_scores)",
            _AUTOGRAD,
            optional=True,
        ),
        insert_before(
            "scores-0.16",
            r"^        # Compute attention scores: q @ k\^T\n",
            "        if torch.is_grad_enabled() and (q.requires_grad or weights.requires_grad or k.requires_grad):\n"
            "            return _StreamedIndexScores.apply(q, weights, k)\n",
            optional=True,
        ),
        # 0.17 on
        insert_before(
            "choice", r'^\):\n    """Naive implementation of QK Topk', "    compute=_compute_index_scores,\n", optional=True
        ),
        replace("chosen", r"^(    index_scores = )_compute_index_scores(\(q, weights, k.*\)\n)", r"\1compute\2", optional=True),
        replace(
            "scores", r"^(    index_scores, topk_indices = fused_qk_topk_naive\((?:[^()]|\n)*)\)\n", _passed, optional=True
        ),
        replace(
            "scores-again",
            r"_compute_index_scores(\(q, weights, k.*\)  # \[B, Sq, Sk\]\n)",
            r"_streamed_index_scores\1",
            optional=True,
        ),
        replace("target-again", _RESHAPED.format("query_reshaped"), _MASKS, optional=True),
        replace("target-sum-again", rf"^(    attention_scores_softmax = ){_SOFTMAX}", _summed, optional=True),
        replace(
            "backward",
            r"^    # Transpose from \[b, sq, sk\] to \[sq, b, sk\]\n(?:.*\n)+?    del grad_scores\n",
            lambda found: (
                "    grad_q, grad_weights, grad_k = _streamed_backward(\n"
                f"        q, weights, k, grad_index_scores_logits{_relu(found[0])}\n    )\n"
            ),
            optional=True,
        ),
    ),
}
