"""``upstream-tests``: the upstream's own tests, on a release as it is and with a pack's fix."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.cli import common, report
from common.errors import UserError
from common.install import checkouts, lanes, releases
from common.install.releases import Release
from common.packs.pack import find
from common.run import plan as plans
from common.run import upstream
from common.run.plan import Plan

HELP = "run the upstream's own tests on a release, without a pack's fix and with it"
DESCRIPTION = """Run the upstream's tests of the files that a pack's fix touches, from a clone, at the release's tag, on the release as it is
and with the fix, in the pack's lane; compare test by test. Nothing is stored. Exit status: 0 if no test passes as released and does not with
the fix, 1 if one does, 2 for a mistake."""
SHOWN = 20


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("pack", help="pack09, 09 or 9")
    parser.add_argument("--source", type=Path, metavar="DIR", required=True, help="a clone of the upstream, with its tags")
    parser.add_argument(
        "--release", metavar="VERSION", help="this release (default: the first with the bug that the pack pins)"
    )
    parser.add_argument("--ref", metavar="REF", help="the tests of this commit, branch or tag instead of the release's tag")
    parser.add_argument("--lane", help="this lane instead of the strongest that the machine allows")
    parser.add_argument(
        "--here", action="store_true", help="in the active environment, which has what the tests import: nothing installed"
    )
    parser.add_argument(
        "--release-path", type=Path, metavar="DIR", help="a folder that holds the installed release (pip install --target DIR)"
    )


def call(options: argparse.Namespace, extra: list[str]) -> int:
    pack, out = find(options.pack), report.console()
    tests = pack.upstream_tests
    if tests is None:
        having = ", ".join(each.name for each in common.about_upstreams(report.console(stderr=True)) if each.upstream_tests)
        raise UserError(f"{pack.name}/pack.toml names no [upstream_tests]; these packs do: {having}.")
    clone = checkouts.clone_at(common.given(options.source))
    pack = replace(pack, requires=(*pack.requires, *tests.requires))
    where = {"here": options.here, "release_path": options.release_path and common.given(options.release_path)}
    plan = plans.planned(pack, "", lanes.choose(pack, options.lane), **where)
    release = _release(plan, options.release, out)
    ref = options.ref or checkouts.tag(clone, release.version, "name a commit with --ref")
    if not (plan.here or plan.release_path):
        common.base(plan.pack.at(release.version), out)
    found = upstream.compare(plan, release, tests, clone, ref, lambda line: out.print(line, markup=False, soft_wrap=True))
    if not found.unpatched:
        raise UserError(f"{', '.join(tests.files)} has no test at {ref}.")
    table = Table("", "passed", "failed", "skipped", pad_edge=False, header_style="bold")
    for side, ends in (("as released", found.unpatched), ("with the fix", found.patched)):
        count = Counter(ends.values())
        table.add_row(side, *(str(count[how]) for how in ("passed", "failed", "skipped")))
    out.print(table)
    mended, broken = found.mended(), found.broken()
    for mark, what, names in (
        ("✓", "pass with the fix alone", mended),
        ("✗", "pass as released, and not with the fix", broken),
    ):
        if names:
            out.print(f"{mark} {len(names)} {what}:", markup=False, style="green" if mark == "✓" else "red")
            for name in names[:SHOWN]:
                out.print(f"  {name}", markup=False, soft_wrap=True)
            if len(names) > SHOWN:
                out.print(f"  … and {len(names) - SHOWN} more")
    if not mended and not broken:
        out.print("Each test ends with the fix as it does without it.")
    return common.SURPRISE if broken else common.OK


def _release(plan: Plan, wanted: str | None, out: Console) -> Release:
    """The one whose tests are run: what is there, or one of the index, for which the environment is made."""
    if plan.here or plan.release_path:
        if wanted:
            raise UserError("--here and --release-path run the release that is there: leave --release out.")
        return common.there(plan)
    chosen, warnings = releases.choose(plan.pack, wanted or plan.pack.shown_on(), plan.cache)
    if len(chosen) != 1:
        raise UserError(f"--release {wanted} names {len(chosen)} releases: name one.")
    for warning in warnings:
        common.warn(warning, out)
    return chosen[0]
