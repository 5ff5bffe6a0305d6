"""Pack 23 on real releases: three flips; breaking the trigger turns the unpatched side red; its README says what the receipts say."""

import os
import subprocess

import pytest
from helpers import installed, run_script

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack23")


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "last", "training", "inside", "still"),
    [
        ("2.1.0", "BUG_REPRODUCED", "scale", "KeyError", "KeyError"),
        ("2.2.0", "BUG_REPRODUCED", "", "KeyError", "KeyError"),
        ("2.19.0", "BUG_REPRODUCED", "", "scale", "KeyError"),
        ("2.20.2", "CHANGED: scale", "", "scale", ""),
    ],
)
def test_the_releases_between_which_it_changes(tmp_path, version, last, training, inside, still):
    said, facts, everything = run_script(PACK, installed(PACK, version), tmp_path / "none", "unpatched", "te-cpu")
    assert said == last, everything
    assert [why.split(" ")[0].rstrip(":") for why in facts["metrics"].values()] == [training, inside, still]


@pytest.mark.network
def test_breaking_the_trigger_turns_the_unpatched_side_red(tmp_path):
    script = PACK.script.read_text()
    assert script.count("te.checkpoint(") == 2
    (tmp_path / "repro.py").write_text(
        script.replace("te.checkpoint(forward, x)", "forward(x)").replace("te.checkpoint(block, x)", "block(x)")
    )
    there = installed(PACK, "2.18.0")
    said, _, everything = run_script(PACK, there, tmp_path / "none", "unpatched", "te-cpu", script=tmp_path / "repro.py")
    assert said == "BUG_ABSENT", everything
    assert PACK.expectation("2.18.0").verdict == "REPRODUCED", "so the run would be red"


@pytest.mark.network
def test_alone_without_a_gpu_it_says_so(tmp_path):
    there = installed(PACK, "2.20.2")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(there.site)}
    done = subprocess.run([there.python, PACK.script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.splitlines()[-1] == "UNTESTABLE: no-device", done.stdout + done.stderr
    assert done.returncode == 125


def test_the_receipts_are_what_the_readme_says():
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.side == "unpatched"]
    found = {s.version: s for s in runs if s.machine == "linux-x86_64-cpu"}
    assert all(s.word == found[s.version].word for s in runs)
    readme = (PACK.folder / "README.md").read_text()
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:5]]
        for line in readme.splitlines()
        if line[:3] == "| 2"
    }
    assert len(rows) == 4
    for versions, cells in rows.items():
        for version in versions.split(" – "):
            assert not found[version].stale
            metrics = found[version].document().facts.metrics
            for name, cell in zip(
                ("training", "FP8 switched on inside the checkpointed function", "eval mode"), cells, strict=True
            ):
                why = metrics[name]
                words = {"": "right", "K": "`KeyError`", "s": "scale stays " + why.removeprefix("scale ")}
                assert cell == words[why[:1]], (version, why)
