"""Pack 02 on a real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack02")


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "0.19.2")


def run(there, fixed, side):
    last, _, said = run_script(PACK, there, fixed, side, "tilelang-codegen", "--no-lowering")
    return last, said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(
    ("dropped", "said"),
    [
        ("guard", "BUG_REPRODUCED"),
        ("dispatch", "AssertionError"),
        ("forward", "Error"),
        ("recompute", "Error"),
        ("assert", "currently specialized"),
        ("d", "AssertionError: Invalid dimensions"),
        ("gradients", "incorrect number of gradients"),
    ],
)
def test_without_a_transform_the_patched_side_is_red(tmp_path, there, dropped, said):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, everything = run(there, tmp_path / "fixed", "patched")
    assert last != "FIX_VALIDATED", everything
    assert said in everything


def metrics(seen):
    return seen.document().facts.metrics


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs if s.version == "0.19.2"}
    assert not any(seen.stale for seen in runs.values())
    lines = (PACK.folder / "README.md").read_text().splitlines()
    row = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    lowered = metrics(runs["patched", "linux-x86_64-cpu"])["lowered"]
    for label, kernel in (("forward: shared memory, wgmma, TMA loads", "fwd"), ("backward", "bwd")):
        found = [lowered[f"{kernel} {shape}"] for shape in ("576/512", "128/64", "192/128")]
        cells = [f"{f['shared_bytes']:,} B, {f['wgmma']}, {f['tma_load']}" for f in found]
        assert [cell.strip() for cell in row[label].split("|")[2:5]] == cells
        assert lowered[f"{kernel} 576/512"] == lowered[f"{kernel} 576/512, as released"]
    bad, good = (metrics(runs[side, "linux-x86_64-nvidia-h200"]) for side in ("unpatched", "patched"))
    tables = [(bad, "as released", ["576 channels, 512 of value, 64 heads"]), (good, "", list(good["outcome"]))]
    for found, suffix, names in tables:
        for name in names:
            total, value, heads = (word.split()[0] for word in name.split(", "))
            errors = found["outcome"][name]
            if errors is None:
                continue
            start = f"{total}/{value}" + (f", {suffix}" if suffix else "")
            cells = f"| {start} | {heads} | {errors['out']:.1e} | {errors['dq']:.1e} | {errors['dkv']:.1e} |"
            assert cells in lines, cells
    for length, peak in good["peak_gib"].items():
        unfused = f"{peak['unfused']:.2f} GiB" if peak["unfused"] else "out of memory"
        assert f"| {length} | {unfused} | {peak['fused']:.2f} GiB |" in lines
