"""``regress``: every release of every upstream that has no fresh receipt, and what changed."""

from __future__ import annotations

import argparse
from functools import partial

from common.cli import cells, common, report
from common.cli.cells import cell_options
from common.run import regress
from common.store import history

HELP = "run every release of every upstream that has no fresh receipt, and report what changed"
DESCRIPTION = """Run every (pack, release, side) that has no fresh receipt from this machine, and report what changed. A call that was
stopped goes on where it stopped. Exit status: 0 if every verdict is what its pack expects, 1 if not, 2 for a mistake, 130 after Ctrl-C."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    cell_options(parser)
    parser.add_argument(
        "--releases",
        choices=("all", "pinned", "new"),
        default="all",
        help="all (the default), those that the packs pin, or those never run on this machine",
    )
    parser.add_argument("--since", metavar="VERSION", help="this release and newer ones only")
    parser.add_argument("--again", action="store_true", help="also cells with a fresh receipt")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and run nothing")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    common.check(options)
    out = report.console()
    packs = cells.chosen_packs(options, out)
    with cells.session(options, packs, out) as (workers, plan_for, results, machine):
        load = partial(history.load, results, packs)
        choose = partial(
            regress.plan, packs, plan_for=plan_for, which=options.releases, since=options.since, again=options.again
        )
        if options.dry_run:
            work = choose(load())
            cells.announce(work, out, dry=True)
            return common.SURPRISE if work.problems else common.OK
        with regress.alone(results, machine) as journal:
            work = choose(load())
            cells.announce(work, out)
            found = cells.run(work, journal, workers, load, options, out)
    cells.bring_up_to_date(results, out)
    cells.show(found, out, results / machine)
    return common.OK if found.as_expected else common.SURPRISE
