"""Pack 12 on a real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack12")
SMALL = ["--shape", "512,2,16,32"]


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "0.19.2")


def run(there, fixed, side):
    last, facts, said = run_script(PACK, there, fixed, side, "device", *SMALL)
    return last, {c["name"].split(":")[0]: c.get("holds") for c in facts.get("comparisons", ())}, said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(("dropped", "peaks"), [("forward", {"forward", "backward"}), ("backward", {"backward"})])
def test_without_a_transform_its_peaks_stay(tmp_path, there, dropped, peaks):
    """The backward makes the scores again, by the function that the forward calls."""
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, holds, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert {name for name in ("forward", "backward") if holds[name]} == peaks


@pytest.mark.network
def test_without_the_streamed_function_the_patched_side_is_red(tmp_path, there):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), "streamed"), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "patched")
    assert last != "FIX_VALIDATED"
    assert "NameError" in said


@pytest.mark.network
def test_wrong_gradients_are_seen(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    file = next((tmp_path / "fixed").rglob("dsa.py"))
    right = "grad_scores.masked_fill_(scores == 0, 0)"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, "pass"))
    last, _, said = run(there, tmp_path / "fixed", "patched")
    assert last == "CHANGED: wrong gradients", said


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version, s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs if s.side}
    readme = (PACK.folder / "README.md").read_text().splitlines()
    for version, releases_row in (("0.16.1", "0.16.x"), ("0.18.2", "0.17.0 – 0.18.2"), ("0.19.2", "0.19.x")):
        bad, good = (runs[version, side, "linux-x86_64-nvidia-h200"] for side in ("unpatched", "patched"))
        assert not bad.stale
        assert not good.stale
        assert good.verdict.claims == ("MEMORY_SAVE_VERIFIED",)
        old, new = (seen.document().facts.metrics for seen in (bad, good))
        row = next(line for line in readme if line.startswith(f"| {releases_row} |"))
        for found in (old, new):
            assert f"| {found['peak_gib']['forward']:.2f}, {found['peak_gib']['backward']:.2f} GiB |" in row
        row = next(line for line in readme if line.startswith(f"| {version} |"))
        peaks = {
            "as released": old["peak_gib"],
            "fixed": new["peak_gib"],
            "forward fixed alone": new.get("forward_only_peak_gib"),
        }
        for name, ms in new["ms"].items():
            said = f"{ms['median']:.1f} ms ({ms['q1']:.1f} – {ms['q3']:.1f}), {peaks[name]['backward']:.2f} GiB"
            assert f"| {said} |" in row, said
        assert runs[version, "patched", "linux-x86_64-cpu"].verdict.claims == ("MEMORY_SAVE_VERIFIED",)
