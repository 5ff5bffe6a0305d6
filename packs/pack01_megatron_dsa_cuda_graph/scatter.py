"""Whether scatters of top-k indices without a branch give what the branching one of da482cf5c8 is defined to give. No verdict."""

import torch
from repro import FACTS, finish, release

CASES = 300


def put_back(mask, index):
    """The form first proposed: clamp, scatter, and slot 0 put back to -inf where only a clamped index hit it."""
    mask.scatter_(-1, index.clamp_min(0), 0.0)
    only_clamped = (index < 0).any(-1) & ~(index == 0).any(-1)
    mask[..., 0] = torch.where(only_clamped, float("-inf"), mask[..., 0])


def defined(mask, index):
    """Zeros at the indices that are not negative, all else as it was."""
    for row, keys in zip(mask.flatten(0, 1), index.flatten(0, 1), strict=True):
        row[keys[keys >= 0]] = 0.0


def main():
    _, _, masking = release()
    torch.manual_seed(0)
    forms = {"this release's": masking.scatter_topk_into_index_mask, "clamp, scatter, put slot 0 back": put_back}
    fills = {"-inf": lambda: torch.full((2, 4, 8), float("-inf")), "additive, below 0": lambda: -torch.rand(2, 4, 8)}
    for what, fill in fills.items():
        for form, function in forms.items():
            right = 0
            for _ in range(CASES):
                mask, index = fill(), torch.randint(-2, 8, (2, 4, 3))
                got, want = mask.clone(), mask.clone()
                function(got, index)
                defined(want, index)
                right += torch.equal(got, want)
            FACTS["metrics"][f"{form}, mask {what}: right of {CASES}"] = right
            print(f"{right:>4} of {CASES} as defined: {form}, mask {what}")
    finish("MEASURED")


if __name__ == "__main__":
    main()
