"""Pack 24: its README says what the receipts say."""

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack24")
CPU = "linux-x86_64-cpu"


def rows(readme):
    """Cells of each row, by its first one; of two with one name the later."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_the_receipts_are_what_the_readme_says():
    readme = (PACK.folder / "README.md").read_text()
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.machine == CPU]
    assert not any(s.stale for s in runs)
    found = {
        (s.version, s.side): s.document().facts.metrics
        for s in runs
        if s.cell.variant == "" and s.outcome in ("REPRODUCED", "ABSENT")
    }
    before, after = found["0.18.0", "unpatched"], found["0.18.0", "patched"]
    first, second = (rows(part) for part in readme.split("## Orders that are not bugs"))
    for name, case, fixed in (
        ("convert, `fully_shard`", "FP8 all-gather", None),
        ("from meta: convert, `fully_shard`, `to_empty`, load", "loaded", None),
        ("from meta: convert, `fully_shard`, load with `assign=True`", "loaded, assign=True", "bytes"),
        ("convert, `fully_shard`, precompute, load weights 16 times as large", "precomputed, loaded", "error"),
        ("that, then precompute", "precomputed again", None),
    ):
        cells, shown = (
            first[name],
            lambda row: {
                "bytes": f"{row['bytes']:,}",
                "error": f"{row['error']:.2g}".replace("1", "1.0") if row["error"] > 0.95 else f"{row['error']:.2g}",
            },
        )
        assert cells[:2] == list(shown(before[case]).values()), name
        assert cells[2] == (shown(after[case])[fixed] if fixed else "")
    for (version, side), metrics in found.items():
        lost = (metrics["loaded, assign=True"]["bytes"], metrics["precomputed, loaded"]["error"] > 0.9)
        assert lost == ((2097152, True) if side == "unpatched" else (524288, False)), version
    measured = next(s for s in runs if s.cell.variant == "orders" and s.side == "unpatched").document().facts.metrics
    for name, row in measured.items():
        cells = second[
            name.replace("fully_shard", "`fully_shard`")
            .replace("optimizer.step()", "`optimizer.step()`")
            .replace("without FP8 all-gather", "with `enable_fsdp_float8_all_gather=False`")
            .replace("compile, ", "`linear.compile()`, ")
        ]
        if "bytes" in row:
            assert cells[0] == f"{row['bytes']:,}"
            assert float(cells[2]) == float(f"{row['error']:.2g}")
            assert cells[1] == str(row.get("all_reduce", ""))
        assert "raises" not in row or cells[3].startswith("loud")
        assert row.get("compiled") is not True
