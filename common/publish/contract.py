"""The contract of the loss: what the releases of each implementation do in each row that the packs with the block ``contract`` measure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common.packs import reportblock
from common.packs.pack import Pack
from common.store import history
from common.store.history import History, Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one release showed in one row: ``ok`` is None where it does not support what the row asks for, or is inconclusive."""

    version: str
    ok: bool | None
    saw: str
    seen: Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One implementation: row -> its releases that were measured, oldest first. ``runs`` is every release that was run."""

    pack: Pack
    rows: dict[str, list[Result]]
    runs: Sequence[str]

    def wrong(self, row: str) -> list[tuple[str, str]]:
        """The first and the last release of each stretch that is wrong; a stretch holds no release that was not measured."""
        at = {result.version: result for result in self.rows.get(row, ())}
        stretches = []
        for is_wrong, group in groupby(self.runs, key=lambda v: v in at and at[v].ok is False):
            versions = list(group)
            stretches += [(versions[0], versions[-1])] if is_wrong else []
        return stretches

    def newest(self, row: str) -> Result | None:
        return self.rows[row][-1] if self.rows.get(row) else None


def measuring(packs: Iterable[Pack]) -> list[Pack]:
    """The packs whose script has the block."""
    return [pack for pack in packs if "contract" in reportblock.blocks(pack.script.read_text(encoding="utf-8"))]


def columns(packs: Iterable[Pack], stored: History) -> list[Column]:
    """One for each pack that measures and has a record."""
    found = []
    for pack in measuring(packs):
        rows: dict[str, list[Result]] = {}
        releases = history.releases(stored.of(pack.name, pack.package))
        for version, sides in releases.items():
            seen = history.best(sides.get("unpatched", ()))
            if seen is None or seen.outcome != "MEASURED":
                continue
            for row, told in _metrics(seen).items():
                rows.setdefault(row, []).append(Result(version=version, ok=told["ok"], saw=told["saw"], seen=seen))
        if rows:
            found.append(Column(pack=pack, rows=rows, runs=list(releases)))
    return found


def _metrics(seen: Seen) -> dict[str, Any]:
    return seen.document().predicate.reproducer.metrics


def rows(found: Sequence[Column]) -> list[str]:
    """The rows that are recorded, in the order of the script; JSON has them sorted."""
    text = reportblock.TEXTS["contract"]
    order = re.findall(r'^    "([^"]+)": ', text[text.index("\nROWS = {") :], re.MULTILINE)
    return sorted(
        {row for column in found for row in column.rows}, key=lambda row: order.index(row) if row in order else len(order)
    )


MARKS = {True: "✓", False: "✗", None: "–"}


def said(column: Column, row: str) -> str:
    """A cell: the newest release's mark, and the releases that are wrong."""
    result = column.newest(row)
    if result is None:
        return "–"
    stretches = [first if first == last else f"{first} – {last}" for first, last in column.wrong(row)]
    return MARKS[result.ok] + (f" {', '.join(stretches)}" if result.ok is False else f" (✗ {', '.join(stretches)})") * bool(
        stretches
    )


def markdown(found: Sequence[Column], root: Path) -> str:
    """The table of docs/contract.md; each mark is a link to the newest release's receipt."""
    names = [f"[{c.pack.package}](../packs/{c.pack.folder.name}/README.md) {c.runs[-1]}" for c in found]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(found) + 1) + "|"]
    for row in rows(found):
        lines.append(f"| {row} | {' | '.join(_linked(column, row, root) for column in found)} |")
    return "\n".join(lines) + "\n"


def _linked(column: Column, row: str, root: Path) -> str:
    result, text = column.newest(row), said(column, row)
    if result is None:
        return text
    return f"[{text[0]}](../{result.seen.path.relative_to(root).as_posix()}){text[1:]}"


def told(found: Sequence[Column], row: str) -> Iterator[tuple[str, Result]]:
    """Each release of each implementation in one row."""
    for column in found:
        for result in column.rows.get(row, ()):
            yield column.pack.package, result
