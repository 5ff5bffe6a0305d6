"""What the machine, the network or a person does to a run is no verdict: INFRA, nothing stored, tried again."""

import signal
import threading
from dataclasses import replace

import psutil
import pytest
from helpers import make_log

from common.run import pool, regress, runner
from common.store import history
from common.store.grade import CRASHES, grade

pytestmark = pytest.mark.hostile

OUTSIDE = ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGALRM", "SIGXCPU"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("body", [[], None], ids=["nothing printed", "after its sentinel"])
def test_a_signal_from_outside_is_no_verdict(name, body):
    assert str(grade(make_log(body=body, exit=None, signal=name))) == f"INFRA: {name}"


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_is_the_releases_own(name):
    assert str(grade(make_log(body=[], exit=None, signal=name))) == f"CHANGED: {name}"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL"])
def test_a_run_that_is_killed_leaves_the_good_receipt_as_it_was(name, wheels, index, run, store_of):
    release = index.add(wheels["1.0"])
    run(release)
    before = store_of()
    number = getattr(signal, name)
    source = f"import os\n\ndef total(xs):\n    os.kill(os.getpid(), {int(number)})\n"
    # The same release on the index, ended from outside while it runs.
    release = index.add(wheels.make("1.0", {"reproducer_toy/__init__.py": source}))
    rows, failures = run(release)
    assert not failures
    assert [row.verdict.outcome for row in rows] == ["INFRA", "INFRA"]
    assert rows[0].receipt is None
    assert store_of() == before


def test_a_warden_that_is_killed_is_no_verdict(wheels, index, run, store_of):
    source = "import os, signal, time\n\ndef total(xs):\n    os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(60)\n"
    rows, _ = run(index.add(wheels.make("1.9", {"reproducer_toy/__init__.py": source})))
    assert rows[0].verdict.outcome == "INFRA"
    assert store_of() == {}


BREAK = {
    "a server error": lambda index, name: setattr(index, "status", 503),
    "a captive portal": lambda index, name: setattr(index, "page", b"<html><form>Please log in</form></html>"),
    "a truncated file": lambda index, name: index.files.update({name: index.files[name][:200]}),
    "another file": lambda index, name: index.files.update({name: index.files[name] + b"x"}),
    "no file": lambda index, name: index.files.pop(name),
    "no answer": lambda index, name: setattr(index, "status", 404),
}


@pytest.mark.parametrize("kind", BREAK)
def test_a_broken_index_is_no_verdict_and_harms_no_receipt(kind, wheels, index, run, plan, store_of, tmp_path, monkeypatch):
    release = index.add(wheels["1.0"])
    run(release)
    before = store_of()
    index.hashes[release.file] = release.sha256  # What the index says stays as it was.
    BREAK[kind](index, release.file)
    index.new_uv_cache()
    rows, failures = run(release, cache=tmp_path / "fresh")
    outcomes = {row.verdict.outcome for row in rows}
    assert outcomes <= {"INFRA"}, (rows, failures)
    assert rows or failures
    assert store_of() == before


def test_a_release_that_cannot_be_built_is_told_after_a_second_try_on_the_same_file(index, run, tmp_path, plan):
    import tarfile

    root = tmp_path / "reproducer_toy-1.4"
    (root / "reproducer_toy").mkdir(parents=True)
    (root / "reproducer_toy" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "reproducer-toy"\nversion = "1.4"\n'
    )
    # It writes down each try, outside: the only thing that a build may still do.
    tries = tmp_path / "tries"
    (root / "backend.py").write_text(
        f"def build_wheel(*_, **__):\n    open({str(tries)!r}, 'a').write('x')\n    raise SystemExit('no compiler')\n"
    )
    with tarfile.open(tmp_path / "reproducer_toy-1.4.tar.gz", "w:gz") as tar:
        tar.add(root, root.name)
    release = index.add(tmp_path / "reproducer_toy-1.4.tar.gz")
    rows, failures = run(release)
    assert not failures
    assert str(rows[0].verdict) == "UNTESTABLE: install"
    assert tries.read_text() == "xx"
    # The same on a machine whose index breaks in between says nothing.
    index.files.clear()
    rows, _ = run(release, cache=tmp_path / "fresh")
    assert rows[0].verdict.outcome == "INFRA"


def test_an_install_that_is_stopped_says_nothing(index, plan, tmp_path, store_of, wheels):
    release = index.add(wheels["1.0"])
    with pool.threads(1) as workers:
        workers.stop.set()
        _, failures = runner.run_all([(plan, release)], workers)
    assert "Interrupted" in failures[0].message
    assert store_of() == {}


def test_regress_tries_again_what_the_network_broke(wheels, index, plan, monkeypatch):
    release = index.add(wheels["1.0"])
    index.status = 503
    monkeypatch.setattr(regress.releases, "of", lambda pack, cache: ([release], None))
    said = []

    def say(line):
        said.append(line)
        index.status = 200

    def load():
        return history.load(plan.results, [plan.pack])

    with pool.threads(1) as workers, regress.alone(plan.results, plan.machine) as journal:
        work = regress.plan([plan.pack], load(), plan_for=lambda *_: plan)
        report = regress.run(work, journal, workers, load, say=say)
    assert "once more" in said[0]
    assert report.ran == 2
    assert report.as_expected


def test_regress_gives_up_and_tells_no_change(wheels, index, plan, run, monkeypatch, store_of, tmp_path):
    release = index.add(wheels["1.0"])
    run(release)
    before = store_of()
    index.status = 503
    monkeypatch.setattr(regress.releases, "of", lambda pack, cache: ([release], None))
    index.new_uv_cache()
    broken = replace(plan, cache=tmp_path / "fresh")

    def load():
        return history.load(plan.results, [plan.pack])

    with pool.threads(1) as workers, regress.alone(plan.results, plan.machine) as journal:
        work = regress.plan([plan.pack], load(), plan_for=lambda *_: broken, again=True)
        report = regress.run(work, journal, workers, load)
    assert report.changes == []
    assert report.problems
    assert store_of() == before


def test_ctrl_c_while_uv_installs_kills_it(monkeypatch, tmp_path):
    from common.install import environment
    from common.process import Interrupted

    fake = tmp_path / "uv"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    environment._uv_settings()
    fake.chmod(0o755)
    import uv

    monkeypatch.setattr(uv, "find_uv_bin", lambda: str(fake))
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Interrupted):
        environment._uv(["pip"], stop=stop)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), 15)",
        "raise OSError(28, 'No space left on device')",
        "raise OSError(122, 'Disk quota exceeded')",
    ],
)
def test_a_build_that_the_machine_ends_is_no_verdict(index, run, tmp_path, end, store_of):
    import tarfile

    root = tmp_path / "reproducer_toy-1.4"
    (root / "reproducer_toy").mkdir(parents=True)
    (root / "reproducer_toy" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (root / "backend.py").write_text(f"import os\n\ndef build_wheel(*_, **__):\n    {end}\n")
    with tarfile.open(tmp_path / "reproducer_toy-1.4.tar.gz", "w:gz") as tar:
        tar.add(root, root.name)
    rows, failures = run(index.add(tmp_path / "reproducer_toy-1.4.tar.gz"))
    assert {row.verdict.outcome for row in rows} <= {"INFRA"}
    assert rows or failures
    assert store_of() == {}


@pytest.mark.parametrize("number", [5, 12, 24, 28, 122])
def test_a_full_disk_while_the_script_runs_is_no_verdict(number):
    body = ["Traceback (most recent call last):", f"OSError: [Errno {number}] No space left on device: 'x'"]
    assert grade(make_log(body=body, exit=1)).outcome == "INFRA"


def test_a_script_that_cannot_be_started_is_no_verdict(tmp_path):
    from common.process import run as execute

    ended = execute([str(tmp_path / "nowhere")], env={}, cwd=tmp_path, timeout=5, memory=2**30)
    assert ended.stopped == "exec"
    assert grade(make_log(body=[], exit=None, stopped="exec")).outcome == "INFRA"


def test_failing_to_start_leaks_no_file(tmp_path):
    from common.process import run as execute

    def attempt():
        with pytest.raises(OSError):
            execute(["true"], env={}, cwd=tmp_path / "gone", timeout=5, memory=2**30)

    attempt()
    before = psutil.Process().num_fds()
    for _ in range(5):
        attempt()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("output", ["None", "subprocess.DEVNULL"], ids=["holds uv's output", "closes it"])
def test_a_build_leaves_no_daemon_and_does_not_hang_the_runner(index, run, tmp_path, output, monkeypatch):
    import tarfile

    from common.install import environment

    monkeypatch.setattr(environment, "UV_TIMEOUT", 8.0)
    root = tmp_path / "reproducer_toy-1.4"
    root.mkdir()
    pid = tmp_path / "pid"
    (root / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (root / "backend.py").write_text(
        "import subprocess, sys\n\ndef build_wheel(*_, **__):\n"
        f"    daemon = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout={output}, stderr={output})\n"
        f"    open({str(pid)!r}, 'a').write(f'{{daemon.pid}} ')\n    sys.exit('no')\n"
    )
    with tarfile.open(tmp_path / "reproducer_toy-1.4.tar.gz", "w:gz") as tar:
        tar.add(root, root.name)
    rows, _ = run(index.add(tmp_path / "reproducer_toy-1.4.tar.gz"))
    assert str(rows[0].verdict) in ("UNTESTABLE: install", "INFRA: install")
    assert not any(psutil.pid_exists(int(word)) for word in pid.read_text().split())
