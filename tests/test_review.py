"""What a pull request does to the known bugs: the comparison, its texts, and the steps of the action that an upstream takes."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile

import pytest
import yaml
from helpers import ROOT

from common import files
from common.install import releases
from common.packs.pack import find
from common.publish import review
from common.publish.review import Judged
from common.run.plan import Row
from common.store.cell import Cell
from common.store.grade import Verdict


def row(outcome, message=""):
    reason = "" if outcome in ("REPRODUCED", "ABSENT") else "why"
    return Row(
        cell=Cell(pack="pack09", dist="liger-kernel", version="1+git.aa", side="unpatched"),
        verdict=Verdict(outcome=outcome, reason=reason, evidence="interpreter"),
        expected="ABSENT",
        why="",
        seconds=1.0,
        receipt=None,
        ran=True,
        environment=None,
        message=message,
    )


def judged(before, after, message=""):
    return Judged(pack="pack09", title="a | bug", base=row(before), head=row(after, message))


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        ("ABSENT", "REPRODUCED", "brought"),
        ("REPRODUCED", "REPRODUCED", "kept"),
        ("REPRODUCED", "ABSENT", "fixed"),
        ("ABSENT", "ABSENT", "free"),
        ("CHANGED", "ABSENT", "free"),
        ("CHANGED", "REPRODUCED", "brought"),
        ("ABSENT", "CHANGED", "changed"),
        ("REPRODUCED", "CHANGED", "changed"),
        ("CHANGED", "CHANGED", "unknown"),
        ("UNTESTABLE", "REPRODUCED", "unknown"),
        ("ABSENT", "UNTESTABLE", "unknown"),
        ("ABSENT", "ERROR", "unknown"),
    ],
)
def test_what_a_pull_request_does(before, after, state):
    assert judged(before, after).state == state


def test_the_texts_say_what_is_brought_first_and_name_what_went_wrong():
    found = [judged("ABSENT", "ABSENT"), judged("REPRODUCED", "CHANGED", "TypeError: no"), judged("ABSENT", "REPRODUCED")]
    text = review.markdown("liger-kernel", "git.aa", "git.bb", found)
    assert "1 brought, 1 changed" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "pack09" in line]
    assert [line[2] for line in rows] == ["❌", "⚠", "✅"]
    assert "TypeError: no" in text
    suite = ET.fromstring(review.junit("liger-kernel", found))
    assert (suite.get("failures"), suite.get("skipped"), suite.get("tests")) == ("1", "1", "3")


def git(folder, *words):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.example", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def upstream(folder):
    """A clone of Liger-Kernel whose last commit is #1298: $UPSTREAM_CLONE where it has that, else made of the releases around it."""
    fix = "9ac26bb822"
    given = os.environ.get("UPSTREAM_CLONE")
    if given and subprocess.run(["git", "-C", given, "cat-file", "-e", f"{fix}^{{commit}}"]).returncode == 0:
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", given, folder], check=True)
        git(folder, "sparse-checkout", "set", "src")
        git(folder, "checkout", "--quiet", fix)
        return
    git(folder.parent, "init", "--quiet", folder)
    known = {r.version: r for r in releases.of(find("pack09"), files.CACHE)[0]}
    for version in ("0.8.1", "0.8.2"):
        wheel = releases.fetch("liger-kernel", known[version].file, folder.parent, sha256=known[version].sha256)
        zipfile.ZipFile(wheel).extractall(folder / "src")
        (folder / "pyproject.toml").write_text(f'[project]\nname = "liger_kernel"\nversion = "{version}"\n')
        git(folder, "add", "-A")
        git(folder, "commit", "--quiet", "-m", version)


@pytest.mark.network
def test_the_upstreams_action_is_green_for_a_fix_and_red_for_what_takes_it_back(tmp_path):
    upstream(tmp_path / "clone")
    action = yaml.safe_load((ROOT / "docs/upstream/action.yml").read_text())
    workflow = yaml.safe_load((ROOT / "docs/upstream-ci.yml").read_text())
    steps = workflow["jobs"]["packs"]["steps"]
    assert next(step for step in steps if "docs/upstream@" in step.get("uses", ""))["with"].keys() <= action["inputs"].keys()
    env = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "UV_FIND_LINKS", "PIP_FIND_LINKS") if name in os.environ},
        "REPRODUCER_CACHE": str(files.CACHE),
        "GITHUB_ACTION_PATH": str(ROOT / "docs/upstream"),
        "GITHUB_WORKSPACE": str(tmp_path / "clone"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "RUNNER_TEMP": str(tmp_path),
        "PACKAGE": "liger-kernel",
        "PACKS": "pack09 pack18",
    }

    def steps_of(base):
        codes = []
        for step in action["runs"]["steps"]:
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", step["run"]],
                cwd=tmp_path,
                env={**env, "BASE": base},
                capture_output=True,
                text=True,
            )
            codes.append(done.returncode)
        return codes, (tmp_path / "known-bugs.md").read_text()

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    codes, text = steps_of("HEAD^1")
    assert codes == [0, 0]
    assert "1 fixed, 1 still there" in text
    fixed = git(tmp_path / "clone", "rev-parse", "HEAD")
    git(tmp_path / "clone", "checkout", "--quiet", "HEAD^1")
    codes, text = steps_of(fixed)
    assert codes == [0, 1], "what takes the fix back brings the bug"
    assert "1 brought" in text
    assert ET.parse(tmp_path / "known-bugs.xml").getroot().get("failures") == "1"
    assert "1 brought" in (tmp_path / "summary").read_text()
