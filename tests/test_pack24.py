"""Pack 24 on a real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack24")


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "0.18.0")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "device")
    return last, [c["holds"] for c in facts.get("comparisons", []) if c["role"] == "trigger"], said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(("dropped", "triggers"), [("wrap", [True, False]), ("stale", [False, True])])
def test_without_a_transform_the_patched_side_is_red(tmp_path, there, dropped, triggers):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, found, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert found == triggers


@pytest.mark.network
def test_a_fix_that_never_uses_a_precomputed_scale_is_seen(tmp_path, there):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), "remember"), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "patched")
    assert last.startswith("CHANGED"), said


@pytest.mark.parametrize(("machine", "raises"), [("cpu", "RuntimeError"), ("nvidia-h200-x2", "NotImplementedError")])
def test_the_receipts_are_what_the_readme_says(machine, raises):
    stored = history.load(files.RESULTS, [PACK]).runs
    runs = {(s.version, s.side): s for s in stored if s.machine == f"linux-x86_64-{machine}"}
    bad, good = (runs["0.18.0", side] for side in ("unpatched", "patched"))
    assert not bad.stale
    assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
    cases = bad.document().facts.metrics["cases"]
    readme = (PACK.folder / "README.md").read_text().splitlines()
    for name, start in (
        ("convert, shard", "| convert, `fully_shard`"),
        ("convert, shard, precompute", "| the same"),
        ("convert without FP8 all-gather, shard", "| convert with"),
        ("meta, convert, shard, load", "| meta, convert, `fully_shard`, load |"),
        ("meta, convert, shard, load with assign", "| meta, convert, `fully_shard`, load with"),
        ("scales gone stale", "| weights changed"),
    ):
        cells = [cell.strip() for cell in next(line for line in readme if line.startswith(start)).split("|")[2:5]]
        found = cases[name]
        assert cells[:2] == [f"{found['bytes']:,}", str(found["all_reduce"])]
        assert float(cells[2]) == pytest.approx(found["error"], abs=0.0015)
    assert cases["shard, convert"]["raises"].startswith(raises)
    assert cases["compile, convert"] == {"compiled": False}
