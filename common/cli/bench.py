"""``bench``: the runner against doing the same by hand."""

from __future__ import annotations

import argparse

from common.cli import common

HELP = "measure the runner against doing the same by hand, into docs/benchmarks.md"
DESCRIPTION = "Measure the runner against doing the same by hand, into docs/benchmarks.md."


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("--quick", action="store_true", help="time two releases of the by-hand way instead of five")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    from common.dev import bench

    bench.main(quick=options.quick)
    return common.OK
