"""``tables``: the generated files in git."""

from __future__ import annotations

import argparse

from common.cli import common
from common.publish import tables

HELP = "rewrite what is generated: tables, schemas, badges, report blocks"
DESCRIPTION = """Rewrite what is generated in git: the tables of README.md, docs/contract.md, docs/mutants.md and results/README.md,
results/timeline.json, schemas, badges and the report block of each script."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when one is not up to date")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    stale = tables.update(check=options.check)
    for path in stale:
        print(f"{path}: {'not up to date: run python -m common tables' if options.check else 'rewritten'}")
    return common.SURPRISE if stale and options.check else common.OK
