"""``blame``: which commits of the upstream brought a bug, and which took it away."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.files import CACHE, RESULTS
from common.install import environment, lanes, sources
from common.install.releases import Release
from common.packs.pack import Pack, find
from common.run import blame, pool, runner
from common.run import plan as plans
from common.run.blame import Commit, Span
from common.run.plan import Plan, Task
from common.store import history

HELP = "find the commits that brought a bug and took it away"
DESCRIPTION = """Between neighbouring releases whose recorded verdicts differ, run every commit that touches the files that the script ran
or the fix changes, and its parent, and name those whose parent shows something else. Where a change came from elsewhere, every commit of the package between is run. A commit that
was run is not run again. Exit status: 0 if each change of verdict was found, 1 if one was not, 2 for a mistake."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("pack", help="pack09, 09 or 9")
    parser.add_argument("--source", type=Path, metavar="DIR", required=True, help="a clone of the upstream, with its tags")
    parser.add_argument("--between", metavar="REF..REF", help="these two commits, branches or tags instead of releases")
    parser.add_argument("--lane", help="this lane instead of the strongest that the machine allows")
    parser.add_argument("--record", action="store_true", help="keep the receipts in results/review/commits/")
    common.pool_options(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    pack, out = find(options.pack), report.console()
    common.check(options)
    if not options.source.is_dir():
        raise UserError(f"{options.source} is not a folder: --source names a clone of {pack.upstream}.")
    runs = history.load(RESULTS, [pack]).of(pack.name, pack.package)
    paths = blame.files(pack, runs)
    spans = [_between(options.between)] if options.between else blame.spans(runs)
    if not spans:
        raise UserError(f"All releases of {pack.package} that {pack.name} can test show the same: say --between REF..REF.")
    lane = lanes.choose(pack, options.lane)
    results = (RESULTS if options.record else CACHE / "runs") / "review" / "commits"
    jobs = options.jobs or plans.default_jobs(lane)
    given = {"machine": options.machine} if options.machine else {}
    plan = plans.planned(pack, "", lane, threads=plans.threads_each(jobs), results=results, checkout=True, **given)
    out.print(f"{pack.name} · {pack.title}", markup=False, style="bold")
    common.base(pack, out)
    found = [_of_span(plan, span, options.source, paths, jobs, out) for span in spans]
    if named := pack.fixed.get("commit"):
        agrees = any(commit.sha.startswith(named) for turns in found for commit, _, outcome in turns if outcome == "ABSENT")
        out.print(f"pack.toml names {named} as the fix: {'so it is' if agrees else 'it was not found'}.", markup=False)
    return common.OK if all(found) else common.SURPRISE


def _between(text: str) -> Span:
    before, dots, after = text.partition("..")
    if not (before and dots and after) or after.startswith("."):
        raise UserError(f"--between {text}: give two commits, branches or tags, as in v0.8.1..main.")
    return Span(before=before, after=after)


def _of_span(plan: Plan, span: Span, clone: Path, paths: list[str], jobs: int, out: Console) -> list[tuple[Commit, str, str]]:
    """The commits of one span after which the verdict is another."""
    count = len(blame.commits(clone, span, paths))
    out.print(f"\n{span.before} → {span.after}: {count} commit(s) touch {', '.join(paths)}", markup=False, style="bold")

    def shows(commits: list[Commit]) -> dict[str, str]:
        return _outcomes(plan, clone, commits, jobs, out)

    found = blame.search(clone, span, paths, sources.folders(plan.pack), shows)
    table = Table(box=None, pad_edge=False)
    for heading in ("commit", "day", "verdict", ""):
        table.add_column(heading, overflow="fold")
    changed = {commit.sha for commit, _, _ in found.turns}
    for commit in found.commits:
        style = "bold" if commit.sha in changed else "dim"
        outcome = found.outcomes[commit.sha]
        table.add_row(*(Text(word, style) for word in (commit.sha[:10], commit.day, outcome, commit.subject)))
    out.print(table)
    for commit, before, after in found.turns:
        where = f"https://github.com/{plan.pack.upstream}/pull/{commit.pull_request}" if commit.pull_request else commit.sha
        out.print(f"{before} → {after}: {commit.sha[:10]}, {commit.day}, {where}", markup=False)
    if not found.turns:
        ends = " and ".join(found.outcomes[commit.sha] for commit in (found.commits[0], found.commits[-1]))
        out.print(f"No commit changes the verdict: {span.before} and {span.after} show {ends}.", style="yellow", markup=False)
    return found.turns


def _outcomes(plan: Plan, clone: Path, commits: list[Commit], jobs: int, out: Console) -> dict[str, str]:
    """What each commit shows; those with a fresh receipt are not run again."""
    wheels = {commit.sha: sources.of_checkout(plan.pack, clone, commit.sha, CACHE) for commit in commits}
    versions = {sha: environment.read_wheel(wheel, plan.pack.package)[1] for sha, wheel in wheels.items()}
    known = _known(plan.results, plan.pack)
    tasks: list[Task] = []
    for sha, version in versions.items():
        if version not in known:
            release = Release(version=version, file=wheels[sha].name, sha256="")
            given = {version: wheels[sha].resolve()}
            tasks.append(
                (
                    plans.planned(
                        plan.pack,
                        "",
                        plan.lane,
                        threads=plan.threads,
                        results=plan.results,
                        checkout=True,
                        machine=plan.machine,
                        wheels=given,
                    ),
                    release,
                )
            )
    if tasks:
        with pool.threads(jobs) as workers, report.Follow(2 * len(tasks), out) as follow:
            _, failures = runner.run_all(tasks, workers, done=follow)
        if failures:
            raise UserError(failures[0].message)
        known = _known(plan.results, plan.pack)
    return {sha: known.get(version, "INFRA") for sha, version in versions.items()}


def _known(results: Path, pack: Pack) -> dict[str, str]:
    runs = history.load(results, [pack]).runs if results.is_dir() else []
    return {seen.version: blame.outcome(seen) for seen in runs if seen.side == "unpatched" and not seen.stale}
