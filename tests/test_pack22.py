"""Pack 22: its README says what the receipts say."""

from packaging.specifiers import SpecifierSet

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack22")
CPU = "linux-x86_64-cpu"
ROWS = {
    "none": "no checkpoint",
    "the first": "reentrant over 0 of 4 blocks",
    "the second": "reentrant over 1 of 4 blocks",
    "the second, `use_reentrant=False`": "not reentrant over 1 of 4 blocks",
    "all four": "reentrant over 0, 1, 2, 3 of 4 blocks",
    "the first, in a second `te.checkpoint`": "nested over 0 of 4 blocks",
}


def test_the_receipts_are_what_the_readme_says():
    lines = (PACK.folder / "README.md").read_text().splitlines()
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.machine == CPU]
    assert not any(s.stale for s in runs)
    judged = [s for s in runs if s.cell.variant == "" and s.outcome in ("REPRODUCED", "ABSENT")]
    assert {s.outcome for s in judged if s.side == "patched"} == {"ABSENT"}
    for seen in judged:
        remembered = seen.document().facts.metrics["remembered"]
        for row, name in ROWS.items():
            cells = [c.strip() for line in lines if line.startswith(f"| {row} |") for c in line.split("|")[2:6]]
            old = seen.version in SpecifierSet("<2.4.0")
            column = 3 if seen.side == "patched" else 0 if old else 1
            assert cells[column] == str(remembered[f"fwd, function of 16, {name}"]), (seen.version, seen.side, row)
            assert cells[3 if seen.side == "patched" else 2] == str(remembered[f"bwd, function of 16, {name}"])
        long = remembered["fwd, function of 1024, reentrant over 0 of 4 blocks"]
        assert long == (512 if seen.side == "unpatched" and seen.version not in SpecifierSet("<2.4.0") else 1024)


def test_what_it_costs_is_what_was_measured():
    lines = (PACK.folder / "README.md").read_text().splitlines()
    runs = {
        (s.version, s.side): s
        for s in history.load(files.RESULTS, [PACK]).runs
        if s.cell.variant == "costs" and s.machine == CPU
    }
    before, after = (runs["2.20.2", side].document().facts.metrics for side in ("unpatched", "patched"))
    for start, found in (
        ("| no checkpointing |", before["0 of 4 blocks checkpointed"]),
        ("| the first of four blocks recomputed |", before["1 of 4 blocks checkpointed"]),
        ("| that with the fix |", after["1 of 4 blocks checkpointed"]),
    ):
        cells = [c.strip() for c in next(line for line in lines if line.startswith(start)).split("|")[2:4]]
        assert cells[0].split(",")[0] == str(found["saturated"])
        assert cells[1] == f"{found['gradient']:.3g}"
