"""What runs is what the index's file installed: an edit of any file is found before a side runs, and never a verdict."""

import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from common.errors import UserError
from common.files import fill_once, locked
from common.install import integrity
from common.run import runner

pytestmark = pytest.mark.hostile

BUGGY = "def total(xs):\n    return xs[0] * len(xs)\n"
FIXED = "def total(xs):\n    return sum(xs)\n"


def site_of(plan, release):
    return runner.installed(plan.pack, release, plan.cache).site


def notes_after(wheels, index, run, plan, change):
    """Run the buggy release, change its environment, run it again: the verdicts hold. What is said of it the second time."""
    release = index.add(wheels["1.0"])
    run(release)
    change(site_of(plan, release))
    rows, failures = run(release)
    assert not failures
    assert [row.verdict.outcome for row in rows] == ["REPRODUCED", "ABSENT"]
    return [note for row in rows for note in row.notes]


def test_an_edit_of_an_installed_file_is_undone_and_said(wheels, index, run, plan):
    release = index.add(wheels["1.0"])
    assert run(release)[0][0].verdict.outcome == "REPRODUCED"
    (site_of(plan, release) / "reproducer_toy" / "__init__.py").write_text(FIXED)
    rows, failures = run(release)
    assert not failures
    assert [row.verdict.outcome for row in rows] == ["REPRODUCED", "ABSENT"]
    assert any("not what was installed; it was installed afresh" in note for row in rows for note in row.notes)


def test_an_edit_does_not_reach_uvs_cache(wheels, index, run, plan):
    release = index.add(wheels["1.0"])
    run(release)
    installed = site_of(plan, release) / "reproducer_toy" / "__init__.py"
    assert installed.stat().st_nlink == 1
    installed.write_text(FIXED)
    shutil.rmtree(plan.cache)
    assert run(release)[0][0].verdict.outcome == "REPRODUCED"


def test_an_edit_of_uvs_cache_is_gone_past(wheels, index, run, plan):
    release = index.add(wheels["1.0"])
    run(release)
    cached = list(Path(os.environ["UV_CACHE_DIR"]).rglob("reproducer_toy/__init__.py"))
    for copy in cached:
        copy.write_text(FIXED)
    shutil.rmtree(plan.cache)
    rows, failures = run(release)
    assert cached
    assert not failures
    assert [row.verdict.outcome for row in rows] == ["REPRODUCED", "ABSENT"]
    assert any("installed afresh, past uv's cache" in note for row in rows for note in row.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda site: (site / "reproducer_toy" / "__init__.py").unlink(), "gone"),
        (lambda site: (site / "reproducer_toy" / "other.py").write_text(""), "other.py was not installed"),
        (lambda site: (site / "sitecustomize.py").write_text("import reproducer_toy"), "sitecustomize.py was not installed"),
        (lambda site: (site / "evil.pth").write_text("import os"), "evil.pth was not installed"),
        (
            lambda site: (
                (site / "reproducer_toy" / "__pycache__").mkdir(),
                (site / "reproducer_toy" / "__pycache__" / "x.pyc").write_bytes(b""),
            ),
            "x.pyc was not installed",
        ),
        (
            lambda site: (
                (site / "reproducer_toy" / "__init__.py").rename(site / "kept"),
                (site / "reproducer_toy" / "__init__.py").symlink_to(site / "kept"),
            ),
            "reproducer_toy/__init__.py is",
        ),
    ],
    ids=["a file gone", "a file more", "sitecustomize", "pth", "byte code", "a link"],
)
def test_anything_that_python_would_read_counts(wheels, index, run, plan, change, said):
    assert any(said in note for note in notes_after(wheels, index, run, plan, change))


def test_a_script_that_edits_its_release_is_found_at_the_other_side(wheels, index, run, plan):
    """The unpatched side's import writes the fix into the installed file: the patched side does not start from that."""
    source = (
        BUGGY
        + "import pathlib\nif 'site-packages' in __file__:\n    pathlib.Path(__file__).write_text('def total(xs):\\n    return sum(xs)\\n')\n"
    )
    release = index.add(wheels.make("1.0.1", {"reproducer_toy/__init__.py": source}))
    rows, _ = run(release)
    assert rows[0].verdict.outcome == "REPRODUCED"
    assert "installed afresh" in " ".join(rows[1].notes)


def test_runs_leave_no_byte_code_in_the_release(wheels, index, run, plan):
    release = index.add(wheels["1.0"])
    rows, _ = run(release)
    run(release)
    assert not any(row.notes for row in rows)
    assert not list(site_of(plan, release).rglob("reproducer_toy/**/*.pyc"))


@pytest.fixture
def folder(wheels, tmp_path):
    """A release as pip would install it into a folder."""
    with zipfile.ZipFile(wheels["1.0"]) as archive:
        archive.extractall(tmp_path / "folder")
    return tmp_path / "folder"


def test_a_folder_that_was_edited_is_refused(folder, run):
    release = runner.Release(version="1.0", file="", sha256="")
    rows, failures = run(release, release_path=folder)
    assert rows[0].verdict.outcome == "REPRODUCED"
    (folder / "reproducer_toy" / "__init__.py").write_text(FIXED)
    rows, failures = run(release, release_path=folder)
    assert not rows
    assert "is not what was installed, so it is not that release" in failures[0].message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda info: shutil.copytree(info, info.with_name("reproducer_toy-2.0.dist-info")), "twice"),
        (lambda info: (info / "RECORD").unlink(), "has no RECORD"),
        (lambda info: (info / "RECORD").write_text("reproducer_toy/__init__.py,,\n"), "without hashes"),
        (lambda info: (info / "RECORD").write_text(""), "without hashes"),
        (
            lambda info: (info / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///x"}'),
            "editable",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused_in_one_sentence(folder, run, change, said):
    change(folder / "reproducer_toy-1.0.dist-info")
    _, failures = run(runner.Release(version="1.0", file="", sha256=""), release_path=folder)
    assert said in failures[0].message
    assert "\n" not in failures[0].message


def test_a_second_owner_of_the_import_name_is_refused(folder, run):
    info = folder / "usurper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: usurper\nVersion: 1.0\n")
    (info / "RECORD").write_text("reproducer_toy/__init__.py,sha256=x,1\n")
    _, failures = run(runner.Release(version="1.0", file="", sha256=""), release_path=folder)
    assert "is installed by usurper, too" in failures[0].message


def test_a_wheel_in_the_active_environment_is_unpacked_again_when_edited(wheels, run, plan):
    release = runner.Release(version="1.0", file="", sha256="")
    given = {"here": True, "wheels": {"1.0": wheels["1.0"]}}
    assert run(release, **given)[0][0].verdict.outcome == "REPRODUCED"
    unpacked = next((plan.cache / "wheels").glob("*/reproducer_toy/__init__.py"))
    unpacked.write_text(FIXED)
    rows, _ = run(release, **given)
    assert [row.verdict.outcome for row in rows] == ["REPRODUCED", "ABSENT"]
    assert any("installed afresh" in note for row in rows for note in row.notes)


def test_an_sdist_in_the_active_environment_is_compared_with_its_archive(wheels, run, plan, tmp_path):
    import tarfile

    root = tmp_path / "reproducer_toy-1.0"
    (root / "reproducer_toy").mkdir(parents=True)
    (root / "reproducer_toy" / "__init__.py").write_text(BUGGY)
    (root / "reproducer_toy.egg-info").mkdir()
    (root / "reproducer_toy.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: reproducer-toy\nVersion: 1.0\n")
    with tarfile.open(tmp_path / "reproducer_toy-1.0.tar.gz", "w:gz") as tar:
        tar.add(root, root.name)
    release = runner.Release(version="1.0", file="", sha256="")
    given = {"here": True, "wheels": {"1.0": tmp_path / "reproducer_toy-1.0.tar.gz"}}
    assert run(release, **given)[0][0].verdict.outcome == "REPRODUCED"
    next((plan.cache / "wheels").glob("*/*/reproducer_toy/__init__.py")).write_text(FIXED)
    rows, _ = run(release, **given)
    assert rows[0].verdict.outcome == "REPRODUCED"


def test_the_whole_release_is_read(tmp_path):
    """Every file counts, whatever its kind; measured, not asserted: liger-kernel 0.8.2 takes 20 ms."""
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (tmp_path / "toy").mkdir()
    lines = []
    for name in ("a.py", "data.bin", "lib.so"):
        (tmp_path / "toy" / name).write_bytes(b"x")
        lines.append(f"toy/{name},sha256={integrity.sha256(tmp_path / 'toy' / name)},1")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    integrity.verify("toy", tmp_path, [tmp_path], owned=True)
    for name in ("a.py", "data.bin", "lib.so"):
        (tmp_path / "toy" / name).write_bytes(b"y")
        with pytest.raises(integrity.Tampered, match=name):
            integrity.verify("toy", tmp_path, [tmp_path], owned=True)
        (tmp_path / "toy" / name).write_bytes(b"x")


def test_two_copies_of_a_project_are_not_one(tmp_path):
    for version in ("1.0", "2.0"):
        info = tmp_path / f"toy-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n")
    with pytest.raises(UserError, match=r"twice, 1\.0 and 2\.0"):
        integrity.distribution("toy", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda site: (site / "_base.pth").write_text((site / "_base.pth").read_text() + "import sys\n"),
        lambda site: (site / ".x.pth").write_text("import sys\n"),
        lambda site: (site.parent.parent.parent / "pyvenv.cfg").unlink(),
        lambda site: (site.parent.parent.parent / "bin" / "python").unlink(),
        lambda site: ((site / "kept").mkdir(), (site / "reproducer_toy" / "__pycache__").symlink_to(site / "kept")),
    ],
    ids=["our own pth", "a hidden pth", "pyvenv.cfg", "its Python", "a linked folder"],
)
def test_what_we_put_there_counts_as_well(wheels, index, run, plan, change):
    assert any("installed afresh" in note for note in notes_after(wheels, index, run, plan, change))


def test_who_waits_for_an_environment_does_not_wait_for_those_who_use_it(tmp_path):
    """A hunt holds a release's environment for hours; a run that was about to make the same one begins once it is there."""
    lock, whole, filled = tmp_path / "env.lock", threading.Event(), []
    with locked(lock):
        waiting = threading.Thread(target=fill_once, args=(lock, whole.is_set, lambda: filled.append(1)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "it is not whole, and another is at it"
        whole.set()
        waiting.join(5)
        assert not waiting.is_alive()
    assert filled == []
    whole.clear()
    fill_once(lock, whole.is_set, lambda: (filled.append(1), whole.set()))
    assert filled == [1]
