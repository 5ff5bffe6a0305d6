"""Pack 07 on the real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack07")
FIRST = ["--kernels", "first"]


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "2.3.2.post1")


def run(there, fixed, side, *arguments):
    last, _, said = run_script(PACK, there, fixed, side, "tilelang-codegen", *arguments)
    return last, said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, said = run(there, tmp_path / "fixed", "unpatched", *FIRST)
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize("dropped", ["first-q-tile"])  # a minute each
def test_without_a_transform_the_patched_side_is_red(tmp_path, there, dropped):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, said = run(there, tmp_path / "fixed", "patched", *FIRST)
    assert last == "BUG_REPRODUCED" or last.startswith("CHANGED"), said


def metrics(seen):
    return seen.document().facts.metrics


def test_the_receipts_are_what_the_readme_says():
    runs = {
        (s.side, s.cell.variant, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs if s.version == "2.3.2.post1"
    }
    for seen in runs.values():
        assert not seen.stale, seen.path
        assert seen.outcome == ("ABSENT" if seen.side == "patched" else "REPRODUCED"), seen.path
    readme = (PACK.folder / "README.md").read_text()
    here = "linux-x86_64-cpu"
    for variant in ("first", "second"):
        assert runs["patched", variant, here].verdict.claims == ("LEGALITY_PROVED",)
        row = next(line for line in readme.splitlines() if line.startswith(f"| {variant}, "))
        bad, good = (metrics(runs[side, variant, here])["lowered"] for side in ("unpatched", "patched"))
        assert "InputDim() == 2" in bad[f"{variant}, TMA on"]["error"]
        off, on = good[f"{variant}, TMA off"], good[f"{variant}, TMA on"]
        assert off["shared_bytes"] == good[f"{variant}, TMA off, as released"]["shared_bytes"]
        assert f"| {off['shared_bytes']:,} B, both | does not compile | {on['tma_load']}, {on['shared_bytes']:,} B |" in row
    seed = metrics(runs["patched", "seed", here])["lowered"]["second, TMA on, a fragment"]
    assert "Divide by zero" in seed["error"]
    for version in ("0.1.9", "0.1.12", "0.1.15"):
        bad, good = (metrics(runs[side, f"tilelang-{version}", here])["lowered"] for side in ("unpatched", "patched"))
        assert not bad["first, TMA on"]["compiles"]
        assert good["first, TMA on"]["tma_load"] == 6
        assert bad["first, TMA on, no stages"]["tma_load"] == good["first, TMA on, no stages"]["tma_load"] == 0
    for variant, machine in (("gradients", here), ("device", "linux-x86_64-nvidia-h200")):
        seen = runs["patched", variant, machine]
        assert seen.verdict.claims == ("BITWISE_IDENTICAL",)
        assert not any(metrics(seen)["differ"].values())
    for name, ms in metrics(runs["patched", "device", "linux-x86_64-nvidia-h200"])["ms"].items():
        assert f"| {name} | {ms['median']:.2f} ms ({ms['q1']:.2f} – {ms['q3']:.2f}) |" in readme
