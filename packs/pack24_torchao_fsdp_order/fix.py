"""The fix: after load_state_dict a weight is wrapped as it was before, and a scale that was made of the old weights is dropped."""

from common.transforms import insert_before

_LOAD = """\
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        \"\"\"With ``assign=True`` the weight of the checkpoint takes the place of the one that gathers FP8.\"\"\"
        before = getattr(self.weight, "_local_tensor", self.weight)
        trained = self.weight.requires_grad
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if not isinstance(before, WeightWithDynamicFloat8CastTensor):
            return
        weight = getattr(self.weight, "_local_tensor", self.weight)
        if not isinstance(weight, WeightWithDynamicFloat8CastTensor):
            dtype = [before._dtype] if hasattr(before, "_dtype") else []  # from 0.6
            wrapped = WeightWithDynamicFloat8CastTensor(weight.detach(), before._linear_mm_config, *dtype)
            if weight is self.weight:
                self.weight = torch.nn.Parameter(wrapped, requires_grad=trained)
            else:
                self.weight._local_tensor = wrapped
            weight = wrapped
        if f"{prefix}weight" in state_dict:
            weight._precomputed_scale = None

"""

FIX = {"torchao/float8/float8_linear.py": (insert_before("load", r"^    @classmethod\n    def from_float\(", _LOAD),)}
