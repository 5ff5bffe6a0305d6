"""What README and docs tell people to type exists, and what exists is told."""

import contextlib
import io
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT
from markdown_it import MarkdownIt

from common.cli import COMMANDS, main
from common.dev import fatbin
from common.packs.pack import all_packs, find
from common.publish import tables

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("packs/*/README.md"))]


def commands():
    for path in DOCS:
        for token in MarkdownIt("gfm-like", {"linkify": False}).parse(path.read_text()):
            if token.type == "fence" and token.info == "console":
                text = token.content.replace("\\\n", " ")
                yield from (
                    (path.name, line[2:].partition("#")[0].strip()) for line in text.splitlines() if line.startswith("$ ")
                )


def help_of(call):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        call()
    return out.getvalue()


def test_every_session_that_is_named_is_there():
    import runpy

    runpy.run_path(str(ROOT / "noxfile.py"))
    from nox import registry

    sessions = set(registry.get())
    named = {re.search(r"nox -s '?([\w-]+(?:\([\d.]+\))?)", line)[1] for _, line in commands() if "nox -s" in line}
    assert {"pack09", "tests", "attach", "new-pack"} <= named
    assert named - {"pack21"} <= sessions
    readme = (ROOT / "README.md").read_text() + (ROOT / "docs" / "adding-a-pack.md").read_text()
    for session in ("tests", "attach", "new-pack", "regress", "watch", "pins", "site"):
        assert f"nox -s {session}" in readme


def test_every_option_that_is_named_is_there():
    known = set(
        re.findall(
            r"--[a-z][a-z-]+",
            "".join(help_of(partial(main, [word, "--help"])) for word in COMMANDS) + help_of(partial(fatbin.main, ["--help"])),
        )
    )
    known |= {"--shape", "--dtype", "--target", "--no-deps", "--no-index", "--package", "--shapes"}
    known |= {option for pack in all_packs() for option in pack.tools}
    for name, line in commands():
        if "common" in line or "nox -s" in line:
            options = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", line))
            assert options <= known, f"{name}: {line}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_and_pictures_lead_somewhere(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("pack09", [">=0.5.3,<0.5.9", ">=0.6.3,<0.8.2"]),
        ("pack12", [">=0.16.0rc0"]),
        ("pack19", [">=0"]),
        ("pack26", [">=2.2.0,<2.19.0"]),
        ("pack10", []),
    ],
)
def test_ranges_that_meet_are_one(name, ranges):
    assert tables.affected_ranges(find(name)) == ranges


def test_generated_tables_are_up_to_date_and_the_check_can_fail(tmp_path):
    # results/README.md is for lint to check: whoever has run a pack here has receipts that it does not know yet.
    assert "README.md" not in tables.update(check=True)
    (tmp_path / "README.md").write_text("<!-- packs -->\nold\n<!-- /packs -->\n")
    everything = [
        "README.md",
        "results/README.md",
        "results/timeline.json",
        "docs/schemas/receipt.json",
        "docs/schemas/timeline.json",
    ]
    assert tables.update(check=True, root=tmp_path) == everything
    assert "old" in (tmp_path / "README.md").read_text()
    assert tables.update(root=tmp_path) == everything
    assert tables.update(check=True, root=tmp_path) == []
    assert "pack09" in (tmp_path / "README.md").read_text()


def test_the_workflow_makes_its_matrix_and_calls_what_is_there(tmp_path):
    import os

    import yaml

    workflow = yaml.safe_load((ROOT / "docs" / "github-actions.yml").read_text())
    plan, cpu, gpu, nightly = (workflow["jobs"][name] for name in ("plan", "cpu", "gpu", "nightly"))
    noxfile = (ROOT / "noxfile.py").read_text()
    for session in nightly["strategy"]["matrix"]["session"]:
        assert f"def {session}(" in noxfile or f'name="{session}"' in noxfile
    script = next(step["run"] for step in plan["steps"] if step.get("id") == "matrix")
    environ = {
        **os.environ,
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=environ, check=True)
    name, _, packs = (tmp_path / "output").read_text().strip().partition("=")
    assert name == "packs"
    assert "pack09" in json.loads(packs)
    assert all(re.fullmatch(r"pack\d\d", pack) and pack != "pack00" for pack in json.loads(packs))
    runs = [step["run"] for step in cpu["steps"] if "run" in step]
    assert cpu["steps"] == gpu["steps"]
    assert any("nox -s watch -- --pack ${{ matrix.pack }} --json" in run for run in runs)
    assert gpu["runs-on"] == ["self-hosted", "gpu"]


@pytest.mark.network
def test_nox_hands_on_the_exit_status_of_a_mistake(tmp_path):
    """nox exits with 1 whatever failed; cron has to tell a change (3) and a mistake (2) from a red verdict."""
    nox = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "--envdir", str(tmp_path / "nox"), "-s", "watch", "--"]
    done = subprocess.run([*nox, "--upstream", "numpy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "No pack is about 'numpy'" in done.stdout  # nox joins a command's two streams
    assert "Traceback" not in done.stdout + done.stderr


def test_no_upstream_code_is_stored():
    """Fixes are transforms and diffs are outputs: no file in git is a diff, and none holds a copyright of others."""
    for path in subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split():
        assert Path(path).suffix not in (".diff", ".patch", ".whl", ".gz")


@pytest.mark.parametrize("readme", sorted((ROOT / "packs").glob("*/README.md")), ids=lambda path: path.parent.name[:6])
def test_no_table_of_a_readme_is_damaged(readme):
    """A row that stands twice, or code that is not closed in its row, is what an edit by a script leaves."""
    rows = [
        line for line in re.sub(r"```.*?```", "", readme.read_text(), flags=re.DOTALL).splitlines() if line.startswith("| ")
    ]
    long = [row for row in rows if len(row) > 60]
    assert [row for row in set(long) if long.count(row) > 1] == []
    assert [row for row in rows if row.count("`") % 2] == []
