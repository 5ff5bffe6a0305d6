"""Whatever a script does, it ends, it is described rightly, and nothing of it stays running."""

import os
import sys
import threading

import psutil
import pytest

from common.process import KEEP, Interrupted, run


def start(tmp_path, code, *, timeout=20, memory=2**30, **options):
    env = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    return run([sys.executable, "-c", code], env=env, cwd=tmp_path, timeout=timeout, memory=memory, **options)


def running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_output_and_exit_code(tmp_path):
    ended = start(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(10)")
    assert (ended.exit, ended.signal, ended.stopped) == (10, None, None)
    assert ended.output == "out\nerr\n"


def test_a_hang_is_stopped(tmp_path):
    ended = start(tmp_path, "import time; print('before', flush=True); time.sleep(600)", timeout=1)
    assert (ended.exit, ended.stopped) == (None, "timeout")
    assert "before" in ended.output


def test_a_hang_that_ignores_signals_is_stopped(tmp_path):
    code = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT)]; time.sleep(600)"
    assert start(tmp_path, code, timeout=1).stopped == "timeout"


def test_a_crash_is_told_by_its_signal(tmp_path):
    ended = start(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (ended.exit, ended.signal, ended.stopped) == (None, "SIGSEGV", None)


def test_memory_is_limited_over_all_processes(tmp_path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'b = []\\nwhile True: b.append(bytearray(2**22))'])"
    ended = start(tmp_path, code, memory=200 * 2**20)
    assert ended.stopped == "memory"
    assert ended.peak_rss > 200 * 2**20


def test_a_flood_of_output_is_cut_in_the_middle(tmp_path):
    ended = start(
        tmp_path, "import sys\nprint('first')\nfor _ in range(1600): sys.stdout.write('x' * 65535 + '\\n')\nprint('last')"
    )
    assert ended.exit == 0
    assert ended.output.startswith("first\n")
    assert ended.output.endswith("last\n")
    assert len(ended.output) < 3 * KEEP
    assert len(ended.output) + ended.cut >= 1600 * 65536


def test_output_that_is_not_utf8(tmp_path):
    ended = start(tmp_path, "import sys; sys.stdout.buffer.write(b'\\xff\\xfe ok\\n')")
    assert ended.output == "\\xff\\xfe ok\n"


@pytest.mark.parametrize("detach", [False, True], ids=["child", "daemon in a session of its own"])
def test_a_fork_that_outlives_its_parent_is_killed(tmp_path, detach):
    code = f"""
import os, sys, time
if os.fork() == 0:
    if {detach}:
        os.setsid()
        if os.fork():
            os._exit(0)
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists({str(tmp_path / "pid")!r}) or not open({str(tmp_path / "pid")!r}).read():
    time.sleep(0.01)
print("parent ends")
"""
    ended = start(tmp_path, code)
    assert ended.exit == 0
    assert ended.seconds < 15
    assert not running(int((tmp_path / "pid").read_text()))


def test_a_stop_from_outside_kills_and_says_so(tmp_path):
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    with pytest.raises(Interrupted):
        start(tmp_path, "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)", stop=stop, timeout=60)
    assert not running(int((tmp_path / "pid").read_text()))
