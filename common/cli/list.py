"""``list``: the packs."""

from __future__ import annotations

import argparse

from rich.table import Table
from rich.text import Text

from common.cli import common, report

HELP = "list the packs"
DESCRIPTION = "List the packs."


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    pass


def call(options: argparse.Namespace, extra: list[str]) -> int:
    table = Table(header_style="bold", pad_edge=False)
    for column in ("pack", "upstream", "kind"):
        table.add_column(column, no_wrap=True)
    table.add_column("pinned", overflow="fold", max_width=12)
    table.add_column("what", overflow="fold")
    for pack in common.packs(report.console(stderr=True)):
        table.add_row(*map(Text, (pack.name, pack.package, pack.kind, ", ".join(pack.pinned), pack.title)))
    report.console().print(table)
    return common.OK
