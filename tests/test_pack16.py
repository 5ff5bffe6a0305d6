"""Pack 16 on a real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import os
import subprocess

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack16")


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "0.16.1")


def run(there, fixed, side, script=None):
    last, facts, said = run_script(PACK, there, fixed, side, "megatron-cpu", script=script)
    return last, facts.get("metrics", {}).get("cast", {}), said


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _, said = run(there, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize(("dropped", "cast"), [("mark-a", ["A_log"]), ("mark-d", ["D"]), ("bfloat16", ["A_log", "D"])])
def test_without_a_transform_its_parameters_are_cast(tmp_path, there, dropped, cast):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), dropped), there.site, tmp_path / "fixed")
    last, found, said = run(there, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    assert found["MambaMixer"] == cast
    assert ("Mamba3" in found) == (dropped == "bfloat16"), "whoever builds it has marked it"


@pytest.mark.network
def test_a_fix_that_casts_nothing_is_seen(tmp_path, there):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    file = next((tmp_path / "fixed").rglob("transformer/module.py"))
    right = "_cast_except_marked(module, torch.bfloat16)"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, "module"))
    # Built in bf16, the layers' other parameters are bf16 anyway: so build this one in fp32, as perform_initialization may.
    script = PACK.script.read_text().replace('"MambaMixer": mixer.to(device)', '"MambaMixer": mixer.float().to(device)')
    assert script != PACK.script.read_text()
    (tmp_path / "repro.py").write_text(script)
    last, _, said = run(there, tmp_path / "fixed", "patched", script=tmp_path / "repro.py")
    assert last.startswith("CHANGED"), said


@pytest.mark.network
def test_alone_without_a_gpu_it_says_so(tmp_path, there):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([there.python, PACK.script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 125, done.stderr
    assert done.stdout.splitlines()[-1] == "UNTESTABLE: no-device"
    assert "nox -s pack16" in done.stdout


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version, s.side, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs if not s.cell.variant}
    readme = (PACK.folder / "README.md").read_text()
    for machine in ("linux-x86_64-cpu", "linux-x86_64-nvidia-h200"):
        bad, good = (runs["0.19.2", side, machine] for side in ("unpatched", "patched"))
        assert not bad.stale
        assert not good.stale
        old, new = (seen.document().facts.metrics for seen in (bad, good))
        assert new["cast"] == {}
        row = next(line for line in readme.splitlines() if line.startswith("| 0.8.0"))
        assert all(name in row for names in old["cast"].values() for name in names)
    said = old["handed over"]["Mamba3 MIMO"]["refused"].partition(": ")[2]
    assert said in readme
    assert old["handed over"]["Mamba3"]["refused"] is None
    assert new["handed over"]["Mamba3 MIMO"]["refused"] is None
