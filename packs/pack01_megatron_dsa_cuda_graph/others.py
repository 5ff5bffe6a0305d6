"""The helpers of dsa_masking and dsa_layout that were first reported, and two more, captured as repro.py does it."""

import torch
from repro import judge, release


def others(_, layout, masking):
    """Name -> a call of one helper, as dsa.py calls it, and cu_seqlens."""

    def scattered(cu):
        mask, at = torch.full((2, 8, 16), float("-inf"), device=cu.device), torch.arange(4, device=cu.device)
        masking.scatter_topk_into_index_mask(mask, torch.where(at < 1, -1, at + 2).expand(2, 8, 4))  # none is the first key
        return mask

    def bounds(cu):
        at, none = torch.arange(8, device=cu.device), dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions"))
        keys = {"varlen_starts": 0 * at, "varlen_ends": at, "key_positions": at}
        ways = {}, {"mask": at.new_zeros(2, 8, 8).float()}, keys
        made = [masking.build_fused_indexer_varlen_bounds(sq=8, skv=8, device=cu.device, **none | way) for way in ways]
        return torch.cat([bound for pair in made for bound in pair or ()])

    def ids(cu):
        zeros = torch.zeros(2, 8, dtype=torch.int64, device=cu.device)
        return layout.extract_query_positions_from_position_ids(zeros, 8, cu.device)

    def varlen(cu):
        return torch.cat(masking.generate_varlen_mask_params_for_positions(cu, torch.arange(24, device=cu.device)))

    lengths = [0, 16, 16, 48], [0, 32, 40, 48]
    return {
        "scatter_topk_into_index_mask": (scattered, lengths),
        "build_fused_indexer_varlen_bounds": (bounds, lengths),
        "extract_query_positions_from_position_ids": (ids, lengths),
        "generate_varlen_mask_params_for_positions": (varlen, lengths),
    }


if __name__ == "__main__":
    judge(others(*release()))
