"""A run ends when it should, whatever it leaves behind, and nothing of it goes on."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT

from common.process import run

pytestmark = pytest.mark.hostile

ESCAPES = {
    "holds stdout in a session of its own": "os.setsid()",
    "closes its output": "os.setsid(); [os.close(fd) for fd in (0, 1, 2)]",
    "forks twice": "os.setsid(); os.fork() and os._exit(0)",
    "clears its environment": "os.setsid(); os.fork() and os._exit(0); "
    "open({pid!r}, 'w').write(str(os.getpid())); os.execve('/bin/sleep', ['sleep', '600'], {{}})",
    "ignores every signal that can be ignored": "os.setsid(); [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15)]",
}


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def start(tmp_path, code, *, timeout=20, memory=2**30):
    env = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    return run([sys.executable, "-c", code], env=env, cwd=tmp_path, timeout=timeout, memory=memory)


@pytest.mark.parametrize("after", ["print('done')", "time.sleep(600)"], ids=["its parent ends", "its parent hangs"])
@pytest.mark.parametrize("kind", ESCAPES)
def test_nothing_escapes(tmp_path, kind, after):
    pid = tmp_path / "pid"
    escape = ESCAPES[kind].format(pid=str(pid))
    code = f"""
import os, signal, sys, time
if os.fork() == 0:
    {escape}
    open({str(pid)!r}, "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read():
    time.sleep(0.01)
{after}
"""
    started = time.monotonic()
    ended = start(tmp_path, code, timeout=4)
    assert time.monotonic() - started < 30, "the runner hangs"
    assert ended.stopped == ("timeout" if "sleep" in after else None)
    assert not alive(int(pid.read_text()))


def test_a_daemons_memory_counts(tmp_path):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/proc/self/exe", ["python", "-c", "b = []\\nwhile True: b.append(bytearray(2**22))"], {})
time.sleep(600)
"""
    ended = start(tmp_path, code, memory=200 * 2**20, timeout=30)
    assert ended.stopped == "memory"


def test_a_fork_bomb_is_swept(tmp_path):
    code = "import os, time\nfor _ in range(6):\n    os.fork()\nos.setsid() if os.getpgid(0) != os.getpid() else None\ntime.sleep(600)"
    ended = start(tmp_path, code, timeout=2)
    assert ended.stopped == "timeout"
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path) and p.pid != os.getpid()]


RUNNER = """
import sys
sys.argv = ["common", "run", "pack00", "--release", "7.0", "--results", {results!r}]
from common.cli import main
from common.run import runner
run = runner.run
runner.run = lambda command, **given: run(command, **{{**given, "timeout": 60}})  # Its own is 4 s, and finding it may take that.
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_is_ended_leaves_no_script(tmp_path, number):
    env = {**os.environ, "REPRODUCER_CACHE": str(tmp_path / "cache")}
    code = RUNNER.format(results=str(tmp_path / "results"))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    scripts = []
    until = time.monotonic() + 60
    while not scripts and time.monotonic() < until:
        time.sleep(0.05)
        scripts = [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(tmp_path) in " ".join(p.info["cmdline"] or []) and "repro.py" in " ".join(p.info["cmdline"])
        ]
    assert scripts, process.communicate(timeout=1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    until = time.monotonic() + 10
    while any(map(alive, (p.pid for p in scripts))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(p.pid) for p in scripts)
    assert b"Traceback" not in out
    assert not list((tmp_path / "results").rglob("reproducer-toy-7.0.*.json"))


@pytest.fixture(params=[True, False], ids=["with a control group", "without one"])
def anywhere(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("common.process._own_cgroup", lambda: None)


@pytest.mark.parametrize("kind", ["forks twice", "clears its environment"])
def test_the_supervisor_holds_what_escapes(tmp_path, anywhere, kind):
    test_nothing_escapes(tmp_path, kind, "print('done')")


def test_what_forks_without_a_pause_is_ended_or_said(tmp_path, anywhere):
    code = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        if os.fork():
            os._exit(0)
"""
    ended = start(tmp_path, code, timeout=3)
    if ended.stopped != "lost":
        time.sleep(0.5)
        assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path) and p.pid != os.getpid()]
    for process in psutil.process_iter(["cwd"]):  # Whatever the outcome, the test itself leaves nothing.
        if process.info["cwd"] == str(tmp_path):
            process.kill()


def test_a_runner_that_waits_for_a_lock_can_be_ended(tmp_path):
    from common.files import locked

    env = {**os.environ, "REPRODUCER_CACHE": str(tmp_path / "cache")}
    code = RUNNER.format(results=str(tmp_path / "results")).replace("7.0", "1.0")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True)
    lock = next((tmp_path / "cache" / "envs").glob("reproducer-toy-1.0-*.lock"))
    with locked(lock):
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        time.sleep(3)
        assert process.poll() is None
        process.terminate()
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in out
