"""Commits of an upstream as wheels: the same commit gives the same file, and one that is not there is said in a sentence."""

import io
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from rich.console import Console

from common.cli import report, run
from common.errors import UserError
from common.install import checkouts, environment, sources
from common.packs.pack import Variant, find
from common.run import plan as plans
from common.store.grade import Verdict


@pytest.fixture
def clone(tmp_path):
    """A repository with one commit: its folder, and a pack with that commit for a variant."""
    folder = tmp_path / "clone"
    (folder / "pkg/core").mkdir(parents=True)
    for name in ("core/__init__.py", "core/data.json", "core/kernel.cpp", "other.py"):
        (folder / "pkg" / name).write_text(name)

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    commit, tree = git("rev-parse", "HEAD"), git("rev-parse", "HEAD^{tree}")
    one = Variant(arguments=(), source=commit, verdict="REPRODUCED")
    pack = replace(find("pack01"), package="toy-pkg", tree=("pkg/core",), variants={"one": one})
    return folder, pack, commit, tree


def test_a_wheel_names_commit_and_tree_and_is_the_same_each_time(clone, tmp_path):
    folder, pack, commit, tree = clone
    made = [sources.wheel(pack, "one", folder, tmp_path / cache) for cache in ("first", "second")]
    assert made[0].read_bytes() == made[1].read_bytes()
    version = f"0+git.{commit[:10]}.tree.{tree[:10]}"
    assert environment.read_wheel(made[0], "toy-pkg")[1] == version
    names = zipfile.ZipFile(made[0]).namelist()
    assert sorted(n for n in names if "dist-info" not in n) == ["pkg/core/__init__.py", "pkg/core/data.json"]


def test_nothing_of_the_clones_own_changes_the_files_of_a_commit(clone, tmp_path):
    """Attributes and filters of a clone change what git archive or a checkout gives; and a program that its configuration names is not run."""
    folder, pack, _, _ = clone
    wanted = sources.wheel(pack, "one", folder, tmp_path / "plain").read_bytes()
    (folder / ".git/info").mkdir(exist_ok=True)
    (folder / ".git/info/attributes").write_text("*.py filter=other\n*.json export-ignore\n")
    for name, value in (
        ("filter.other.smudge", "sed s/core/other/"),
        ("core.autocrlf", "true"),
        ("core.fsmonitor", f"touch {tmp_path}/was-run; false"),
    ):
        subprocess.run(["git", "-C", folder, "config", name, value], check=True)
    assert sources.wheel(pack, "one", folder, tmp_path / "odd").read_bytes() == wanted
    checkouts.wheel(pack, folder, None, tmp_path / "odd")
    assert not (tmp_path / "was-run").exists()


def test_an_environment_of_a_checkout_that_was_moved_is_made_anew(clone, tmp_path):
    folder, pack, _, _ = clone
    wheel = sources.wheel(pack, "one", folder, tmp_path)
    wanted = environment.Wanted(package=pack.package, version="0", file="", sha256="", wheel=wheel)
    environment.made(wanted, tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "moved")
    there = environment.made(wanted, tmp_path / "moved")
    base = Path((there.site / "_base.pth").read_text().strip())
    assert base.is_dir() and base.is_relative_to(tmp_path / "moved")


def test_it_is_installed_by_uv(clone, tmp_path):
    folder, pack, _, _ = clone
    wheel = sources.wheel(pack, "one", folder, tmp_path)
    there = environment.made(
        environment.Wanted(package=pack.package, version="0", file="", sha256="", wheel=wheel), tmp_path / "cache"
    )
    assert (there.site / "pkg/core/data.json").read_text() == "core/data.json"


def test_a_commit_that_is_not_there_is_one_sentence(clone, tmp_path):
    folder, pack, _, _ = clone
    other = replace(pack, variants={"one": structs.replace(pack.variants["one"], source="0" * 40)})
    with pytest.raises(UserError, match=r"^UNTESTABLE: source: .* does not have it\. .*--source DIR$"):
        sources.wheel(other, "one", folder, tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        sources.wheel(pack, "one", folder / "nowhere", tmp_path)
    with pytest.raises(UserError, match="cannot be fetched"):
        sources.wheel(replace(other, upstream="../nowhere"), "one", None, tmp_path)


def test_a_pinned_commit_runs_with_the_releases_and_one_that_is_not_there_is_told(clone, tmp_path, monkeypatch):
    folder, pack, commit, _ = clone
    pinned = {"one": structs.replace(pack.variants["one"], pinned=True)}
    pinned["two"] = structs.replace(pinned["one"], source="0" * 40)
    plan = plans.planned(
        replace(pack, variants=pinned), "", pack.lanes[0], threads=1, results=tmp_path, machine="m", cache=tmp_path / "cache"
    )
    monkeypatch.setattr(run, "CACHE", tmp_path / "cache")
    wanted, missing = run._with_commits(plan, [], folder, Console())
    assert [(each.variant, release.version[:16]) for each, release in wanted] == [("one", f"0+git.{commit[:10]}")]
    assert [sentence.partition(" of ")[0] for sentence in missing] == ["UNTESTABLE: source: commit 0000000000"]


def test_the_last_line_tells_what_says_nothing_of_the_bug():
    each = Verdict(outcome="REPRODUCED"), Verdict(outcome="ABSENT"), Verdict(outcome="UNTESTABLE", reason="no-api")
    said = [SimpleNamespace(verdict=verdict) for verdict in each]
    assert str(report.ending(said[:2])) == "✓ Every verdict is what the pack expects."
    assert str(report.ending(said, 1)).endswith("; 3 of 5 sides are UNTESTABLE (1 no-api, 2 source).")


def test_a_source_belongs_to_a_variant(cli):
    done = cli("run", "pack00", "--source", ".")
    assert done.returncode == 2
    assert "--variant that is a commit; pack00 has: none." in done.stderr


def test_an_sdist_that_cannot_be_built_is_installed_as_it_is(tmp_path):
    files = {
        "setup.py": "raise SystemExit('it cannot be built')",
        "toy_pkg/__init__.py": "",
        "toy_pkg/core/data.json": "{}",
        "toy_pkg/include/toy.cuh": "",
    }
    with tarfile.open(tmp_path / "toy_pkg-1.5.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"toy_pkg-1.5/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    wheel = sources.of_sdist(tmp_path / "toy_pkg-1.5.tar.gz", "toy-pkg", "1.5", tmp_path)
    there = environment.made(
        environment.Wanted(package="toy-pkg", version="0", file="", sha256="", wheel=wheel), tmp_path / "cache"
    )
    assert (there.version, (there.site / "toy_pkg/core/data.json").read_text()) == ("1.5", "{}")
    assert not (there.site / "toy_pkg/include").exists()
    assert not (there.site / "setup.py").exists()


def test_a_base_that_lost_files_is_made_again(tmp_path, monkeypatch):
    """It would make a release look as if it could not be imported."""
    made = []

    def uv(arguments, *_, **__):
        if arguments[0] == "venv":
            (environment._site(Path(arguments[-1]))).mkdir(parents=True)
        else:
            made.append(arguments)
            site = environment._site(Path(arguments[3]).parent.parent)
            (site / "tqdm").mkdir()
            (site / "tqdm" / "__init__.py").write_text("x = 1\n")
            (site / "tqdm" / "large.so").write_bytes(b"\0" * environment.SHARED_BYTES)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(environment, "_uv", uv)
    place = environment.base(["tqdm"], tmp_path)
    environment._COMPARED.clear()
    assert environment.base(["tqdm"], tmp_path) == place
    assert len(made) == 1
    (environment._site(place) / "tqdm" / "__pycache__").mkdir(exist_ok=True)
    (environment._site(place) / "tqdm" / "__pycache__" / "more.cpython-311.pyc").write_bytes(b"1")
    environment._COMPARED.clear()
    assert environment.has_base(["tqdm"], tmp_path), "byte code is no part of it"
    (environment._site(place) / "tqdm" / "__init__.py").unlink()
    environment._COMPARED.clear()
    assert not environment.has_base(["tqdm"], tmp_path)
    environment.base(["tqdm"], tmp_path)
    assert len(made) == 2
    other = environment.base(["tqdm", "rich"], tmp_path)
    large, small = (environment._site(other) / "tqdm" / name for name in ("large.so", "__init__.py"))
    assert large.samefile(environment._site(place) / "tqdm" / "large.so"), "kept once for all bases"
    assert small.stat().st_nlink == 1, "an edit of a source file reaches no other base"
    assert not list(large.parent.glob("*.link"))
    large.write_bytes(b"\1" * environment.SHARED_BYTES)
    third = environment._site(environment.base(["tqdm", "attrs"], tmp_path)) / "tqdm" / "large.so"
    assert third.read_bytes() == b"\0" * environment.SHARED_BYTES, "one that was changed is not handed on"
