"""Bring the receipts up to date, release by release, and report what changed.

A cell with a fresh receipt is not run again, so an interrupted call goes on where it stopped. What was there before the
first cell ran is kept beside the receipts until a call ends, so that the changes told at the end are those since then.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct
from packaging.version import Version

from common.errors import UserError
from common.files import RESULTS, like, locked, write_atomically
from common.install import releases
from common.install.releases import Release
from common.packs.pack import Pack
from common.run import runner
from common.run.plan import Failure, Plan, Row, Task, expected
from common.run.pool import Pool
from common.store import history, receipt
from common.store.cell import SIDES, Cell, order
from common.store.history import Change, History, Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one call is about: ``cells`` are all that were chosen, ``tasks`` those of them without a fresh receipt."""

    machine: str
    results: Path
    stored: History
    cells: Sequence[Task]
    tasks: Sequence[Task]
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
        return {"schema": 1, **asdict(self), "changes": [change.to_dict() for change in self.changes]}


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
    pending: Collection[Cell] = (),
) -> Work:
    """Choose cells. An upstream whose releases cannot be listed is a problem told at the end, and stops no other.

    ``newer`` takes the releases above the newest with a receipt from any machine, and those that ``pending`` names (see
    `pending`); ``pre`` includes pre-releases.
    """
    fresh = {(seen.cell, seen.machine, seen.lane) for seen in stored.runs if not seen.stale}
    cells: list[Task] = []
    tasks: list[Task] = []
    problems: list[str] = []
    warnings: list[str] = []
    machine, results = "", RESULTS
    for pack, variant in [(each, variant) for each in packs for variant in ("", *each.matrix())]:
        with _noted(problems, pack):
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
def _noted(problems: list[str], pack: Pack) -> Iterator[None]:
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
    pending: Collection[Cell],
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
        waiting = {(cell.pack, cell.dist, cell.version) for cell in pending}
        every = pre or pack.package == pack.nightly
        chosen = [release for release in chosen if every or not order(release.version).is_prerelease]
        chosen = (
            [
                release
                for release in chosen
                if order(release.version) > newest or (pack.name, pack.package, release.version) in waiting
            ]
            if newest is not None
            else chosen[-1:]
        )
    return [release for release in chosen if since is None or order(release.version) >= Version(since)]


def _state(planned: Plan, release: Release, stored: History, fresh: Collection[tuple[Cell, str, str]]) -> tuple[str, str]:
    """Whether both sides of a release have a fresh receipt from this machine, and a sentence on one that cannot be read."""
    for side in SIDES:
        cell = planned.cell(release, side)
        error = stored.unreadable.get(planned.results / planned.machine / cell.pack / f"{cell.stem}.json")
        if isinstance(error, receipt.NewerReceipt):
            return "newer", str(error)
        if error is not None:
            return "unreadable", str(error)
    there = [(planned.cell(release, side), planned.machine, planned.lane) in fresh for side in SIDES]
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


class Was(Struct, frozen=True, forbid_unknown_fields=True):
    """What a cell showed."""

    outcome: str
    word: str
    version: str
    rows: dict[str, bool | None] = {}


class Journal(Struct, forbid_unknown_fields=True):
    """What was there before the first cell ran: each cell, by its line, and the packs that had receipts."""

    schema: Literal[1]
    started: list[str]
    cells: dict[Annotated[str, like(r"\S+ \S+ \S+ (un)?patched( \S+)?")], Was | None]


def _journal(path: Path) -> Journal | None:
    """The journal of a call that was stopped, None without one; ValueError where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Journal)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError from error


def pending(path: Path) -> list[Cell]:
    """The cells that a call which was stopped had taken on."""
    try:
        found = _journal(path)
    except ValueError:
        return []
    return [Cell.parse(line) for line in found.cells] if found else []


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
    ran = {row.cell for row in rows}
    doubtful = [c for c in changes if c.cell in ran]
    if doubtful and confirm > 1:
        say(f"{len(doubtful)} change(s): {confirm - 1} more run(s) of each, to rule out flakiness.")
        sure = dict(zip(doubtful, _confirmed(doubtful, rows, work, pool, confirm), strict=True))
        changes = [sure.get(c, c) for c in changes]
        after = load()
    problems = [*work.problems, *(f"{f.cell.pack} {f.cell.dist} {f.cell.version}: {f.message}" for f in failures)]
    problems += [
        f"{c.cell}: a change that was seen in {c.runs} of {confirm} runs alone, for the others could not be made: run it again."
        for c in changes
        if c.cell in {d.cell for d in doubtful} and c.runs < confirm
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
    tasks: Sequence[Task], pool: Pool, done: Callable[[Row | Failure], None], say: Callable[[str], None]
) -> tuple[list[Row], list[Failure]]:
    """Run the tasks, and again those that the machine or the network broke: that says nothing of their releases."""
    found: dict[Cell, Row] = {}  # Of a side that ran well and whose other side did not, the last run counts.
    lasting: list[Failure] = []
    for attempt in range(1, TRIES + 1):
        rows, failures = runner.run_all(tasks, pool, done=done)
        lasting += failures
        broken: dict[Cell, Row] = {}
        for row in rows:
            if row.receipt is not None:
                found[row.cell] = row
            elif not row.as_expected:
                broken.setdefault(row.cell.release, row)
        if not broken:
            break
        if attempt == TRIES:
            lasting += [Failure(cell=cell, message=row.message) for cell, row in broken.items()]
            break
        say(f"{len(broken)} release(s) could not be run for a fault of the machine or the network: once more.")
        tasks = [(planned, release) for planned, release in tasks if planned.cell(release) in broken]
    return list(found.values()), lasting


class _Before:
    """What each cell showed before the first call of a series that was stopped and taken up again."""

    def __init__(self, journal: Path, work: Work, say: Callable[[str], None]) -> None:
        self.journal = journal
        now = _on(work.machine, work.stored)
        cells = [planned.cell(release, side) for planned, release in work.tasks for side in SIDES]
        #: Packs that had receipts before; of another, nothing can have changed.
        self.started = sorted({cell.pack for cell in now})
        self.cells = {cell: _was(now.get(cell)) for cell in cells}
        try:
            if earlier := _journal(journal):
                say("Resuming a call that was stopped: changes are reported relative to the state before it.")
                self.started = earlier.started
                self.cells |= {Cell.parse(line): was for line, was in earlier.cells.items()}
        except ValueError:
            say(f"{journal} cannot be read: changes are reported relative to the current receipts.")
        if work.tasks:
            kept = Journal(schema=1, started=self.started, cells={str(cell): was for cell, was in self.cells.items()})
            write_atomically(journal, msgspec.json.encode(kept))

    def forget(self) -> None:
        self.journal.unlink(missing_ok=True)

    def changes(self, after: History, machine: str) -> Iterator[Change]:
        now = _on(machine, after)
        for cell, was in sorted(self.cells.items(), key=lambda item: item[0].order):
            seen = now.get(cell)
            if seen is None or seen.stopped == "skipped":
                continue  # not there yet, or it follows from the other side, which is told
            compared = [was] if was else self._neighbours(seen, after)
            if told := next(filter(None, (history.changed(each, seen) for each in compared)), None):
                yield told

    def _neighbours(self, seen: Seen, after: History) -> Iterator[Was]:
        """For a release that was never run: the one before it, as released; and the last that told something, where this one does."""
        cell = seen.cell
        if cell.side != "unpatched" or cell.variant or cell.pack not in self.started:
            return
        runs = [
            s
            for s in after.runs
            if (s.cell.pack, s.machine, s.side, s.cell.variant) == (cell.pack, seen.machine, "unpatched", "")
            and order(s.version) < order(seen.version)
        ]
        older = [s for s in runs if s.cell.dist == cell.dist] or runs  # the first nightly follows the newest release
        for those in (older, [s for s in older if history.is_told(s) and history.is_told(seen)]):
            if was := _was(max(those, key=lambda s: order(s.version), default=None)):
                yield was


def _was(seen: Seen | None) -> Was | None:
    return Was(seen.outcome, seen.word, seen.version, seen.rows) if seen else None


def _on(machine: str, stored: History) -> dict[Cell, Seen]:
    return {seen.cell: seen for seen in stored.runs if seen.machine == machine}


def _confirmed(changes: Sequence[Change], first: Sequence[Row], work: Work, pool: Pool, confirm: int) -> Iterator[Change]:
    """The same changes with how many runs agree; one that not all runs show is flaky. What most runs show is the record."""
    wanted = {c.cell for c in changes}
    tasks = [(planned, release) for planned, release in work.tasks if {planned.cell(release, side) for side in SIDES} & wanted]
    runs: dict[Cell, list[tuple[receipt.Receipt, str, str]]] = {}
    # Beside the cache, which every worker sees; the receipts of these runs are no record of their own.
    folder = tasks[0][0].cache / "confirm" / uuid.uuid4().hex[:12]
    try:
        collected = [first]
        for i in range(confirm - 1):
            again = [(replace(planned, results=folder / str(i)), release) for planned, release in tasks]
            collected.append(runner.run_all(again, pool)[0])
        for rows in collected:
            for row in rows:
                if row.cell in wanted and row.receipt is not None:
                    document = receipt.read(row.receipt)
                    word = history.shown(row.verdict, row.cell.side)
                    runs.setdefault(row.cell, []).append((document, receipt.read_log(row.receipt, document), word))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for c in changes:
        mine = runs[c.cell]
        words = [word for _, _, word in mine]
        if len(mine) > 1:
            document, log, others = receipt.majority(mine)
            receipt.write(work.results, c.cell, log, document, machine=work.machine, other_logs=others)
        agree = words.count(c.shown)
        yield replace(c, kind=c.kind if agree == len(words) else "flaky", runs=len(words), agree=agree)


def _unexpected(work: Work, after: History) -> Iterator[str]:
    now = _on(work.machine, after)
    for planned, release in work.cells:
        for side in SIDES:
            key = planned.cell(release, side)
            seen = now.get(key)
            wanted, why = expected(planned, release.version, side)
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
            key = f"{seen.machine} {seen.cell.pack}"
            found[key] = found.get(key, 0) + 1
    return found
