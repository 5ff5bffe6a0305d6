"""``attach``: the text and the files to attach to an upstream issue."""

from __future__ import annotations

import argparse

from common.cli import common, report
from common.files import RESULTS
from common.packs.pack import find
from common.publish import attach

HELP = "write the text and the files to attach to an upstream issue"
DESCRIPTION = """Write results/attach/PACK.md from the stored receipts, and beside it the script, the fix's diff and the receipts. It
files nothing."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("pack", help="pack09, 09 or 9")
    parser.add_argument(
        "--for",
        dest="template",
        metavar="UPSTREAM",
        help="under the headings of this upstream's bug template, e.g. liger-kernel",
    )
    parser.add_argument(
        "--machine", metavar="NAME", help="receipts of this machine (default: the one with the strongest evidence)"
    )
    common.results_option(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    out = report.console()
    written = attach.write(find(options.pack), options.results or RESULTS, machine=options.machine, template=options.template)
    out.print("Read it, run the pack once more if in doubt, and sign it with your own name. To attach:")
    for path in written:
        out.print(f"  {report.where(path)}", markup=False, soft_wrap=True)
    return common.OK
