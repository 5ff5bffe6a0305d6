"""Pack 16 alone without a GPU, and its README says what the receipts say."""

import os
import subprocess

import pytest
from helpers import installed

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack16")


@pytest.mark.network
def test_alone_without_a_gpu_it_says_so(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    there = installed(PACK, "0.16.1")
    done = subprocess.run([there.python, PACK.script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 125, done.stderr
    assert done.stdout.splitlines()[-1] == "UNTESTABLE: no-device"
    assert "nox -s pack16" in done.stdout


def test_the_receipts_are_what_the_readme_says():
    runs = {(s.version, s.side, s.machine, s.cell.variant): s for s in history.load(files.RESULTS, [PACK]).runs if s.side}
    readme = (PACK.folder / "README.md").read_text()
    row = next(line for line in readme.splitlines() if line.startswith("| 0.8.0"))
    for machine in ("linux-x86_64-cpu", "linux-x86_64-nvidia-h200"):
        bad, good = (runs["0.19.2", side, machine, ""] for side in ("unpatched", "patched"))
        assert not bad.stale
        assert not good.stale
        old, new = (seen.document().facts.metrics for seen in (bad, good))
        assert not any(found["cast"] for found in new.values())
        assert all(name in row for found in old.values() for name in found["cast"])
    old, new = (
        runs["0.19.2", side, "linux-x86_64-nvidia-h200", "mamba3"].document().facts.metrics for side in ("unpatched", "patched")
    )
    said = old["Mamba3 MIMO"]["in a Float16Module"]["said"].partition(": ")[2]
    assert said in readme
    assert old["Mamba3"]["in a Float16Module"]["said"] is None
    assert all(found["in a Float16Module"]["said"] is None for found in new.values())
    old, new = (runs["0.19.2", side, "linux-x86_64-cpu", "fsdp2"].document().facts.metrics for side in ("unpatched", "patched"))
    assert (old["refused"], new["refused"]) == (0, 1)
    assert "FSDP expects uniform original parameter dtype" in readme
