"""``python -m common``: run packs, attach their output, add a pack. The nox sessions call this."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from common import __version__, commands
from common.__main__ import missing
from common.commands import OK, USAGE
from common.errors import UserError, full

#: Exit code of Ctrl-C, by convention 128 + the signal's number.
INTERRUPTED = 130
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, extra = parser.parse_known_args(arguments)
    if threading.current_thread() is threading.main_thread() and arguments is None:
        _guard()
    if extra and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    try:
        return int(options.call(options, extra))
    except UserError as error:
        commands.complain(str(error))
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
        if not full(error):
            raise
        commands.complain(f"No space left on the disk of {error.filename or 'the cache'}: free some and run again.")
        return USAGE
    except KeyboardInterrupt as error:
        commands.complain("Stopped. Receipts of the runs that had ended are kept; nothing is left running.")
        return error.args[0] if error.args else INTERRUPTED


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


def _parser() -> argparse.ArgumentParser:
    # A nox session tells its own name: nox -s attach --
    session = os.environ.get("REPRODUCER_PROG")
    parser = argparse.ArgumentParser(
        prog="python -m common",
        description="Is this upstream bug in that release, and does this fix cure it?",
        epilog="Exit status: 0 every verdict is what the pack expects, 1 one is not, 2 a mistake in the call or its surroundings, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = sub.add_parser(
        "run",
        prog=session,
        help="run a pack on releases of its upstream, unpatched and patched",
        description="Run a pack on releases of its upstream, unpatched and patched, and compare with what is recorded. "
        "Arguments of the pack's own script (--shape, --dtype, …) may follow and are handed to it.",
    )
    # A nox session names the pack itself.
    run.add_argument("pack", help=argparse.SUPPRESS if session else "pack09, 09 or 9")
    which = run.add_mutually_exclusive_group()
    which.add_argument(
        "--releases",
        "--release",
        metavar="WHICH",
        help="pinned (the default), all, or versions and specifiers: 0.6.5 or '>=0.6,<0.8'",
    )
    which.add_argument(
        "--wheel",
        type=Path,
        action="append",
        metavar="FILE",
        help="a wheel of the upstream package, or an sdist of plain Python; may be repeated",
    )
    which.add_argument(
        "--release-path",
        type=Path,
        metavar="DIR",
        help="a folder that holds the installed release (pip install --target DIR)",
    )
    run.add_argument("--source", type=Path, metavar="DIR", help="a clone of the upstream, for a variant that is a commit of it")
    run.add_argument("--here", action="store_true", help="in the active environment: no nox, no network, nothing installed")
    run.add_argument(
        "--patch",
        type=Path,
        metavar="DIFF",
        help="judge this diff (a pull request under review) instead of the pack's fix",
    )
    run.add_argument(
        "--without", metavar="TRANSFORM", help="leave one transform of the fix out: the patched side must turn red"
    )
    run.add_argument(
        "--sandbox",
        action="store_true",
        help="run each script under bubblewrap: no network, your files out of sight, nothing to write (docs/security.md)",
    )
    run.add_argument("--lane", help="this lane instead of the strongest that the machine allows")
    run.add_argument("--variant", help="arguments that the pack has a name for (see its pack.toml)")
    run.add_argument("--jobs", type=int, metavar="N", help="releases at a time (default: one a core, one on a GPU)")
    run.add_argument("--record", action="store_true", help="keep the receipts in results/, as regress does")
    run.add_argument(
        "--results", type=Path, metavar="DIR", help="where receipts go (default: .cache/runs/, or results/ with --record)"
    )
    run.add_argument("--machine", metavar="NAME", help="the machine's name in results/ (default: made from what it is)")
    run.add_argument("--proofs", action="store_true", help="print the three proofs of every verdict, however many")
    run.add_argument("--picture", type=Path, metavar="SVG", help="also save what is printed as a picture")
    run.set_defaults(call=commands.run)

    regress = sub.add_parser(
        "regress",
        prog=session,
        help="run every release of every upstream that has no fresh receipt, and tell what changed",
        description="Run every (pack, release, side) that has no fresh receipt from this machine, and tell what changed. "
        "A call that was stopped goes on where it stopped. Exit status: 0 if every verdict is what its pack expects, else 1.",
    )
    _cell_options(regress)
    regress.add_argument(
        "--releases",
        choices=("all", "pinned", "new"),
        default="all",
        help="all (the default), those that the packs pin, or those never run on this machine",
    )
    regress.add_argument("--since", metavar="VERSION", help="this release and newer ones only")
    regress.add_argument("--again", action="store_true", help="also cells with a fresh receipt")
    regress.add_argument("--dry-run", action="store_true", help="say what would be run, and run nothing")
    regress.set_defaults(call=commands.regress)

    watch = sub.add_parser(
        "watch",
        prog=session,
        help="run the releases that are newer than the receipts, and tell what changed",
        description="Ask the package index for releases newer than the receipts, run just those, and tell what changed. It files nothing. "
        "Made for cron and CI: exit status 3 if something changed, 0 if nothing did, 1 if a verdict is not what its pack expects, 2 for a mistake.",
    )
    _cell_options(watch)
    watch.add_argument("--pre", action="store_true", help="pre-releases too")
    watch.add_argument(
        "--nightly",
        action="store_true",
        help="also the newest nightly, of upstreams that publish them as a package of their own",
    )
    watch.add_argument(
        "--json",
        metavar="FILE",
        default="-",
        help="where the JSON goes (default: -, standard output, and the lines to standard error)",
    )
    watch.set_defaults(call=commands.watch)

    pins = sub.add_parser(
        "pins",
        prog=session,
        help="say which release to pin and what is wrong with the others, and write constraints.txt",
        description="Say which release of each upstream to pin and what is wrong with the others, from the stored receipts, and write constraints for pip and uv.",
    )
    pins.add_argument("upstream", nargs="*", help="e.g. liger-kernel (default: all that there are packs about)")
    pins.add_argument("--json", action="store_true", help="the advice as JSON on standard output")
    pins.add_argument(
        "--output",
        type=Path,
        default=Path("constraints.txt"),
        metavar="FILE",
        help="where the constraints go (default: constraints.txt)",
    )
    pins.add_argument("--results", type=Path, metavar="DIR", help="where receipts are (default: results/)")
    pins.set_defaults(call=commands.pins)

    site = sub.add_parser(
        "site",
        prog=session,
        help="make the static site from the stored receipts",
        description="Make a static site from the stored receipts: it opens from disk, with no server and no network.",
    )
    site.add_argument("--output", type=Path, default=Path("site"), metavar="DIR", help="where it goes (default: site/)")
    site.add_argument("--base-url", metavar="URL", help="where this checkout can be browsed: receipts become links")
    site.add_argument("--results", type=Path, metavar="DIR", help="where receipts are (default: results/)")
    site.set_defaults(call=commands.site)

    listing = sub.add_parser("list", help="list the packs")
    listing.set_defaults(call=commands.listing)

    attach = sub.add_parser(
        "attach",
        prog=session,
        help="write the text and the files to attach to an upstream issue",
        description="Write results/attach/PACK.md from the stored receipts, and beside it the script, the fix's diff and the receipts. It files nothing.",
    )
    attach.add_argument("pack", help="pack09, 09 or 9")
    attach.add_argument(
        "--for",
        dest="template",
        metavar="UPSTREAM",
        help="under the headings of this upstream's bug template, e.g. liger-kernel",
    )
    attach.add_argument(
        "--machine", metavar="NAME", help="receipts of this machine (default: the one with the strongest evidence)"
    )
    attach.add_argument("--results", type=Path, metavar="DIR", help="where receipts are (default: results/)")
    attach.set_defaults(call=commands.attach)

    new = sub.add_parser("new-pack", prog=session, help="make the skeleton of a pack that passes the contract tests")
    new.add_argument("number", type=int, help="two digits that no pack has had, e.g. 21")
    new.add_argument("slug", help="lower-case words joined by underscores, e.g. mimo_reduce")
    new.add_argument("--package", default="example", help="the upstream's name on PyPI")
    new.set_defaults(call=commands.new_pack)

    tables = sub.add_parser("tables", help="rewrite the generated tables of README.md")
    tables.add_argument("--check", action="store_true", help="change nothing; exit 1 when one is not up to date")
    tables.set_defaults(call=commands.tables)

    for name, what in (
        ("regrade", "recompute every verdict from the stored logs, running nothing, and report differences"),
        ("verify", "check stored receipts: schema, hashes of logs and wheels, nothing private"),
    ):
        audit = sub.add_parser(name, prog=session, help=what, description=f"{what.capitalize()}.")
        audit.add_argument("--results", type=Path, metavar="DIR", help="where receipts are (default: results/)")
        audit.set_defaults(call=commands.audit)

    bench = sub.add_parser(
        "bench",
        prog=session,
        help="measure the runner against doing the same by hand, into docs/benchmarks.md",
    )
    bench.add_argument("--quick", action="store_true", help="time two releases of the by-hand way instead of five")
    bench.set_defaults(call=commands.bench)
    return parser


def _cell_options(parser: argparse.ArgumentParser) -> None:
    """What regress and watch have in common."""
    parser.add_argument("--pack", action="append", metavar="PACK", help="only this pack: 09 or pack09; may be repeated")
    parser.add_argument("--upstream", action="append", metavar="NAME", help="only packs about this package; may be repeated")
    parser.add_argument("--jobs", type=int, metavar="N", help="releases at a time (default: one a core, one on a GPU)")
    parser.add_argument(
        "--confirm", type=int, default=3, metavar="N", help="runs in all before a change is believed (default: 3)"
    )
    parser.add_argument("--only-changes", action="store_true", help="print no line for each run")
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="run on the dask cluster with this scheduler; 'local' starts one here"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where receipts are and go (default: results/)")
    parser.add_argument("--machine", metavar="NAME", help="the machine's name in results/ (default: made from what it is)")
