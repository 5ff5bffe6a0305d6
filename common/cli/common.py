"""What several commands have in common: exit codes, options, which packs they are about."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.text import Text

from common.cli import report
from common.errors import UserError
from common.files import CACHE, RESULTS, ROOT
from common.install import environment
from common.install.machine import MACHINE
from common.install.releases import Release
from common.packs import reportblock
from common.packs.pack import Pack, all_packs
from common.run.plan import Plan
from common.scrub import plain
from common.store import audit, history, receipt
from common.store.receipt import NO_RECORD

#: Exit codes: every verdict as expected; one is not; a usage or environment error; something changed (watch); Ctrl-C, by convention 128 + SIGINT.
OK, SURPRISE, USAGE, CHANGED, INTERRUPTED = 0, 1, 2, 3, 130


def called_from() -> Path:
    """The folder that the person stands in: under nox it is not the process's."""
    try:
        return Path(os.environ.get("REPRODUCER_CWD") or Path.cwd())
    except FileNotFoundError as error:
        raise UserError("The folder that you are in is gone: change to another one.") from error


def given(path: Path) -> Path:
    """A path as the person gave it, who may stand elsewhere than the process."""
    here = called_from()
    return path if here == Path.cwd() else here / path


def folder(path: Path | None, option: str) -> None:
    """`UserError` where what is given as a folder to write to is something else; nothing there is right, too."""
    if path is not None and (path.is_symlink() or path.exists()) and not path.is_dir():
        raise UserError(f"{path} is not a folder: name one with {option}.")


def output(path: Path, mark: str, *, stream: bool = False) -> Path:
    """Where a command may write: a new file, an empty one, or one that it wrote before, which begins with ``mark``.

    With ``stream`` a pipe, a terminal or a device, too: files are written by putting another in their place.

    Asked before the work is done, so that nothing is lost by it: neither the work nor a file of the user's.
    """
    target = called_from() / path
    if target.is_symlink() and not stream:
        target = target.resolve()
    if target.exists() and not (stream or target.is_file() or target.is_dir()):
        raise UserError(f"{path} is a pipe or a device: name a file.")
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "is in a folder that does not exist"
        raise UserError(f"{path} {why}: name a file that can be written.")
    try:
        held = target.read_text(encoding="utf-8", errors="replace") if target.is_file() else ""  # not of a pipe or a terminal
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name another file.") from error
    if held and not held.startswith(mark):
        raise UserError(f"{path} is there, and was not written by this command: name another file, or move it away.")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: name another file.")
    return target


def complain(sentence: str) -> None:
    report.console(stderr=True).print(Text(plain(sentence, None), "red"), soft_wrap=True)


def warn(sentence: str, out: Console) -> None:
    out.print(Text(plain(sentence, None), "yellow"), soft_wrap=True)


def results_option(parser: argparse.ArgumentParser, text: str = "where receipts are (default: results/)") -> None:
    parser.add_argument("--results", type=lambda text: given(Path(text)), metavar="DIR", default=None, help=text)


def results_only(parser: argparse.ArgumentParser, session: str | None) -> None:
    results_option(parser)


def results_folder(options: argparse.Namespace) -> Path:
    """The folder of receipts that is asked for; `UserError` where it is none."""
    results: Path = options.results or RESULTS
    if not results.is_dir():
        raise UserError(f"{results} is not a folder: --results names one that holds receipts, as results/ does.")
    return results


def receipts(options: argparse.Namespace) -> Path:
    """The same; `UserError`, too, where it holds no receipt."""
    results = results_folder(options)
    if not any(receipt.stored(root) for root in (results, *receipt.reviews(results))):
        raise UserError(f"There are no receipts in {results}.")
    return results


def look_at(options: argparse.Namespace, look: Callable[[Path], Iterable[str]], what: str, warnings: Sequence[str] = ()) -> int:
    """Say what ``look`` finds at each stored receipt."""
    out = report.console()
    results = receipts(options)
    paths = {root: receipt.stored(root) for root in (results, *receipt.reviews(results))}
    wrong = broken = 0
    for root, here in paths.items():
        for path, problems, unreadable in audit.problems(root, here, look):
            wrong += bool(problems)
            broken += bool(unreadable)
            for problem in [unreadable] if unreadable else [f"{report.where(path)}: {problem}" for problem in problems]:
                out.print(Text(plain(f"✗ {problem}", None), "red"), soft_wrap=True)
    for warning in warnings:
        warn(warning, out)
    more = f", {broken} cannot be read" if broken else ""
    out.print(f"{sum(map(len, paths.values()))} receipts, {wrong} {what}{more}.", markup=False)
    return SURPRISE if wrong or broken else OK


def pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, metavar="N", help="releases at a time (default: one a core, one on a GPU)")
    parser.add_argument("--machine", metavar="NAME", help="the machine's name in results/ (default: made from what it is)")


def check(options: argparse.Namespace) -> None:
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is not a number of at least 1.")
    if getattr(options, "confirm", 1) < 1:
        raise UserError(f"--confirm {options.confirm} is not a number of at least 1.")
    if (since := getattr(options, "since", None)) is not None:
        try:
            Version(since)
        except InvalidVersion as error:
            raise UserError(f"--since {since} is not a version (PEP 440).") from error
    if options.machine is not None and not MACHINE.fullmatch(options.machine):
        raise UserError(f"--machine {options.machine} is not a folder name: use letters, digits, '.', '_' and '-' only.")
    if options.machine in NO_RECORD:
        raise UserError(
            f"--machine {options.machine} is not a machine's name: results/{options.machine}/ is for something else."
        )


def packs(out: Console) -> list[Pack]:
    """Every pack; one that is not sound is said, and stops no other."""
    problems: list[str] = []
    found = all_packs(problems=problems)
    for problem in dict.fromkeys(problems):
        warn(f"Left out: {problem}", out)
    return found


def about_upstreams(out: Console) -> list[Pack]:
    """All but the self-test, which says nothing of a release."""
    return [pack for pack in packs(out) if pack.kind != "selftest"]


def judges(pack: Pack) -> None:
    """`UserError` where a pack's scripts do not come to their verdict by the report block of today."""
    own = {path: path.read_text(encoding="utf-8") for path in pack.folder.glob("*.py")}
    if reportblock.another(own.pop(pack.script, ""), own.values()):
        raise UserError(f"{pack.name}: its report block is missing or another one: python -m common tables writes it.")


def formatted(packs: Sequence[Pack], out: Console) -> None:
    """Format the files of packs whose runs are to be recorded: a receipt holds their hashes, and formatted later it would be stale."""
    ruff = [sys.executable, "-m", "ruff", "format", "--quiet"]
    before = {path: path.read_bytes() for pack in packs for path in pack.folder.glob("*.py")}
    if before:  # Where there is no ruff, as in --here, they stay as they are.
        subprocess.run([*ruff, *map(str, before)], capture_output=True, cwd=ROOT)
    for path, data in before.items():
        if path.read_bytes() != data:
            warn(f"Formatted: {report.where(path)}.", out)


def about_these(named: Iterable[Pack], upstreams: Sequence[str]) -> None:
    """`UserError` where a pack that was named is about none of the packages that were named."""
    for pack in named:
        if upstreams and pack.package not in upstreams:
            raise UserError(f"{pack.name} is about {pack.package}, not about {' or '.join(upstreams)}.")


def stored(options: argparse.Namespace, chosen: list[Pack], out: Console) -> history.History:
    """The stored runs; one that cannot be read is said, and hides no other."""
    found = history.load(receipts(options), chosen)
    for error in found.unreadable.values():
        warn(f"Ignored: {error}", out)
    return found


def base(pack: Pack, out: Console) -> None:
    """Install what the releases share, once; where that fails, the runs that need it say so."""
    if not environment.has_base(pack.requires, CACHE):
        with report.waiting(f"installing {', '.join(pack.requires) or 'nothing'} once, for every release to share", out):
            environment.base(pack.requires, CACHE)


def there(plan: Plan) -> Release:
    """The one release that is there where nothing is installed: in the active environment, or in the folder of --release-path."""
    found = environment.here(plan.pack.package, plan.cache, release_path=plan.release_path)
    return Release(version=found.version, file="", sha256="")
