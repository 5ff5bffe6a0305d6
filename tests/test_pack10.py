"""Pack 10 on a commit of the dev branch: breaking its fix or its trigger turns it red; its README says what the receipts say."""

import pytest
from helpers import installed, made_of_commit, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack10")
VARIANT = "d48bd6be0a"


@pytest.fixture(scope="module")
def there():
    return made_of_commit(PACK, VARIANT)


def run(there, fixed, side):
    return run_script(PACK, there, fixed, side, "triton-interpreter")


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.variants[VARIANT].verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize("dropped", ["choice", "forward_dp_epilogue-start", "forward_tp_epilogue_original-mask"])
def test_without_a_transform_it_is_red(tmp_path, there, dropped):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, facts, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_REPRODUCED", said
    broken = {
        c["name"] for c in facts["comparisons"] if c["role"] == "trigger" and (c.get("holds") or c.get("error", 0) is None)
    }
    assert all(("compute capability" in name) == (dropped == "choice") for name in broken)
    assert all(name.startswith(dropped.split("_epilogue")[0]) for name in broken if dropped != "choice")


@pytest.mark.network
def test_a_wrong_fallback_is_seen(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    file = next((tmp_path / "fixed").rglob("fused_linear_cross_entropy.py"))
    right = "count = valid.sum()"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, "count = valid.sum() + 1"))
    last, _, said = run(there, tmp_path / "fixed", "patched")
    assert last.startswith("CHANGED"), said


@pytest.mark.network
def test_a_release_does_not_have_it(tmp_path):
    last, _, said = run(installed(PACK, "0.19.2"), tmp_path / "none", "unpatched")
    assert last == "UNTESTABLE: no-api", said


def test_the_receipts_are_what_the_readme_says():
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.cell.variant == VARIANT]
    bad, good = (next(s for s in runs if s.side == side) for side in ("unpatched", "patched"))
    assert not bad.stale
    assert (bad.outcome, good.outcome) == ("REPRODUCED", "ABSENT")
    readme = (PACK.folder / "README.md").read_text()
    answers = bad.document().facts.metrics["answers"]
    assert {c: a.split(":")[0] for c, a in answers.items()} == {
        c: "AttributeError" if c in ("10.0", "10.3") else "ValueError"
        for c in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
    }
    metrics = good.document().facts.metrics
    assert all(answer.endswith("_unfused_forward, 1 warning") for answer in metrics["answers"].values())
    rows = {"one rank": "| one rank |", "one rank, bf16": "| one rank, bf16", "TP=2": "| TP=2 (gloo)", "SP=2": "| TP=2 with"}
    for way, start in rows.items():
        found = [f for name, f in metrics["parity"].items() if name.split(", rank")[0] == way]
        row = next(line for line in readme.splitlines() if line.startswith(start))
        assert f"{max(max(f['errors'].values()) for f in found):.1e}" in row
        assert f"{found[0]['largest']:,} / {found[0]['logits']:,}" in row
        assert all(f["divides by"] == f["valid labels"] == 22 for f in found)
