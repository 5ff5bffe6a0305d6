"""The fix: GPUs without fused kernels get an unfused fallback that never holds all logits, and that is said once.

The fallback has the contract of the fused entry points, tensor and sequence parallelism included. Logits of 4096 vocabulary rows at a time
are made in the forward, and again in the backward; the maximum and the sum of exponentials are kept in fp32.
"""

from common.transforms import insert_before, replace

_FUSIONS = "megatron/core/fusions"
_FALLBACK = '''\
_CHUNK = 4096  # vocabulary rows whose logits are held at a time


def _local_logits(x, weight, target, start, first):
    """Logits [tokens, chunk] in fp32 from vocabulary row ``start``, and where each token's label is among them."""
    logits = (x @ weight[start : start + _CHUNK].t()).float()
    column = target - first - start
    here = (column >= 0) & (column < logits.shape[1])
    return logits, column.clamp(0, logits.shape[1] - 1).unsqueeze(1), here


def _unfused_forward(
    hidden, weight, labels, tp_group=None, reduction="mean", ignore_index=-100, sequence_parallel=False
):
    """Linear and cross entropy as the fused entry points compute it, by torch."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"Invalid reduction: {reduction}")
    rank, world = 0, 1
    if tp_group is not None:
        rank, world = torch.distributed.get_rank(tp_group), torch.distributed.get_world_size(tp_group)
    global_hidden = hidden
    if world > 1 and sequence_parallel:
        global_hidden = hidden.new_empty((hidden.shape[0] * world, *hidden.shape[1:]))
        torch.distributed.all_gather_into_tensor(global_hidden, hidden.contiguous(), group=tp_group)
    x, target = global_hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    assert len(x) == len(target), f"{len(x)} tokens and {len(target)} labels"
    maximum = torch.full((len(x),), float("-inf"), dtype=torch.float32, device=x.device)
    accumulate, picked = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for start in range(0, weight.shape[0], _CHUNK):
        logits, column, here = _local_logits(x, weight, target, start, rank * weight.shape[0])
        larger = torch.maximum(maximum, logits.amax(-1))
        accumulate = accumulate * (maximum - larger).exp() + (logits - larger.unsqueeze(1)).exp().sum(-1)
        maximum = larger
        picked += torch.where(here, logits.gather(1, column).squeeze(1), 0.0)
    if world > 1:
        own = maximum.clone()
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=tp_group)
        accumulate *= (own - maximum).exp()
        torch.distributed.all_reduce(accumulate, group=tp_group)
        torch.distributed.all_reduce(picked, group=tp_group)
    valid = target != ignore_index
    loss = torch.where(valid, maximum + accumulate.log() - picked, 0.0)
    count = valid.sum()
    if reduction != "none":
        loss = loss.sum() / (count if reduction == "mean" else 1)
    return loss, maximum, accumulate, count, rank, world, global_hidden


def _unfused_backward(
    dlogprobs, global_hidden, weight, labels, maximum, accu, num_valid_tokens,
    reduction="mean", ignore_index=-100, tp_group=None, tp_rank=0, tp_world_size=1, sequence_parallel=False,
):
    """Gradients of hidden and weight; the logits are made again."""
    x, target = global_hidden.reshape(-1, global_hidden.shape[-1]), labels.reshape(-1)
    scale = dlogprobs.float().reshape(-1) / (num_valid_tokens if reduction == "mean" else 1)
    scale = torch.where(target != ignore_index, scale, 0.0).unsqueeze(1)
    d_hidden, d_weight = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(weight)
    for start in range(0, weight.shape[0], _CHUNK):
        logits, column, here = _local_logits(x, weight, target, start, tp_rank * weight.shape[0])
        d_logits = (logits - maximum.unsqueeze(1)).exp_().div_(accu.unsqueeze(1))
        d_logits.scatter_add_(1, column, -here.to(d_logits.dtype).unsqueeze(1))
        d_logits = d_logits.mul_(scale).to(x.dtype)
        d_hidden += d_logits @ weight[start : start + _CHUNK]
        d_weight[start : start + _CHUNK] = d_logits.t() @ x
    if tp_world_size > 1:
        torch.distributed.all_reduce(d_hidden, group=tp_group)
        if sequence_parallel:
            d_hidden = d_hidden.chunk(tp_world_size)[tp_rank]
            return d_hidden.to(x.dtype).view(-1, *global_hidden.shape[1:]), d_weight
    return d_hidden.to(x.dtype).view(global_hidden.shape), d_weight


'''
_CHOICE = """\
        fused = None
        if cc[0] == 10:
            # It swallows the error of an import that fails, and then defines nothing.
            from .linear_cross_entropy.blackwell import entry

            fused = entry if hasattr(entry, "forward") else None
            why = "CUTLASS or CUDA bindings that its kernels need cannot be imported"
        else:
            why = f"there are no fused kernels for compute capability {cc[0]}.{cc[1]}"
        if fused is None:
            warnings.warn(f"Linear cross entropy runs unfused: {why}.")
        self.forward_func: typing.Callable[..., typing.Any] = fused.forward if fused else _unfused_forward
        self.backward_func: typing.Callable[..., typing.Any] = fused.backward if fused else _unfused_backward
"""

FIX = {
    f"{_FUSIONS}/fused_linear_cross_entropy.py": (
        replace("warnings", r"^import typing\n", "import typing\nimport warnings\n"),
        insert_before("fallback", r"^class Platform:", _FALLBACK),
        replace("choice", r"^        if cc\[0\] == 10:\n(?:.*\n)+?            raise ValueError\(.*\n", lambda _: _CHOICE),
    ),
}
