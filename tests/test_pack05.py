"""Pack 05 on the real release; what breaks its fix is in its mutants.toml."""

import json
import os
import subprocess

import pytest
from helpers import installed

from common.packs.pack import find

PACK = find("pack05")


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
