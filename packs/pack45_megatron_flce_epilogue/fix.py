"""The fix: the epilogues' maximum starts at -inf, and what is masked reads as -inf."""

from common.transforms import replace

FIX = {
    "megatron/core/fusions/linear_cross_entropy/blackwell/triton.py": (
        *(
            replace(
                f"{kernel}-start",
                rf"(def {kernel}\([\s\S]*?global_max = tl)\.zeros\(\(BLOCK_SIZE_M,\), dtype=tl\.float32\)",
                r'\1.full((BLOCK_SIZE_M,), float("-inf"), dtype=tl.float32)',
            )
            for kernel in ("forward_dp_epilogue", "forward_tp_epilogue")
        ),
        *(
            replace(
                f"{kernel}{name}-mask",
                rf"(def {kernel}\([\s\S]*? {name}_max = tl\.load\([\s\S]*?)other=0\.0",
                r'\1other=float("-inf")',
            )
            for kernel, name in (
                ("forward_dp_epilogue", ""),
                ("forward_tp_epilogue", "_reduced"),
                ("forward_tp_epilogue", "_original"),
            )
        ),
    ),
}
