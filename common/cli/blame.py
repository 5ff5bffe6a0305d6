"""``blame``: which commits of the upstream introduced a bug, and which fixed it."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.files import CACHE, RESULTS
from common.install import checkouts, environment, lanes
from common.install.releases import Release
from common.packs.pack import find
from common.run import blame, pool, runner
from common.run import plan as plans
from common.run.blame import Commit, Span
from common.run.plan import Plan
from common.scrub import plain
from common.store import history

HELP = "find the commits that introduced and fixed a bug"
DESCRIPTION = """Between neighbouring releases whose recorded verdicts differ, run every commit that touches the files that the script ran
or the fix changes, and its parent, and name those whose parent shows something else. Where a change came from elsewhere, every commit of the package between is run. A commit that
was run is not run again. Exit status: 0 if each change of verdict was found, 1 if one was not, 2 for a mistake."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("pack", help="pack09, 09 or 9")
    parser.add_argument("--source", type=Path, metavar="DIR", required=True, help="a clone of the upstream, with its tags")
    parser.add_argument("--between", metavar="REF..REF", help="these two commits, branches or tags instead of releases")
    parser.add_argument("--lane", help="this lane instead of the strongest that the machine allows")
    parser.add_argument("--record", action="store_true", help="keep the receipts in results/review/commits/")
    parser.add_argument("--again", action="store_true", help="run commits that were run before, too")
    common.pool_options(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    pack, out = find(options.pack), report.console()
    common.check(options)
    if pack.as_files or pack.kind == "selftest":
        raise UserError(f"{pack.name} runs files of its own making, not a checkout of {pack.repository}.")
    clone = checkouts.clone_at(common.given(options.source))
    if checkouts.git(clone, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true":
        raise UserError(f"{clone} is a shallow clone, which lacks the commits between: git fetch --unshallow --tags.")
    runs = history.load(RESULTS, [pack]).of(pack.name, pack.package)
    if not options.between and runs and all(seen.stale for seen in runs):
        raise UserError(
            f"{pack.name} has changed since its releases were run: nox -s regress -- --pack {pack.name}, or say --between REF..REF."
        )
    spans = [_between(options.between)] if options.between else blame.spans(runs)
    if not spans:
        raise UserError(f"All releases of {pack.package} that {pack.name} can test show the same: say --between REF..REF.")
    # What the clone lacks is said before anything is installed.
    between = [(span, names, blame.ends(clone, *names)) for span in spans for names in [_names(clone, span)]]
    lane = lanes.choose(pack, options.lane)
    results = (RESULTS if options.record else CACHE / "runs") / "review" / "commits"
    jobs = options.jobs or plans.default_jobs(lane)
    given = {"machine": options.machine} if options.machine else {}
    plan = plans.planned(pack, "", lane, threads=plans.threads_each(jobs), results=results, checkout=True, **given)
    out.print(f"{pack.name} · {pack.title}", markup=False, style="bold")
    common.base(pack, out)
    runner_of = _Runner(plan, clone, jobs, out, again=options.again)
    paths = blame.files(pack, runs)
    complete = [_of_span(*each, paths, runner_of) for each in between]
    return common.OK if all(complete) else common.SURPRISE


def _between(text: str) -> Span:
    before, dots, after = text.partition("..")
    if not (before and dots and after) or after.startswith("."):
        raise UserError(f"--between {text}: give two commits, branches or tags, as in v0.8.1..main.")
    return Span(before=before, after=after)


def _names(clone: Path, span: Span) -> list[str]:
    return [
        checkouts.tag(clone, each, "say --between REF..REF") if any(span.outcomes) else each
        for each in (span.before, span.after)
    ]


def _of_span(span: Span, names: list[str], ends: tuple[Commit, Commit], paths: list[str], run: _Runner) -> bool:
    """Tell the commits of one span after which the verdict is another; whether every change was found."""
    (start, end), clone, out, pack = ends, run.clone, run.out, run.plan.pack
    count = len(blame.commits(clone, start, end, paths))
    out.print(f"\n{span.before} → {span.after}: {count} commit(s) touch {', '.join(paths)}", markup=False, style="bold")
    if start != (first := blame.commit(clone, names[0])):
        common.warn(f"{span.before} is on another branch: from {start.sha[:10]}, where it left.", out)
    shown = run([first, end])
    if any(span.outcomes) and (shown[first.sha], shown[end.sha]) != span.outcomes:
        said = " and ".join(f"{shown[c.sha]} at the tag of {name}" for c, name in ((first, span.before), (end, span.after)))
        common.warn(
            f"Recorded is {' → '.join(span.outcomes)}, and here is {said}: what was released is not what was tagged, or cannot be run from a checkout.",
            out,
        )
        if shown[first.sha] == shown[end.sha]:
            return False
    found = blame.search(clone, start, end, paths, checkouts.folders(pack), run)
    table = Table(box=None, pad_edge=False)
    for heading in ("commit", "day", "verdict", "evidence", ""):
        table.add_column(heading, overflow="fold")
    changed = {turn.commit.sha for turn in found.turns}
    for commit in found.commits:
        style = "bold" if commit.sha in changed else "dim"
        words = (commit.sha[:10], commit.day, found.outcomes[commit.sha], run.evidence.get(commit.sha, "–"), commit.subject)
        table.add_row(*(Text(plain(word), style) for word in words))
    out.print(table)
    for turn in found.turns:
        suspects = [*turn.suspects, turn.commit]
        told = [_named(commit, pack.repository) for commit in suspects]
        named = ", ".join(told) if len(told) < 6 else f"{told[0]} … {told[-1]}"
        out.print(f"{turn.before} → {turn.after}: {'one of ' if turn.suspects else ''}{named}", markup=False, soft_wrap=True)
        if turn.suspects:
            common.warn(f"All but the last of these {len(suspects)} cannot be run, so that it is not known which.", out)
    if all(found.outcomes[commit.sha] in blame.UNTOLD for commit in found.commits):
        common.warn(
            "None of these commits could be run: where a package needs compiled parts, its checkouts cannot be judged.", out
        )
    elif not found.turns:
        common.warn(f"No commit changes the verdict: {span.before} and {span.after} both show {found.outcomes[end.sha]}.", out)
    fixed = pack.fixed.get("commit", "")
    if fixed and any(commit.sha.startswith(fixed) for commit in found.commits):
        agrees = any(turn.commit.sha.startswith(fixed) and turn.after == "ABSENT" for turn in found.turns)
        out.print(f"pack.toml names {fixed} as the fix: {'so it is' if agrees else 'it is not'}.", markup=False)
    return bool(found.turns) and not any(turn.suspects for turn in found.turns) and found.outcomes[end.sha] not in blame.UNTOLD


def _named(commit: Commit, repository: str) -> str:
    where = f"https://github.com/{repository}/pull/{commit.pull_request}" if commit.pull_request else commit.sha
    return f"{commit.sha[:10]}, {commit.day}, {where}"


class _Runner:
    """Runs commits; those that showed something on this machine and in this lane are not run again, or once with ``again``."""

    def __init__(self, plan: Plan, clone: Path, jobs: int, out: Console, *, again: bool) -> None:
        self.plan, self.clone, self.jobs, self.out = plan, clone, jobs, out
        self.again: set[str] | None = set() if again else None
        #: The level at which each commit was seen.
        self.evidence: dict[str, str] = {}

    def __call__(self, commits: list[Commit]) -> dict[str, str]:
        pack = self.plan.pack
        wheels, tasks = {}, []
        for commit in commits:
            with suppress(checkouts.NoPackage):  # It is not there yet, or is elsewhere.
                wheels[commit.sha] = checkouts.wheel(pack, self.clone, commit.sha, CACHE)
        versions = {sha: environment.read_wheel(wheel, pack.package)[1] for sha, wheel in wheels.items()}
        known = self._known()
        for sha, version in versions.items():
            if version not in known or known[version][0] in blame.UNTOLD or (self.again is not None and sha not in self.again):
                release = Release(version=version, file=wheels[sha].name, sha256="")
                tasks.append((replace(self.plan, wheels={version: wheels[sha].resolve()}), release))
        if tasks:
            with pool.threads(self.jobs) as workers, report.Follow(2 * len(tasks), self.out) as follow:
                _, failures = runner.run_all(tasks, workers, done=follow)
            if failures:
                raise UserError(failures[0].message)
            known = self._known()
        if self.again is not None:
            self.again |= set(versions)
        shown = {sha: known.get(version, ("INFRA", "–")) for sha, version in versions.items()}
        self.evidence |= {sha: level for sha, (_, level) in shown.items()}
        return {commit.sha: shown[commit.sha][0] if commit.sha in shown else "UNTESTABLE" for commit in commits}

    def _known(self) -> dict[str, tuple[str, str]]:
        """What each version shows, and the level, by fresh receipts from this machine in this lane."""
        results = self.plan.results
        runs = history.load(results, [self.plan.pack]).runs if results.is_dir() else []
        mine = [
            s
            for s in runs
            if s.side == "unpatched" and not s.stale and (s.machine, s.lane) == (self.plan.machine, self.plan.lane)
        ]
        return {seen.version: (blame.outcome(seen), seen.evidence) for seen in mine}
