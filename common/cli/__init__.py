"""``python -m common``: a command a module; the nox sessions call this."""

from __future__ import annotations

import argparse
import ctypes
import difflib
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common import __version__
from common.__main__ import missing
from common.cli.common import INTERRUPTED, OK, USAGE, complain
from common.errors import UNWRITABLE, UserError, full
from common.files import CACHE

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def main(arguments: Sequence[str] | None = None) -> int:
    _streams()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        parser = _parser(words)
        options, extra = parser.parse_known_args(words)
        if threading.current_thread() is threading.main_thread() and arguments is None:
            _guard()
        if extra and options.command != "run":
            options.parser.error(f"{options.command} does not take {' '.join(extra)}")
        _no_empty(words)
        return int(options.call(options, extra))
    except UserError as error:
        complain(str(error))
        return USAGE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "common":
            raise
        print(missing(error.name), file=sys.stderr)  # Without what prints in colour, which may be what is missing.
        return USAGE
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        if not full(error) and error.filename and error.errno in UNWRITABLE:
            other = "Name another folder with REPRODUCER_CACHE" if _of_cache(error.filename) else "Name another file or folder"
            complain(f"{error.filename}: {os.strerror(error.errno)}. {other}.")
            return USAGE
        if not full(error):
            raise
        complain(f"No space left on the disk of {error.filename or 'what is written'}: free some and run again.")
        return USAGE
    except KeyboardInterrupt as error:
        complain("Stopped. Receipts of the runs that had ended are kept; nothing is left running.")
        return error.args[0] if error.args else INTERRUPTED


def _no_empty(words: Sequence[str]) -> None:
    """An empty word is never meant: as a path it would be the folder that one stands in."""
    for before, word in zip(["", *words], words, strict=False):
        if not word or re.fullmatch(r"--[a-z-]+=", word):
            name = word.rstrip("=") or (before if before.startswith("--") else "An argument")
            raise UserError(f"{name} was given without a name: is a shell variable unset?")


def _of_cache(name: str) -> bool:
    return Path(name) in (CACHE, *CACHE.parents) or Path(name).is_relative_to(CACHE)


def _streams() -> None:
    """Streams that take what we write: one that was closed takes and loses it, one for ASCII alone has a sign for the rest."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as we run
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _guard() -> None:
    """End our children when we are ended, and let nobody read our environment."""

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # A second one ends us at once, and the supervisors what runs.
        raise KeyboardInterrupt(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored, and that holds.
            signal.signal(number, stop)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # Else a script could read our environment, and what we know of tokens, from /proc (where it is not root).
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        if os.environ.get("REPRODUCER_PROG"):  # nox does not hand on the signal that ends it.
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


#: A module of this folder each: HELP, DESCRIPTION, ``arguments`` and ``call``.
COMMANDS = (
    "run", "blame", "upstream-tests", "review", "check", "regress", "watch", "changes", "pins", "contract", "hunt", "site", "list", "attach", "new-pack", "tables", "regrade", "verify", "mutants", "bench",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """One sentence for a mistake in a call, in place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1) if wrong else []
        if wrong and len(wrong[2]) > 80:
            message = f"{message[: wrong.start()]}there is no {wrong[1]!r}"
        meant = f" Did you mean {near[0]}?" if near else ""
        complain(f"{message[:1].upper()}{message[1:]}.{meant} {self.prog} --help says what there is.")
        sys.exit(USAGE)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    # A nox session tells its own name: nox -s attach --
    session = os.environ.get("REPRODUCER_PROG")
    parser = _Parser(
        prog="python -m common",
        description="Is this upstream bug in that release, and does this fix fix it?",
        epilog="Exit status: 0 every verdict is what the pack expects, 1 one is not, 2 a mistake in the call or its surroundings, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # One that is called needs no other.
    called = [name for name in COMMANDS if name in words[:1]] or COMMANDS
    for name in called:
        module = importlib.import_module(f"common.cli.{name.replace('-', '_')}")
        command = sub.add_parser(name, prog=session, help=module.HELP, description=module.DESCRIPTION)
        module.arguments(command, session)
        command.set_defaults(call=module.call, parser=command)
    return parser
