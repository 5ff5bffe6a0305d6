"""The upstream's own tests on both sides: what is read from a clone, and how two reports are compared."""

import subprocess

import pytest

from common.cli import main
from common.errors import UserError
from common.packs.pack import UpstreamTests
from common.run import upstream

REPORT = """<testsuites><testsuite>
<testcase classname="test.a" name="right[1]"/>
<testcase classname="test.a" name="wrong"><failure message="assert 1 == 2"/></testcase>
<testcase classname="test.a" name="broken"><error message="fixture"/></testcase>
<testcase classname="test.a" name="left out"><skipped message="no GPU"/></testcase>
<testcase classname="test.a" name="not here"><failure message="triton.runtime.errors.InterpreterError: x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    for name, text in {
        "test/ops/test_a.py": "def test(): pass\n",
        "test/data.arrow": "x",
        "src/toy/__init__.py": "bad\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
        ["tag", "v1.0"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_how_each_test_ended():
    assert upstream.outcomes(REPORT) == {
        "test.a::right[1]": "passed",
        "test.a::wrong": "failed",
        "test.a::broken": "failed",
        "test.a::left out": "skipped",
        "test.a::not here": "skipped",
    }


def test_what_a_fix_mends_and_what_it_breaks():
    before = {"a": "passed", "b": "failed", "c": "failed", "d": "passed", "e": "passed", "f": "skipped"}
    after = {"a": "passed", "b": "passed", "c": "failed", "d": "failed", "f": "passed"}
    found = upstream.Compared(unpatched=before, patched=after)
    assert found.mended() == ["b", "f"]
    assert found.broken() == ["d", "e"], "one that is not run any more has not passed"


def test_the_tests_of_a_tag_are_read_and_nothing_of_the_package(clone, tmp_path):
    upstream.extract(clone, "v1.0", UpstreamTests(files=("test/ops/test_a.py",)), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["test_a.py"]
    with pytest.raises(UserError, match=r"has no test/ops/test_b\.py at v1\.0"):
        upstream.extract(clone, "v1.0", UpstreamTests(files=("test/ops/test_b.py",)), tmp_path / "more")
    with pytest.raises(UserError, match="cannot be read"):
        upstream.extract(clone, "no-such-ref", UpstreamTests(files=("test/ops/test_a.py",)), tmp_path / "none")


def test_a_pack_without_them_and_a_folder_that_is_no_clone_are_one_sentence(capsys, tmp_path):
    assert main(["upstream-tests", "pack13", "--source", str(tmp_path)]) == 2
    assert "names no [upstream_tests]; these packs do: pack09" in capsys.readouterr().err
    assert main(["upstream-tests", "pack09", "--source", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_here_and_a_release_that_is_there(clone, capsys):
    said = []
    for words in (["--here", "--release", "0.7.0"], ["--release-path", str(clone / "none")], ["--here"]):
        assert main(["upstream-tests", "pack09", "--source", str(clone), *words]) == 2
        said.append(capsys.readouterr().err)
    assert "leave --release out" in said[0]
    assert "is not a folder" in said[1]
    assert "is not installed in the active environment" in said[2]
