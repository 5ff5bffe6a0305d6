"""Pack 05 on the real release; what breaks its fix is in its mutants.toml."""

import json
import os
import re
import subprocess

import pytest
from helpers import installed

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack05")


def test_the_table_of_the_readme_is_what_validate_py_measured():
    runs = history.load(files.RESULTS, [PACK]).runs
    seen = next(s for s in runs if s.side == "patched" and s.version == "2.3.2.post1" and s.machine == "linux-x86_64-cpu")
    assert not seen.stale
    facts = [json.loads(line) for line in seen.log().splitlines() if line.startswith('{"report"')]
    errors = facts[-1]["metrics"]["errors"]
    readme = (PACK.folder / "README.md").read_text()
    for kind in ("dense", "varlen"):
        row = next(line for line in readme.splitlines() if re.match(rf"\| {kind}, ", line))
        worst = [max(each.values()) for name, each in errors.items() if name.startswith(kind)]
        assert [f"{w:.1e}" for w in worst] == [cell.strip() for cell in row.split("|")[2:-1] if cell.strip() != "–"]


@pytest.mark.network
def test_alone_without_a_gpu_it_says_so(tmp_path):
    there = installed(PACK, "2.3.2.post1")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([there.python, PACK.script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 125, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "UNTESTABLE: no-device"
    assert "nox -s pack05" in lines[0]
    assert json.loads(lines[-2])["verdict"] == "UNTESTABLE"
