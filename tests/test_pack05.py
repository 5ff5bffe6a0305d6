"""Pack 05 on the real release: breaking its fix or its trigger turns it red, and its README says what the receipts say."""

import json
import os
import subprocess

import pytest
from helpers import installed, run_script

from common import files, transforms
from common.packs.pack import find
from common.run import overlay
from common.store import history

PACK = find("pack05")


@pytest.fixture(scope="module")
def there():
    return installed(PACK, "2.3.2.post1")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script with four heads and G = 1, 2 in place of sixteen and 1, 2, 8, 16; TileLang compiles each kernel once for all tests."""
    source = PACK.script.read_text()
    for old, new in (
        ("chunk, lengths = 16, (1, 16, 16, 2,", "chunk, lengths = 4, (1, 16, 4, 2,"),
        ("groups = (1, 2, 8, H)\nelse", "groups = (1, 2)\nelse"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    small = tmp_path_factory.mktemp("small") / "repro.py"
    small.write_text(source)
    return small


def run(there, script, fixed, side):
    return run_script(PACK, there, fixed, side, "tilelang-cpu", script=script)


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path, there, script):
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    last, _facts, said = run(there, script, tmp_path / "fixed", "unpatched")
    assert last == "BUG_ABSENT", said
    assert PACK.expectation(there.version).verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_without_a_transform_the_patched_side_is_red(tmp_path, there, script, name):
    overlay.apply_fix(overlay.drop(transforms.load_fix(PACK.fix), name), there.site, tmp_path / "fixed")
    last, facts, said = run(there, script, tmp_path / "fixed", "patched")
    assert last == "BUG_REPRODUCED", said
    holds = {c["name"].split()[0]: c["holds"] for c in facts["comparisons"] if c["role"] == "trigger"}
    assert holds == {"dense": name == "dense", "varlen": name == "varlen"}


@pytest.mark.network
def test_a_wrong_reduction_is_seen(tmp_path, there, script):
    """It raises nothing: the heads of a group taken as interleaved, not as neighbours."""
    overlay.apply_fix(transforms.load_fix(PACK.fix), there.site, tmp_path / "fixed")
    file = tmp_path / "fixed/mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py"
    right, wrong = "unflatten(3, (G, H // G)).sum(dim=4)", "unflatten(3, (H // G, G)).sum(dim=3)"
    assert file.read_text().count(right) == 2
    file.write_text(file.read_text().replace(right, wrong))
    last, _facts, said = run(there, script, tmp_path / "fixed", "patched")
    assert last.startswith("CHANGED: dense G=2"), said


def test_the_receipts_are_what_the_readme_says():
    runs = {
        (s.side, s.cell.variant, s.machine): s for s in history.load(files.RESULTS, [PACK]).runs if s.version == "2.3.2.post1"
    }
    cpu = runs["patched", "", "linux-x86_64-cpu"]
    gpu = runs["patched", "measure", "linux-x86_64-nvidia-h200"]
    readme = (PACK.folder / "README.md").read_text()
    for seen, heads, label in ((cpu, 16, "C backend, fp32, H=16"), (gpu, 128, "H200, bf16, H=128, R=4 N=128 P=64")):
        assert not seen.stale, seen.path
        assert seen.outcome == "ABSENT"
        errors = seen.document().facts.metrics["errors"]
        for kind in ("dense", "varlen"):
            row = next(line for line in readme.splitlines() if line.startswith(f"| {label}, {kind}"))
            worst = [max(errors[f"{kind} G={g} H={heads}"].values()) for g in (1, 2, 8, heads)]
            assert [f"{w:.1e}" for w in worst] == [cell.strip() for cell in row.split("|")[2:6]]
    metrics = gpu.document().facts.metrics
    for found in metrics["measured"]:
        row = next(line for line in readme.splitlines() if line.startswith(f"| G={found['shape']['G']} H="))
        for name in ("forward", "backward"):
            assert f"{found[name]['ms']:.2f} ms, {found[name]['tflops']:.1f} TFLOP/s" in row
    assert f"{metrics['as called']['backward']['ms']:.0f} ms" in readme


@pytest.mark.network
def test_alone_without_a_gpu_it_says_so(tmp_path, there):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([there.python, PACK.script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 125, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "UNTESTABLE: no-device"
    assert "nox -s pack05" in lines[0]
    assert json.loads(lines[-2])["verdict"] == "UNTESTABLE"
