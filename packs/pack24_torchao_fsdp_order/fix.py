"""The fix: after load_state_dict a weight is wrapped as the one was whose place it took."""

from common.transforms import insert_before

_LOAD = """\
    def _load_from_state_dict(self, state_dict, prefix, *rest, **named):
        \"\"\"With ``assign=True`` the weight of the checkpoint takes the place of the one that gathers FP8.\"\"\"
        before = getattr(self.weight, "_local_tensor", self.weight)
        trained = self.weight.requires_grad
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        weight = getattr(self.weight, "_local_tensor", self.weight)
        if not isinstance(before, WeightWithDynamicFloat8CastTensor) or isinstance(weight, type(before)):
            return
        dtype = [before._dtype] if hasattr(before, "_dtype") else []  # from 0.6
        wrapped = WeightWithDynamicFloat8CastTensor(weight.detach(), before._linear_mm_config, *dtype)
        if weight is not self.weight:  # a DTensor of its own: a Parameter in the checkpoint is its owner's
            sharded = self.weight.detach()
            sharded._local_tensor, wrapped = wrapped, sharded
        self.weight = torch.nn.Parameter(wrapped, requires_grad=trained)

"""

FIX = {"torchao/float8/float8_linear.py": (insert_before("load", r"^    @classmethod\n    def from_float\(", _LOAD),)}
