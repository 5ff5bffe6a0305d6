"""``review``: what a pull request does to the known bugs of its package."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table
from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.files import CACHE, write_atomically
from common.install import checkouts, environment, lanes
from common.install.releases import Release
from common.packs.pack import find
from common.publish import review
from common.publish.review import Judged
from common.run import plan as plans
from common.run import pool, runner
from common.run.plan import Task

HELP = "run all packs about a package on a pull request and on its base"
DESCRIPTION = """Run all packs about a package on two commits of a clone and compare. Exit status: 1 if one shows a bug that the base does not
have, 0 if none does, 2 for a mistake. Made for the upstream's own CI: docs/upstream-ci.yml."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("package", help="the upstream's name on PyPI")
    parser.add_argument("--source", type=Path, metavar="DIR", required=True, help="a clone of the upstream")
    parser.add_argument("--base", metavar="REF", required=True, help="the commit to compare with, as origin/main")
    parser.add_argument("--head", metavar="REF", help="the commit that is judged (default: the working tree as it is)")
    parser.add_argument("--pack", action="append", metavar="PACK", help="only this pack: 09 or pack09; may be repeated")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="where the table goes as Markdown, for a comment or a job's summary"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="where it goes as JUnit's XML")
    common.pool_options(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    common.check(options)
    out = report.console()
    about = [pack for pack in common.about_upstreams(out) if pack.package == options.package]
    if not about:
        known = ", ".join(sorted({pack.package for pack in common.about_upstreams(out)}))
        raise UserError(f"No pack is about {options.package!r}; there are packs about {known}.")
    if options.pack:
        named = {find(name).name for name in options.pack}
        if others := sorted(named - {pack.name for pack in about}):
            raise UserError(f"{', '.join(others)} is not about {options.package}: leave it out.")
        about = [pack for pack in about if pack.name in named]
    # A pack that measures has no verdict that a pull request could change.
    about = [pack for pack in about if not pack.as_files and pack.kind != "claim"]
    if not about:
        raise UserError(f"None of the named packs gives a verdict on a clone of {options.package}.")
    markdown, junit = (
        None if path is None else common.output(path, mark)
        for path, mark in ((options.markdown, review.HEADING), (options.junit, review.XML))
    )
    if markdown is not None and markdown == junit:
        raise UserError("--markdown and --junit name one file: give each its own.")
    jobs = options.jobs or min(plans.default_jobs(lanes.choose(pack)) for pack in about)
    tasks: list[Task] = []
    versions: list[str] = []
    for ref in (options.base, options.head):
        for pack in about:
            wheel = checkouts.wheel(pack, common.given(options.source), ref, CACHE)
            version = environment.read_wheel(wheel, pack.package)[1]
            versions.append(version)
            plan = plans.planned(
                pack,
                "",
                lanes.choose(pack),
                threads=plans.threads_each(jobs),
                results=CACHE / "runs" / "review" / "pull-requests",
                checkout=True,
                wheels={version: wheel.resolve()},
                **({"machine": options.machine} if options.machine else {}),
            )
            tasks.append((plan, Release(version=version, file=wheel.name, sha256="")))
    base, head = versions[0], versions[-1]
    if base == head:
        raise UserError(f"The base and what is judged hold the same files of {options.package}: there is nothing to compare.")
    for needed in {plan.pack.requires: plan.pack for plan, _ in tasks}.values():
        common.base(needed, out)
    with pool.threads(jobs) as workers, report.Follow(2 * len(tasks), out) as follow:
        out.print(f"{len(about)} pack(s) about {options.package} on {base} and on {head}, {workers.where}", markup=False)
        rows, failures = runner.run_all(tasks, workers, done=follow)
    if failures:
        raise UserError(failures[0].message)
    shown = {(row.cell.pack, row.cell.version): row for row in rows if row.cell.side == "unpatched"}
    found = review.ordered(
        [Judged(pack=p.name, title=p.title, base=shown[p.name, base], head=shown[p.name, head]) for p in about]
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("pack", "bug", base.partition("+")[2], head.partition("+")[2], ""):
        table.add_column(heading, overflow="fold")
    for each in found:
        style = {"brought": "bold red", "fixed": "green", "free": "green", "kept": "magenta"}.get(each.state, "yellow")
        words = (each.pack, each.title, str(each.base.verdict), str(each.head.verdict))
        table.add_row(*map(Text, words), Text(each.state, style))
    out.print(table)
    for each in found:
        if each.why:
            common.warn(f"{each.pack}: {review.STATES[each.state]}: {each.why}.", out)
    names = base.partition("+")[2], head.partition("+")[2]
    if markdown is not None:
        write_atomically(markdown, review.markdown(options.package, *names, found))
    if junit is not None:
        write_atomically(junit, review.junit(options.package, found))
    return common.SURPRISE if any(each.state == "brought" for each in found) else common.OK
