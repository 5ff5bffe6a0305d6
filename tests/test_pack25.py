"""Pack 25 on the release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack25")


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path):
    there = installed(PACK, "1.0.0")
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, facts, said = run_script(PACK, there, tmp_path / "fixed", "unpatched", "device")
    assert last == "BUG_ABSENT", said
    assert facts["metrics"]["deep_gemm"]["one cold cache"] == {"compiles": 2}


@pytest.mark.network
def test_without_its_lock_the_patched_side_is_red(tmp_path):
    there = installed(PACK, "1.0.0")
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), "lock"), there.site, tmp_path / "fixed")
    last, facts, said = run_script(PACK, there, tmp_path / "fixed", "patched", "device")
    assert last == "BUG_REPRODUCED", said
    assert facts["metrics"]["deep_gemm"]["one cold cache"]["compiles"] > 2


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.side, s.cell.variant): s for s in history.load(files.RESULTS, [PACK]).runs if s.evidence}
    for variant in ("", *PACK.variants):
        assert not runs["unpatched", variant].stale and not runs["patched", variant].stale
    before, after = (runs[side, ""].document().facts.metrics for side in ("unpatched", "patched"))
    lines = (PACK.folder / "README.md").read_text().splitlines()
    for case in before["deep_gemm"]:
        cells = [cell.strip() for cell in next(line for line in lines if line.startswith(f"| {case} |")).split("|")[2:5]]
        for cell, row in zip(cells, (before["deep_gemm"], after["deep_gemm"], before["triton"]), strict=True):
            if cell == "up to 8":
                assert 2 < row[case]["compiles"] <= 8
            else:
                assert cell.startswith("`OSError`") if "failed" in row[case] else cell == str(row[case]["compiles"])
