"""``new-pack``: the skeleton of a pack."""

from __future__ import annotations

import argparse

from common.cli import common, report
from common.packs import scaffold

HELP = "create the skeleton of a pack that passes the contract tests"
DESCRIPTION = "Create the skeleton of a pack that passes the contract tests."

NEXT = """
Next (docs/adding-a-pack.md says more):
  1. Write main() of repro.py: the upstream call, its checks.   uv run {folder}/repro.py
  2. Name upstream, kind, threads and requires in pack.toml.
  3. See what each release shows, and get [expected] from it:   nox -s {name} -- --releases all --propose
  4. Write fix.py and look at its diff:                         nox -s {name} -- --diff
     A breakpoint() works with                                  nox -s {name} -- --debug patched
  5. Run both sides of the pinned releases:                     nox -s {name}
  6. Name the fix's outputs in mutants.toml, and break it:      nox -s mutants -- {name}
  7. Write README.md, record every release, make the tables:    nox -s regress -- --pack {name} && nox -s tables
"""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("number", type=int, help="two digits that no pack has had, e.g. 50")
    parser.add_argument("slug", help="lower-case words joined by underscores, e.g. mimo_reduce")
    parser.add_argument("--package", default="example", help="the upstream's name on PyPI")
    parser.add_argument("--title", default="", help="what breaks: the first line of the bug report")
    parser.add_argument(
        "--lane", choices=("device", "cpu"), default="device", help="cpu, for a package that needs no GPU (default: device)"
    )


def call(options: argparse.Namespace, extra: list[str]) -> int:
    out = report.console()
    made = scaffold.new_pack(options.number, options.slug, options.package, title=options.title, lane=options.lane)
    for path in made:
        out.print(report.where(path), markup=False)
    folder = made[0].parent
    out.print(NEXT.format(name=folder.name[:6], folder=report.where(folder)), markup=False, soft_wrap=True)
    return common.OK
