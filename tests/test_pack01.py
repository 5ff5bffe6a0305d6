"""Pack 01 on a real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack01")


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "0.19.2")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "device")
    return last, facts.get("metrics", {}).get("waits", {}), said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(
    ("dropped", "helper", "lines"),
    [
        ("empty-sequences", "build_packed_allgather_cp_local_positions", 3),
        ("empty-segments", "build_packed_allgather_cp_local_positions", 2),
        ("padding", "build_packed_allgather_cp_local_positions", 1),
        ("rows-given", "generate_varlen_mask_params", 1),
    ],
)
def test_without_a_transform_its_lines_are_found_again(tmp_path, there, dropped, helper, lines):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, waits, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert {name: len(found) for name, found in waits.items() if found} == {helper: lines}


@pytest.mark.network
def test_wrong_rows_are_seen(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    file = next((tmp_path / "fixed").rglob("dsa_layout.py"))
    right = "(output_size - segment_lens.sum())"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, "(output_size - segment_lens.sum() - 1)"))
    last, _, said = run(there, tmp_path / "fixed", "patched")
    assert last.startswith("CHANGED") or "Error" in said, said
    assert last != "FIX_VALIDATED"


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version.split(".tree")[0], s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs}
    readme = (PACK.folder / "README.md").read_text()
    two = ("build_packed_allgather_cp_local_positions", "generate_varlen_mask_params")
    rows = {"0.19.2": "| 0.19.0, ", "0+git.da482cf5c8": "| commit da482cf5c8", "0+git.d1cab16a01": "| commit d1cab16a01"}
    for version, start in rows.items():
        seen, fixed = (runs[version, side, "linux-x86_64-cpu"] for side in ("unpatched", "patched"))
        assert not seen.stale
        assert fixed.outcome == "ABSENT"
        waits = seen.document().facts.metrics["waits"]
        counts = [len(waits[name]) for name in two] + [sum(len(found) for name, found in waits.items() if name not in two)]
        row = next(line for line in readme.splitlines() if line.startswith(start))
        assert [cell.strip() for cell in row.split("|")[2:5]] == [str(n) for n in counts]
        if version == "0.19.2":
            assert all(f"{w['where']}: {w['what']}: {w['line']}" in readme for name in two for w in waits[name])
    for version, refused in (("0.19.0", 2), ("0.19.2", 2), ("0+git.da482cf5c8", 5)):
        seen, fixed = (runs[version, side, "linux-x86_64-nvidia-h200"] for side in ("unpatched", "patched"))
        assert not seen.stale
        assert fixed.outcome == "ABSENT"
        waits = seen.document().facts.metrics["waits"]
        found = runs[version, "unpatched", "linux-x86_64-cpu"].document().facts.metrics["waits"]
        assert sum(map(bool, waits.values())) == refused
        assert {name for name, why in waits.items() if why} == {name for name, lines in found.items() if lines}
