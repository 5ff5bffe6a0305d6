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
from common.install import sources
from common.packs.pack import Pack
from common.store import history
from common.store.history import Seen

#: What says nothing of a commit, so that it is passed over.
_UNTOLD = ("UNTESTABLE", "INFRA", "ERROR")


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


def ref(clone: Path, name: str) -> str:
    """What the clone calls a release, or a ref as it was given."""
    short = name.removesuffix(".0")
    for each in (f"v{name}", name, f"core_v{name}", f"core_r{name}", f"v{short}", f"release_v{short}"):
        if sources.has(clone, each):
            return each
    raise UserError(f"{clone} has no tag of {name}: fetch its tags, or say --between REF..REF.")


def commits(clone: Path, span: Span, paths: Iterable[str]) -> list[Commit]:
    """Commits after the first and up to the last that touch one of ``paths``, oldest first.

    They follow first parents, so that each is the next state of one branch; what a merge brings is one step.
    """
    said = sources.log(clone, "--first-parent", f"{ref(clone, span.before)}..{ref(clone, span.after)}", "--", *paths)
    return [Commit(sha=sha, day=day, subject=subject) for sha, day, subject in said]


def turns(shown: Iterable[tuple[Commit, str]], before: str) -> Iterator[tuple[Commit, str, str]]:
    """Commits whose outcome is another than that of the one before; what cannot be tested is passed over."""
    for commit, after in shown:
        if after in _UNTOLD:
            continue
        if before and after != before:
            yield commit, before, after
        before = after


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was run between two refs, oldest first, what each commit shows, and those after which that is another."""

    commits: list[Commit]
    outcomes: dict[str, str]
    turns: list[tuple[Commit, str, str]]


def search(
    clone: Path, span: Span, paths: Iterable[str], folders: Iterable[str], shows: Callable[[list[Commit]], dict[str, str]]
) -> Found:
    """Find the commits between two refs after which the verdict is another; ``shows`` runs commits and gives their outcomes.

    Run are those that touch ``paths``, and the parent of each, so that a change that came from elsewhere is not laid at their door:
    where two neighbours differ and one is not the other's parent, all commits between them that touch ``folders`` are run.
    """
    listed = [_commit(clone, ref(clone, span.before))]
    for commit in commits(clone, span, paths):
        parent = f"{commit.sha}^"  # which the first of all has not
        listed += [*([_commit(clone, parent)] if sources.has(clone, parent) else []), commit]
    listed = list(dict.fromkeys([*listed, _commit(clone, ref(clone, span.after))]))
    shown = dict(shows(listed))
    told = [commit for commit in listed if shown[commit.sha] not in _UNTOLD]
    found: list[tuple[Commit, str, str]] = []
    for before, after in pairwise(told):
        if shown[before.sha] == shown[after.sha]:
            continue
        more = [after]
        if not sources.has(clone, f"{after.sha}^") or _commit(clone, f"{after.sha}^") != before:
            more = list(dict.fromkeys([*commits(clone, Span(before=before.sha, after=after.sha), folders), after]))
            shown |= shows(more)
            listed[listed.index(before) + 1 : listed.index(after) + 1] = more
        found += turns([(commit, shown[commit.sha]) for commit in more], shown[before.sha])
    return Found(commits=listed, outcomes=shown, turns=found)


def _commit(clone: Path, name: str) -> Commit:
    sha, day, subject = sources.log(clone, "--no-walk", name)[0]
    return Commit(sha=sha, day=day, subject=subject)
