"""``watch``: the releases that are newer than the receipts, and what changed. Made for cron and CI."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.cli import cells, common, report
from common.errors import writing
from common.run import regress
from common.run.regress import Report
from common.store import history

HELP = "run the releases that are newer than the receipts, and report what changed"
DESCRIPTION = """Ask the package index for releases newer than the receipts, run just those, and report what changed. It files nothing.
Made for cron and CI: exit status 3 if something changed, 0 if nothing did, 1 if a verdict is not what its pack expects, 2 for a mistake."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    cells.cell_options(parser)
    parser.add_argument("--pre", action="store_true", help="pre-releases too")
    parser.add_argument(
        "--nightly",
        action="store_true",
        help="also the newest nightly, of upstreams that publish them as a package of their own",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        default="-",
        help="where the JSON goes (default: -, standard output, and the lines to standard error)",
    )


def call(options: argparse.Namespace, extra: list[str]) -> int:
    common.check(options)
    target = None if options.json == "-" else common.output(Path(options.json), '{"schema"', stream=True)
    out = report.console(stderr=target is None)
    packs = cells.chosen_packs(options, out)
    if options.nightly:
        packs += [replace(pack, package=pack.nightly) for pack in packs if pack.nightly]
    with cells.session(options, packs, out) as (workers, plan_for, results, machine):
        load = partial(history.load, results, common.packs(out) if options.results is None else packs)
        with regress.alone(results, machine) as journal:
            work = regress.plan(packs, load(), plan_for=plan_for, newer=True, pre=options.pre, pending=regress.pending(journal))
            cells.announce(work, out)
            found = cells.run(work, journal, workers, load, options, out, deliver=partial(_deliver, target))
    cells.bring_up_to_date(results, out)
    cells.show(found, out, results / machine)
    if found.changes:
        return common.CHANGED
    return common.OK if found.as_expected else common.SURPRISE


def _deliver(target: Path | None, found: Report) -> None:
    text = f"{json.dumps(found.to_dict(), ensure_ascii=False)}\n"
    if target:
        with writing(target):
            target.write_text(text, encoding="utf-8")  # It may be a pipe, or /dev/stderr.
    else:
        print(text, end="", flush=True)
