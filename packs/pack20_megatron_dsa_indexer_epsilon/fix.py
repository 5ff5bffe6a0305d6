"""The fix: the indexer's log probabilities come from log_softmax, and their gradient is what it is: probability minus target.

Log probabilities and gradient are as 0.19.0 has them (d1cab16a01, #5099). What is masked is not: masked keys keep the value that the release
gives them here, log(1e-10), and a row without any key stays NaN.
"""

from common.transforms import replace

FIX = {
    "megatron/core/transformer/experimental_attention_variant/dsa.py": (
        replace(
            "log-probabilities",
            r"^    index_scores = torch\.nn\.functional\.softmax\(index_scores, dim=-1, dtype=torch\.float32\)\n",
            "    masked = index_scores == float('-inf')\n"
            "    masked &= ~masked.all(dim=-1, keepdim=True)  # a row without keys has no probabilities, and stays so\n"
            "    index_log_scores = torch.nn.functional.log_softmax(index_scores, dim=-1, dtype=torch.float32)\n"
            "    index_log_scores = index_log_scores.masked_fill(masked, math.log(1e-10))\n",
        ),
        replace("divergence", r"torch\.log\(index_scores \+ 1e-10\)", "index_log_scores"),
        replace(
            "gradient",  # in 0.16 autograd's
            r"^    # Backward through kl_per_element = (?:.*\n)+?    del index_scores_softmax, grad_index_scores_softmax, sum_grad\n",
            "    # Backward through kl_per_element and the softmax at once: no quotient of small numbers\n"
            "    grad_index_scores_logits = (\n"
            "        index_scores_softmax - attention_scores_normalized\n"
            "    ) * grad_kl_per_element\n"
            "    del index_scores_softmax, attention_scores_normalized\n",
            optional=True,
        ),
    ),
}
