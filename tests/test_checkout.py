"""A working tree, a commit or a pull request becomes a wheel that names it, and is judged as what it is."""

import functools
import http.server
import io
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from common.cli import report
from common.errors import UserError
from common.install import environment, sources
from common.packs.pack import find
from common.run.plan import Plan, expected, skipped
from common.store.grade import Verdict

PACK = find("pack09")  # src/liger_kernel
FILES = {
    "pyproject.toml": '[project]\nname = "liger_kernel"\nversion = "0.8.2"\n',
    "src/liger_kernel/__init__.py": "",
    "src/liger_kernel/ops.py": "x = 1\n",
    "src/liger_kernel/kernel.cu": "// compiled\n",
    "test/test_ops.py": "",
}


def git(folder, *words):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.example", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def made(wheel):
    return environment.read_wheel(wheel, "liger-kernel")[1], zipfile.ZipFile(wheel).namelist()


def test_a_clean_clone_is_named_by_its_commit(clone, tmp_path):
    version, names = made(sources.of_checkout(PACK, clone, None, tmp_path / "cache"))
    head = git(clone, "rev-parse", "HEAD")
    assert version == f"0.8.2+git.{head[:10]}"
    assert [name for name in names if ".dist-info" not in name] == ["liger_kernel/__init__.py", "liger_kernel/ops.py"]


def test_changes_that_are_not_committed_are_in_it_and_in_its_name(clone, tmp_path):
    clean = made(sources.of_checkout(PACK, clone, None, tmp_path / "cache"))[0]
    (clone / "src/liger_kernel/ops.py").write_text("x = 2\n")
    (clone / "src/liger_kernel/new.py").write_text("")
    wheel = sources.of_checkout(PACK, clone, None, tmp_path / "cache")
    version, names = made(wheel)
    assert version.startswith(f"{clean}.dirty.")
    assert "liger_kernel/new.py" in names
    assert zipfile.ZipFile(wheel).read("liger_kernel/ops.py") == b"x = 2\n"
    (clone / "src/liger_kernel/ops.py").write_text("x = 3\n")
    assert made(sources.of_checkout(PACK, clone, None, tmp_path / "cache"))[0] != version


def test_a_commit_is_what_was_committed(clone, tmp_path):
    (clone / "src/liger_kernel/ops.py").write_text("x = 2\n")
    git(clone, "commit", "--quiet", "-am", "second")
    for ref, text in (("HEAD", b"x = 2\n"), ("HEAD~1", b"x = 1\n")):
        wheel = sources.of_checkout(PACK, clone, ref, tmp_path / "cache")
        assert made(wheel)[0] == f"0.8.2+git.{git(clone, 'rev-parse', ref)[:10]}"
        assert zipfile.ZipFile(wheel).read("liger_kernel/ops.py") == text


def test_a_folder_without_git_is_named_by_its_content(tmp_path):
    (tmp_path / "src/liger_kernel").mkdir(parents=True)
    (tmp_path / "src/liger_kernel/__init__.py").write_text('__version__ = "0.9.0.dev1"\n')
    assert made(sources.of_checkout(PACK, tmp_path, None, tmp_path / "cache"))[0].startswith("0.9.0.dev1+local.")


@pytest.mark.parametrize(
    ("files", "base"),
    [
        ({"version.txt": b"0.19.0\n"}, "0.19.0"),
        ({"build_tools/VERSION.txt": b"2.21.0.dev0\n"}, "2.21.0.dev0"),
        ({"at/package_info.py": b"MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc0'\n"}, "0.20.1"),
        ({"pyproject.toml": b'version = "not one"\n'}, "0"),
        ({}, "0"),
    ],
)
def test_the_version_is_what_the_upstream_says(files, base):
    assert sources._base(files, ("at",)) == base


def test_what_is_no_checkout_is_said(clone, tmp_path):
    for directory, ref, words in (
        (tmp_path / "nowhere", None, "is not a folder"),
        (clone, "nope", "has no commit nope"),
        (tmp_path / "clone" / "test", None, "holds nothing below src/liger_kernel"),
    ):
        with pytest.raises(UserError, match=words):
            sources.of_checkout(PACK, directory, ref, tmp_path / "cache")


def test_a_checkout_is_asked_whether_it_is_free_of_the_bug():
    plan = Plan(pack=PACK, lane="triton-interpreter", checkout=True)
    for version in ("0.7.0+git.1", "0.8.2+git.1", "99+git.1"):
        assert [expected(plan, version, side)[0] for side in ("unpatched", "patched")] == ["ABSENT", "NOTHING_TO_PATCH"]
    assert skipped(Verdict(outcome="REPRODUCED", reason=""), plan, "0.8.2+git.1")["stopped"] == "nothing-to-patch"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--commit", "HEAD"], "of which clone of linkedin/Liger-Kernel"),
        (["--checkout", ".", "--patch", "f.diff"], "it has no meaning beside --patch"),
        (["--checkout", ".", "--without", "save"], "it has no meaning beside --without"),
        (["--checkout", "nowhere"], "is not a folder"),
        (["--pr", "x"], "invalid int value"),
        (["--checkout", ".", "--releases", "0.8.2"], "not allowed with"),
    ],
)
def test_mistakes_are_one_sentence(cli, words, said):
    done = cli("run", "pack09", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_ending_says_what_was_found():
    assert "does not have the bug" in report.of_checkout(row("ABSENT"), True).plain
    assert "--patch" not in report.of_checkout(row("ABSENT"), False).plain
    assert report.of_checkout(row("REPRODUCED"), True).plain == "✗ git.1 has the bug."
    assert "build a wheel" in report.of_checkout(row("UNTESTABLE", "import"), True).plain


def row(outcome, reason=""):
    plan = Plan(pack=PACK, lane="triton-interpreter", checkout=True)
    from common.install.releases import Release
    from common.run.plan import Row

    cell = plan.cell(Release(version="0.8.2+git.1", file="", sha256=""))
    verdict = Verdict(outcome=outcome, reason=reason)
    facts = {"seconds": 0.0, "receipt": None, "ran": True, "environment": None, "message": ""}
    return Row(cell=cell, verdict=verdict, expected="ABSENT", why="", **facts)


def test_a_pull_request_is_fetched_by_its_number(clone, tmp_path, monkeypatch):
    """From GitHub; here git is told to take a folder in its place."""
    hub = tmp_path / "hub" / PACK.upstream
    hub.parent.mkdir(parents=True)
    git(tmp_path, "clone", "--quiet", "--bare", clone, hub)
    (clone / "src/liger_kernel/ops.py").write_text("x = 7\n")
    git(clone, "commit", "--quiet", "-am", "a pull request")
    git(clone, "push", "--quiet", hub, "HEAD:refs/pull/7/head")
    told = {"COUNT": "1", "KEY_0": f"url.file://{tmp_path / 'hub'}/.insteadOf", "VALUE_0": "https://github.com/"}
    for name, value in told.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    source, commit = sources.pull_request(PACK.upstream, 7, tmp_path / "cache")
    assert commit == git(clone, "rev-parse", "HEAD")
    wheel = sources.of_checkout(PACK, source, commit, tmp_path / "cache")
    assert zipfile.ZipFile(wheel).read("liger_kernel/ops.py") == b"x = 7\n"
    with pytest.raises(UserError, match=r"Pull request 8 of .* cannot be fetched"):
        sources.pull_request(PACK.upstream, 8, tmp_path / "cache")


def test_a_diff_may_be_an_address_or_standard_input(tmp_path, monkeypatch):
    text = b"--- a/x\n+++ b/x\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert sources.of_diff("-", tmp_path).read_bytes() == text
    assert sources.of_diff("some.diff", tmp_path) == Path("some.diff")
    (tmp_path / "my fix.diff").write_bytes(text)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(handler.func, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = sources.of_diff(f"http://127.0.0.1:{server.server_port}/my%20fix.diff", tmp_path)
        assert found.read_bytes() == text
        with pytest.raises(UserError, match=r"cannot be fetched \(HTTPError\): save the diff"):
            sources.of_diff(f"http://127.0.0.1:{server.server_port}/none.diff", tmp_path)
        server.shutdown()
