"""Pack 11 on commits of the dev branch: breaking its fix or its trigger turns it red; its README says what the receipts say."""

import pytest
from helpers import made_of_commit, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack11")
HEAD, LOST = "d48bd6be0a", "a1a73f8449"


@pytest.fixture(scope="module")
def there():
    return made_of_commit(PACK, HEAD)


def run(there, fixed, side, script=None):
    return run_script(PACK, there, fixed, side, "megatron-cpu", script=script)


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.variants[HEAD].verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(("commit", "dropped"), [(HEAD, "hybrid-class"), (HEAD, "hybrid-call"), (LOST, "mamba-class")])
def test_without_a_transform_it_is_red(tmp_path, commit, dropped):
    there = made_of_commit(PACK, commit)
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, facts, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert facts["metrics"]["linear"]["raises"].startswith("UnboundLocalError" if dropped == "hybrid-call" else "TypeError")


@pytest.mark.network
def test_a_loss_that_makes_logits_is_seen(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    file = next((tmp_path / "fixed").rglob("fused_linear_cross_entropy.py"))
    right = "_CHUNK = 4096"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, "_CHUNK = 1 << 20"))
    last, _, said = run(there, tmp_path / "fixed", "patched")
    assert last != "FIX_VALIDATED", said


@pytest.mark.network
def test_the_factor_of_mup_is_applied(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    script = PACK.script.read_text()
    for old, new in (
        ("num_layers=1,", "num_layers=1, use_mup=True, mup_output_mult=0.5,"),
        ("@ exact[1].t()", "@ exact[1].t() * 0.5"),
        ('loss_of("GPTModel", "linear")', 'loss_of(KIND, "linear")'),  # GPTModel raises with it
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "repro.py").write_text(script)
    last, facts, said = run(there, tmp_path / "fixed", "unpatched", script=tmp_path / "repro.py")
    assert last == "BUG_ABSENT", said
    assert max(facts["metrics"]["linear"]["errors"].values()) < 1e-5


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.cell.variant, s.side): s for s in history.load(files.RESULTS, [PACK]).runs if s.cell.variant}
    assert not any(seen.stale for seen in runs.values())
    raised = {"8a29fd5752": None, LOST: "TypeError", "64d2e0a62c": "UnboundLocalError", HEAD: "UnboundLocalError"}
    for commit, error in raised.items():
        seen = runs[commit, "unpatched"].document().facts.metrics["linear"]
        assert "call" in seen or seen["raises"].startswith(error)
        assert runs[commit, "unpatched"].outcome == ("REPRODUCED" if error else "ABSENT")
        assert not error or runs[commit, "patched"].outcome == "ABSENT"
    metrics = runs[HEAD, "patched"].document().facts.metrics
    readme = (PACK.folder / "README.md").read_text()
    for impl in ("unfused", "native", "linear"):
        row = next(line for line in readme.splitlines() if line.startswith(f"| {impl}"))
        ignored = metrics["label -100"][impl]["loss of label -100"]
        assert [cell.strip() for cell in row.split("|")[2:6]] == [
            str(metrics[impl]["logits"]),
            f"{max(metrics[impl]['errors'].values()):.1e}",
            f"{ignored:.3g}",
            f"{metrics['peak GB'][impl]:.2f} GB",
        ]
    for way, start in (("TP=2 HybridModel", "| linear, TP=2, each"), ("SP=2 HybridModel", "| linear, TP=2 with")):
        row = next(line for line in readme.splitlines() if line.startswith(start))
        assert f"{max(max(ways[way]['errors'].values()) for ways in metrics['ranks']):.1e}" in row
    own = [ways["SP=2, mean of own tokens"]["errors"]["dH"] for ways in metrics["ranks"]]
    assert all(f"off by {error:.0%}".replace("%", " %") in readme for error in own)
