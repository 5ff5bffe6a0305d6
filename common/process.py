"""Run one command with limits on time, memory and output, and leave nothing of it running.

Knows nothing of packs: command in, what happened out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

#: Kept from the start and from the end of a command's output, in bytes each; what is between is cut, and counted.
KEEP = 256 * 1024
#: Marks every process that a command starts, also one that has left its process group and its parent.
MARKER = "REPRODUCER_CELL"


class Interrupted(Exception):
    """The run was stopped by its caller; there is nothing to grade."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a command ended.

    ``stopped`` is "timeout" or "memory" where the limit ended it. ``seconds`` is wall-clock time, ``peak_rss`` the largest
    sum of resident memory over its processes, in bytes, sampled every 0.1 s. ``cut`` counts the output's bytes not kept.
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
    mark = mark or uuid.uuid4().hex
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**env, MARKER: mark},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = _Reader(process.stdout)
    stopped, peak = None, 0
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                break
            peak = max(peak, _resident(process.pid))
            if time.monotonic() - started > timeout:
                stopped = "timeout"
            elif peak > memory:
                stopped = "memory"
            if stopped:
                break
            if stop is not None and stop.is_set():
                raise Interrupted
    finally:
        stragglers = _kill(process.pid, mark)
        code = process.wait()
        reader.join()
    return Ended(
        output=reader.text(),
        exit=None if stopped or code < 0 else code,
        signal=signal.Signals(-code).name if code < 0 and not stopped else None,
        stopped=stopped,
        seconds=round(time.monotonic() - started, 2),
        peak_rss=peak,
        cut=reader.cut,
        stragglers=stragglers,
    )


class _Reader(threading.Thread):
    """Drains a pipe, keeping only its start and its end, so that 100 MB of output cost neither memory nor disk."""

    def __init__(self, pipe: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.pipe = pipe
        self.head = b""
        self.tail: deque[bytes] = deque()
        self.cut = 0
        self.start()

    def run(self) -> None:
        size = 0
        while chunk := os.read(self.pipe.fileno(), 65536):
            room = KEEP - len(self.head)
            self.head += chunk[:room]
            if rest := chunk[room:]:
                self.tail.append(rest)
                size += len(rest)
            while self.tail and size - len(self.tail[0]) >= KEEP:
                size -= len(self.tail[0])
                self.cut += len(self.tail.popleft())

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self.pipe.close()

    def text(self) -> str:
        head = self.head.decode("utf-8", "backslashreplace")
        tail = b"".join(self.tail).decode("utf-8", "backslashreplace")
        return f"{head}\n[… {self.cut} bytes cut …]\n{tail}" if self.cut else head + tail


def _resident(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _kill(group: int, mark: str) -> int:
    """Kill the command's process group, then whatever else carries its mark; returns how many others there were."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    return kill_marked(mark, but=group)


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
