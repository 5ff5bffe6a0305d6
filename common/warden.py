"""Start one command and leave nothing of it running: ``python -I -S warden.py STATUS_FD PARENT [CGROUP] -- COMMAND…``.

Linux gives a process whose parent has died to the nearest ancestor that is a "child subreaper". The warden is one, so
whatever the command starts, also what has left its session, closed its output or cleared its environment, stays among the
warden's descendants, and dies with the command, with the warden, or with the runner. With a CGROUP the command is in there,
too, and what a control group holds cannot leave it. https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html

The standard library only: it starts in milliseconds. How the command ended goes to STATUS_FD as one line of JSON.
"""

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def descendants(root: int) -> list[int]:
    """The process ids below ``root``, by the parents that /proc names. Zombies are left out: they run nothing."""
    children: dict[int, list[int]] = {}
    dead = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # The command's name stands in parentheses and may hold anything, a parenthesis too.
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            pid = int(stat.parent.name)
            children.setdefault(int(parent), []).append(pid)
            if state in "ZX":
                dead.add(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return [pid for pid in found if pid not in dead]


def reap() -> bool:
    """Take leave of the children that have ended; whether there are others. Who adopts orphans and has none has no descendants."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


def kill_descendants(patience: float = 5.0) -> tuple[int, bool]:
    """Kill all that is left below this process, stopping each first so that none forks away.

    Returns how many there were, and whether none is left: what forks and ends without a pause may not be caught.
    """
    killed: set[int] = set()
    until = time.monotonic() + patience
    while reap():
        if time.monotonic() > until:
            return len(killed), False
        left = descendants(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, number)
        killed.update(left)
        time.sleep(0 if left else 0.001)
    return len(killed), True


def main(arguments: list[str]) -> None:
    own, command = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    status_fd, parent, cgroup = int(own[0]), int(own[1]), own[2] if len(own) > 2 else ""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # It died before it could be watched.
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        kill_descendants()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    failure, failed_fd = os.pipe()
    child = os.fork()
    if child == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.close(status_fd)
        if cgroup:
            with suppress(OSError):
                Path(cgroup, "cgroup.procs").write_text("0")
        try:
            os.execvpe(command[0], command, os.environ)
        except OSError as error:
            os.write(failed_fd, str(error.errno).encode())
        os._exit(127)
    os.close(failed_fd)
    if why := os.read(failure, 16):  # Closed by exec, where it succeeds.
        os.write(status_fd, json.dumps({"exec": int(why)}).encode())
        return
    while True:
        # Waits without a poll; orphans that the command leaves behind are reaped on the way.
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    # Children of the command's own that end with it are no stragglers.
    time.sleep(0.02)
    stragglers, clean = kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    os.write(status_fd, json.dumps({"code": code, "stragglers": stragglers, "clean": clean}).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
