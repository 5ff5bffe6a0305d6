"""``attach``: the text and the files to attach to an upstream issue."""

from __future__ import annotations

import argparse

from common.cli import common, report
from common.files import CACHE, RESULTS
from common.install.releases import choose
from common.packs.pack import Pack, find
from common.publish import attach
from common.run import plan as plans
from common.run import runner

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
    written = attach.write(
        find(options.pack), options.results or RESULTS, remade=_diff, machine=options.machine, template=options.template
    )
    out.print("Read it, run the pack once more if in doubt, and sign it with your own name. To attach:")
    for path in written:
        out.print(f"  {report.where(path)}", markup=False, soft_wrap=True)
    return common.OK


def _diff(pack: Pack, version: str, lane: str) -> str:
    """What the fix changes in a release, which is installed for it."""
    return runner.fix_of(plans.planned(pack, "", lane), choose(pack, version, CACHE)[0][0])
