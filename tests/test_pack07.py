"""Pack 07: its README says what the receipts say. `nox -s mutants -- pack07` breaks the fix."""

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack07")


def test_the_receipts_are_what_the_readme_says():
    seen = {s.side: s for s in history.load(files.RESULTS, [PACK]).runs if s.version == "2.3.2.post1" and not s.cell.variant}
    assert (seen["unpatched"].outcome, seen["patched"].outcome) == ("REPRODUCED", "ABSENT")
    assert seen["patched"].verdict.claims == ("BITWISE_IDENTICAL",)
    readme = (PACK.folder / "README.md").read_text()
    bad, good = (seen[side].document().facts.metrics["lowered"] for side in ("unpatched", "patched"))
    first, second = ((bad[f"{name}, TMA on"], good[f"{name}, TMA on"]) for name in ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"))
    assert all("InputDim() == 2" in released["error"] for released, _ in (first, second))
    assert f"| {bad['mamba_mimo_bwd_fwd, TMA off']['shared_bytes']:,} B | not lowered |" in readme
    for name, (_, fixed) in (("first", first), ("second", second)):
        row = next(line for line in readme.splitlines() if line.startswith(f"| {name}, "))
        assert f"| {len(fixed['loads'])} (" in row
        assert f"{fixed['shared_bytes']:,} B |" in row
        assert all(load in row for load in fixed["loads"])
