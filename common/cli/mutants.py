"""``mutants``: break every fix, blunt every trigger, and see that the packs notice."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.files import ROOT, write_atomically
from common.packs.pack import find
from common.publish import mutants as pages

HELP = "break every fix and blunt every trigger: each mutant must be noticed"
DESCRIPTION = """Run each pack with a transform of its fix left out, with each output of the fixed code poisoned (NaN, zeros, sign, a
factor), with each wrong fix that its mutants.toml names, and with its trigger disabled. What it found goes into docs/mutants.md. A
call that was stopped goes on where it stopped. Exit status: 0 if each turned its side red, 1 if not, 2 for a mistake, 130 after Ctrl-C."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("pack", nargs="*", help="pack09, 09 or 9 (default: all)")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="those whose names hold this; docs/mutants.md stays as it is"
    )
    parser.add_argument("--again", action="store_true", help="also those that ended in a call that was stopped")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a clone of the upstream, for bugs that are in no release")
    parser.add_argument("--jobs", type=int, metavar="N", help="mutants at a time (default: one a core)")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    from common.dev import mutants

    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is not a number of at least 1.")
    out = report.console()
    chosen = [find(name) for name in options.pack] or common.about_upstreams(out)
    count = sum(len(mutants.of(pack, options.only)[1]) for pack in chosen)
    if not count:
        raise UserError(f"No mutant's name holds {options.only!r}." if options.only else "None of these packs has mutants.")
    out.print(f"{count} mutants of {len(chosen)} pack(s); what their releases share is installed first.", markup=False)
    today = pages.digests(common.packs(out))
    journals = {} if options.only else {pack.name: today[pack.name] for pack in chosen if pack.name in today}
    before = [] if options.again else [outcome for told in journals.items() for outcome in mutants.kept(*told)]
    if before:
        out.print(f"{len(before)} of them ended in a call that was stopped; --again runs them, too.", markup=False)
    ended = len(before)

    def done(outcome: pages.Outcome) -> None:
        nonlocal ended
        ended += 1
        if outcome.pack in journals:
            mutants.keep(outcome, journals[outcome.pack])
        word = Text("✓ ", "green") if outcome.killed else Text("✗ ", "bold red")
        out.print(word + f"[{ended}/{count}] {outcome.pack} {outcome.kind} {outcome.name}: {outcome.saw}", soft_wrap=True)

    found = mutants.run(
        chosen,
        jobs=options.jobs or max(1, os.cpu_count() or 1),
        done=done,
        source=options.source and common.given(options.source),
        only=options.only,
        before=before,
    )
    survived = [outcome for outcome in found if not outcome.killed]
    out.print(f"{len(found)} mutants, {len(survived)} survived.")
    if options.only:
        return common.SURPRISE if survived else common.OK
    path = ROOT / "docs" / "mutants.md"
    left_out = {pack.name: mutants.left_out(mutants.of(pack)[0]) for pack in chosen}
    page = path.read_text("utf-8") if path.is_file() else ""
    write_atomically(path, pages.page(found, left_out, page, today))
    for told in journals.items():
        mutants.forget(*told)
    out.print("written: docs/mutants.md", markup=False)
    return common.SURPRISE if survived else common.OK
