"""What is to be run, what it is held to show, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.files import CACHE, RESULTS
from common.install.environment import Environment
from common.install.machine import gpu, machine_name
from common.install.releases import Release
from common.packs.pack import Pack
from common.store.cell import Cell
from common.store.grade import Verdict

_ASKED = "a checkout is asked whether it is free of the bug"
#: Of a pack without a fix.py.
NO_FIX = "the pack has no fix of its own"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What holds for every cell of one call of the runner."""

    pack: Pack
    lane: str
    arguments: tuple[str, ...] = ()
    variant: str = ""
    patch: Path | None = None
    drop: str | None = None
    here: bool = False
    wheels: Mapping[str, Path] = field(default_factory=dict)
    release_path: Path | None = None
    results: Path = RESULTS
    machine: str = field(default_factory=machine_name)
    cache: Path = CACHE
    threads: int = 0
    several: bool = False
    #: Each script in a sandbox of its own: no network, nothing to write but its own folder.
    sandbox: bool = False
    #: A working tree, a commit or a pull request: no release, so it is held to show nothing, and asked whether it has the bug.
    checkout: bool = False

    def cell(self, release: Release, side: str = "unpatched") -> Cell:
        return Cell(pack=self.pack.name, dist=self.pack.package, version=release.version, side=side, variant=self.variant)


#: The unit of work of every pool: both sides of one release.
Task = tuple[Plan, Release]


def planned(pack: Pack, variant: str, lane: str, **given: Any) -> Plan:
    """How ``pack`` is run in one of its lanes and variants; ``given`` are fields of `Plan`."""
    own = pack.variants.get(variant)
    given = {"arguments": own.arguments, **given} if own else given
    return Plan(pack=pack.varied(variant, lane), lane=lane, variant=variant, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the closing table."""

    cell: Cell
    verdict: Verdict
    expected: str
    why: str
    seconds: float
    #: None for a run that says nothing of the release (INFRA), of which nothing is stored.
    receipt: Path | None
    ran: bool
    environment: Environment | None
    message: str
    patch: Mapping[str, Any] | None = None
    #: What the person at the keyboard should know of how it came about.
    notes: tuple[str, ...] = ()

    @property
    def as_expected(self) -> bool:
        return self.verdict.meets(self.expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A release that could not be run for a reason that says nothing of it: the call, the machine, or a fault of ours."""

    cell: Cell
    message: str


def expected(plan: Plan, version: str, side: str) -> tuple[str, str]:
    """What a side is held to show, and why. The patched side follows from the unpatched one."""
    if plan.checkout:
        return ("ABSENT", _ASKED) if side == "unpatched" else ("NOTHING_TO_PATCH", _ASKED)
    expectation = plan.pack.expectation(version)
    if expectation is None:
        return "an [expected] range", f"no range in pack.toml holds {version}"
    own = plan.pack.variants.get(plan.variant)
    if own is not None and own.verdict is not None:
        expectation = replace(expectation, verdict=own.verdict, why=f"the variant {plan.variant} shows it")
    if expectation.lane not in (None, plan.lane) and (own is None or own.verdict != "MEASURED"):
        return "UNTESTABLE: no-device", f"only the lane {expectation.lane} can judge it"
    if "MEASURED" in (expectation.verdict, own and own.verdict):
        return _measured(plan, version, side)
    if side == "unpatched":
        return expectation.verdict, expectation.why
    if plan.patch is not None and expectation.outcome != "REPRODUCED":
        return "NOTHING_TO_FIX", f"a patch under review must break nothing; {expectation.why}"
    if plan.patch is not None:
        return "ABSENT", "a patch under review must fix the bug and break nothing else"
    if expectation.outcome == "REPRODUCED":
        return ("ABSENT", "the fix works") if plan.pack.fix.is_file() else ("NOTHING_TO_PATCH", NO_FIX)
    if expectation.outcome in ("ABSENT", "CHANGED"):
        return "NOTHING_TO_PATCH", expectation.why
    return expectation.verdict, expectation.why


def _measured(plan: Plan, version: str, side: str) -> tuple[str, str]:
    """A variant that measures does so as released and, where there is something to fix, with the fix."""
    expectation = plan.pack.expectation(version)
    fixed = expectation is not None and expectation.outcome == "REPRODUCED" and plan.pack.fix.is_file()
    return ("MEASURED", "it measures") if side == "unpatched" or fixed else ("NOTHING_TO_PATCH", "there is nothing to fix")


def skipped(before: Verdict, plan: Plan, version: str) -> dict[str, str] | None:
    """Why the patched side is not run, if it is not: only a bug that was seen can be seen to be cured.

    A diff under review also has to break nothing where there is no bug.
    """
    if plan.checkout:
        return {"stopped": "nothing-to-patch", "message": "a checkout is run as it is"}
    if before.outcome == "REPRODUCED":
        return None if plan.patch or plan.pack.fix.is_file() else {"stopped": "nothing-to-patch", "message": NO_FIX}
    if before.outcome == "MEASURED" and _measured(plan, version, "patched")[0] == "MEASURED":
        return None
    if before.outcome in ("ABSENT", "CHANGED", "MEASURED"):
        return None if plan.patch else {"stopped": "nothing-to-patch", "message": f"the unpatched side is {before}"}
    return {"stopped": "skipped", "verdict": before.outcome, "message": before.reason}


def default_jobs(lane: str) -> int:
    """One at a time on a GPU (timings, memory peaks); else one a core."""
    return 1 if lane == "device" and gpu() else max(1, os.cpu_count() or 1)


def threads_each(jobs: int) -> int:
    """How many threads a run may start beside ``jobs - 1`` others; 0, as many as it likes, where it is alone."""
    return max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else 0
