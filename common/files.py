"""Where files are, files that are whole or not there, and files that only one holds at a time."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Meta

from common.errors import Interrupted, writing

if sys.platform != "win32":
    import fcntl

ROOT = Path(__file__).resolve().parent.parent
PACKS = ROOT / "packs"
RESULTS = ROOT / "results"
CACHE = Path(os.environ.get("REPRODUCER_CACHE") or ROOT / ".cache")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``path`` in one step: after a kill or a full disk it holds its old content or the new one, never a part."""
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise


#: Set when the runner is being stopped: whoever waits for a lock gives up.
STOPPED = threading.Event()


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[None]:
    """Hold the lock file ``path``; another process or thread waits, or without ``wait`` gets a BlockingIOError.

    Many may hold it ``shared``, and then nobody alone.

    The system lets go of it when its holder dies, so a killed run leaves nothing locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    raise
                # Not left to the system: a thread that waits there cannot be stopped.
                if STOPPED.wait(0.05):
                    raise Interrupted from None
        yield


def fill_once(lock: Path, is_whole: Callable[[], bool], fill: Callable[[], None]) -> None:
    """Call ``fill``, holding ``lock`` alone, unless ``is_whole``.

    Who waits for the lock waits no longer than that: whoever uses what is whole holds it, too, and a hunt does so for hours.
    """
    while not is_whole():
        try:
            with locked(lock, wait=False):
                if not is_whole():
                    fill()
        except BlockingIOError:
            if STOPPED.wait(0.05):
                raise Interrupted from None


def like(pattern: str) -> Meta:
    """A constraint on text that is read: all of it matches ``pattern``. (Python's $ lets a line feed follow.)"""
    return Meta(pattern=f"^(?:{pattern})$(?!\\n)")
