"""Pack 26 on real releases: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack26")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "triton-interpreter")
    wrong = {
        c["name"].removeprefix("each token, ").split(":")[0].split(",")[0]
        for c in facts.get("comparisons", [])
        if c["role"] == "trigger" and (c.get("holds") or c.get("error", 0) is None or c.get("error", 0) > 1e-5)
    }
    return last, wrong, said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path):
    there = installed(PACK, "2.7.0")
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation("2.7.0").verdict == "REPRODUCED", "so the run would be red"


def without(version, dropped, tmp_path):
    there = installed(PACK, version)
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    return run(there, tmp_path / "fixed", "patched")


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "dropped", "wrong"),
    [
        ("2.7.0", "layout", "logits transposed"),
        ("2.10.0", "gradient", "gradient of stride 0"),
        ("2.11.0", "mean", "mean"),
    ],
)
def test_without_a_transform_its_bug_is_back(tmp_path, version, dropped, wrong):
    last, found, said = without(version, dropped, tmp_path)
    assert last == "BUG_REPRODUCED", said
    assert found == {wrong}


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "dropped", "error"),
    [("2.4.0", "count", "missing 1 required positional argument"), ("2.11.0", "common-count", "invalid operands")],
)
def test_without_half_of_a_change_nothing_is_said(tmp_path, version, dropped, error):
    last, _, said = without(version, dropped, tmp_path)
    assert not last.startswith(("BUG_", "FIX_", "CHANGED", "UNTESTABLE")), said
    assert error in said


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "last"), [("2.13.0", "BUG_REPRODUCED"), ("2.14.0", "BUG_ABSENT"), ("2.1.0", "UNTESTABLE: no-api")]
)
def test_the_last_wrong_release_and_the_first_right_one(tmp_path, version, last):
    assert run(installed(PACK, version), tmp_path / "none", "unpatched")[0] == last


def test_the_receipts_are_what_the_readme_says():
    runs = history.load(files.RESULTS, [PACK]).runs
    found = {(s.version, s.side): s for s in runs if s.machine == "linux-x86_64-cpu"}
    assert not any(seen.stale for seen in runs)
    assert all(s.outcome == found[s.version, s.side].outcome for s in runs)
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:6]]
        for line in (PACK.folder / "README.md").read_text().splitlines()
        if line.startswith("| 2.")
    }
    names = (
        "each token, all weights 1",
        "each token, weighted",
        "each token, gradient of stride 0",
        "mean, 4 of 24 labels ignored",
    )
    for versions, cells in rows.items():
        if "with the fix" in versions:
            continue
        for version in versions.replace(" – ", ", ").split(", "):
            seen = found[version, "unpatched"]
            assert seen.outcome != "REPRODUCED" or found[version, "patched"].outcome == "ABSENT"
            errors = seen.document().facts.metrics["errors"]
            for name, cell in zip(names, cells, strict=True):
                error = errors.get(f"{name}: gradient", "cannot ignore labels")
                if isinstance(error, float):
                    error = "right" if error < 1e-5 else f"off by {error:.2f}"
                assert (error or "not finite") == cell, (version, name)
