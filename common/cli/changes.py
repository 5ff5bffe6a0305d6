"""``changes``: what changed from release to release, by when it was seen."""

from __future__ import annotations

import argparse
import datetime
import json

from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.publish import timeline

HELP = "report what changed from release to release"
DESCRIPTION = "Tell from the stored receipts what changed from release to release: what broke, what was fixed; with the day of the newest record, the latest last."


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("--since", metavar="DATE", help="only what was last recorded on this day or later: 2026-11-01")
    parser.add_argument("--upstream", metavar="NAME", help="only this package")
    parser.add_argument("--json", action="store_true", help="as JSON")
    common.results_option(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    since = ""
    if options.since:
        try:
            since = datetime.date.fromisoformat(options.since).isoformat()
        except ValueError as error:
            raise UserError(f"--since {options.since} is not a day: write it as 2026-11-01.") from error
    out = report.console()
    notes = report.console(stderr=True)
    packs = common.about_upstreams(notes)
    if options.upstream and options.upstream not in {pack.package for pack in packs}:
        known = ", ".join(sorted({pack.package for pack in packs}))
        raise UserError(f"No pack is about {options.upstream!r}; there are packs about {known}.")
    told = [
        (when, change)
        for when, change in timeline.changes(packs, common.stored(options, packs, notes))
        if when[:10] >= since and options.upstream in (None, change.cell.dist)
    ][::-1]
    if options.json:
        print(json.dumps([{"seen": when, **change.to_dict()} for when, change in told], ensure_ascii=False))
        return common.OK
    for when, change in told:
        out.print(
            Text(f"{when[:10]}  {change.kind:<10} {change}", "green" if change.kind == "fixed" else "red"), soft_wrap=True
        )
    if not told:
        out.print("Nothing changed.")
    return common.OK
