"""``python -m common``: run packs, attach their output, add a pack. The nox sessions call this."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from common import __version__
from common.errors import UserError, full
from common.files import write_atomically
from common.pack import Pack, all_packs, find

if TYPE_CHECKING:
    from common import runner
    from common.releases import Release

#: Exit codes: every verdict as expected; one is not; the call or its surroundings are wrong; stopped by Ctrl-C.
OK, SURPRISE, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, extra = parser.parse_known_args(arguments)
    if extra and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    try:
        return int(options.call(options, extra))
    except UserError as error:
        _complain(str(error))
        return USAGE
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        if not full(error):
            raise
        _complain(f"No space left on the disk of {error.filename or 'the cache'}: free some and run again.")
        return USAGE
    except KeyboardInterrupt:
        _complain("Stopped. Receipts of the runs that had ended are kept; nothing is left running.")
        return INTERRUPTED


def _complain(sentence: str) -> None:
    from common.report import console

    console(stderr=True).print(Text(sentence, "red"), soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    # A nox session tells its own name: nox -s attach --
    session = os.environ.get("REPRODUCER_PROG")
    parser = argparse.ArgumentParser(
        prog="python -m common",
        description="Is this upstream bug in that release, and does this fix cure it?",
        epilog="Exit status: 0 every verdict is what the pack expects, 1 one is not, 2 a mistake in the call or its surroundings, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        prog=session,
        help="run a pack on releases of its upstream, unpatched and patched",
        description="Run a pack on releases of its upstream, unpatched and patched, and store a receipt of each run. "
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
        "--wheel", type=Path, action="append", metavar="FILE", help="a wheel of the upstream package; may be repeated"
    )
    which.add_argument(
        "--release-path",
        type=Path,
        metavar="DIR",
        help="a folder that holds the installed release (pip install --target DIR)",
    )
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
    run.add_argument("--lane", help="this lane instead of the strongest that the machine allows")
    run.add_argument("--variant", help="arguments that the pack has a name for (see its pack.toml)")
    run.add_argument("--jobs", type=int, metavar="N", help="releases at a time (default: one a core, one on a GPU)")
    run.add_argument("--results", type=Path, metavar="DIR", help="where receipts go (default: results/)")
    run.add_argument("--machine", metavar="NAME", help="the machine's name in results/ (default: made from what it is)")
    run.add_argument("--proofs", action="store_true", help="print the three proofs of every verdict, however many")
    run.add_argument("--picture", type=Path, metavar="SVG", help="also save what is printed as a picture")
    run.set_defaults(call=_run)

    listing = commands.add_parser("list", help="list the packs")
    listing.set_defaults(call=_list)

    attach = commands.add_parser(
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
    attach.set_defaults(call=_attach)

    new = commands.add_parser("new-pack", prog=session, help="make the skeleton of a pack that passes the contract tests")
    new.add_argument("number", type=int, help="two digits that no pack has had, e.g. 21")
    new.add_argument("slug", help="lower-case words joined by underscores, e.g. mimo_reduce")
    new.add_argument("--package", default="example", help="the upstream's name on PyPI")
    new.set_defaults(call=_new_pack)

    tables = commands.add_parser("tables", help="rewrite the generated tables of README.md")
    tables.add_argument("--check", action="store_true", help="change nothing; exit 1 when one is not up to date")
    tables.set_defaults(call=_tables)

    for name, what in (
        ("regrade", "recompute every verdict from the stored logs, running nothing, and report differences"),
        ("verify", "check stored receipts: schema, hashes of logs and wheels, nothing private"),
    ):
        audit = commands.add_parser(name, prog=session, help=what, description=f"{what.capitalize()}.")
        audit.add_argument("--results", type=Path, metavar="DIR", help="where receipts are (default: results/)")
        audit.set_defaults(call=_audit)

    bench = commands.add_parser(
        "bench",
        prog=session,
        help="measure the runner against doing the same by hand, into docs/benchmarks.md",
    )
    bench.add_argument("--quick", action="store_true", help="time two releases of the by-hand way instead of five")
    bench.set_defaults(call=_bench)
    return parser


def _run(options: argparse.Namespace, extra: list[str]) -> int:
    from common import environment, lanes, report, runner

    pack = find(options.pack)
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is not a number of at least 1.")
    if options.machine is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.machine):
        raise UserError(f"--machine {options.machine} is no name for a folder: letters, digits, '.', '_' and '-' only.")
    if options.patch is not None and options.without is not None:
        raise UserError("--without leaves out a part of the pack's own fix; it has no meaning beside --patch.")
    variant, arguments = _arguments(pack, options.variant, extra)
    lane = lanes.choose(pack, options.lane)
    out = report.console()
    # The self-test's receipts are about the harness and say nothing of a release.
    results = options.results or (runner.CACHE / "selftest" if pack.kind == "selftest" else runner.RESULTS)
    review = options.patch is not None or options.without is not None
    if review:  # Verdicts on somebody's diff, or on a fix broken on purpose, are no record of the release.
        results = results / "review" / (options.patch.stem if options.patch else f"without-{options.without}")
    jobs = options.jobs or runner.default_jobs(lane)
    wheels = {environment.read_wheel(wheel, pack.package)[1]: wheel.resolve() for wheel in options.wheel or ()}
    plan = runner.Plan(
        pack=pack,
        threads=max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else 0,
        lane=lane,
        arguments=arguments,
        variant=variant,
        patch=options.patch,
        drop=options.without,
        here=options.here,
        wheels=wheels,
        release_path=options.release_path,
        results=results,
        **({"machine": options.machine} if options.machine else {}),
    )
    chosen, warnings = _releases(plan, options.releases, out)
    for warning in warnings:
        out.print(Text(warning, "yellow"))
    out.print(f"{pack.name} · {pack.title}", markup=False, style="bold")
    if not (plan.here or plan.release_path or environment.has_base(pack.requires, plan.cache)):
        with report.waiting(f"installing {', '.join(pack.requires) or 'nothing'} once, for every release to share", out):
            environment.base(pack.requires, plan.cache)
    out.print(
        f"{len(chosen)} release(s) of {pack.package}, both sides, lane {lane}, {min(jobs, len(chosen))} at a time",
        markup=False,
    )
    with report.Follow(2 * len(chosen), out) as follow:
        rows = runner.run_all(plan, chosen, jobs=jobs, done=follow)
    surprising = list(report.surprises(rows))
    parts: list[RenderableType] = [report.proofs(rows)] if options.proofs or len(rows) <= report.PROOFS else []
    parts.append(report.table(rows, f"{pack.name} · {pack.package}" + (f" · {variant}" if variant else "")))
    parts += surprising or [Text("✓ Every verdict is what the pack expects.", "green")]
    for part in parts:
        out.print(part)
    if options.picture is not None:
        write_atomically(options.picture, report.picture(parts, f"nox -s {pack.name}"))
    return SURPRISE if surprising else OK


def _releases(plan: runner.Plan, wanted: str | None, out: Console) -> tuple[list[Release], list[str]]:
    """The releases to run, and warnings: from wheels, from where one is installed, or from the index."""
    from common import environment, report, runner
    from common.releases import Release, choose

    pack = plan.pack
    if plan.wheels:
        return [Release(version=version, file=wheel.name, sha256="") for version, wheel in plan.wheels.items()], []
    if plan.here or plan.release_path:
        if wanted:
            raise UserError(
                "--here runs the one release that is there: give others with --wheel or --release-path, not with --releases."
            )
        there = environment.here(pack.package, plan.cache, release_path=plan.release_path)
        return [Release(version=there.version, file="", sha256="")], []
    if pack.wheels is not None:
        built = runner.built_wheels(pack, plan.cache)
        names = list(pack.pinned) if wanted in (None, "pinned", "all") else str(wanted).split(",")
        if unknown := [version for version in names if version not in built]:
            raise UserError(f"{pack.package} has no release {unknown[0]}; there are {', '.join(built)}.")
        return [Release(version=version, file=built[version].name, sha256="") for version in names], []
    with report.waiting(f"{pack.name}: asking the package index for the releases of {pack.package}", out):
        return choose(pack, wanted, plan.cache)


def _arguments(pack: Pack, variant: str | None, extra: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The script's arguments and a name for them: they are part of what a receipt is about."""
    if variant is not None and extra:
        raise UserError(f"--variant {variant} already names the script's arguments: give either it or {' '.join(extra)}.")
    if variant is not None:
        if variant not in pack.variants:
            known = ", ".join(pack.variants) or "none"
            raise UserError(f"{pack.name} has no variant {variant!r}; it has: {known}.")
        return variant, pack.variants[variant]
    takes = set(re.findall(r"add_argument\(\s*['\"](--[a-z-]+)", pack.script.read_text(encoding="utf-8")))
    for word in extra:
        if word.startswith("--") and word.partition("=")[0] not in takes:
            raise UserError(
                f"{word} is no option of this command ('--help' lists them), nor of {pack.name}'s script ({', '.join(sorted(takes)) or 'none'})."
            )
    if extra and not extra[0].startswith("--"):
        raise UserError(f"{extra[0]!r} is not understood here: '--help' lists the options.")
    return re.sub(r"[^a-z0-9]+", "-", " ".join(extra).lower()).strip("-"), tuple(extra)


def _list(options: argparse.Namespace, extra: list[str]) -> int:
    from rich.table import Table

    from common import report

    table = Table(header_style="bold", pad_edge=False)
    for column in ("pack", "upstream", "kind", "pinned", "what"):
        table.add_column(column, overflow="fold")
    for pack in all_packs():
        table.add_row(pack.name, pack.package, pack.kind, ", ".join(pack.pinned), pack.title)
    report.console().print(table)
    return OK


def _attach(options: argparse.Namespace, extra: list[str]) -> int:
    from common import attach, report, runner

    out = report.console()
    results = options.results or runner.RESULTS
    files = attach.write(find(options.pack), results, machine=options.machine, template=options.template)
    out.print("Read it, run the pack once more if in doubt, and sign it with your own name. To attach:")
    for path in files:
        out.print(f"  {report.where(path)}", markup=False, soft_wrap=True)
    return OK


def _new_pack(options: argparse.Namespace, extra: list[str]) -> int:
    from common import report, scaffold

    for path in scaffold.new_pack(options.number, options.slug, options.package):
        report.console().print(report.where(path), markup=False)
    return OK


def _tables(options: argparse.Namespace, extra: list[str]) -> int:
    from common import tables

    stale = tables.update(check=options.check)
    for path in stale:
        print(f"{path}: {'not up to date: run python -m common tables' if options.check else 'rewritten'}")
    return SURPRISE if stale and options.check else OK


def _audit(options: argparse.Namespace, extra: list[str]) -> int:
    from common import audit, receipt, report, runner

    out = report.console()
    paths = receipt.stored(options.results or runner.RESULTS)
    if not paths:
        raise UserError(f"There is no receipt in {options.results or runner.RESULTS}.")
    published = audit.Published(runner.CACHE)
    look = audit.regrade if options.command == "regrade" else lambda path: audit.verify(path, published)
    wrong = 0
    for path, problems in audit.problems(paths, look):
        wrong += bool(problems)
        for problem in problems:
            out.print(Text(f"✗ {report.where(path)}: {problem}", "red"), soft_wrap=True)
    for warning in published.warnings:
        out.print(Text(warning, "yellow"))
    what = "graded differently today" if options.command == "regrade" else "not sound"
    out.print(f"{len(paths)} receipts, {wrong} {what}.", markup=False)
    return SURPRISE if wrong else OK


def _bench(options: argparse.Namespace, extra: list[str]) -> int:
    from common import bench

    bench.main(quick=options.quick)
    return OK
