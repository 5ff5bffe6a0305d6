"""Which spans are looked at, which commits are in them, and after which the verdict is another."""

import subprocess
from types import SimpleNamespace

import pytest

from common import files
from common.cli.blame import _Runner
from common.errors import UserError
from common.install import checkouts
from common.packs.pack import find
from common.run import blame
from common.run import plan as plans
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


def commit(clone, name):
    return blame.commit(clone, name)


def test_commits_are_those_after_the_first_that_touch_the_files(clone):
    found = blame.commits(clone, commit(clone, "v1.0"), commit(clone, "v1.1"), ["a.py"])
    assert [(each.subject, each.pull_request) for each in found] == [("second (#22)", "22"), ("third", "")]
    assert len(blame.commits(clone, commit(clone, "v1.0"), commit(clone, "HEAD"), ["."])) == 3


def test_a_release_without_a_tag_is_said_and_a_branch_of_its_name_is_none(clone):
    git(clone, "branch", "v3.0")
    assert checkouts.tag(clone, "1.0.0", "") == "refs/tags/v1.0"
    with pytest.raises(UserError, match=r"has no tag of 3\.0: fetch its tags, or say --between"):
        checkouts.tag(clone, "3.0", "say --between REF..REF")


def test_a_range_the_wrong_way_round_is_said(clone):
    with pytest.raises(UserError, match="name the older one first"):
        blame.ends(clone, "v1.1", "v1.0")


def found(clone, outcomes, before="v1.0", after="HEAD", paths=("a.py",)):
    """What is told of commits that show ``outcomes``, by their first lines; all others show ABSENT."""

    def shows(commits):
        return {each.sha: outcomes.get(each.subject, "ABSENT") for each in commits}

    return blame.search(clone, *blame.ends(clone, before, after), paths, ["."], shows)


def named(found):
    return [(turn.commit.subject, [each.subject for each in turn.suspects]) for turn in found.turns]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (["other"], ["other", "second (#22)"]),  # brought by a commit that touches another file
        (["other", "second (#22)", "third"], ["other"]),
        (["second (#22)", "third"], ["second (#22)"]),
        (["second (#22)"], ["second (#22)", "third"]),
        (["third"], ["third"]),
        ([], []),
    ],
)
def test_a_commit_is_named_whose_own_parent_shows_what_was_there_before(clone, bad, told):
    assert [name for name, _ in named(found(clone, dict.fromkeys(bad, "REPRODUCED")))] == told


def test_commits_that_cannot_be_run_are_suspects(clone):
    shown = {"other": "UNTESTABLE", "second (#22)": "UNTESTABLE", "third": "REPRODUCED"}
    assert named(found(clone, shown)) == [("third", ["other", "second (#22)"])]
    shown = {"first (#1)": "UNTESTABLE", "other": "REPRODUCED", "second (#22)": "REPRODUCED", "third": "REPRODUCED"}
    assert named(found(clone, shown)) == [], "what cannot be run is no state to change from"


def branch(clone, name, at, *files):
    git(clone, "checkout", "--quiet", "-b", name, at)
    for file, subject in files:
        (clone / file).write_text(subject)
        git(clone, "add", "-A")
        git(clone, "commit", "--quiet", "-m", subject)


def test_what_a_merge_brings_is_one_step_of_the_branch_that_it_is_on(clone):
    main = git(clone, "branch", "--show-current")
    branch(clone, "side", "v1.0", ("a.py", "a comment"))
    git(clone, "checkout", "--quiet", main)
    git(clone, "merge", "--quiet", "--strategy=ours", "-m", "Merge pull request #7 from side", "side")
    (clone / "a.py").write_text("evil")
    git(clone, "commit", "--quiet", "--amend", "-a", "--no-edit")
    bad = dict.fromkeys(["first (#1)", "other", "second (#22)", "a comment"], "REPRODUCED")
    assert named(found(clone, bad)) == [("third", [])], "the comment's branch is of an older state"
    told = found(clone, {**bad, "third": "REPRODUCED"}).turns
    assert [(turn.commit.subject, turn.commit.pull_request) for turn in told] == [("Merge pull request #7 from side", "7")]


def test_a_release_branch_is_left_for_where_the_other_one_left_it(clone):
    main = git(clone, "branch", "--show-current")
    branch(clone, "release", "HEAD~1", ("a.py", "a fix of the release alone"))
    start, _ = blame.ends(clone, "release", main)
    assert start.subject == "second (#22)"
    told = found(clone, dict.fromkeys(["first (#1)", "second (#22)", "third"], "REPRODUCED"), "release", main)
    assert named(told) == []


def test_a_shallow_clone_is_refused(clone, tmp_path, cli):
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{clone}", tmp_path / "shallow")
    done = cli("blame", "pack09", "--source", tmp_path / "shallow")
    assert (done.returncode, "is a shallow clone" in done.stderr) == (2, True)
    done = cli("blame", "pack09", "--source", tmp_path / "nowhere")
    assert (done.returncode, "is not a folder" in done.stderr) == (2, True)


def test_runs_of_another_machine_or_lane_and_what_could_not_be_run_are_no_answer(clone, tmp_path, monkeypatch):
    run = _Runner(plans.planned(PACK, "", "triton-interpreter", results=tmp_path, machine="here"), clone, 1, None, again=False)
    seen = [("a", "here", "triton-interpreter"), ("b", "there", "triton-interpreter"), ("c", "here", "device")]
    runs = [SimpleNamespace(version=v, machine=m, lane=lane, side="unpatched", stale=False) for v, m, lane in seen]
    monkeypatch.setattr(history, "load", lambda *_: SimpleNamespace(runs=runs))
    monkeypatch.setattr(blame, "outcome", lambda seen: "ABSENT")
    for each in runs:
        each.evidence = "interpreter"
    assert run._known() == {"a": ("ABSENT", "interpreter")}
