"""The fix: a weight that takes the place of a wrapped one is wrapped as it was; a precomputed scale counts only for the values it was made of."""

from common.transforms import insert_after, insert_before, replace

_LOAD = """\
    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        \"\"\"With ``assign=True`` the weight of the checkpoint takes the place of the one that gathers FP8.\"\"\"
        before = self.weight
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        old, new = (getattr(weight, "_local_tensor", weight) for weight in (before, self.weight))
        if not isinstance(old, WeightWithDynamicFloat8CastTensor) or isinstance(new, WeightWithDynamicFloat8CastTensor):
            return
        more = (old._dtype,) if hasattr(old, "_dtype") else ()
        weight = WeightWithDynamicFloat8CastTensor(new.detach(), old._linear_mm_config, *more)
        if new is not self.weight:
            sharded = self.weight
            weight = type(sharded.data).from_local(
                weight, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
            )
        self.weight = torch.nn.Parameter(weight, requires_grad=before.requires_grad)

"""

FIX = {
    "torchao/float8/float8_linear.py": (insert_before("wrap", r"^    @classmethod\n    def from_float\(", _LOAD),),
    "torchao/float8/fsdp_utils.py": (
        insert_after(
            "made-of",
            r"^        self\._precomputed_scale = precomputed_scale\n",
            "        self._precomputed_of = None if precomputed_scale is None else tensor._version\n",
        ),
        insert_after(
            "remember",
            r"^        float8_linear\.weight\._local_tensor\._precomputed_scale = .*\n",
            "        local = float8_linear.weight._local_tensor\n        local._precomputed_of = local._tensor._version\n",
        ),
        replace(
            "stale",
            r"(def fsdp_pre_all_gather\([\s\S]*?if (?:self\._)?precomputed_scale is not None):",
            r"\1 and self._precomputed_of == self._tensor._version:",
        ),
    ),
}
