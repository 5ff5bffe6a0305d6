"""Pack 22 on real releases: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from conftest import installed, run_script

from common import history, overlay, runner
from common.pack import find

PACK = find("pack22")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "te-cpu")
    return last, facts.get("metrics", {}).get("remembered", {}), said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path):
    there = installed(PACK, "2.4.0")
    overlay.apply_fix(overlay.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation("2.4.0").verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(("dropped", "one", "nested"), [("quantization-recompute", 8, 5), ("enter", 8, 5)])
def test_without_a_transform_the_patched_side_is_red(tmp_path, dropped, one, nested):
    there = installed(PACK, "2.20.2")
    overlay.apply_fix(overlay.drop(overlay.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, remembered, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert (remembered["1 max reentrant"], remembered["1 max nested"]) == (one, nested)


@pytest.mark.network
def test_a_scale_that_is_never_updated_is_seen(tmp_path):
    there = installed(PACK, "2.20.2")
    overlay.apply_fix(overlay.drop(overlay.load_fix(PACK.fix), "exit"), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "patched")  # after the first recomputation nothing is updated
    assert last not in ("FIX_VALIDATED", ""), said


@pytest.mark.network
@pytest.mark.parametrize(("version", "last"), [("2.1.0", "CHANGED: scale"), ("2.3.0", "BUG_ABSENT")])
def test_the_last_right_release_and_the_one_before(tmp_path, version, last):
    assert run(installed(PACK, version), tmp_path / "none", "unpatched")[0] == last


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version, s.side, s.variant): s for s in history.load(runner.RESULTS, [PACK]).runs}
    readme = (PACK.folder / "README.md").read_text()
    for version in ("2.4.0", "2.20.2"):
        bad, good = (runs[version, side, ""] for side in ("unpatched", "patched"))
        assert not bad.stale
        assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
        before, after = (s.document()["predicate"]["reproducer"]["metrics"] for s in (bad, good))
        rows = {
            "0": "| 0 |",
            "1 max reentrant": "| 1, reentrant",
            "1 max nested": "| 1, in a second",
            "4 max reentrant": "| 4 |",
        }
        for name, start in rows.items():
            line = next(line for line in readme.splitlines() if line.startswith(start))
            assert [cell.strip() for cell in line.split("|")[2:4]] == [str(m["remembered"][name]) for m in (before, after)]
        for found, start in (
            (before["outlier every 12 steps"]["0"], "| no checkpointing"),
            (before["outlier every 12 steps"]["1"], "| one block"),
            (after["outlier every 12 steps"]["1"], "| with the fix"),
        ):
            cells = next(line for line in readme.splitlines() if line.startswith(start)).split("|")[2:4]
            assert cells[0].split(",")[0].strip() == str(found["saturated"])
            assert cells[1].strip() == f"{found['gradient']:.2g}"
