"""Bring the receipts up to date, release by release, and tell what changed.

A cell with a fresh receipt is not run again, so an interrupted call goes on where it stopped. What was there before the
first cell ran is kept beside the receipts until a call ends, so that the changes told at the end are those since then.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from common import history, receipt, releases, runner
from common.errors import UserError
from common.files import locked, write_atomically
from common.history import Change, History, Seen, order
from common.pack import Pack
from common.pool import Pool
from common.releases import Release
from common.runner import Failure, Plan, Row

SIDES = ("unpatched", "patched")
#: Which releases a call is about.
WHICH = ("all", "pinned", "new")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one call is about: ``cells`` are all that were chosen, ``tasks`` those of them without a fresh receipt."""

    machine: str
    results: Path
    stored: History
    cells: Sequence[tuple[Plan, Release]]
    tasks: Sequence[tuple[Plan, Release]]
    problems: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What came of it. ``unexpected`` are the cells that do not show what their pack expects, with the reason given there."""

    ran: int
    cells: int
    changes: Sequence[Change]
    unexpected: Sequence[str]
    problems: Sequence[str]
    stale: Mapping[str, int] = field(default_factory=dict)
    killed: Sequence[str] = ()

    @property
    def as_expected(self) -> bool:
        return not (self.unexpected or self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self), "changes": [{"text": str(c), **asdict(c)} for c in self.changes]}


def plan(
    packs: Iterable[Pack],
    stored: History,
    *,
    plan_for: Callable[[Pack, str], Plan],
    which: str = "all",
    since: str | None = None,
    again: bool = False,
    newer: bool = False,
    pre: bool = True,
    pending: Collection[str] = (),
) -> Work:
    """Choose cells. An upstream whose releases cannot be listed is a problem told at the end, and stops no other.

    ``newer`` takes the releases above the newest with a receipt from any machine, and those that ``pending`` names (see
    `pending`); ``pre`` includes pre-releases.
    """
    fresh = {(_key(seen), seen.machine, seen.lane) for seen in stored.runs if not seen.stale}
    cells: list[tuple[Plan, Release]] = []
    tasks: list[tuple[Plan, Release]] = []
    problems: list[str] = []
    warnings: list[str] = []
    machine, results = "", runner.RESULTS
    for pack, variant in [(each, variant) for each in packs for variant in ("", *each.matrix())]:
        with _told(problems, pack):
            planned = plan_for(pack, variant)
            machine, results = planned.machine, planned.results
            known, warning = releases.of(pack, planned.cache)
            warnings += [warning] if warning else []
            seen = stored.of(pack.name, pack.package)
            if variant:  # Other compilers and the like: on the releases that the pack pins.
                chosen = [release for release in known if release.version in pack.pinned and not newer and which != "new"]
            else:
                chosen = _chosen(pack, known, seen, which, since, machine, newer=newer, pre=pre, pending=pending)
            cells += [(planned, release) for release in chosen]
            for release in chosen:
                state, sentence = _state(planned, release, stored, fresh)
                if state == "newer":
                    problems.append(f"{pack.name} {release.version}: left alone. {sentence}")
                elif state != "fresh" or again:
                    warnings += [f"{sentence} It is run again."] if sentence else []
                    tasks.append((planned, release))
            if variant:
                continue
            gone = {s.version for s in seen if s.stale and s.machine == machine} - {release.version for release in known}
            warnings += [
                f"{pack.name}: {pack.package} {version} is no longer on the index; its stale receipt stays as it is."
                for version in sorted(gone, key=order)
            ]
            yanked = [release.version for release in chosen if release.yanked]
            warnings += (
                [f"{pack.name}: yanked from the index by its publisher, and run all the same: {', '.join(yanked)}."]
                if yanked
                else []
            )
    return Work(
        machine=machine,
        results=results,
        stored=stored,
        cells=cells,
        tasks=tasks,
        problems=problems,
        warnings=list(dict.fromkeys(warnings)),
    )


@contextmanager
def _told(problems: list[str], pack: Pack) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems.append(f"{pack.name}: {error}")


def _chosen(
    pack: Pack,
    known: Sequence[Release],
    seen: Sequence[Seen],
    which: str,
    since: str | None,
    machine: str,
    *,
    newer: bool,
    pre: bool,
    pending: Collection[str],
) -> list[Release]:
    chosen = releases.without_builds(pack, known)
    if which == "pinned":
        chosen = [release for release in known if release.version in pack.pinned]
    elif which == "new":
        there = {s.version for s in seen if s.machine == machine}
        chosen = [release for release in known if release.version not in there]
    if newer:
        newest = max((order(s.version) for s in seen), default=None)
        # A nightly comes several times a day: without a receipt to start from, the newest alone is of use.
        waiting = {" ".join(key.split(" ")[:3]) for key in pending}
        every = pre or pack.package == pack.nightly
        chosen = [release for release in chosen if every or not order(release.version).is_prerelease]
        chosen = (
            [
                release
                for release in chosen
                if order(release.version) > newest or f"{pack.name} {pack.package} {release.version}" in waiting
            ]
            if newest is not None
            else chosen[-1:]
        )
    return [release for release in chosen if since is None or order(release.version) >= Version(since)]


def _state(planned: Plan, release: Release, stored: History, fresh: Collection[tuple[str, str, str]]) -> tuple[str, str]:
    """Whether both sides of a release have a fresh receipt from this machine, and a sentence on one that cannot be read."""
    for side in SIDES:
        cell = _cell(planned, release, side)
        error = stored.unreadable.get(planned.results / planned.machine / cell.pack / f"{cell.stem}.json")
        if isinstance(error, receipt.NewerReceipt):
            return "newer", str(error)
        if error is not None:
            return "unreadable", str(error)
    there = [(_key(_cell(planned, release, side)), planned.machine, planned.lane) in fresh for side in SIDES]
    return ("fresh" if all(there) else "missing"), ""


@contextmanager
def alone(results: Path, machine: str) -> Iterator[Path]:
    """Hold a machine's receipts for one call, so that two do not run the same cells; yields where its journal is."""
    with receipt.prepared(results, machine):
        pass
    try:
        with locked(results / machine / ".regress.lock", wait=False):
            yield results / machine / ".regress.json"
    except BlockingIOError as error:
        raise UserError(
            f"Another call is running the cells of {results / machine}: wait for it, or give another folder with --results."
        ) from error


def pending(journal: Path) -> list[str]:
    """The cells that a call which was stopped had taken on."""
    try:
        found = json.loads(journal.read_text(encoding="utf-8"))
        return list(found["cells"]) if _is_whole(found) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def run(
    work: Work,
    journal: Path,
    pool: Pool,
    load: Callable[[], History],
    *,
    confirm: int = 3,
    done: Callable[[Row | Failure], None] = lambda row: None,
    say: Callable[[str], None] = lambda line: None,
    deliver: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run the tasks, then tell what changed. A change seen once is run ``confirm`` times in all before it is believed.

    What was there before is forgotten only when ``deliver`` has handed the report on: else the next call tells it again.
    """
    before = _Before(journal, work, say)
    rows, failures = _patiently(work.tasks, pool, done, say)
    after = load()
    changes = list(before.changes(after, work.machine))
    ran = {_key(row.cell) for row in rows}
    doubtful = [c for c in changes if _key(c) in ran]
    if doubtful and confirm > 1:
        say(f"{len(doubtful)} change(s): {confirm - 1} more run(s) of each, to tell a change from a chance.")
        sure = dict(zip(doubtful, _confirmed(doubtful, rows, work, pool, confirm), strict=True))
        changes = [sure.get(c, c) for c in changes]
        after = load()
    problems = [*work.problems, *(f"{f.pack} {f.dist} {f.version}: {f.message}" for f in failures)]
    problems += [
        f"{_key(c)}: a change that was seen in {c.runs} of {confirm} runs alone, for the others could not be made: run it again."
        for c in changes
        if _key(c) in {_key(d) for d in doubtful} and c.runs < confirm
    ]
    report = Report(
        ran=sum(row.ran for row in rows),
        cells=len(work.cells) * 2,
        changes=changes,
        unexpected=list(_unexpected(work, after)),
        problems=problems,
        stale=_stale(after),
        killed=runner.killed(work.tasks[0][0].cache) if work.tasks else (),
    )
    deliver(report)
    before.forget()
    return report


#: How often in all a run is tried that the machine or the network broke.
TRIES = 3


def _patiently(
    tasks: Sequence[tuple[Plan, Release]], pool: Pool, done: Callable[[Row | Failure], None], say: Callable[[str], None]
) -> tuple[list[Row], list[Failure]]:
    """Run the tasks, and again those that the machine or the network broke: that says nothing of their releases."""
    found: dict[receipt.Cell, Row] = {}  # Of a side that ran well and whose other side did not, the last run counts.
    lasting: list[Failure] = []
    for attempt in range(1, TRIES + 1):
        rows, failures = runner.run_all(tasks, pool, done=done)
        lasting += failures
        broken: dict[tuple[str, str, str, str], Row] = {}
        for row in rows:
            if row.receipt is not None:
                found[row.cell] = row
            elif not row.as_expected:
                broken.setdefault((row.cell.pack, row.cell.dist, row.cell.version, row.cell.variant), row)
        if not broken:
            break
        if attempt == TRIES:
            lasting += [
                Failure(pack=pack, dist=dist, version=version, variant=variant, message=row.message)
                for (pack, dist, version, variant), row in broken.items()
            ]
            break
        say(f"{len(broken)} release(s) could not be run for a fault of the machine or the network: once more.")
        tasks = [t for t in tasks if (t[0].pack.name, t[0].pack.package, t[1].version, t[0].variant) in broken]
    return list(found.values()), lasting


class _Before:
    """What each cell showed before the first call of a series that was stopped and taken up again."""

    def __init__(self, journal: Path, work: Work, say: Callable[[str], None]) -> None:
        self.journal = journal
        earlier = self._read(say)
        now = _on(work.machine, work.stored)
        self.cells: dict[str, dict[str, str] | None] = {}
        for planned, release in work.tasks:
            for side in SIDES:
                key = _key(_cell(planned, release, side))
                self.cells[key] = _plain(now[key]) if key in now else None
        self.cells |= earlier.get("cells", {})
        #: Packs that had receipts before; of another, nothing can have changed.
        self.started: list[str] = earlier.get("started", sorted({key.partition(" ")[0] for key in now}))
        if work.tasks:
            write_atomically(journal, json.dumps({"schema": 1, "started": self.started, "cells": self.cells}))

    def _read(self, say: Callable[[str], None]) -> dict[str, Any]:
        try:
            found = json.loads(self.journal.read_text(encoding="utf-8"))
            if found["schema"] == 1 and _is_whole(found):
                say("Going on from a call that was stopped: changes are told against what was there before it.")
                return dict(found)
        except OSError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        say(f"{self.journal} cannot be read: changes are told against what is there now.")
        return {}

    def forget(self) -> None:
        self.journal.unlink(missing_ok=True)

    def changes(self, after: History, machine: str) -> Iterator[Change]:
        now = _on(machine, after)
        for key, was in sorted(self.cells.items(), key=lambda item: _sorting(item[0])):
            seen = now.get(key)
            if seen is None or seen.stopped == "skipped":
                continue  # not there yet, or it follows from the other side, which is told
            if was is None:
                was = self._neighbour(seen, after)
            kind = history.change(seen.side, was["outcome"], seen.outcome) if was else None
            if was and kind:
                yield history.changed(kind, seen, before=was["word"], before_version=was["version"])

    def _neighbour(self, seen: Seen, after: History) -> dict[str, str] | None:
        """For a release that was never run: the one before it, as released."""
        if seen.side != "unpatched" or seen.variant or seen.pack not in self.started:
            return None
        runs = [
            s
            for s in after.runs
            if (s.pack, s.machine, s.side, s.variant) == (seen.pack, seen.machine, "unpatched", "")
            and order(s.version) < order(seen.version)
        ]
        older = [s for s in runs if s.dist == seen.dist] or runs  # the first nightly follows the newest release
        return _plain(max(older, key=lambda s: order(s.version))) if older else None


def _is_whole(journal: dict[str, Any]) -> bool:
    cells, started = journal["cells"], journal["started"]
    return (
        isinstance(cells, dict)
        and all(len(key.split(" ")) in (4, 5) for key in cells)
        and all(
            was is None or (isinstance(was, dict) and all(isinstance(was.get(n), str) for n in ("outcome", "word", "version")))
            for was in cells.values()
        )
        and isinstance(started, list)
        and all(isinstance(name, str) for name in started)
    )


def _cell(planned: Plan, release: Release, side: str) -> receipt.Cell:
    return receipt.Cell(
        pack=planned.pack.name, dist=planned.pack.package, version=release.version, side=side, variant=planned.variant
    )


def _key(seen: Seen | receipt.Cell | Change) -> str:
    return " ".join([seen.pack, seen.dist, seen.version, seen.side, *([seen.variant] if seen.variant else [])])


def _on(machine: str, stored: History) -> dict[str, Seen]:
    return {_key(seen): seen for seen in stored.runs if seen.machine == machine}


def _sorting(key: str) -> tuple[str, str, Version, str, bool]:
    pack, dist, version, side, *variant = key.split(" ")
    return pack, dist, order(version), "".join(variant), side == "patched"


def _plain(seen: Seen) -> dict[str, str]:
    return {"outcome": seen.outcome, "word": seen.word, "version": seen.version}


def _confirmed(changes: Sequence[Change], first: Sequence[Row], work: Work, pool: Pool, confirm: int) -> Iterator[Change]:
    """The same changes with how many runs agree; one that not all runs show is flaky. What most runs show is the record."""
    wanted = {_key(c) for c in changes}
    tasks = [task for task in work.tasks if any(_key(_cell(*task, side)) in wanted for side in SIDES)]
    runs: dict[str, list[tuple[dict[str, Any], str, str]]] = {}
    cells = {_key(row.cell): row.cell for row in first}
    # Beside the cache, which every worker sees; the receipts of these runs are no record of their own.
    folder = tasks[0][0].cache / "confirm" / uuid.uuid4().hex[:12]
    try:
        collected = [first]
        for i in range(confirm - 1):
            again = [(replace(planned, results=folder / str(i)), release) for planned, release in tasks]
            collected.append(runner.run_all(again, pool)[0])
        for rows in collected:
            for row in rows:
                if (key := _key(row.cell)) in wanted and row.receipt is not None:
                    document = receipt.read(row.receipt)
                    word = history.said(row.verdict, row.cell.side)
                    runs.setdefault(key, []).append((document, receipt.read_log(row.receipt, document), word))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for c in changes:
        mine = runs[_key(c)]
        words = [word for _, _, word in mine]
        if len(mine) > 1:
            document, log, others = receipt.majority(mine)
            receipt.write(work.results, cells[_key(c)], log, document, machine=work.machine, other_logs=others)
        agree = words.count(c.after)
        yield replace(c, kind=c.kind if agree == len(words) else "flaky", runs=len(words), agree=agree)


def _unexpected(work: Work, after: History) -> Iterator[str]:
    now = _on(work.machine, after)
    for planned, release in work.cells:
        for side in SIDES:
            key = _key(_cell(planned, release, side))
            seen = now.get(key)
            wanted, why = runner.expected(planned, release.version, side)
            if seen is None:
                continue  # Not run: said among the problems.
            if seen.stale or seen.lane != planned.lane:
                yield f"{key}: its receipt is stale, and it could not be run again."
            elif not seen.verdict.meets(wanted):
                yield f"{key}: expected {wanted} ({why}), saw {seen.verdict}."
            elif seen.flaky:
                yield f"{key}: its runs differ ({seen.word}), so its verdict cannot be relied on."


def _stale(after: History) -> dict[str, int]:
    """Stale receipts that are left, by machine and pack."""
    found: dict[str, int] = {}
    for seen in after.runs:
        if seen.stale:
            key = f"{seen.machine} {seen.pack}"
            found[key] = found.get(key, 0) + 1
    return found
