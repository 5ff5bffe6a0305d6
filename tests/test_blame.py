"""Which spans are looked at, which commits are in them, and after which the verdict is another."""

import subprocess

import pytest

from common import files
from common.errors import UserError
from common.packs.pack import find
from common.run import blame
from common.run.blame import Commit, Span
from common.store import history

PACK = find("pack09")


def git(folder, *words):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.example", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def runs():
    return history.load(files.RESULTS, [PACK]).of("pack09", "liger-kernel")


def test_spans_are_the_neighbours_whose_recorded_verdicts_differ():
    found = [(span.before, span.after, *span.outcomes) for span in blame.spans(runs())]
    assert found == [
        ("0.5.2", "0.5.3", "CHANGED", "REPRODUCED"),
        ("0.5.8", "0.5.9", "REPRODUCED", "CHANGED"),
        ("0.6.2", "0.6.3", "CHANGED", "REPRODUCED"),
        ("0.8.1", "0.8.2", "REPRODUCED", "ABSENT"),
    ]


def test_files_are_those_that_ran_and_those_that_the_fix_changes():
    assert blame.files(PACK, runs()) == ["src/liger_kernel/ops/fused_linear_cross_entropy.py"]


@pytest.fixture
def clone(tmp_path):
    git(tmp_path, "init", "--quiet")
    for name, subject in (("a.py", "first (#1)"), ("b.py", "other"), ("a.py", "second (#22)"), ("a.py", "third")):
        (tmp_path / name).write_text(subject)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "--quiet", "-m", subject)
    git(tmp_path, "tag", "v1.0", "HEAD~3")
    git(tmp_path, "tag", "v1.1", "HEAD")
    return tmp_path


def test_commits_are_those_after_the_first_that_touch_the_files(clone):
    found = blame.commits(clone, Span(before="1.0.0", after="1.1"), ["a.py"])
    assert [(commit.subject, commit.pull_request) for commit in found] == [("second (#22)", "22"), ("third", "")]
    assert len(blame.commits(clone, Span(before="v1.0", after="HEAD"), ["."])) == 3


def test_a_release_without_a_tag_is_said(clone):
    with pytest.raises(UserError, match=r"has no tag of 3\.0: fetch its tags, or say --between"):
        blame.ref(clone, "3.0")


def test_a_bug_that_came_twice_is_found_twice():
    commits = [Commit(sha=str(i), day="", subject="") for i in range(6)]
    shown = zip(commits, ("ABSENT", "REPRODUCED", "UNTESTABLE", "REPRODUCED", "ABSENT", "REPRODUCED"), strict=True)
    found = [(commit.sha, before, after) for commit, before, after in blame.turns(shown, "ABSENT")]
    assert found == [("1", "ABSENT", "REPRODUCED"), ("4", "REPRODUCED", "ABSENT"), ("5", "ABSENT", "REPRODUCED")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--source", "nowhere"], "is not a folder"),
        ([], "--source"),
        (["--source", ".", "--between", "v1"], "give two commits, branches or tags"),
    ],
)
def test_mistakes_are_one_sentence(cli, words, said):
    done = cli("blame", "pack09", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({1}, ["other", "second (#22)"]),  # brought by a commit that touches another file
        ({2, 3}, ["second (#22)"]),
        ({2}, ["second (#22)", "third"]),
        ({3}, ["third"]),
        (set(), []),
    ],
)
def test_a_commit_is_named_whose_own_parent_shows_what_was_there_before(clone, bad, named):
    order = git(clone, "rev-list", "--reverse", "HEAD").split()

    def shows(commits):
        return {commit.sha: "REPRODUCED" if order.index(commit.sha) in bad else "ABSENT" for commit in commits}

    found = blame.search(clone, Span(before="v1.0", after="HEAD"), ["a.py"], ["."], shows)
    assert [commit.subject for commit, _, _ in found.turns] == named


def test_a_change_that_no_commit_to_the_file_made_is_found_elsewhere(clone):
    order = git(clone, "rev-list", "--reverse", "HEAD").split()

    def shows(commits):
        return {commit.sha: ["ABSENT", "REPRODUCED", "REPRODUCED", "REPRODUCED"][order.index(commit.sha)] for commit in commits}

    found = blame.search(clone, Span(before="v1.0", after="HEAD"), ["a.py"], ["."], shows)
    assert [commit.subject for commit, _, _ in found.turns] == ["other"]
    assert [commit.sha for commit in found.commits] == order
