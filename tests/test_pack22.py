"""Pack 22 on real releases: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack22")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "te-cpu")
    return last, facts.get("metrics", {}).get("remembered", {}), said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path):
    there = installed(PACK, "2.4.0")
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation("2.4.0").verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(
    ("dropped", "one", "nested"), [("quantization-recompute", 8, 5), ("enter", 8, 5), ("take back", 16, 17)]
)
def test_without_a_transform_the_patched_side_is_red(tmp_path, dropped, one, nested):
    there = installed(PACK, "2.20.2")
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, remembered, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert (remembered["1 function reentrant"], remembered["1 function nested"]) == (one, nested)


@pytest.mark.network
def test_a_scale_that_is_never_updated_is_seen(tmp_path):
    there = installed(PACK, "2.20.2")
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), "exit"), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "patched")  # after the first recomputation nothing is updated
    assert last not in ("FIX_VALIDATED", ""), said


@pytest.mark.network
@pytest.mark.parametrize(("version", "last"), [("2.1.0", "CHANGED: scale"), ("2.3.0", "BUG_ABSENT")])
def test_the_last_right_release_and_the_one_before(tmp_path, version, last):
    assert run(installed(PACK, version), tmp_path / "none", "unpatched")[0] == last


def test_the_receipts_are_what_the_readme_says():
    readme = (PACK.folder / "README.md").read_text()
    shown = {(s.machine, s.version, s.side): s for s in history.load(files.RESULTS, [PACK]).runs if s.cell.variant == ""}

    def metrics(machine, version):
        for side, outcome in (("unpatched", "REPRODUCED"), ("patched", "ABSENT")):
            assert (shown[machine, version, side].outcome, shown[machine, version, side].stale) == (outcome, False)
            yield shown[machine, version, side].document().facts.metrics

    def cells(start, count):
        line = next(line for line in readme.splitlines() if line.startswith(start))
        return [cell.strip() for cell in line.split("|")[2 : 2 + count]]

    cpu, gpu = "linux-x86_64-cpu", "linux-x86_64-nvidia-h200"
    rows = {
        "0 function": "| 0 |",
        "1 function reentrant": "| 1, reentrant",
        "1 function nested": "| 1, in a second",
        "4 function reentrant": "| 4 |",
    }
    for before, after in (metrics(cpu, "2.4.0"), metrics(cpu, "2.20.2"), metrics(gpu, "2.20.2")):
        for name, start in rows.items():
            assert cells(start, 4)[0::3] == [str(m["remembered"][name]) for m in (before, after)]
    before, after = metrics(gpu, "2.20.2")
    for name, start in (("0 max", "| 0 |"), ("1 max reentrant", "| 1, reentrant"), ("1 max nested", "| 1, in a second")):
        assert cells(start, 3)[1:] == [str(m["remembered"][name]) for m in (before, after)]
    for machine, column in ((cpu, 1), (gpu, 2)):
        before, after = metrics(machine, "2.20.2")
        for found, start in (
            (before["outlier every 12 steps"]["0"], "| no checkpointing"),
            (before["outlier every 12 steps"]["1"], "| one block"),
            (after["outlier every 12 steps"]["1"], "| with the fix"),
        ):
            assert cells(start, 3)[0].split(",")[0] == str(found["saturated"])
            assert cells(start, 3)[column] == f"{found['gradient']:.2g}"
