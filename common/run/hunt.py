"""The hunt: cases of a contract, tried on a release in processes that may die, until one is wrong; then the least that is.

Hypothesis makes the cases and shrinks them (https://hypothesis.readthedocs.io). What a case is, and whether it is right, a pack's hunt.py says.
"""

from __future__ import annotations

import json
import math
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from common.errors import UserError, writing
from common.install import lanes
from common.install.releases import Release
from common.packs.pack import find as find_pack
from common.run import execute, runner
from common.run.plan import Plan

WORKER = Path(__file__).with_name("hunter.py")
#: How long one case may take, in seconds; the first of a worker may compile.
PATIENCE = 120.0
Case = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Find:
    """The least case that was found of one fault. ``differs`` is what it has beside the ``plain`` one."""

    plain: Case
    differs: Case
    how: str
    error: float | None
    #: The pack that shows it already.
    pack: str | None
    #: Whether it came again, twice.
    sure: bool


@dataclass(kw_only=True, slots=True)
class Report:
    seed: int
    file: str = ""
    evidence: str = ""
    space: Mapping[str, list[Any]] = field(default_factory=dict)
    finds: list[Find] = field(default_factory=list)
    #: Cases by how they ended: right, wrong, not taken.
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("right", "wrong", "not taken"), 0))
    #: Option -> value, as JSON -> cases that took it and were judged.
    tried: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Lines of the release's file that ran.
    lines: set[int] = field(default_factory=set)
    seconds: float = 0.0
    #: Whether Ctrl-C ended it.
    stopped: bool = False


class _Worker:
    """A process that has the release loaded and answers cases."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            command, env=dict(env), cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.listeners = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._drain)]
        for thread in self.listeners:
            thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said = [*self.said[-20:], line.rstrip()]

    def first(self) -> dict[str, Any]:
        """What hunt.py says of itself."""
        try:
            line = self.answers.get(timeout=PATIENCE)
        except queue.Empty:
            line = None
        if line is None:
            self.process.kill()
            self.listeners[1].join()  # until all that it said is read
            raise UserError(f"The release cannot be hunted: {self.said[-1] if self.said else 'its worker says nothing'}")
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, options: Case, *, cover: bool) -> dict[str, Any] | None:
        """How a case ended; None where the process did not live to say it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"options": options, "cover": cover}) + "\n")
            self.process.stdin.flush()
        try:
            line = self.answers.get(timeout=PATIENCE)
        except queue.Empty:
            return {"ok": False, "how": f"hangs for {PATIENCE:.0f} s", "error": None, "dead": True}
        return None if line is None else json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for thread in self.listeners:
            thread.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def death(self) -> str:
        code = self.process.wait()
        return f"dies of {signal.Signals(-code).name}" if code < 0 else f"dies with exit {code}"


class Pool:
    """One worker that is asked, and one that is loaded beside it for when the first dies."""

    def __init__(self, start: Callable[[], _Worker]) -> None:
        self._start = start
        self._ready = [start(), start()]
        try:
            self.told = self._ready[0].first()
            self._ready[1].first()
        except UserError:
            self.end()
            raise

    def ask(self, options: Case, *, cover: bool = False) -> dict[str, Any]:
        worker = self._ready[0]
        answer = worker.ask(options, cover=cover)
        if answer is not None and not answer.get("dead"):
            return answer
        answer = answer or {"ok": False, "how": worker.death(), "error": None}
        worker.end()
        self._ready = [self._ready[1], self._start()]
        self._ready[1].first()
        return answer

    def end(self) -> None:
        for worker in self._ready:
            worker.end()


@contextmanager
def pool(plan: Plan, release: Release, *, reference: bool) -> Iterator[Pool]:
    """Workers with a release loaded, in the pack's lane. With ``reference``, the definition is asked in its place."""
    assert plan.pack.hunt is not None
    script = (plan.pack.folder / plan.pack.hunt).resolve()
    with writing(plan.cache), ExitStack() as stack:
        there, place = runner.held(plan, release, stack)
        command = [*lanes.command(there.python, plan.lane, WORKER), str(script), str(plan.pack.folder)]
        command += ["--reference"] if reference else []
        env = execute.environ(plan, plan.cell(release, "unpatched"), there, place)
        made = Pool(lambda: _Worker(command, env, place / "tmp"))
        stack.callback(made.end)
        made.told["known"] = [row for row in made.told["known"] if _is_expected(row, plan, release)]
        yield made


def _is_expected(row: Mapping[str, Any], plan: Plan, release: Release) -> bool:
    """Whether this release has a known bug. Of a file of somebody's own nothing is expected, and how a find ends has to do."""
    if row["package"] != plan.pack.package:
        return False
    expected = None if plan.wheels or plan.here else find_pack(row["pack"]).expectation(release.version)
    return expected is None or expected.outcome != "ABSENT"


def hunt(asked: Pool, *, seed: int, seconds: float, say: Callable[[str], None]) -> Report:
    """Try cases until the time is over, or each was tried. The same seed tries the same cases, in the same order."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    space = asked.told["space"]
    report = Report(seed=seed, file=asked.told["file"], evidence=asked.told["evidence"], space=space)
    started = time.monotonic()
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    # Half of all options are as in the plainest case: one where many are not fails for what is known.
    strategy = st.fixed_dictionaries({name: st.just(0) | st.integers(0, len(values) - 1) for name, values in space.items()})
    rounds = settings(
        max_examples=150,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    def key_of(choice: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(choice[name] for name in space)  # Hypothesis gives them in any order.

    def judged(choice: Mapping[str, int]) -> dict[str, Any]:
        key = key_of(choice)
        if key not in known:
            options = {name: space[name][i] for name, i in choice.items()}
            known[key] = answer = asked.ask(options, cover=len(known) % 10 == 0)
            end = {True: "right", False: "wrong", None: "not taken"}[answer["ok"]]
            report.ended[end] += 1
            report.lines.update(answer.get("lines", ()))
            for name, value in options.items() if answer["ok"] is not None else ():
                row = report.tried.setdefault(name, {})
                row[json.dumps(value)] = row.get(json.dumps(value), 0) + 1
        return known[key]

    def is_new(choice: Mapping[str, int]) -> bool:
        # Hypothesis asks the least case again at the end, and takes another answer for a flaky one.
        if time.monotonic() - started > seconds and key_of(choice) not in known:
            return False
        answer = judged(choice)
        return answer["ok"] is False and not any(_explains(find, choice, answer, space) for find in report.finds)

    def keep(least: Mapping[str, int]) -> None:
        report.finds.append(_found(least, judged(least), asked, space))
        say(_said(report.finds[-1]))

    plain = dict.fromkeys(space, 0)
    number, told = 0, started
    try:
        if is_new(plain):  # All else would be told of in its place.
            keep(plain)
        while time.monotonic() - started < seconds and not _is_hopeless(report):
            number += 1
            try:
                keep(find(strategy, is_new, settings=rounds, random=Random(f"{seed} {number}")))
            except NoSuchExample:
                if len(known) == math.prod(map(len, space.values())) and not any(
                    is_new(dict(zip(space, key, strict=True))) for key in known
                ):
                    break
                if time.monotonic() - told > 15:
                    told = time.monotonic()
                    say(f"{sum(report.ended.values())} cases, {time.monotonic() - started:.0f} s")
    except KeyboardInterrupt:  # What was found until now is not to be lost.
        report.stopped = True
    report.seconds = time.monotonic() - started
    return report


def _is_hopeless(report: Report) -> bool:
    """The plainest case is wrong, and so explains all others."""
    return any(not find.differs for find in report.finds)


def _kind(how: str) -> str:
    """How a case ends without its figures: two that end alike may be one fault."""
    return how.partition(":")[0]


def _explains(find: Find, choice: Mapping[str, int], answer: Mapping[str, Any], space: Mapping[str, list[Any]]) -> bool:
    """Whether a case may be wrong for the reason of an earlier find: it ends alike, and has all that the find needed, with its values."""
    same = _kind(find.how) == _kind(answer["how"])
    return same and all(space[name][choice[name]] == value for name, value in find.differs.items())


def _found(choice: Mapping[str, int], answer: Mapping[str, Any], asked: Pool, space: Mapping[str, list[Any]]) -> Find:
    options = {name: space[name][i] for name, i in choice.items()}
    differs = {name: options[name] for name, i in choice.items() if i}
    again = [asked.ask(options) for _ in range(2)]
    packs = [row["pack"] for row in asked.told["known"] if _is_known(row, answer["how"], differs)]
    sure = all(other["ok"] is False and _kind(other["how"]) == _kind(answer["how"]) for other in again)
    return Find(
        plain={name: values[0] for name, values in space.items()},
        differs=differs,
        how=answer["how"],
        error=answer["error"],
        pack=packs[0] if packs else None,
        sure=sure,
    )


def _is_known(row: Mapping[str, Any], how: str, differs: Mapping[str, Any]) -> bool:
    """Whether a find is what a pack shows: it ends so, needs nothing else than that does, and each with such a value."""
    needed = {name: values for name, values in row["options"].items() if values is not None}
    return (
        re.search(row["how"], how) is not None
        and set(needed) <= set(differs) <= set(row["options"])
        and all(differs[name] in values for name, values in needed.items())
    )


def _said(find: Find) -> str:
    differs = ", ".join(f"{name} {json.dumps(value)}" for name, value in find.differs.items()) or "the plainest case"
    error = f" by {find.error:.2g}" if find.error is not None else ""
    return (
        f"{differs}: {find.how}{error}{f' (known: {find.pack})' if find.pack else ''}{'' if find.sure else ' (not each time)'}"
    )
