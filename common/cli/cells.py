"""What regress and watch have in common: options, workers, running the cells, the closing lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from common.cli import report
from common.cli.common import about_these, about_upstreams, base, folder, formatted, judges, pool_options, results_option, warn
from common.errors import UserError
from common.files import CACHE, RESULTS
from common.install import lanes
from common.install.machine import machine_name
from common.packs.pack import Pack, find
from common.publish import tables
from common.run import plan as plans
from common.run import pool, regress, runner
from common.run.plan import Plan
from common.run.pool import Pool
from common.run.regress import Report, Work
from common.store import history


def cell_options(parser: argparse.ArgumentParser) -> None:
    """What regress and watch have in common."""
    parser.add_argument("--pack", action="append", metavar="PACK", help="only this pack: 09 or pack09; may be repeated")
    parser.add_argument("--upstream", action="append", metavar="NAME", help="only packs about this package; may be repeated")
    parser.add_argument(
        "--confirm", type=int, default=3, metavar="N", help="runs in all before a change is believed (default: 3)"
    )
    parser.add_argument("--only-changes", action="store_true", help="print no line for each run")
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="run on the dask cluster with this scheduler; 'local' starts one here"
    )
    pool_options(parser)
    results_option(parser, "where receipts are and go (default: results/)")


def chosen_packs(options: argparse.Namespace, out: Console) -> list[Pack]:
    """Those that were named, else all but the self-test, which says nothing of a release."""
    chosen = [find(name) for name in options.pack or ()] or about_upstreams(out)
    upstreams = sorted({pack.package for pack in chosen})
    about_these(chosen if options.pack else (), options.upstream or ())
    if unknown := sorted(set(options.upstream or ()) - set(upstreams)):
        raise UserError(f"No pack is about {unknown[0]!r}; there are packs about {', '.join(upstreams)}.")
    return [pack for pack in chosen if not options.upstream or pack.package in options.upstream]


@contextmanager
def session(
    options: argparse.Namespace, packs: Sequence[Pack], out: Console
) -> Iterator[tuple[Pool, Callable[[Pack, str], Plan], Path, str]]:
    """Workers, what holds for each pack's runs on them, where receipts go and the machine's name."""
    folder(options.results, "--results")
    if any(pack.kind == "selftest" for pack in packs) and options.results is None:
        raise UserError("The self-test's receipts are no record of a release: name a folder for them with --results.")
    for pack in packs:
        judges(pack)
    if not getattr(options, "dry_run", False):
        formatted(packs, out)
    results = (options.results or RESULTS).resolve()
    jobs = options.jobs or plans.default_jobs("device")
    there: AbstractContextManager[Pool] = (
        pool.cluster(options.scheduler, options.jobs) if options.scheduler else pool.threads(jobs)
    )
    with there as workers:
        machine = options.machine or str(workers.ask(machine_name))
        strongest = {pack.name: str(workers.ask(partial(lanes.choose, pack))) for pack in packs}
        out.print(f"{machine}, {workers.where}", markup=False)

        def plan_for(pack: Pack, variant: str) -> Plan:
            own = pack.variants.get(variant)
            lane = (own.lane if own else None) or strongest[pack.name]
            # On a cluster it is not known how many runs share a machine's cores.
            threads = 1 if options.scheduler else plans.threads_each(jobs)
            return plans.planned(pack, variant, lane, threads=threads, results=results, machine=machine)

        yield workers, plan_for, results, machine


def announce(work: Work, out: Console, *, dry: bool = False) -> None:
    """What is to be done, before it is."""
    for warning in work.warnings:
        warn(warning, out)
    by_pack: dict[str, list[str]] = {}
    for planned, release in work.tasks:
        named = f"{planned.pack.name} {planned.variant}".rstrip()
        by_pack.setdefault(f"{named} {planned.pack.package} ({planned.lane})", []).append(release.version)
    fresh = len(work.cells) - len(work.tasks)
    out.print(f"{len(work.cells)} releases: {fresh} with fresh receipts, {len(work.tasks)} to run on both sides.", markup=False)
    for name, versions in by_pack.items() if dry else ():
        out.print(f"  {name}: {', '.join(versions)}", markup=False, soft_wrap=True)
    for problem in work.problems if dry else ():
        out.print(Text(f"✗ {problem}", "red"), soft_wrap=True)


def run(
    work: Work,
    journal: Path,
    workers: Pool,
    load: Callable[[], history.History],
    options: argparse.Namespace,
    out: Console,
    *,
    deliver: Callable[[Report], None] = lambda found: None,
) -> Report:
    for label in runner.killed(CACHE):
        warn(f"A run that was killed was cleared away: {label}.", out)
    needed = [planned.pack.at(release.version) for planned, release in work.tasks]
    for pack in {pack.requires: pack for pack in needed}.values():
        base(pack, out)
    with report.Follow(2 * len(work.tasks), out, quiet=options.only_changes) as follow:
        return regress.run(
            work,
            journal,
            workers,
            load,
            confirm=options.confirm,
            done=follow,
            say=lambda line: warn(line, out),
            deliver=deliver,
        )


def bring_up_to_date(results: Path, out: Console) -> None:
    if results == RESULTS.resolve():
        for path in tables.update():
            out.print(f"rewritten: {path}", markup=False)


def show(found: Report, out: Console, folder: Path) -> None:
    """The closing lines, the changes last."""
    for label in found.killed:
        warn(f"Run again, for an earlier run of it had been killed: {label}.", out)
    for problem in found.problems:
        out.print(Text(f"✗ {problem}", "red"), soft_wrap=True)
    for line in found.unexpected:
        out.print(Text(f"✗ {line}", "red"), soft_wrap=True)
    wrong = len(found.unexpected) + len(found.problems)
    said = f"{wrong} not as expected" if wrong else "every verdict is what its pack expects" if found.cells else "none to run"
    out.print(
        f"{found.ran} runs, {found.cells} cells: {said}. Receipts in {report.where(folder)}/.", markup=False, soft_wrap=True
    )
    for machine, count in found.stale.items():
        out.print(
            Text(f"stale      {machine}: {count} receipt(s), made by another script or fix than today's", "dim"), soft_wrap=True
        )
    for change in found.changes:
        out.print(Text(f"{change.kind:<10} {change}", "red" if change.kind != "fixed" else "green"), soft_wrap=True)
    if not found.changes:
        out.print("Nothing changed.")
