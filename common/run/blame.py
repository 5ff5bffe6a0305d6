"""Which commits brought a bug and took it away: between releases whose verdicts differ, every commit that touches what the script ran.

All of them are run and none is bisected, for a bug may come twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from common import transforms
from common.errors import UserError
from common.install import checkouts
from common.packs.pack import Pack
from common.store import history
from common.store.history import Seen

#: What says nothing of a commit, so that it is passed over.
UNTOLD = ("UNTESTABLE", "INFRA", "ERROR")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Two neighbouring releases, or refs of the clone, and what the first and the last show, where that is known."""

    before: str
    after: str
    outcomes: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One commit of the upstream: its hash, its day and its first line."""

    sha: str
    day: str
    subject: str

    @property
    def pull_request(self) -> str:
        """The number in the first line of a squashed or merged pull request; empty where it has none."""
        found = re.search(r"\(#(\d+)\)\s*$|^Merge pull request #(\d+) ", self.subject)
        return next(filter(None, found.groups()), "") if found else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A commit after which the outcome is another, and those before it that could not be run and may be it as well."""

    commit: Commit
    before: str
    after: str
    suspects: tuple[Commit, ...] = ()


def outcome(seen: Seen) -> str:
    """What a run says for a blame: that the call is not there yet is an outcome of its own, for a bug may come with it."""
    return "no-api" if seen.verdict.reason.partition(" ")[0] == "no-api" else seen.outcome


def spans(runs: Iterable[Seen]) -> list[Span]:
    """Neighbouring releases whose default runs differ; what cannot be tested, but for a call that is not there yet, is no neighbour."""
    of_release: dict[str, list[Seen]] = {}
    for seen in runs:
        if seen.side == "unpatched" and not seen.cell.variant and not seen.stale and outcome(seen) != "UNTESTABLE":
            of_release.setdefault(seen.version, []).append(seen)
    shown = [
        (version, outcome(best)) for version in sorted(of_release, key=Version) if (best := history.best(of_release[version]))
    ]
    return [Span(before=a, after=b, outcomes=(x, y)) for (a, x), (b, y) in pairwise(shown) if x != y and _tells(x, y)]


def _tells(before: str, after: str) -> bool:
    """A call that arrives is of interest where the bug arrives with it."""
    return "no-api" not in (before, after) or "REPRODUCED" in (before, after)


def files(pack: Pack, runs: Iterable[Seen]) -> list[str]:
    """Paths in the upstream's repository: the files that the script's runs named, and those that the fix changes."""
    named = {name for seen in runs for name in re.findall(r'"file": "<release>/([^"]+)"', seen.log())}
    fixed = transforms.load_fix(pack.fix) if pack.fix.is_file() else {}
    return sorted(f"{pack.prefix}{name}" for name in {*named, *fixed})


def commit(clone: Path, name: str) -> Commit:
    sha, day, subject = checkouts.log(clone, "--no-walk", name)[0]
    return Commit(sha=sha, day=day, subject=subject)


def ends(clone: Path, before: str, after: str) -> tuple[Commit, Commit]:
    """Where to begin and to end: two commits of one line of history. Of two branches, where the second left the first."""
    first, last = commit(clone, before), commit(clone, after)
    base = checkouts.git(clone, "merge-base", first.sha, last.sha).stdout.decode().strip()
    if not base:
        raise UserError(f"{before} and {after} have no history in common in {clone}.")
    if base == last.sha:
        raise UserError(f"{after} is no later than {before}: name the older one first.")
    return first if base == first.sha else commit(clone, base), last


def commits(clone: Path, start: Commit, end: Commit, paths: Iterable[str]) -> list[Commit]:
    """Commits after the first and up to the last that touch one of ``paths``, oldest first.

    They follow first parents, so that each is the next state of one branch; what a merge brings is one step.
    """
    said = checkouts.log(clone, "--first-parent", f"{start.sha}..{end.sha}", "--", *paths)
    return [Commit(sha=sha, day=day, subject=subject) for sha, day, subject in said]


def turns(shown: Iterable[tuple[Commit, str]], before: str) -> Iterator[Turn]:
    """Commits whose outcome is another than that of the one before; what cannot be run is passed over, and suspected."""
    suspects: list[Commit] = []
    for each, after in shown:
        if after in UNTOLD:
            suspects.append(each)
            continue
        if before and after != before:
            yield Turn(commit=each, before=before, after=after, suspects=tuple(suspects))
        before, suspects = after, []


def _parent(clone: Path, of: Commit) -> list[Commit]:
    """The first parent, which the first commit of all has not."""
    return [commit(clone, f"{of.sha}^")] if checkouts.has(clone, f"{of.sha}^") else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was run between two commits, oldest first, what each shows, and those after which that is another."""

    commits: list[Commit]
    outcomes: dict[str, str]
    turns: list[Turn]


def search(
    clone: Path,
    start: Commit,
    end: Commit,
    paths: Iterable[str],
    folders: Iterable[str],
    shows: Callable[[list[Commit]], dict[str, str]],
) -> Found:
    """Find the commits of one line of history after which the verdict is another; ``shows`` runs commits and gives their outcomes.

    Run are those that touch ``paths``, and the parent of each, so that a change that came from elsewhere is not laid at their door:
    where two neighbours differ and one is not the other's parent, all commits between them that touch ``folders`` are run.
    """
    listed = [start]
    for each in commits(clone, start, end, paths):
        listed += [*_parent(clone, each), each]
    listed = list(dict.fromkeys([*listed, end]))
    shown = dict(shows(listed))
    told = [each for each in listed if shown[each.sha] not in UNTOLD]
    found: list[Turn] = []
    for before, after in pairwise(told):
        if shown[before.sha] == shown[after.sha]:
            continue
        more = [after]
        if _parent(clone, after) != [before]:
            more = list(dict.fromkeys([*commits(clone, before, after, folders), after]))
            shown |= shows(more)
            listed[listed.index(before) + 1 : listed.index(after) + 1] = more
        found += turns([(each, shown[each.sha]) for each in more], shown[before.sha])
    return Found(commits=listed, outcomes=shown, turns=found)
