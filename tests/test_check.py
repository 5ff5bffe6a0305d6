"""``check``: what is installed against what is known, from every kind of input, in every format, and every mistake in a sentence."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema
import pytest
import yaml
from helpers import ROOT

from common.cli import main
from common.errors import UserError
from common.install import stack
from common.publish import affected


def run(capsys, *words):
    code = main(["check", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.fixture
def results(tmp_path):
    """An index of two packs on one package, and one on another."""

    def release(version, outcome, reason="", **more):
        run = {"machine": "m", "side": "unpatched", "outcome": outcome, "reason": reason, "evidence": "source", "stale": False}
        runs = [{**run, "receipt": f"m/{version}.json", **more}]
        if outcome == "REPRODUCED":
            runs.append({**runs[0], "side": "patched", "outcome": "ABSENT"})
        return {"version": version, "runs": runs}

    def entry(pack, package, releases, **more):
        told = {
            "pack": pack,
            "title": f"{pack} breaks",
            "package": package,
            "upstream": "a/b",
            "kind": "crash",
            "matters": "who calls it",
        }
        return {**told, "workaround": "", "threads": [], "fixed": {}, "bad": [], "releases": releases, **more}

    first = [("1.0", "ABSENT"), ("2.0", "REPRODUCED"), ("3.0rc1", "ABSENT"), ("3.0", "ABSENT")]
    first += [("4.0", "UNTESTABLE", "import"), ("5.0", "CHANGED", "other")]
    second = [release("2.0", "UNTESTABLE", "no-api"), release("3.0", "REPRODUCED", stale=True)]
    second += [release("4.0", "UNTESTABLE", "no-api")]  # it had the bug before: it may have another name now
    packs = [
        entry("pack50", "toy-pkg", [release(*each) for each in first]),
        entry("pack51", "toy-pkg", second),
        entry("pack52", "other", [release("1.0", "ABSENT", runs=3, agree=2)], nightly="other_nightly"),
        entry("pack53", "toy-pkg", [release("2.0", "REPRODUCED")], kind="refactor"),
    ]
    (tmp_path / "timeline.json").write_text(json.dumps({"schema": 1, "packs": packs}))
    return tmp_path


@pytest.mark.parametrize(
    ("version", "pack50", "pack51", "code"),
    [
        ("2.0", "affected", "unaffected", 1),
        ("1.0", "unaffected", "unknown", 0),
        ("3.0", "unaffected", "affected", 1),
        ("4.0", "unknown", "unknown", 0),
        ("5.0", "unknown", "unknown", 0),
        ("2.5", "unknown", "unknown", 0),
        ("2.0+cu126", "affected", "unknown", 1),
    ],
)
def test_each_verdict(results, capsys, version, pack50, pack51, code):
    (results / "requirements.txt").write_text(f"Toy_Pkg=={version}\n")
    done, said = run(capsys, results / "requirements.txt", "--results", results, "--json")
    found = {f["pack"]: f for status in ("affected", "unknown", "unaffected") for f in json.loads(said)[status]}
    assert (found["pack50"]["status"], found["pack51"]["status"], done) == (pack50, pack51, code)
    assert "pack53" not in found
    assert all(f["why"] for f in found.values() if f["status"] == "unknown")
    if version == "2.0":
        assert (found["pack50"]["newer"], found["pack50"]["older"], found["pack50"]["cured"]) == ("3.0", "1.0", True)
    if version == "2.0+cu126":
        assert found["pack50"]["why"] == "a local build of 2.0, which was run"


def test_of_a_nightly_build_nothing_is_known(results, capsys):
    (results / "asked").write_text("other-nightly==1.1.dev20261101\n")
    code, said = run(capsys, results / "asked", "--results", results)
    assert code == 0
    assert "? other 1.1.dev20261101, pack52: other_nightly is not what was run: other's releases are" in said
    assert "0 known bugs, 1 not known" in said


def test_runs_that_differ_are_not_known(results):
    index = affected.load(results / "timeline.json")
    assert affected.findings(index, {"other": "1.0"})[0].why == "2 of 3 runs"


def test_an_upgrade_says_what_it_fixes_and_what_it_brings(results, capsys):
    (results / "requirements.txt").write_text("toy-pkg==2.0\n")
    done, said = run(capsys, results / "requirements.txt", "--results", results, "--upgrade", "toy-pkg==3.0")
    assert done == 1
    assert "✓ fixes pack50" in said
    assert "✗ brings pack51" in said
    assert run(capsys, results / "requirements.txt", "--results", results, "--upgrade", "toy-pkg==1.0")[0] == 0


def test_an_upgrade_of_a_package_that_is_asked_for_in_two_versions(results, capsys):
    """Of the two the worse counts, as it does without --upgrade."""
    (results / "requirements.txt").write_text("toy-pkg==2.0\ntoy-pkg==1.0\n")
    _, said = run(capsys, results / "requirements.txt", "--results", results, "--upgrade", "toy-pkg==3.0")
    assert "✓ fixes pack50" in said
    done, said = run(capsys, results / "requirements.txt", "--results", results, "--upgrade", "toy-pkg==2.0")
    assert done == 1 and "✗ keeps pack50" in said


LOCKS = {
    "uv.lock": 'version = 1\n[[package]]\nname = "toy-pkg"\nversion = "2.0"\nsource = { registry = "https://x" }\n',
    "pylock.toml": 'lock-version = "1.0"\n[[packages]]\nname = "toy-pkg"\nversion = "2.0"\n',
    "constraints.txt": "# why\n\n--index-url https://x\ntoy.pkg == 2.0 ; python_version > '3' # because\n-e .\n./local\n",
    "frozen.txt": "toy_pkg[extra]==2.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nx @ file:///y\n",
}


@pytest.mark.parametrize("name", LOCKS)
def test_every_kind_of_file_is_read_with_its_lines(tmp_path, name):
    (tmp_path / name).write_text(LOCKS[name])
    found = stack.of_file(tmp_path / name)
    assert found.versions["toy-pkg"] == "2.0"
    line = next(i for i, text in enumerate(LOCKS[name].splitlines(), 1) if "toy" in text)
    assert found.lines["toy-pkg"] == (str(tmp_path / name), line)


def test_included_files_ranges_and_files_that_disagree(tmp_path):
    (tmp_path / "a.txt").write_text("-r b.txt\n-c c.txt\nranged>=1\n")
    (tmp_path / "b.txt").write_text("-r a.txt\ntoy-pkg\n")
    (tmp_path / "c.txt").write_text("toy-pkg==2.0\n")
    found = stack.of_file(tmp_path / "a.txt")
    assert found.versions == {"toy-pkg": "2.0"}
    assert found.open == {"ranged": ">=1"}
    (tmp_path / "d.txt").write_text("toy-pkg==3.0\n")
    both = stack.merged([stack.of_file(tmp_path / name) for name in ("c.txt", "d.txt")])
    assert both.several == {"toy-pkg": ("2.0", "3.0")}
    assert both.versions == both.open == {}


def test_a_checkout_is_no_release(tmp_path):
    """What its metadata says of itself holds of the release, and not of what somebody made of it."""
    locks = {
        "uv.lock": 'version = 1\n[[package]]\nname = "toy-pkg"\nversion = "2.0"\nsource = { git = "https://x?rev=v1" }\n',
        "poetry.lock": '[[package]]\nname = "toy-pkg"\nversion = "2.0"\n[package.source]\ntype = "git"\nurl = "https://x"\n',
        "pylock.toml": 'lock-version = "1.0"\n[[packages]]\nname = "toy-pkg"\nversion = "2.0"\nvcs = { type = "git" }\n',
        "pdm.lock": '[[package]]\nname = "toy-pkg"\nversion = "2.0"\ngit = "https://x"\n',
    }
    for name, text in locks.items():
        (tmp_path / name).write_text(text)
        assert stack.of_file(tmp_path / name).open == {"toy-pkg": "2.0, made of a checkout"}, name
    frozen = "# Editable install with no version control (toy_pkg==2.0)\n-e /home/me/toy\nhttps://x/toy_two-1.0.tar.gz\n"
    found = stack.of_lines(f"{frozen}git+https://x/y@v1\n".splitlines())
    assert found.open == {"toy-pkg": "a checkout", "git+https://x/y@v1": ""}
    assert found.versions == {"toy-two": "1.0"}
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    rows = [
        ["toy-pkg", "2.0", '{"url": "https://x", "vcs_info": {}}'],
        ["toy-two", "1.0", '{"url": "https://x/toy_two-1.0.tar.gz", "archive_info": {}}'],
    ]
    python.write_text(f"#!/bin/sh\ncat <<'E'\n{json.dumps(rows)}\nE\n")
    python.chmod(0o755)
    found = stack.of_python(tmp_path)
    assert (found.versions, found.open) == ({"toy-two": "1.0"}, {"toy-pkg": "2.0, made of a checkout"})


@pytest.mark.parametrize(
    ("text", "open_"),
    [
        ("toy-pkg==2.0\ntoy-pkg @ git+https://x/y@v1", {"toy-pkg": "@ git+https://x/y@v1"}),
        (
            "toy-pkg @ https://x/y/archive/refs/heads/toy_pkg-2.0.zip",
            {"toy-pkg": "@ https://x/y/archive/refs/heads/toy_pkg-2.0.zip"},
        ),
        ("toy-pkg @ https://x/patch-1.zip", {"toy-pkg": "@ https://x/patch-1.zip"}),
        ("https://x/y/archive/patch-1.tar.gz", {"https://x/y/archive/patch-1.tar.gz": ""}),
    ],
)
def test_a_file_with_another_name_is_no_release(text, open_):
    found = stack.of_lines(text.splitlines())
    assert (found.versions, found.open) == ({}, open_)


def test_an_archive_of_a_branch_is_no_release(tmp_path):
    for url, open_ in (("https://x/toy_pkg-2.0-py3-none-any.whl", {}), ("https://x/archive/main.zip", {"toy-pkg"})):
        for name, source in (("uv.lock", f'source = {{ url = "{url}" }}'), ("pylock.toml", f'archive = {{ url = "{url}" }}')):
            (tmp_path / name).write_text(f'[[package]]\nname = "toy-pkg"\nversion = "2.0"\n{source}\n')
            assert set(stack.of_file(tmp_path / name).open) == set(open_), (name, url)


def test_the_folder_that_a_python_is_started_in_is_not_its_environment(tmp_path, monkeypatch):
    (tmp_path / "toy_here-1.0.dist-info").mkdir()
    (tmp_path / "toy_here-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-here\nVersion: 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert "toy-here" not in stack.of_python(Path(sys.executable)).versions


def test_a_line_without_a_name_is_told(results, capsys):
    (results / "r.txt").write_text("toy-pkg==1.0\ngit+https://x/y@v1\n")
    done, said = run(capsys, results / "r.txt", "--results", results, "--pack", "50")
    assert (done, "r.txt:2 names no package (git+https://x/y@v1)" in said) == (0, True)


@pytest.mark.parametrize(
    "text",
    [
        "-rbad.txt",
        "-r\tbad.txt",
        "--requirement=bad.txt",
        "--requirement bad.txt # why",
        "-cbad.txt",
        "toy-pkg==2.0 \\",
        "# a note \\\ntoy-pkg==2.0",
        "toy-pkg==2.0\t# why",
        "toy-pkg \\\n  ==2.0",
        "toy-pkg==2.0 --config-settings x=y",
        "./wheels/toy_pkg-2.0-py3-none-any.whl",
        "https://host/toy_pkg-2.0-py3-none-any.whl#sha256=0",
        "toy-pkg @ https://host/toy_pkg-2.0-py3-none-any.whl",
    ],
)
def test_what_pip_reads_is_read(tmp_path, text):
    (tmp_path / "bad.txt").write_text("toy-pkg==2.0\n")
    (tmp_path / "a.txt").write_text(text)
    assert stack.of_file(tmp_path / "a.txt").versions == {"toy-pkg": "2.0"}


def test_a_checkout_is_open_and_a_file_on_standard_input_is_asked_for(tmp_path):
    (tmp_path / "a.txt").write_text("-e git+https://host/toy@v2.0#egg=toy_pkg\n--index-url https://x\n./folder\n")
    assert stack.of_file(tmp_path / "a.txt").open == {"toy-pkg": "a checkout", "./folder": ""}
    with pytest.raises(UserError, match=r"standard input:1 asks for bad\.txt: give that file itself"):
        stack.of_lines(["-r bad.txt"])


def test_of_several_versions_the_worst_counts(results, capsys):
    (results / "uv.lock").write_text(
        '[[package]]\nname = "toy-pkg"\nversion = "1.0"\n[[package]]\nname = "toy-pkg"\nversion = "2.0"\n'
    )
    (results / "a.txt").write_text("toy-pkg==1.0\ntoy-pkg==1.0.0\n")
    done, said = run(capsys, results / "uv.lock", "--results", results)
    assert done == 1
    assert "1.0, 2.0 are asked for" in said
    assert run(capsys, results / "a.txt", "--results", results)[0] == 0, "one version, written in two ways"


@pytest.mark.parametrize("form", ["--sarif", "--junit", "--markdown"])
def test_an_upgrade_is_told_as_text_or_json(results, capsys, form):
    (results / "requirements.txt").write_text("toy-pkg==2.0\n")
    done, said = run(capsys, results / "requirements.txt", "--results", results, "--upgrade", "toy-pkg==3.0", form)
    assert done == 2
    assert f"{form} is about what is installed" in said


def test_standard_input_and_another_python(results):
    command = [sys.executable, "-m", "common", "check", "--results", results]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "-"], input="toy-pkg==2.0\n", capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "✗ pack50  toy-pkg 2.0  pack50 breaks" in done.stdout
    done = subprocess.run([*command, "--python", sys.prefix], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "None is among what packs are about: other, toy-pkg." in done.stdout


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ("toy-pkg=2.0\n", (), "requirements.txt:1 is not a requirement: 'toy-pkg=2.0'"),
        ("-r gone.txt\n", (), "asks for gone.txt, which is not there"),
        ("toy-pkg==2.0\n", ("--upgrade", "toy-pkg"), "is not NAME==VERSION"),
        ("toy-pkg==2.0\n", ("--upgrade", "numpy==1.0"), "No pack is about numpy"),
        ("toy-pkg==2.0\n", ("--pack", "pack99"), "pack99 is not a pack about a bug"),
        ("toy-pkg==2.0\n", ("--python", "nowhere"), "not both"),
    ],
)
def test_a_mistake_is_one_sentence(results, capsys, content, words, said):
    (results / "requirements.txt").write_text(content)
    code, told = run(capsys, results / "requirements.txt", "--results", results, *words)
    assert code == 2
    assert said in told.replace("\n", " ")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("name", "said"), [("x.lock", "no list of packages"), ("y.toml", "not valid TOML"), ("z.txt", "cannot be read")]
)
def test_files_that_are_none(results, capsys, name, said):
    if name != "z.txt":
        (results / name).write_text({"x.lock": "a = 1", "y.toml": "a ="}[name])
    code, told = run(capsys, results / name, "--results", results)
    assert code == 2
    assert said in told.replace("\n", " ")


def test_no_index_is_one_sentence(tmp_path, capsys):
    code, told = run(capsys, "--results", tmp_path)
    assert code == 2
    assert "python -m common tables" in told


def test_sarif_junit_and_markdown_of_what_is_recorded(tmp_path, capsys):
    """The schema is SchemaStore's sarif-2.1.0.json at fa3b6446 (Apache License 2.0)."""
    (tmp_path / "requirements.txt").write_text("numpy==2.0\nliger-kernel==0.7.0\ntransformer-engine>2\n")
    code, said = run(capsys, tmp_path / "requirements.txt", "--sarif")
    assert code == 1
    document = json.loads(said)
    jsonschema.Draft7Validator(json.loads((ROOT / "tests/data/sarif-2.1.0.json").read_text())).validate(document)
    result = next(r for r in document["runs"][0]["results"] if r["ruleId"] == "pack09")
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 2
    _, said = run(capsys, tmp_path / "requirements.txt", "--junit")
    suite = ET.fromstring(said)
    assert suite.get("failures") == "4" == str(len(suite.findall("testcase/failure")))  # packs 09, 17, 18 and 19
    assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped")) > 0
    _, said = run(capsys, tmp_path / "requirements.txt", "--markdown")
    assert said.startswith("### 4 known bugs in what is installed")


def test_every_pack_says_whom_it_matters_to():
    index = affected.load(ROOT / "results/timeline.json")
    assert index
    assert not [entry.pack for entry in index if not entry.matters]


@pytest.mark.network
def test_the_actions_steps_run(tmp_path):
    """As GitHub runs a composite action: its steps in bash, one after the other."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "requirements.txt").write_text("liger-kernel==0.7.0\n")
    action = yaml.safe_load((ROOT / "docs/check/action.yml").read_text())
    env = {
        "PATH": f"{tmp_path / 'venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_ACTION_PATH": str(ROOT / "docs/check"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "RUNNER_TEMP": str(tmp_path),
        "FILE": "requirements.txt",
    }
    codes = []
    for step in action["runs"]["steps"]:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        codes.append((done.returncode, done.stderr))
    assert [code for code, _ in codes] == [0, 1], codes
    assert "pack09" in (tmp_path / "summary").read_text()
    assert json.loads((tmp_path / "known-bugs.sarif").read_text())["version"] == "2.1.0"
    hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    done = subprocess.run([*hook["entry"].split(), "requirements.txt"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1


def test_a_contract_or_a_missing_feature_is_no_known_bug():
    """pack03 is about code that hands FP8 tensors on by itself, and its fix is in another package; pack02's feature is in none."""
    index = affected.load(ROOT / "results/timeline.json")
    found = affected.findings(index, {"transformer-engine": "2.20.2", "megatron-core": "0.19.2"})
    named = {finding.pack for finding in found if finding.status == "affected"}
    assert {"pack22", "pack23", "pack12", "pack16"} <= named
    assert not {"pack02", "pack03"} & {finding.pack for finding in found}
