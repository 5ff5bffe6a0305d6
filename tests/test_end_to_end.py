"""One real pack on two real releases, as ``nox -s pack09`` runs it; its environments are those that nox uses, made once."""

import subprocess

from helpers import ROOT

from common import files


def test_pack09(cli):
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = cli("run", "pack09", cache=files.CACHE, results=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("BUG_REPRODUCED", "FIX_VALIDATED", "BUG_ABSENT", "4 of 4 sides as recorded"):
        assert word in done.stdout, done.stdout
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert after == before, "a plain run changes no tracked file"
