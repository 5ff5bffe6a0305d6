"""Errors that are told to a person in one sentence, without a traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Something the person at the keyboard can mend; the message says what was wrong and what to do next."""


class InfraError(Exception):
    """The machine or the network broke a run (the verdict INFRA): it says nothing of the release, and is never stored."""


class Interrupted(Exception):
    """A run was stopped by its caller; there is nothing to grade."""


class AnchorError(Exception):
    """A transform did not find the place it changes, or found it more than once, in a release's source."""


#: What a path that a person named may come to.
UNWRITABLE = (
    errno.ENOENT,
    errno.EEXIST,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)


def full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, instead: str = "--results, or of the cache with REPRODUCER_CACHE") -> Iterator[None]:
    """Turn a full disk or a read-only folder, met while writing ``path``, into a `UserError`; ``instead`` names another."""
    try:
        yield
    except OSError as error:
        if full(error):
            raise UserError(
                f"No space left on the disk of {path}: free some and run again; nothing half-written was kept."
            ) from error
        if error.errno in UNWRITABLE:
            raise UserError(
                f"{path} cannot be written ({os.strerror(error.errno)}): name another folder with {instead}."
            ) from error
        raise
