"""The receipts are brought up to date, release by release; what changed is told, whatever interrupts or goes wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
from helpers import ROOT, raw

from common.errors import UserError
from common.install import releases
from common.install.releases import Release
from common.packs.pack import find
from common.process import MARKER
from common.run import pool, regress, runner
from common.run.plan import Plan
from common.store import history, receipt
from common.store.cell import SIDES, Cell


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(cache, tmp_path):
    """Calls `regress` in this process on toy releases, by default a right one and a wrong one."""

    def call(versions=("1.0", "2.0"), *, pack=None, confirm=1, say=lambda line: None, workers=None, again=False, extra=()):
        pack = pack or find("pack00")
        plan = Plan(pack=pack, lane="device", results=tmp_path / "results", machine="here", cache=cache)

        def load():
            return history.load(plan.results, [pack])

        with pool.threads(2) as threads, regress.alone(plan.results, "here") as journal:
            work = regress.plan([pack], load(), plan_for=lambda *_: plan, again=again)
            keep = {"cells": [c for c in work.cells if c[1].version in versions] + [(plan, r) for r in extra]}
            keep["tasks"] = [t for t in work.tasks if t[1].version in versions] + [(plan, r) for r in extra]
            work = replace(work, **keep)
            return regress.run(work, journal, workers or threads, load, confirm=confirm, say=say)

    return call


def stored(tmp_path, version, side="unpatched"):
    return tmp_path / "results" / "here" / "pack00" / f"reproducer-toy-{version}.{side}.json"


def rewrite(path, *, stale=True, **facts):
    """As if the cell had shown something else, with another script."""
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"].update(facts)
    if facts.get("outcome") in ("ABSENT", "REPRODUCED"):
        document["predicate"]["reproducer"].update(
            proofs=dict.fromkeys(("agreement", "control", "trigger"), ""), evidence="source"
        )
    if stale:
        document["predicate"]["configuration"][0]["digest"]["sha256"] = "0" * 64
    path.write_text(json.dumps(document))


def test_a_fresh_receipt_is_not_made_again(here, tmp_path):
    first = here()
    assert (first.ran, first.cells, first.as_expected, first.changes) == (3, 4, True, [])
    before = stored(tmp_path, "1.0").read_bytes()
    second = here()
    assert (second.ran, second.cells, second.as_expected) == (0, 4, True)
    assert stored(tmp_path, "1.0").read_bytes() == before
    rewrite(stored(tmp_path, "1.0"))
    third = here()
    assert third.ran == 2
    assert third.changes == []
    assert third.stale == {}
    assert here(again=True).ran == 3


def test_what_changed_is_told_by_its_word(here, tmp_path):
    here(("1.0", "2.0", "4.0"))
    rewrite(stored(tmp_path, "1.0"), outcome="ABSENT")
    rewrite(stored(tmp_path, "1.0", "patched"), outcome="REPRODUCED")
    rewrite(stored(tmp_path, "2.0"), outcome="REPRODUCED")
    rewrite(stored(tmp_path, "4.0"), outcome="ABSENT")
    report = here(("1.0", "2.0", "4.0"), confirm=3)
    told = {(c.cell.version, c.cell.side): (c.kind, c.agree, c.runs) for c in report.changes}
    assert told == {
        ("1.0", "unpatched"): ("regressed", 3, 3),
        ("1.0", "patched"): ("fixed", 3, 3),
        ("2.0", "unpatched"): ("fixed", 3, 3),
        ("4.0", "unpatched"): ("broken", 3, 3),
    }
    assert report.as_expected, "a change to what the pack expects is a change all the same"
    assert "BUG_ABSENT → BUG_REPRODUCED (3 of 3 runs), source" in str(report.changes[0])


def test_runs_that_differ_are_flaky(here, tmp_path, monkeypatch):
    here()
    rewrite(stored(tmp_path, "2.0"), outcome="REPRODUCED")
    real, calls = runner.run_all, []

    def flaky(tasks, workers, **given):
        rows, failures = real(tasks, workers, **given)
        calls.append(len(tasks))
        if len(calls) == 2:
            rows = [replace(row, verdict=replace(row.verdict, outcome="REPRODUCED")) for row in rows]
        return rows, failures

    monkeypatch.setattr(runner, "run_all", flaky)
    report = here(confirm=3)
    assert [(c.kind, c.agree, c.runs) for c in report.changes] == [("flaky", 2, 3)]
    assert not report.as_expected
    assert "its runs differ" in report.unexpected[0]


def test_a_new_release_is_compared_with_the_one_before_it(here):
    here(("1.0",))
    report = here(("1.0", "2.0", "3.0"))
    assert [(c.kind, c.cell.version, c.before_version) for c in report.changes] == [
        ("fixed", "2.0", "1.0"),
        ("broken", "3.0", "2.0"),
    ]


def test_what_is_not_expected_is_told_with_the_reason(here):
    pack = find("pack00")
    wrong = replace(pack, expected=tuple(replace(e, verdict="ABSENT") if e.range == "==1.0" else e for e in pack.expected))
    report = here(pack=wrong)
    assert not report.as_expected
    assert "1.0 unpatched: expected ABSENT (the buggy release), saw REPRODUCED" in report.unexpected[0]


def test_a_cell_that_fails_stops_no_other(here, tmp_path):
    report = here(extra=[Release(version="99.0", file="", sha256="")])
    assert len(report.problems) == 1
    assert "reproducer-toy 99.0: KeyError" in report.problems[0]
    assert not report.as_expected
    assert stored(tmp_path, "2.0").is_file()


def test_a_receipt_that_is_not_whole_is_made_again_and_a_newer_one_is_left_alone(here, tmp_path):
    here()
    stored(tmp_path, "1.0").write_text('{"_type":')
    document = json.loads(stored(tmp_path, "2.0").read_text())
    document["predicate"]["reproducer"]["schema"] = 99
    stored(tmp_path, "2.0").write_text(json.dumps(document))
    before = stored(tmp_path, "2.0").read_bytes()
    report = here()
    assert report.ran == 2
    assert receipt.read(stored(tmp_path, "1.0"))
    assert stored(tmp_path, "2.0").read_bytes() == before
    assert any("left alone" in problem and "update the checkout" in problem for problem in report.problems)


def test_a_clock_that_jumps_changes_nothing(here, tmp_path):
    here()
    rewrite(stored(tmp_path, "1.0"), stale=False, started="2093-01-01T00:00:00Z")
    os.utime(stored(tmp_path, "2.0"), (0, 0))
    report = here()
    assert (report.ran, report.as_expected) == (0, True)


def test_yanked_and_deleted_releases_are_said(monkeypatch, tmp_path, store):
    pack = find("pack09")
    store(tmp_path, version="0.0.1", stale=True, machine="here")
    known = [Release(version="0.7.0", file="w", sha256="0", yanked=True)]
    monkeypatch.setattr(releases, "releases", lambda package, cache, **_: (known, None))
    plan = Plan(pack=pack, lane="triton-interpreter", results=tmp_path, machine="here")
    work = regress.plan([pack], history.load(tmp_path, [pack]), plan_for=lambda *_: plan)
    assert any("0.0.1 is no longer on the index" in warning for warning in work.warnings)
    assert any("yanked from the index by its publisher, and run all the same: 0.7.0" in warning for warning in work.warnings)
    assert [release.version for _, release in work.tasks] == ["0.7.0"]


def test_which_releases(monkeypatch, tmp_path, store):
    pack = find("pack09")
    for version in ("0.7.0", "0.8.1"):
        store(tmp_path, version=version, machine="elsewhere")
    store(tmp_path, version="0.8.0", machine="here")
    versions = ("0.6.5", "0.7.0", "0.8.0", "0.8.1", "0.8.2", "0.9.0rc1", "0.9.0")
    monkeypatch.setattr(
        releases, "releases", lambda package, cache, **_: ([Release(version=v, file="w", sha256="0") for v in versions], None)
    )
    plan = Plan(pack=pack, lane="triton-interpreter", results=tmp_path, machine="here")
    stored = history.load(tmp_path, [pack])

    def chosen(**how):
        work = regress.plan([pack], stored, plan_for=lambda *_: plan, **how)
        return [release.version for _, release in work.cells]

    assert chosen() == list(versions)
    assert chosen(which="pinned") == ["0.7.0", "0.8.2"]
    assert chosen(which="new") == [v for v in versions if v != "0.8.0"]
    assert chosen(since="0.8.1") == ["0.8.1", "0.8.2", "0.9.0rc1", "0.9.0"]
    assert chosen(newer=True) == ["0.8.2", "0.9.0rc1", "0.9.0"], "newer than the receipts of any machine"
    assert chosen(newer=True, pre=False) == ["0.8.2", "0.9.0"]
    pending = [Cell(pack="pack09", dist="liger-kernel", version="0.7.0", side=side) for side in SIDES]
    assert chosen(newer=True, pending=pending) == ["0.7.0", "0.8.2", "0.9.0rc1", "0.9.0"], "taken on by a call that was stopped"


def test_an_index_that_does_not_answer_stops_only_its_own_packs(cli, cache, tmp_path):
    env = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple/"}
    # The cache knows no list of liger-kernel.
    done = cli("regress", "--pack", "9", "--pack", "0", "--since", "12", "--results", tmp_path / "r", cache=cache, env=env)
    assert done.returncode == 1
    assert "✗ pack09: The package index did not answer for liger-kernel" in done.stdout
    assert "2 runs, 4 cells" in done.stdout
    assert len(list((tmp_path / "r").glob("*/pack00/*.json"))) == 4
    assert "Traceback" not in done.stderr + done.stdout


def start(results, cache, *more):
    command = [sys.executable, "-m", "common", "regress", "--pack", "00", "--results", str(results), *more]
    environ = {**os.environ, "REPRODUCER_CACHE": str(cache)}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("nothing happened")


def running(cache, label=""):
    """Processes of the cells that are being run with this cache."""
    cells = {path.parent.name for path in cache.glob("cells/*/cell") if label in path.read_text()}
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get("HOME", "").startswith(str(cache)) and (not label or environ.get(MARKER) in cells):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.hostile
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_call_that_was_stopped_goes_on_where_it_stopped(cli, cache, tmp_path, how):
    results = tmp_path / "r"
    done = cli("regress", "--pack", "00", "--since", "13", "--results", results, cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    path = next(results.glob("*/pack00/reproducer-toy-13.0.unpatched.json"))
    rewrite(path, outcome="ABSENT")  # so that there is a change to tell
    process = start(results, cache, "--since", "7", "--jobs", "1", "--confirm", "1")
    # 7.0 hangs until its time limit, and is the first to be run.
    until(lambda: running(cache, "7.0"))
    process.send_signal(how)
    _, error = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert "Traceback" not in error
    if how == signal.SIGINT:
        assert not running(cache)
        assert not list(cache.glob("cells/*/"))
    assert not list(results.glob("*/pack00/*-7.0.*"))
    assert not list(results.rglob("*.tmp"))
    done = cli("regress", "--pack", "00", "--since", "7", "--confirm", "1", "--results", results, cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 releases: 0 with fresh receipts" in done.stdout
    assert ("cleared away: pack00 reproducer-toy 7.0 unpatched" in done.stdout) == (how == signal.SIGKILL)
    assert "Resuming a call that was stopped" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "broken     pack00 reproducer-toy 13.0 unpatched: BUG_ABSENT → UNTESTABLE: oom"
    )
    assert not running(cache)
    assert not list(cache.glob("cells/*/"))
    done = cli("regress", "--pack", "00", "--since", "7", "--results", results, cache=cache)
    assert "7 with fresh receipts, 0 to run" in done.stdout
    assert done.stdout.splitlines()[-1] == "Nothing changed."


def test_two_at_once_on_one_folder(cli, cache, tmp_path):
    with regress.alone(tmp_path / "r", "here"):
        done = cli("regress", "--pack", "00", "--machine", "here", "--results", tmp_path / "r", cache=cache)
    assert done.returncode == 2
    assert done.stderr.startswith("Another call is running the cells of")
    assert done.stderr.count("\n") == 1


def test_two_writers_of_one_cell_leave_a_whole_pair(cache, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    plan = Plan(pack=find("pack00"), lane="device", results=tmp_path, machine="here", cache=cache)
    wheel = releases.built_wheels(plan.pack, cache)["1.0"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: runner.run_release(plan, Release(version="1.0", file=wheel.name, sha256="")), range(8)))
    for path in receipt.stored(tmp_path):
        receipt.read_log(path, receipt.read(path))
    assert len(list(tmp_path.glob("here/pack00/*.log"))) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pack", "00"], "The self-test's receipts are no record of a release"),
        (["--pack", "77"], "There is no pack '77'"),
        (["--upstream", "numpy"], "No pack is about 'numpy'; there are packs about"),
        (["--since", "next"], "--since next is not a version"),
        (["--jobs", "0"], "--jobs 0"),
        (["--confirm", "0"], "--confirm 0"),
        (["--machine", "a/b"], "is not a folder name"),
        (["--pack", "00", "--dry-run", "--results", "README.md"], "README.md is not a folder: name one with --results."),
        pytest.param(
            ["--pack", "00", "--results", "RESULTS", "--scheduler", "tcp://127.0.0.1:9"],
            "No dask scheduler answers at",
            marks=pytest.mark.cluster,
        ),
    ],
)
def test_a_mistake_is_one_sentence(cli, cache, tmp_path, arguments, said):
    arguments = [str(tmp_path / "r") if word == "RESULTS" else word for word in arguments]
    done = cli("regress", *arguments, cache=cache, env={"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_dry_run_says_what_it_would_do(cli, cache, tmp_path):
    done = cli("regress", "--pack", "00", "--since", "12", "--dry-run", "--results", tmp_path / "r", cache=cache)
    assert done.returncode == 0
    assert "pack00 reproducer-toy (device): 12.0, 13.0" in done.stdout
    assert not (tmp_path / "r").exists()


def test_watch_runs_what_is_newer_and_exits_with_3_when_something_changed(cli, cache, tmp_path):
    results = tmp_path / "r"
    done = cli("run", "pack00", "--release", "10.0,11.0", "--results", results, results=False, cache=cache)
    done = cli("watch", "--pack", "00", "--confirm", "2", "--results", results, cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["ran"], found["cells"], found["changes"]) == (2, 4, [])
    for path in results.glob("*/pack00/*-1[23].*"):
        path.unlink()
    rewrite(next(results.glob("*/pack00/*-11.0.unpatched.json")), stale=False, outcome="ABSENT")
    done = cli("watch", "--pack", "00", "--confirm", "2", "--results", results, "--json", tmp_path / "w.json", cache=cache)
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads((tmp_path / "w.json").read_text())
    assert [(c["kind"], c["version"], c["before_version"], c["agree"]) for c in found["changes"]] == [
        ("broken", "12.0", "11.0", 2)
    ]
    assert done.stdout.splitlines()[-1].startswith("broken     pack00 reproducer-toy 12.0 unpatched: BUG_ABSENT in 11.0")
    done = cli("watch", "--pack", "00", "--results", results, cache=cache)
    assert done.returncode == 0
    assert json.loads(done.stdout)["cells"] == 0


def comparable(results):
    """What stored runs say, without times and what depends on them."""
    found = {}
    for path in receipt.stored(results):
        facts = raw(path)["predicate"]["reproducer"]
        for name in ("started", "seconds", "peak_rss", "log"):
            facts.pop(name)
        facts["environment"]["settings"] = {}
        found[path.name] = facts
    return found


@pytest.mark.cluster
def test_a_cluster_gives_the_same_even_when_a_worker_is_killed(cache, tmp_path):
    from distributed import LocalCluster

    pack = find("pack00")
    plan = Plan(pack=pack, lane="device", results=tmp_path / "cluster", machine="here", cache=cache)
    chosen = [r for r in releases.of(pack, cache)[0] if r.version in ("1.0", "2.0", "3.0", "4.0", "7.0", "12.0")]

    def kill():
        # 7.0 hangs for three seconds: the worker that waits for it is killed meanwhile.
        until(lambda: running(cache, "7.0"))[0].parent().kill()

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as local,
        pool.cluster(local.scheduler_address) as workers,
    ):
        killer = threading.Thread(target=kill)
        killer.start()
        rows, failures = runner.run_all([(plan, release) for release in chosen], workers)
        killer.join()
    assert failures == []
    assert runner.killed(cache) == ["pack00 reproducer-toy 7.0 unpatched"]
    assert len(rows) == 12
    with pool.threads(2) as threads:
        runner.run_all([(replace(plan, results=tmp_path / "local"), release) for release in chosen], threads)
    assert comparable(tmp_path / "cluster") == comparable(tmp_path / "local")
    assert not running(cache)


def test_a_cluster_of_different_machines_is_refused():
    with pytest.raises(UserError, match="not of one kind"):
        pool._one_answer({"a": "linux-x86_64-cpu", "b": "linux-x86_64-nvidia-h200"}, lambda: "")
    with pytest.raises(UserError, match="no worker"):
        pool._one_answer({}, lambda: "")
