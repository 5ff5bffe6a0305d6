"""A working tree, a commit or a pull request becomes a wheel that names it, and is judged as what it is."""

import functools
import http.server
import io
import os
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from common.cli import report
from common.errors import UserError
from common.install import checkouts, environment, sources
from common.packs.pack import all_packs, find
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
    version, names = made(checkouts.wheel(PACK, clone, None, tmp_path / "cache"))
    head = git(clone, "rev-parse", "HEAD")
    assert version == f"0.8.2+git.g{head[:10]}"
    assert [name for name in names if ".dist-info" not in name] == ["liger_kernel/__init__.py", "liger_kernel/ops.py"]


def test_changes_that_are_not_committed_are_in_it_and_in_its_name(clone, tmp_path):
    clean = made(checkouts.wheel(PACK, clone, None, tmp_path / "cache"))[0]
    (clone / "src/liger_kernel/ops.py").write_text("x = 2\n")
    (clone / "src/liger_kernel/new.py").write_text("")
    wheel = checkouts.wheel(PACK, clone, None, tmp_path / "cache")
    version, names = made(wheel)
    assert version.startswith(f"{clean}.dirty.")
    assert "liger_kernel/new.py" in names
    assert zipfile.ZipFile(wheel).read("liger_kernel/ops.py") == b"x = 2\n"
    (clone / "src/liger_kernel/ops.py").write_text("x = 3\n")
    assert made(checkouts.wheel(PACK, clone, None, tmp_path / "cache"))[0] != version


def test_a_commit_is_what_was_committed(clone, tmp_path):
    (clone / "src/liger_kernel/ops.py").write_text("x = 2\n")
    git(clone, "commit", "--quiet", "-am", "second")
    for ref, text in (("HEAD", b"x = 2\n"), ("HEAD~1", b"x = 1\n")):
        wheel = checkouts.wheel(PACK, clone, ref, tmp_path / "cache")
        assert made(wheel)[0] == f"0.8.2+git.g{git(clone, 'rev-parse', ref)[:10]}"
        assert zipfile.ZipFile(wheel).read("liger_kernel/ops.py") == text


def test_a_folder_without_git_is_named_by_its_content(tmp_path):
    (tmp_path / "src/liger_kernel").mkdir(parents=True)
    (tmp_path / "src/liger_kernel/__init__.py").write_text('__version__ = "0.9.0.dev1"\n')
    assert made(checkouts.wheel(PACK, tmp_path, None, tmp_path / "cache"))[0].startswith("0.9.0.dev1+local.")


@pytest.mark.parametrize(
    ("files", "base"),
    [
        ({"version.txt": b"0.19.0\n"}, "0.19.0"),
        ({"build_tools/VERSION.txt": b"2.21.0.dev0\n"}, "2.21.0.dev0"),
        ({"at/package_info.py": b"MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc0'\n"}, "0.20.1rc0"),
        ({"pyproject.toml": b'[tool.commitizen]\nversion = "9.9"\n', "version.txt": b"1.2\n"}, "1.2"),
        ({"pyproject.toml": b"[project\n", "at/__init__.py": b'__version__ = "1.3"\n'}, "1.3"),
        ({"pyproject.toml": b'[project]\nversion = "not one"\n'}, "0"),
        ({}, "0"),
    ],
)
def test_the_version_is_what_the_upstream_says(files, base):
    assert checkouts._version(files, "at") == base


def test_what_is_no_checkout_is_said(clone, tmp_path):
    for directory, ref, words in (
        (tmp_path / "nowhere", None, "is not a folder"),
        (clone, "nope", "has no commit 'nope'"),
        (clone, "", "has no commit ''"),
        (tmp_path, None, "holds nothing below src/liger_kernel"),
    ):
        with pytest.raises(UserError, match=words):
            checkouts.wheel(PACK, directory, ref, tmp_path / "cache")


def test_a_checkout_is_asked_whether_it_is_free_of_the_bug():
    plan = Plan(pack=PACK, lane="triton-interpreter", checkout=True)
    for version in ("0.7.0+git.1", "0.8.2+git.g1", "99+git.1"):
        assert [expected(plan, version, side)[0] for side in ("unpatched", "patched")] == ["ABSENT", "NOTHING_TO_PATCH"]
    assert skipped(Verdict(outcome="REPRODUCED", reason=""), plan, "0.8.2+git.g1")["stopped"] == "nothing-to-patch"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--commit", "HEAD"], "of which clone of linkedin/Liger-Kernel"),
        (["--checkout", ".", "--patch", "f.diff"], "it has no meaning beside --patch"),
        (["--checkout", ".", "--without", "save"], "it has no meaning beside --without"),
        (["--checkout", "nowhere"], "is not a folder"),
        (["--checkout", ".", "--propose"], "it has no meaning beside --propose"),
        (["--commit", "", "--source", "."], "is a shell variable unset"),
        (["--commit", ""], "is a shell variable unset"),
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
    assert report.of_checkout(row("REPRODUCED"), True).plain == "✗ git.g1 has the bug."
    assert "build a wheel" in report.of_checkout(row("UNTESTABLE", "import"), True).plain


def row(outcome, reason=""):
    plan = Plan(pack=PACK, lane="triton-interpreter", checkout=True)
    from common.install.releases import Release
    from common.run.plan import Row

    cell = plan.cell(Release(version="0.8.2+git.g1", file="", sha256=""))
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
    wheel = checkouts.wheel(PACK, source, commit, tmp_path / "cache")
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


def test_a_tree_is_dirty_by_its_content_and_not_by_what_git_was_told(clone, tmp_path):
    cache = tmp_path / "cache"
    clean = made(checkouts.wheel(PACK, clone, None, cache))[0]
    git(clone, "config", "status.showUntrackedFiles", "no")
    git(clone, "update-index", "--assume-unchanged", "src/liger_kernel/ops.py")
    (clone / "src/liger_kernel/ops.py").write_text("x = 9\n")
    assert made(checkouts.wheel(PACK, clone, None, cache))[0].startswith(f"{clean}.dirty.")
    (clone / "src/liger_kernel/ops.py").write_text("x = 1\n")
    (clone / "src/liger_kernel/new.py").write_text("")
    assert made(checkouts.wheel(PACK, clone, None, cache))[0].startswith(f"{clean}.dirty.")
    (clone / "src/liger_kernel/new.py").unlink()
    assert made(checkouts.wheel(PACK, clone, None, cache))[0] == clean
    (clone / "README.md").write_text("no part of the package\n")
    assert made(checkouts.wheel(PACK, clone, None, cache))[0] == clean


def test_a_sparse_tree_a_link_and_a_submodule_are_refused(clone, tmp_path):
    git(clone, "update-index", "--skip-worktree", "src/liger_kernel/ops.py")
    (clone / "src/liger_kernel/ops.py").unlink()
    with pytest.raises(UserError, match=r"is sparse and lacks src/liger_kernel/ops\.py"):
        checkouts.wheel(PACK, clone, None, tmp_path)
    git(clone, "update-index", "--no-skip-worktree", "src/liger_kernel/ops.py")
    git(clone, "checkout", "--quiet", "--", "src")
    (clone / "src/liger_kernel/link.py").symlink_to("ops.py")
    with pytest.raises(UserError, match=r"link\.py is a symbolic link"):
        checkouts.wheel(PACK, clone, None, tmp_path)
    git(clone, "add", "-A")
    git(clone, "commit", "--quiet", "-m", "a link")
    with pytest.raises(UserError, match=r"link\.py is a symbolic link"):
        checkouts.wheel(PACK, clone, "HEAD", tmp_path)


def test_a_hooks_repository_and_replacements_and_attributes_change_nothing(clone, tmp_path, monkeypatch):
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", clone, other)
    (other / "src/liger_kernel/ops.py").write_text("x = 5\n")
    git(other, "commit", "--quiet", "-am", "other")
    head = git(clone, "rev-parse", "HEAD")
    (clone / ".git/info/attributes").write_text("src/liger_kernel/ops.py export-ignore\n")
    git(clone, "fetch", "--quiet", other)
    git(clone, "replace", head, "FETCH_HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    for ref in ("HEAD", None):
        wheel = checkouts.wheel(PACK, clone, ref, tmp_path / "cache")
        assert made(wheel)[0] == f"0.8.2+git.g{head[:10]}"
        assert zipfile.ZipFile(wheel).read("liger_kernel/ops.py") == b"x = 1\n"


def test_names_that_are_no_text_and_files_beside_the_package_do_no_harm(clone, tmp_path):
    (clone / os.fsdecode(b"caf\xe9.txt")).write_text("")
    with (clone / "checkpoint.pt").open("wb") as file:
        file.truncate(2**40)  # holds nothing, and could not be read
    git(clone, "add", os.fsdecode(b"caf\xe9.txt"))
    git(clone, "commit", "--quiet", "-m", "a line\u2028separator")
    assert checkouts.log(clone, "-1")[0][2] == "a line\u2028separator"
    for ref in ("HEAD", None):
        assert made(checkouts.wheel(PACK, clone, ref, tmp_path / "cache"))[0].startswith("0.8.2+git.g")


def test_a_folder_of_a_clone_means_the_clone_and_an_unpacked_tree_itself(clone, tmp_path):
    whole = made(checkouts.wheel(PACK, clone, None, tmp_path / "cache"))
    for folder in ("src", "src/liger_kernel", "test"):
        assert made(checkouts.wheel(PACK, clone / folder, None, tmp_path / "cache")) == whole
        assert made(checkouts.wheel(PACK, clone / folder, "HEAD", tmp_path / "cache")) == whole
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    (outer / "unpacked/src/liger_kernel").mkdir(parents=True)
    (outer / "unpacked/src/liger_kernel/__init__.py").write_text("")
    (outer / "unpacked/pyproject.toml").write_text('[project]\nversion = "0.9"\n')
    assert made(checkouts.wheel(PACK, outer / "unpacked", None, tmp_path / "cache"))[0].startswith("0.9+local.")


def test_a_clone_that_git_refuses_is_said_in_gits_words(clone, tmp_path, monkeypatch):
    refused = subprocess.CompletedProcess([], 128, b"", b"fatal: detected dubious ownership in repository at 'x'\n")
    monkeypatch.setattr(checkouts, "git", lambda *_, **__: refused)
    for ref in (None, "HEAD"):
        with pytest.raises(UserError, match="dubious ownership"):
            checkouts.wheel(PACK, clone, ref, tmp_path)


def test_a_pack_that_is_filed_elsewhere_than_its_package_is_built_takes_the_packages_clone():
    pack = find("pack03")
    assert (pack.upstream, pack.repository) == ("NVIDIA/Megatron-LM", "NVIDIA/TransformerEngine")
    assert all(each.repository == each.upstream for each in all_packs() if each.name != "pack03")
