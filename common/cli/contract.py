"""``contract``: what each fused cross entropy does in each row of the contract of the loss."""

from __future__ import annotations

import argparse
import json
from difflib import get_close_matches

from rich.table import Table
from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.publish import contract
from common.store import history

HELP = "the contract of the loss: rows × implementations, from the records"
DESCRIPTION = """Show what each fused cross entropy does in each row of the contract of the loss, from the stored receipts: ✓ as torch's own
functions do, ✗ otherwise, – where it does not take what the row asks for. docs/contract.md says what the rows mean. To run a release anew:
nox -s pack32 -- --release 0.8.5."""
COLOURS = {True: "green", False: "red", None: "dim"}


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("--row", metavar="ROW", help="each release in this row, with what it showed and its receipt")
    parser.add_argument(
        "--json", action="store_true", help="JSON on standard output: row -> package -> release -> what it showed"
    )
    common.results_option(parser, "where the receipts are (default: results/)")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    out = report.console()
    packs = contract.measuring(common.about_upstreams(report.console(stderr=True)))
    root = common.results_folder(options)
    found = contract.columns(packs, history.load(root, packs))
    rows = contract.rows(found)
    if not found:
        raise UserError(f"There is no receipt of the contract in {root}: run nox -s pack32 -- --record first.")
    if options.row is not None and options.row not in rows:
        near = get_close_matches(options.row, rows, 1, 0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {'; '.join(rows)}."
        raise UserError(f"There is no row {options.row!r}: {hint}")
    wanted = [options.row] if options.row else rows
    if options.json:
        print(json.dumps({row: _told(found, row) for row in wanted}, indent=1, ensure_ascii=False))
    elif options.row:
        for package, result in contract.told(found, options.row):
            line = f"{contract.MARKS[result.ok]} {package} {result.version}  {result.saw}  {result.seen.path.relative_to(root)}"
            out.print(Text(line, COLOURS[result.ok]), soft_wrap=True)
    else:
        # Names that a narrow terminal would cut stand below the table.
        wide = out.width >= 40 + sum(len(c.pack.package) + 3 for c in found)
        heads = (f"{c.pack.package}\n{c.pack.name}" if wide else c.pack.name for c in found)
        table = Table("", *heads, pad_edge=False, header_style="bold")
        for row in rows:
            cells = [(contract.said(column, row), column.newest(row)) for column in found]
            table.add_row(row, *(Text(text, COLOURS[result.ok if result else None]) for text, result in cells))
        out.print(table)
        if not wide:
            out.print(" · ".join(f"{c.pack.name} {c.pack.package}" for c in found), markup=False)
        out.print("✓ as torch does · ✗ not, in these releases · – not taken; --row ROW shows what was seen", markup=False)
    return common.OK


def _told(found: list[contract.Column], row: str) -> dict[str, dict[str, dict[str, object]]]:
    told: dict[str, dict[str, dict[str, object]]] = {}
    for package, result in contract.told(found, row):
        receipt = f"{result.seen.machine}/{result.seen.cell.pack}/{result.seen.path.name}"
        told.setdefault(package, {})[result.version] = {"ok": result.ok, "saw": result.saw, "receipt": receipt}
    return told
