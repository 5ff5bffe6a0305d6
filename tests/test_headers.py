"""The header of each script installs in an empty folder, and the script gets to its verdict there, or says what is missing."""

import os
import re
import shutil
import subprocess

import pytest
import uv

from common.install import machine
from common.install.environment import _uv_settings
from common.packs.pack import all_packs

pytestmark = pytest.mark.headers

LAST = re.compile(r"BUG_REPRODUCED|BUG_ABSENT|MEASURED|(?:CHANGED|UNTESTABLE): \S+.*")


@pytest.mark.parametrize("pack", [pack for pack in all_packs() if pack.kind != "selftest"], ids=lambda pack: pack.name)
def test_the_script_runs_alone_in_an_empty_folder(pack, tmp_path):
    shutil.copy(pack.script, tmp_path)
    command = [uv.find_uv_bin(), "run", "--no-project", "repro.py"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=tmp_path, env={**env, **_uv_settings()}, capture_output=True, text=True, timeout=900)
    if "failed to lookup address" in done.stderr or "No interpreter found" in done.stderr:
        pytest.skip("no Python of that version, and none can be fetched")
    lines = done.stdout.splitlines() or [""]
    assert LAST.fullmatch(lines[-1]), done.stdout + done.stderr
    assert done.returncode == {"BUG_REPRODUCED": 10, "BUG_ABSENT": 0, "MEASURED": 0}.get(lines[-1], 125)
    if lines[-1].startswith("UNTESTABLE"):  # no-api: what has the bug is a commit, in no release
        assert lines[-1] == "UNTESTABLE: no-api" or not machine.gpu()
        assert f"nox -s {pack.name}" in done.stdout, "one sentence says what is missing, and which command does without it"
    else:
        assert lines[-1] == ("MEASURED" if pack.kind == "claim" else "BUG_REPRODUCED")
