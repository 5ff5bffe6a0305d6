"""Run one command with limits on time, memory and output, and leave nothing of it running.

Knows nothing of packs: command in, what happened out. A `warden` starts the command; see there for what cannot escape.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.errors import Interrupted

#: Kept from the start and from the end of a command's output, in bytes each; what is between is cut, and counted.
KEEP = 256 * 1024
#: Marks every process that a command starts, also one that has left its process group and its parent.
MARKER = "REPRODUCER_CELL"
WARDEN = Path(__file__).with_name("warden.py")
#: Seconds that the warden gets to kill what it has started.
PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a command ended.

    ``stopped`` is "timeout" or "memory" where the limit ended it; "lost" where it is not known how it ended (its warden was
    killed, or something of it cannot be); "exec" where it could not be started. ``seconds`` is wall-clock
    time, ``peak_rss`` the largest sum of resident memory over its processes, in bytes, sampled every 0.25 s. ``cut`` counts the
    output's bytes not kept.
    """

    output: str
    exit: int | None
    signal: str | None
    stopped: str | None
    seconds: float
    peak_rss: int
    cut: int
    stragglers: int


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,
    memory: int,
    stop: threading.Event | None = None,
    mark: str | None = None,
) -> Ended:
    """Run ``command`` until it ends, or for ``timeout`` seconds, or until its processes hold ``memory`` bytes.

    ``mark`` is what its processes can be found by, should the caller die first: see `kill_marked`.
    """
    if stop is not None and stop.is_set():  # What ends sooner than we look would end as if nobody had stopped it.
        raise Interrupted
    mark = mark or uuid.uuid4().hex
    started = time.monotonic()
    told, tell = os.pipe()
    with _ControlGroup(mark) as group, ExitStack() as ends:
        ends.callback(os.close, told)
        with ExitStack() as handed:
            handed.callback(os.close, tell)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WARDEN), str(tell), str(os.getpid()), *group.argument, "--", *command],
                env={**env, MARKER: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(tell,),
            )
        assert process.stdout is not None
        reader = _Reader(process.stdout.fileno())
        stopped, peak, said = None, 0, b""
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.25)  # to see what they hold costs 8 ms
                    break
                peak = max(peak, _resident(process.pid, group.members()))
                if time.monotonic() - started > timeout:
                    stopped = "timeout"
                elif peak > memory:
                    stopped = "memory"
                if stopped:
                    break
                if stop is not None and stop.is_set():
                    raise Interrupted
        finally:
            # The warden kills what it has started; it is killed only where it does not come to an end.
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            group.kill()
            escaped = kill_marked(mark, but=process.pid)
            reader.end()
            process.stdout.close()
            os.set_blocking(told, False)
            with suppress(BlockingIOError):
                said = os.read(told, 1024)
    ended = json.loads(said) if said else {}
    code = ended.get("code")
    if stopped is None and (code is None or (not ended["clean"] and not group.path)):
        stopped = "exec" if "exec" in ended else "lost"
    return Ended(
        output=reader.text(),
        exit=None if stopped or code is None or code < 0 else code,
        signal=signal.Signals(-code).name if not stopped and code is not None and code < 0 else None,
        stopped=stopped,
        seconds=round(time.monotonic() - started, 2),
        peak_rss=peak,
        cut=reader.cut,
        stragglers=int(ended.get("stragglers", 0)) + escaped,
    )


class _ControlGroup:
    """A control group (cgroup v2) of its own below the caller's, where the system lets us make one; else it holds nothing.

    What is started in it stays in it, whatever it does with its sessions and parents.
    https://docs.kernel.org/admin-guide/cgroup-v2.html
    """

    def __init__(self, mark: str) -> None:
        self.path: Path | None = None
        above = _own_cgroup()
        if above is not None:
            with suppress(OSError):
                (above / f"reproducer-{mark}").mkdir()
                self.path = above / f"reproducer-{mark}"

    @property
    def argument(self) -> list[str]:
        return [str(self.path)] if self.path else []

    def __enter__(self) -> _ControlGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for _attempt in range(50) if self.path else ():
            try:
                Path(str(self.path)).rmdir()
                return
            except OSError:  # Its last process is not yet reaped.
                time.sleep(0.02)

    def members(self) -> list[int]:
        with suppress(OSError):
            if self.path:
                return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        return []

    def kill(self) -> None:
        if self.path is None:
            return
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        for pid in self.members():  # Linux before 5.14 has no cgroup.kill.
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _own_cgroup() -> Path | None:
    """The folder of this process's cgroup (v2), if there is one."""
    with suppress(OSError, ValueError):
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        mount = next((line.split()[4] for line in mounts if " - cgroup2 " in line), None)
        entry = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
        if mount and entry:
            return Path(mount) / entry[3:].lstrip("/")
    return None


class _Reader(threading.Thread):
    """Drains a pipe, keeping only its start and its end, so that 100 MB of output cost neither memory nor disk.

    It never waits for the pipe to be closed: a process that got away may hold it open for ever.
    """

    def __init__(self, pipe: int) -> None:
        super().__init__(daemon=True)
        self.pipe = pipe
        self.head = b""
        self.tail: deque[bytes] = deque()
        self.cut = 0
        self._size = 0
        self._until: float | None = None
        os.set_blocking(pipe, False)
        self.start()

    def run(self) -> None:
        waiting = select.poll()
        waiting.register(self.pipe, select.POLLIN | select.POLLHUP)
        while True:
            late = self._until is not None
            if not waiting.poll(0 if late else 100):
                if late:
                    return  # Nothing is left in it.
                continue
            with suppress(BlockingIOError):
                chunk = os.read(self.pipe, 65536)
                if not chunk:
                    return
                self._keep(chunk)
            if self._until is not None and time.monotonic() > self._until:
                return

    def _keep(self, chunk: bytes) -> None:
        room = KEEP - len(self.head)
        self.head += chunk[:room]
        if rest := chunk[room:]:
            self.tail.append(rest)
            self._size += len(rest)
        while self.tail and self._size - len(self.tail[0]) >= KEEP:
            self._size -= len(self.tail[0])
            self.cut += len(self.tail.popleft())

    def end(self) -> None:
        """Take what is in the pipe, for two seconds at most, and stop."""
        self._until = time.monotonic() + 2
        self.join()

    def text(self) -> str:
        head = self.head.decode("utf-8", "backslashreplace")
        tail = b"".join(self.tail).decode("utf-8", "backslashreplace")
        return f"{head}\n[… {self.cut} bytes cut …]\n{tail}" if self.cut else head + tail


def _resident(warden: int, members: Sequence[int]) -> int:
    """Resident memory, in bytes, of all that the warden has started."""
    total = 0
    pids = set(members)
    with suppress(psutil.Error):
        pids |= {process.pid for process in psutil.Process(warden).children(recursive=True)}
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


def kill_marked(mark: str, *, but: int = 0) -> int:
    """Kill every process that carries ``mark``, but the one with the process id ``but``; returns how many there were."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != but and process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == mark:
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=5)
    return len(found)
