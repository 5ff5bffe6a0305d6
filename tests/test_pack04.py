"""Pack 04: its README says what the receipts say, and alone without a GPU the script says what is missing.

Breaking its fix or its trigger is for `nox -s mutants`.
"""

import json
import os
import subprocess

import pytest

from common import files
from common.install import releases
from common.packs.pack import find
from common.run import runner
from common.store import history

PACK = find("pack04")


def test_the_receipts_are_what_the_readme_says():
    stored = history.load(files.RESULTS, [PACK])
    runs = {(s.side, s.cell.variant, s.machine): s for s in stored.runs if s.version == "2.3.2.post1"}
    for seen in runs.values():
        if seen.machine == "linux-x86_64-cpu":
            assert not seen.stale, seen.path
    for version in ("3.5.0", "3.5.1", "3.6.0", "3.7.0", "3.8.0", "3.9.0"):
        sides = [
            runs[side, f"triton-{version}", "linux-x86_64-cpu"].document().facts.metrics for side in ("unpatched", "patched")
        ]
        assert [m["triton"] for m in sides] == [version, version]
        assert [m["compiled"]["products"]["as written"] for m in sides] == [3, 1]
        assert [m["compiled"]["products"]["at the end"] for m in sides] == [1, 1]
        assert [m["compiled"]["dots"]["as written"] for m in sides] == [16, 14]
        assert sides[0]["compiled"]["ptx_sha256"] == sides[1]["compiled"]["ptx_sha256"]
        assert sides[0]["compiled"]["shared_bytes"] == (77824 if version.startswith("3.5") else 61440)
        late = version in ("3.8.0", "3.9.0")
        assert [m["without_cse"]["wgmma"] for m in sides] == ([42, 42] if late else [60, 58])
        assert (sides[0]["without_cse"]["ptx_sha256"] == sides[1]["without_cse"]["ptx_sha256"]) == late
    assert str(runs["unpatched", "triton-3.4.0", "linux-x86_64-cpu"].verdict) == "UNTESTABLE: compile"
    for machine in ("linux-x86_64-cpu", "linux-x86_64-nvidia-h200"):
        seen = runs["patched", "", machine]
        assert seen.outcome == "ABSENT"
        assert seen.verdict.claims == (("BITWISE_IDENTICAL",) if "nvidia" in machine else ())


@pytest.mark.network
def test_alone_without_a_gpu_it_says_so(tmp_path):
    release = next(r for r in releases.releases(PACK.package, files.CACHE)[0] if r.version == "2.3.2.post1")
    there = runner.installed(PACK, release, files.CACHE)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([there.python, PACK.script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 125, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "UNTESTABLE: no-device"
    assert "nox -s pack04" in lines[0]
    assert json.loads(lines[-2])["verdict"] == "UNTESTABLE"
