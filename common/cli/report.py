"""What a person sees while cells run and when they have run."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from common.run.plan import Failure, Row
from common.scrub import plain
from common.store.cell import Cell
from common.store.grade import Verdict
from common.store.history import History, Seen, said, shown

#: The colour of an outcome; red is for what is not as expected, never for a bug that was to be seen.
STYLE = {
    "REPRODUCED": "magenta",
    "ABSENT": "green",
    "NOTHING_TO_PATCH": "dim",
    "CHANGED": "yellow",
    "UNTESTABLE": "yellow",
    "MEASURED": "cyan",
}
#: More rows than this get the table alone; their proofs are in the receipts.
PROOFS = 8


def console(*, stderr: bool = False) -> Console:
    """A console whose lines are not folded at 80 columns where there is no terminal to fold them for."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 180, highlight=False)


def told(row: Row) -> str:
    """What a row says of itself: its verdict, or that it did not have to be run."""
    return said(row.verdict, row.cell.side) if _is_own(row) else f"not run ({row.verdict.outcome})"


def _is_own(row: Row) -> bool:
    """Whether a row says something of its own, and not only that the other side was inconclusive."""
    return row.ran or row.verdict.outcome == "NOTHING_TO_PATCH"


def number(value: float | None) -> str:
    """With two digits, and as short as may be: 2.1e-7, 1e-5."""
    return "–" if value is None else re.sub(r"(?<=e-)0|(?<=e)\+0?", "", f"{value:.2g}")


def where(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def table(rows: Sequence[Row], title: str, *, judged: bool = True) -> Table:
    """The closing table; ``judged``: each verdict is marked as expected or not."""
    folders = sorted({where(row.receipt.parent) for row in rows if row.receipt})
    found = Table(
        title=Text(title), title_justify="left", header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD
    )
    found.caption = Text(f"receipts: {', '.join(folders)}/RELEASE.SIDE.json") if folders else None
    found.caption_justify = "left"
    for column in ("release", "side", "verdict", "evidence", "bug / limit / control", "s"):
        found.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for row in rows:
        verdict = row.verdict
        as_expected = row.as_expected or not judged
        mark = Text("" if not judged else "✓ ", "green") if as_expected else Text("✗ ", "bold red")
        errors = (verdict.bug_error, verdict.limit, verdict.control_error)
        told_errors = ["exact" if verdict.is_by_exact_checks else number(errors[0]), *map(number, errors[1:])]
        found.add_row(
            Text(row.cell.version),
            row.cell.side,
            mark + Text(told(row), "bold red" if not as_expected else STYLE.get(verdict.outcome, "red") if row.ran else "dim"),
            verdict.evidence if verdict.evidence != "none" else "–",
            " / ".join(told_errors) if any(e is not None for e in errors) else "–",
            f"{row.seconds:.1f}" if row.ran else "–",
        )
    return found


def proofs(rows: Sequence[Row], *, whole: bool = False) -> Table:
    """The proofs of each verdict that has them, a line each; for a side that was not needed, why. ``whole`` lists all controls."""
    grid = Table.grid(padding=(0, 1))
    longest = max((len(f"{row.cell.version} {row.cell.side}") for row in rows), default=0)
    grid.add_column(no_wrap=True, min_width=max(longest, len("  4. validation")))
    grid.add_column(overflow="fold" if whole else "ellipsis", no_wrap=not whole)
    for row in rows:
        head = f"{row.cell.version} {row.cell.side}"
        if row.verdict.proofs:
            grid.add_row(
                Text(head, "bold"), Text(f"{said(row.verdict, row.cell.side)} (evidence: {row.verdict.evidence})", "bold")
            )
            for i, (name, what) in enumerate(row.verdict.proofs.items(), 1):
                grid.add_row(f"  {i}. {name}", Text(what if whole else _short(name, what)))
        elif row.verdict.outcome == "NOTHING_TO_PATCH":
            grid.add_row(Text(head, "bold"), Text(f"nothing to patch: {row.verdict.reason}"))
    return grid


def _short(name: str, what: str) -> str:
    """A proof on one line: controls are counted, of the file that ran the name is said."""
    if name == "control":
        return f"{what.count('; ') + 1} passed"
    what = re.sub(r" trigger \w+\(s\) ran on (.*) from ", r" ran on \1, ", what)
    return re.sub(r"(<\w+>/)\S+/", r"\1…/", what)


def claims(rows: Sequence[Row]) -> Iterator[Text]:
    """What the runs showed beyond their verdicts, in the words that a pack claims: BITWISE_IDENTICAL and the like."""
    for row in rows:
        if row.verdict.claims and row.as_expected:
            yield Text(f"✓ {row.cell.version} {row.cell.side}: {', '.join(row.verdict.claims)}", "green")


def marks(rows: Sequence[Row]) -> Iterator[Text]:
    """What a release showed in the rows of a contract: how many are as they should be, and those that are not."""
    for row in rows:
        told = {
            name: each for name, each in row.verdict.metrics.items() if isinstance(each, dict) and {"ok", "saw"} <= set(each)
        }
        if not told or row.verdict.outcome != "MEASURED":
            continue
        count = {ok: sum(each["ok"] is ok for each in told.values()) for ok in (True, False, None)}
        yield Text(
            f"{row.cell.version}: {count[True]} of {len(told)} rows as they should be, {count[None]} not taken, {count[False]} not{':' * bool(count[False])}"
        )
        for name, each in told.items():
            if each["ok"] is False:
                yield Text(f"  ✗ {name}: {each['saw']}", "red")


def surprises(rows: Sequence[Row]) -> Iterator[Text]:
    """One line for each verdict that is not what was expected, with the reason that the pack gives."""
    for row in rows:
        if not row.as_expected:
            wanted = said(Verdict(outcome=row.expected), row.cell.side)
            saw = said(row.verdict, row.cell.side)
            text = f"{row.cell.dist} {row.cell.version} {row.cell.side}: expected {wanted} ({row.why}), saw {saw}"
            if row.verdict.outcome == "ABSENT" and row.expected == "REPRODUCED":
                text += ". If upstream fixed it, update [expected] and retire the workaround"
            if row.verdict.reason.endswith(("timeout", "oom")):
                text += ". Is the machine busy? Run it once more by itself, with --jobs 1"
            if row.ran and row.message and row.message not in text:
                hint = ": check() takes a number as its error" if "must be real number, not str" in row.message else ""
                text += f" ({row.message.rstrip('.')}{hint})"
            if row.ran and row.receipt:
                logs = row.receipt.parent.glob(f"{row.cell.stem}.{'?' * 12}.log")  # 12 digits of a hash: not a variant's
                text += f". Log: {where(next(logs, row.receipt))}"
            yield Text(plain(f"✗ {text}.", None), "red")


def of_checkout(row: Row, deep: bool) -> Text:
    """What is to be said of a working tree, a commit or a pull request; ``deep``: the pack has a validate.py."""
    name = row.cell.version.partition("+")[2]
    if row.verdict.outcome == "ABSENT":
        text = Text(f"✓ {name} does not have the bug", "green")
        more = "; validate.py, which looks for wrong fixes, judges a diff against a release: --patch FILE.diff" if deep else ""
        return text.append(f". repro.py says so{more}.", "dim")
    if row.verdict.outcome == "REPRODUCED":
        return Text(f"✗ {name} has the bug.", "red")
    why = f" ({plain(row.message.rstrip('.'), None)})" if row.message else ""
    hint = ""
    if row.verdict.reason == "import":
        hint = (
            " A checkout gives its Python files alone: where compiled parts are needed, build a wheel and name it with --wheel."
        )
    return Text(f"✗ It cannot be said whether {name} has the bug: {row.verdict}{why}.{hint}", "yellow")


def ending(rows: Sequence[Row], missing: int = 0) -> Text:
    """The last line of a run that is as expected: how much of it says nothing of the bug. ``missing`` commits were not run."""
    untold = Counter(row.verdict.reason for row in rows if row.verdict.outcome == "UNTESTABLE")
    untold["source"] += 2 * missing
    text = Text("✓ Every verdict is what the pack expects", "green")
    if total := sum(untold.values()):
        why = ", ".join(f"{count} {reason}" for reason, count in untold.items() if count)
        text.append(f"; {total} of {len(rows) + 2 * missing} sides are UNTESTABLE ({why})", "yellow")
    return text.append(".")


def coverage(row: Row) -> Iterator[str]:
    """What a diff under review came to: the files that were applied, and those that were not."""
    patch = row.patch or {}
    for key, what in (
        ("applied", "applied"),
        ("skipped", "no part of the release, left out"),
        ("unsupported", "NOT applied, and would matter: no verdict can be given on the whole diff"),
        ("beyond", "changed, too, which the pack's own fix leaves alone: perhaps no check looks at it"),
        ("unrun", "changed, and no check ran it here: no verdict can be given on the whole diff"),
        ("undefined", "read, and defined nowhere: whatever runs there fails"),
        ("left", "as released, where the pack's own fix changes it: perhaps no check of this lane looks at it"),
    ):
        if patch.get(key):
            yield f"{patch['name']}: {what}: {', '.join(patch[key])}"


def compared(rows: Sequence[Row], recorded: History, *, keep: bool) -> Iterator[Text]:
    """Whether runs agree with the records of any machine, so that a plain run says something without changing a file in git.

    ``keep``: they could be recorded.
    """
    ran = [row for row in rows if row.receipt]
    known: dict[Cell, list[Seen]] = {}
    for seen in recorded.runs:
        known.setdefault(seen.cell, []).append(seen)
    agree, earlier, unknown = 0, 0, []
    for row in ran:
        cell = row.cell
        words = {seen.shown: seen for seen in known.get(cell, [])}
        if not words:
            unknown.append(f"{cell.version} {cell.side}")
        elif (word := shown(row.verdict, cell.side) if _is_own(row) else "not run") in words:
            agree += 1
            earlier += all(seen.stale for seen in known[cell] if seen.shown == word)
        else:
            was = "; ".join(f"{seen.shown} on {seen.machine}, {seen.started[:10]}" for seen in words.values())
            yield Text(f"≠ {cell.version} {cell.side}: {word}, and recorded is {was}", "yellow")
    if ran:
        old = f" ({earlier} with an earlier script)" if earlier else ""
        how = "; --record keeps these runs there" if keep else ""
        yield Text(f"{agree} of {len(ran)} sides as recorded in results/{old}{how}.", "dim")
    if unknown:
        yield Text(f"No record of {', '.join(unknown)}.", "dim")


def picture(parts: Sequence[RenderableType], title: str) -> str:
    """An SVG of a terminal that shows ``parts``; it opens without a network: the viewer's own fixed-width font serves."""
    recorder = Console(record=True, width=128, file=io.StringIO(), force_terminal=True, highlight=False)
    for part in parts:
        recorder.print(part)
    return re.sub(r"@font-face \{.*?\}\s*", "", recorder.export_svg(title=title), flags=re.DOTALL)


class Follow:
    """Progress: a bar with the time left on a terminal, a line a run elsewhere."""

    def __init__(self, total: int, to: Console, *, quiet: bool = False) -> None:
        self.total, self.to, self.count, self.quiet = total, to, 0, quiet
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=to,
            transient=True,
            disable=not to.is_terminal,
        )
        self.task = self.bar.add_task("running", total=total)

    def __enter__(self) -> Follow:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, row: Row | Failure) -> None:
        with self._lock:
            failed = isinstance(row, Failure)
            label = " ".join(filter(None, (row.cell.pack, row.cell.version, "" if failed else row.cell.side, row.cell.variant)))
            # A release that could not be run counts for both its sides.
            self.count = min(self.total, self.count + (2 if failed else 1))
            self.bar.update(self.task, completed=self.count, description=f"ended: {label}")
            if self.quiet or (self.to.is_terminal and not failed):
                return
            if isinstance(row, Failure):
                self.to.print(Text(f"[{self.count}/{self.total}] {label}: not run. {row.message}", "red"))
                return
            took = f" ({row.seconds:.1f} s)" if row.ran else ""
            self.to.print(f"[{self.count}/{self.total}] {label}: {told(row)}{took}{self._left()}", markup=False)

    def _left(self) -> str:
        """Time left, by how long it took so far; for short waits not worth a word."""
        seconds = (time.monotonic() - self.started) / self.count * (self.total - self.count)
        return (
            f" · about {seconds / 60:.0f} min left"
            if seconds >= 90
            else f" · about {seconds:.0f} s left"
            if seconds >= 10
            else ""
        )


@contextmanager
def waiting(what: str, to: Console) -> Iterator[None]:
    """A spinner on a terminal, one line elsewhere, for a wait of unknown length."""
    if to.is_terminal:
        with to.status(what):
            yield
    else:
        to.print(f"{what} …", markup=False)
        yield
