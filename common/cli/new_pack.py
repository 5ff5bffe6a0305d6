"""``new-pack``: the skeleton of a pack."""

from __future__ import annotations

import argparse

from common.cli import common, report
from common.packs import scaffold

HELP = "make the skeleton of a pack that passes the contract tests"
DESCRIPTION = "Make the skeleton of a pack that passes the contract tests."


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("number", type=int, help="two digits that no pack has had, e.g. 21")
    parser.add_argument("slug", help="lower-case words joined by underscores, e.g. mimo_reduce")
    parser.add_argument("--package", default="example", help="the upstream's name on PyPI")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    for path in scaffold.new_pack(options.number, options.slug, options.package):
        report.console().print(report.where(path), markup=False)
    return common.OK
