"""An odd stored file is named and hides no other; a receipt that is not of its log is found; nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest
from helpers import FACTS, ROOT, judged, make_log, raw
from msgspec import structs

from common.errors import UserError
from common.packs.pack import all_packs, find
from common.publish import pins, timeline
from common.run import pool, regress, runner
from common.store import audit, history, receipt
from common.store.grade import grade

pytestmark = pytest.mark.hostile

PACK = find("pack09")
VARIANT = next(iter(find("pack04").variants.values()))


def loaded(results):
    return history.load(results, [PACK])


def wrong(results, paths):
    """What is wrong with each receipt, or why it cannot be read."""
    return {path: found or [why] for path, found, why in audit.problems(results, paths, audit.regrade) if found or why}


def edit(path, **facts):
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"].update(facts)
    path.write_text(json.dumps(document))


ODD = {
    "a lane that is gone": lambda path: edit(path, lane="quantum"),
    "a lone surrogate": lambda path: path.write_text(path.read_text().replace('"reason": ""', '"reason": "\\ud800"')),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{"),
    "cut in half": lambda path: path.write_text(path.read_text()[:200]),
    "a list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "another release's": lambda path: edit(path, version="0.8.5"),
    "a name with a path": lambda path: edit(path, patch={"name": "../../../x", "sha256": "0" * 64}),
    "a log with a path": lambda path: edit(path, log={"name": "../x.log", "sha256": "0" * 64, "cut": 0}),
    "a version with a path": lambda path: edit(path, version="../../0.7.0"),
    "an empty file": lambda path: path.write_text(""),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_receipt_is_named_and_the_rest_goes_on(kind, tmp_path, store):
    odd = store(tmp_path, version="0.6.5")
    store(tmp_path, version="0.7.0")
    ODD[kind](odd)
    found = loaded(tmp_path)
    assert "0.7.0" in [seen.version for seen in found.runs]
    if kind == "a lane that is gone":
        assert next(seen for seen in found.runs if seen.version == "0.6.5").stale
    else:
        assert odd in found.unreadable
        assert str(odd) in str(found.unreadable[odd])
    for make in (
        lambda: timeline.markdown([PACK], found).encode(),
        lambda: msgspec.json.encode(timeline.document([PACK], found)),
        lambda: timeline.atom([PACK], found).encode(),
        lambda: list(pins.text(pins.advise(PACK.package, [PACK], found))),
    ):
        make()
    problems = wrong(tmp_path, receipt.stored(tmp_path))
    assert odd in problems


def test_an_odd_log_is_named(tmp_path, store):
    path = store(tmp_path)
    log = path.parent / raw(path)["predicate"]["reproducer"]["log"]["name"]
    log.write_bytes(b"\xff\xfe")
    assert "is not the one" in wrong(tmp_path, [path])[path][0]
    import hashlib

    edit(path, log={"name": log.name, "sha256": hashlib.sha256(b"\xff\xfe").hexdigest(), "cut": 0})
    assert "is not UTF-8" in wrong(tmp_path, [path])[path][0]


def test_receipts_without_a_machine_are_named(tmp_path, store):
    store(tmp_path)
    store(tmp_path, machine="other")
    (tmp_path / "other" / "machine.json").unlink()
    found = loaded(tmp_path)
    assert {seen.machine for seen in found.runs} == {"test-machine"}
    assert any(path.name == "machine.json" and path.parent.name == "other" for path in found.unreadable)
    assert "machine.json is missing" in str(wrong(tmp_path, receipt.stored(tmp_path)))


def test_a_log_that_no_receipt_names_is_named(tmp_path, store):
    path = store(tmp_path)
    orphan = path.with_name("liger-kernel-0.7.0.unpatched.0123456789ab.log")
    orphan.write_text("x")
    assert wrong(tmp_path, receipt.stored(tmp_path))[orphan] == ["no receipt names this log"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"version": "0.8.5"}, "its version is '0.8.5', and its log is of '0.7.0'"),
        ({"lane": "device"}, "its lane is 'device'"),
        ({"claims": ["BITWISE_IDENTICAL"]}, "claims was"),
        ({"metrics": {"speed": 100}}, "metrics was"),
        ({"evidence": "device:sm_90"}, "evidence was"),
        ({"bug_error": 0.25}, "bug_error was"),
        ({"exit": 0}, "its exit is 0"),
        ({"seconds": 0.5}, "its seconds is"),
        ({"proofs": {"trigger": "a", "control": "b", "agreement": "c"}}, "proofs was"),
    ],
)
def test_a_receipt_that_does_not_follow_from_its_log_is_found(facts, said, tmp_path, store):
    path = store(tmp_path)
    assert list(audit.regrade(path)) == []
    edit(path, **facts)
    assert any(said in problem for problem in audit.regrade(path)), list(audit.regrade(path))


def test_a_log_of_one_release_filed_as_another_is_found(tmp_path, store):
    path = store(tmp_path)
    other = path.with_name("liger-kernel-0.8.5.unpatched.json")
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"]["version"] = "0.8.5"
    other.write_text(json.dumps(document))
    assert any("its log is of '0.7.0'" in problem for problem in audit.regrade(other))


def test_evidence_of_a_gpu_needs_the_gpu(tmp_path, store):
    facts = {**FACTS, "evidence": "device:sm_90", "version": "0.7.0"}
    log = make_log(facts).replace("triton-interpreter", "device").replace('"version": "1.0"', '"version": "0.7.0"')
    assert grade(log.replace('"arguments"', '"gpus": ["sm_90"], "arguments"')).outcome == "REPRODUCED"
    assert grade(log.replace('"arguments"', '"gpus": [], "arguments"')).outcome == "ERROR"
    assert grade(log.replace('"arguments"', '"gpus": ["sm_80"], "arguments"')).outcome == "ERROR"
    path = store(tmp_path, log=log)  # An earlier log, which names no GPUs; nor does the receipt.
    edit(path, lane="device")
    assert any("its machine has no GPU" in problem for problem in audit.regrade(path))


def test_a_duplicate_pack_number_is_named_and_the_rest_goes_on(tmp_path):
    shutil.copytree(ROOT / "packs", tmp_path / "packs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tmp_path / "packs" / PACK.folder.name, tmp_path / "packs" / "pack09_other")
    (tmp_path / "packs" / "pack13_tilelang_floormod" / "pack.toml").write_text("not toml")
    problems = []
    found = [pack.name for pack in all_packs(tmp_path / "packs", problems)]
    assert "pack04" in found
    assert not {"pack09", "pack13"} & set(found)
    assert any("pack09_liger_reduction_none and pack09_other" in problem for problem in problems)
    assert any("pack13_tilelang_floormod/pack.toml is not valid TOML" in problem for problem in problems)
    with pytest.raises(UserError):
        all_packs(tmp_path / "packs")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"schema": 1}',
        '{"schema": 1, "started": [], "cells": {"x": 1}}',
        '{"schema": 1, "started": [1], "cells": {}}',
    ],
)
def test_a_broken_journal_is_said_and_the_call_goes_on(text, wheels, index, plan, monkeypatch):
    release = index.add(wheels["1.0"])
    monkeypatch.setattr(regress.releases, "of", lambda pack, cache: ([release], None))
    said = []
    with pool.threads(1) as workers, regress.alone(plan.results, plan.machine) as journal:
        journal.write_text(text)
        assert regress.pending(journal) == []
        work = regress.plan([plan.pack], history.History(), plan_for=lambda *_: plan)
        report = regress.run(work, journal, workers, lambda: history.load(plan.results, [plan.pack]), say=said.append)
    assert report.ran == 2
    assert "cannot be read" in said[0]


def test_a_report_that_cannot_be_handed_on_is_told_by_the_next_call(wheels, index, plan, monkeypatch):
    release = index.add(wheels["2.0"])
    monkeypatch.setattr(regress.releases, "of", lambda pack, cache: ([release], None))

    def load():
        return history.load(plan.results, [plan.pack])

    def call(deliver):
        with pool.threads(1) as workers, regress.alone(plan.results, plan.machine) as journal:
            work = regress.plan([plan.pack], load(), plan_for=lambda *_: plan)
            return regress.run(work, journal, workers, load, deliver=deliver)

    def fail(report):
        raise OSError("the disk is gone")

    call(lambda report: None)
    path = next(plan.results.rglob("*2.0.unpatched.json"))
    edit(path, outcome="REPRODUCED", schema=2)
    document = json.loads(path.read_text())
    document["predicate"]["configuration"][0]["digest"]["sha256"] = "0" * 64
    path.write_text(json.dumps(document))
    with pytest.raises(OSError, match="the disk is gone"):
        call(fail)
    assert [change.kind for change in call(lambda report: None).changes] == ["fixed"]


def test_watch_to_a_place_that_cannot_be_written_runs_nothing(cli, tmp_path):
    done = cli("watch", "--pack", "9", "--results", tmp_path / "results", "--json", "/proc/nowhere/x.json", results=False)
    assert done.returncode == 2
    assert "/proc/nowhere/x.json is in a folder that does not exist" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cluster
def test_ctrl_c_on_a_cluster_is_clean(tmp_path):
    """dask's executor takes no ``cancel_futures``: Ctrl-C ended in a TypeError."""
    pytest.importorskip("distributed")
    code = f"""
import sys
from common.run import runner, pool
from common.run.plan import Plan
from common.packs.pack import find
from common.install.releases import Release
from pathlib import Path
here = Path({str(tmp_path)!r})
if __name__ == "__main__":
    from dataclasses import replace
    pack = replace(find("pack00"), timeout=60)
    plan = Plan(pack=pack, lane="device", results=here / "r", machine="here", cache=here / "c")
    with pool.cluster("local", 1) as workers:
        print("ready", flush=True)
        try:
            runner.run_all([(plan, Release(version="7.0", file="", sha256=""))] * 3, workers)
        except KeyboardInterrupt:
            print("stopped", flush=True)
            sys.exit(130)
"""
    (tmp_path / "cluster.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "cluster.py")],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "stopped\n"), err
    assert "cancel_futures" not in err


STALE = {
    "timeout": {"timeout": 99.0},
    "memory": {"memory": 1.0},
    "beside": {"beside": ("six",)},
    "build": {"build": {"X": "1"}},
    "as_files": {"as_files": True},
    "requires": {"requires": ("six",)},
    "pinned packages of a variant": {"variants": {"v": structs.replace(VARIANT, arguments=("--other",))}},
}


@pytest.mark.parametrize("what", STALE)
def test_whatever_decides_a_run_makes_its_receipts_stale(what):
    pack = replace(PACK, variants={"v": VARIANT})
    assert replace(pack, **STALE[what]).hashes("unpatched", (), "v") != pack.hashes("unpatched", (), "v")


def test_the_toys_are_part_of_what_decides(tmp_path):
    pack = find("pack00")
    folder = tmp_path / pack.folder.name
    shutil.copytree(pack.folder, folder)
    other = replace(pack, folder=folder)
    assert other.hashes("unpatched") == pack.hashes("unpatched")
    (folder / "toys.py").write_text((folder / "toys.py").read_text() + "\n# changed\n")
    assert other.hashes("unpatched") != pack.hashes("unpatched")


@pytest.mark.parametrize("shown", [("ABSENT", "REPRODUCED", "REPRODUCED"), ("REPRODUCED", "REPRODUCED", "ABSENT")])
def test_a_flaky_cell_records_what_most_runs_show_and_is_never_advised(shown, wheels, index, plan, monkeypatch):
    """The release that is run changes from run to run, as a race would."""
    release = index.add(wheels["2.0"])
    monkeypatch.setattr(regress.releases, "of", lambda pack, cache: ([release], None))

    def load():
        return history.load(plan.results, [plan.pack])

    def call(workers, journal, **given):
        work = regress.plan([plan.pack], load(), plan_for=lambda *_: plan, again=True)
        return regress.run(work, journal, workers, load, **given)

    logs = {"ABSENT": None, "REPRODUCED": None}
    for outcome, version in (("REPRODUCED", "1.0"), ("ABSENT", "2.0")):
        rows, _ = runner.run_all(
            [(replace(plan, results=plan.results.with_name(version)), index.add(wheels[version]))], pool_of_one()
        )
        logs[outcome] = receipt.read_log(rows[0].receipt, receipt.read(rows[0].receipt)).replace(
            f'"version": "{version}"', '"version": "2.0"'
        )
    with pool.threads(1) as workers, regress.alone(plan.results, plan.machine) as journal:
        call(workers, journal)
        first = next(plan.results.rglob("*2.0.unpatched.json"))
        if shown[0] == "ABSENT":  # There has to be a change to be doubted.
            document = json.loads(first.read_text())
            document["predicate"]["reproducer"].update(outcome="REPRODUCED")
            first.write_text(json.dumps(document))
        real, turn = runner._log, iter([*shown, *shown])

        def flaky(plan, cell, *rest):
            return logs[next(turn)] if cell.side == "unpatched" else real(plan, cell, *rest)

        monkeypatch.setattr(runner, "_log", flaky)
        report = call(workers, journal)
    assert [(change.kind, change.runs) for change in report.changes] == [("flaky", 3)]
    assert not report.as_expected
    seen = next(seen for seen in load().runs if seen.side == "unpatched")
    assert (seen.outcome, seen.runs, seen.agree, seen.flaky) == ("REPRODUCED", 3, 2, True)
    assert "flaky: 2 of 3 runs" in seen.word
    assert len(list(first.parent.glob("*2.0.unpatched.*.log"))) >= 2, "the other runs are kept beside it"
    # The logs are put in here, so only how the real runs ended does not fit them.
    assert all(problem.startswith(("its exit", "its seconds", "its peak_rss")) for problem in audit.regrade(first))
    advice = pins.advise("reproducer-toy", [plan.pack], load())
    assert advice.pin is None
    assert "≈" in timeline.markdown([plan.pack], load())


def pool_of_one():
    from concurrent.futures import ThreadPoolExecutor

    return pool.Pool(executor=ThreadPoolExecutor(1), stop=None, ask=lambda f: f(), where="", cancel=lambda: None)


def test_a_flaky_release_without_the_bug_is_not_advised(tmp_path, store):
    path = store(
        tmp_path,
        log=make_log(
            {
                **FACTS,
                "verdict": "ABSENT",
                "version": "0.7.0",
                "checks": [FACTS["checks"][0], judged(FACTS["checks"][1], error=1e-7)],
            },
            sentinel="BUG_ABSENT",
            exit=0,
        ).replace('"version": "1.0"', '"version": "0.7.0"'),
    )
    assert pins.advise(PACK.package, [PACK], loaded(tmp_path)).pin == "0.7.0"
    facts = raw(path)["predicate"]["reproducer"]
    own = {"word": "BUG_ABSENT", "started": facts["started"], "log": {n: facts["log"][n] for n in ("name", "sha256")}}
    other = {**own, "word": "BUG_REPRODUCED", "log": {"name": "x.log", "sha256": "0" * 64}}
    edit(path, runs=[own, own, other])
    advice = pins.advise(PACK.package, [PACK], loaded(tmp_path))
    assert advice.pin is None
    assert "flaky: 2 of 3 runs" in " ".join(pins.text(advice))


@pytest.mark.parametrize(
    "facts", [{"bug_error": 10**400}, {"version": "abc"}, {"evidence": "device:<img src=x>"}, {"outcome": []}]
)
def test_what_a_table_cannot_take_is_named(facts, tmp_path, store):
    odd = store(tmp_path, version="0.6.5")
    store(tmp_path, version="0.7.0")
    edit(odd, **facts)
    found = loaded(tmp_path)
    assert [seen.version for seen in found.runs] == ["0.7.0"]
    assert odd in found.unreadable
    assert timeline.markdown([PACK], found)


def test_a_machine_is_no_markup(tmp_path, store):
    store(tmp_path, machine="<img src=x>")
    assert loaded(tmp_path).runs == () or not loaded(tmp_path).runs
    assert any("<img src=x>" in str(path) for path in loaded(tmp_path).unreadable)


def test_a_machine_is_not_called_as_a_folder_of_ours(cli):
    done = cli("run", "pack00", "--release", "1.0", "--machine", "attach")
    assert done.returncode == 2
    assert "not a machine's name" in done.stderr


def test_a_patch_receipt_follows_from_its_log(wheels, index, run, tmp_path):
    diff = "--- a/reproducer_toy/__init__.py\n+++ b/reproducer_toy/__init__.py\n@@ -1,2 +1,2 @@\n def total(xs):\n-    return xs[0] * len(xs)\n+    return sum(xs)\n"
    (tmp_path / "x.diff").write_text(diff)
    path = run(index.add(wheels["1.0"]), patch=tmp_path / "x.diff")[0][1].receipt
    facts = raw(path)["predicate"]["reproducer"]
    assert list(audit.regrade(path)) == []
    for patch in (None, {**facts["patch"], "sha256": "0" * 64}, {**facts["patch"], "skipped": ["x"]}):
        edit(path, patch=patch)
        assert any("its patch is" in problem for problem in audit.regrade(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("timeout", "1" + "0" * 400), ("memory", "inf"), ("timeout", "nan"), ("python", '"3.' + "9" * 5000 + '"')],
)
def test_a_pack_with_a_number_that_is_none_is_a_sentence(tmp_path, key, value):
    from common.packs.pack import load

    folder = tmp_path / "pack98_x"
    shutil.copytree(PACK.folder, folder)
    text = (folder / "pack.toml").read_text()
    (folder / "pack.toml").write_text(f"{key} = {value}\n{text}")
    with pytest.raises(UserError, match=key):
        load(folder)


def test_the_first_receipts_are_read_by_threads_at_the_same_time():
    """msgspec builds what it knows of a type when that is first asked for, and two threads that do so crash the process."""
    path = next((ROOT / "results").rglob("pack09/*.json"))
    code = f"""
import sys, threading
from pathlib import Path
from common.store import receipt
sys.setswitchinterval(1e-6)
together = threading.Barrier(2)
threads = [threading.Thread(target=lambda: (together.wait(), receipt.read(Path({str(path)!r})))) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
