"""Which commits brought a bug and took it away: between releases whose verdicts differ, every commit that touches what the script ran.

All of them are run and none is bisected, for a bug may come twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
        """The number that a squashed pull request's first line ends with; empty where it has none."""
        found = re.search(r"\(#(\d+)\)\s*$", self.subject)
        return found[1] if found else ""


def spans(runs: Iterable[Seen]) -> list[Span]:
    """Neighbouring releases whose default runs differ; what cannot be tested is no neighbour."""
    of_release: dict[str, list[Seen]] = {}
    for seen in runs:
        if seen.side == "unpatched" and not seen.cell.variant and not seen.stale and seen.outcome != "UNTESTABLE":
            of_release.setdefault(seen.version, []).append(seen)
    shown = [
        (version, best.outcome) for version in sorted(of_release, key=Version) if (best := history.best(of_release[version]))
    ]
    return [Span(before=a, after=b, outcomes=(x, y)) for (a, x), (b, y) in pairwise(shown) if x != y]


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
    """Commits after the first and up to the last that touch one of ``paths``, oldest first, without merges."""
    said = sources.log(clone, "--no-merges", f"{ref(clone, span.before)}..{ref(clone, span.after)}", "--", *paths)
    return [Commit(sha=sha, day=day, subject=subject) for sha, day, subject in said]


def turns(shown: Iterable[tuple[Commit, str]], before: str) -> Iterator[tuple[Commit, str, str]]:
    """Commits whose outcome is another than that of the one before; what cannot be tested is passed over."""
    for commit, outcome in shown:
        if outcome in ("UNTESTABLE", "INFRA", "ERROR"):
            continue
        if before and outcome != before:
            yield commit, before, outcome
        before = outcome
