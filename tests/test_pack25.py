"""Pack 25: its README says what the receipts say."""

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack25")


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.side, s.cell.variant): s for s in history.load(files.RESULTS, [PACK]).runs if s.evidence}
    assert {variant for _, variant in runs} == {"", *PACK.variants}
    assert not any(s.stale for s in runs.values())
    first, second = (PACK.folder / "README.md").read_text().split("## Triton")
    before, after = (runs[side, ""].document().facts.metrics for side in ("unpatched", "patched"))

    def cells(text, start):
        return [
            cell.strip()
            for cell in next(line for line in text.splitlines() if line.startswith(f"| {start} |")).split("|")[2:-1]
        ]

    for case in before:
        assert cells(first, case) == [str(before[case]), str(after[case])]
    for variant in PACK.variants:
        measured = runs["unpatched", variant].document().facts.metrics
        for case, count in measured["ptxas"].items():
            both = [(side, each) for side in ("unpatched", "patched") for each in PACK.variants]
            counts = [runs[each].document().facts.metrics["ptxas"][case] for each in both]
            span = f"{min(counts)} – {max(counts)}" if len(set(counts)) > 1 else str(count)
            assert [span] == cells(second, case), variant
        assert measured["no DG_CACHE_DIR"] == {
            "calls of nvcc with DG_JIT_USE_NVRTC=1": 1,
            "in ~/.deep_gemm/cache": 1,
        }
