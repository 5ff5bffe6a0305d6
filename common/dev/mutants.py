"""Break every fix and blunt every trigger, and see that the pack notices: a mutant that stays green is a defect of the pack.

Each mutant is a copy of the packs' folders with one of them changed, run on one release as the pack itself is. What to poison
and how to blunt a trigger stands in the pack's ``mutants.toml``; docs/adding-a-pack.md says how.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec.json
import msgspec.toml
from msgspec import Meta, Struct

from common.errors import UserError
from common.files import CACHE
from common.install import environment, lanes, sources
from common.install.releases import Release, choose
from common.packs.pack import Pack, load
from common.publish.mutants import Outcome
from common.run import plan as plans
from common.run import runner
from common.run.plan import Plan, Row
from common.run.pool import ended
from common.store import history
from common.store.grade import NOT_RIGHT
from common.transforms import Fix, Transform, load_fix

#: What a poison does to an output: nothing (which must stay green), and what must turn the patched side red.
POISONS = {
    "same": "value",
    "NaN": "value * float('nan')",
    "zeros": "value * 0",
    "sign": "-value",
    "factor": "value * {factor}",
}


class Blunt(Struct, forbid_unknown_fields=True):
    """Edits of the pack's scripts by which the trigger does not trigger, or a check does not check: text -> replacement."""

    name: str
    edits: Annotated[dict[str, str], Meta(min_length=1)]
    file: str = "repro.py"
    #: Which side has to turn red.
    side: Literal["unpatched", "patched"] = "unpatched"
    #: The release or variant that is run, where it is another than the pack's other mutants are of.
    at: str = ""


class Edit(Struct, forbid_unknown_fields=True):
    """A wrong fix: text of fix.py -> replacement. ``raises`` where it has to be noticed by its error; else a check has to fail."""

    name: str
    edits: Annotated[dict[str, str], Meta(min_length=1)]
    raises: bool = False
    #: The release or variant that is run, where it is another than the pack's other mutants are of.
    at: str = ""


class Mutants(Struct, forbid_unknown_fields=True):
    """A pack's mutants.toml."""

    #: The release that is run; the first that the pack pins and expects to be wrong, where it is not given.
    release: str | None = None
    #: The variant that is run: a commit, for a bug that is in no release.
    variant: str = ""
    #: Transforms without which the fix is still right, and why.
    equivalent: dict[str, str] = {}
    #: Transforms that another release or variant needs -> which.
    at: dict[str, str] = {}
    #: File below site-packages -> functions in it ("Class.method"), with the places of what they return: "f 0 2", or "f".
    poison: dict[str, list[Annotated[str, Meta(pattern=r"^[\w.]+( \d+)*$")]]] = {}
    #: Why no wrapper that changes nothing is run: of a pack whose checks read the source, and refuse every change of it.
    wrapper: str = ""
    #: Just over the limit of the pack's checks.
    factor: float = 1.001
    blunt: list[Blunt] = []
    wrong: list[Edit] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """``side`` has to turn red; None for the mutant that changes nothing, which must stay green."""

    kind: str
    name: str
    side: str | None
    make: Callable[[Path], None]
    raises: bool = False
    at: str = ""


def of(pack: Pack, only: str = "") -> tuple[Mutants, list[Mutant]]:
    """What a pack's mutants.toml says, and the mutants themselves, those whose names hold ``only``."""
    path = pack.folder / "mutants.toml"
    try:
        told = msgspec.toml.decode(path.read_bytes(), type=Mutants) if path.is_file() else Mutants()
    except msgspec.DecodeError as error:
        raise UserError(f"{pack.folder.name}/mutants.toml: {error}.") from error
    if (told.poison or told.wrong) and not pack.fix.is_file():
        raise UserError(f"{pack.folder.name}/mutants.toml: the pack has no fix.py to be broken.")
    mutants = [*_dropped(pack, told), *_poisoned(told), *_wrong(told), *_blunted(told)]
    return told, [mutant for mutant in mutants if only in mutant.name]


def left_out(told: Mutants) -> dict[str, str]:
    """What is not run -> why."""
    return told.equivalent | ({"same": told.wrapper} if told.wrapper else {})


def _dropped(pack: Pack, told: Mutants) -> Iterator[Mutant]:
    fix = load_fix(pack.fix) if pack.fix.is_file() else {}
    names = dict.fromkeys(transform.name for transforms in fix.values() for transform in transforms)
    if strange := sorted({*told.equivalent, *told.at} - set(names)):
        raise UserError(f"{pack.folder.name}/mutants.toml: there is no transform {strange[0]!r} in its fix.")
    for name in names:
        if name not in told.equivalent:
            make = _appended(f"drop(FIX, {name!r})")
            yield Mutant(kind="dropped", name=name, side="patched", make=make, raises=True, at=told.at.get(name, ""))


def _poisoned(told: Mutants) -> Iterator[Mutant]:
    for file, functions in told.poison.items():
        for function in functions:
            name, *places = function.split(" ")
            for place in places or [""]:
                for how, formula in POISONS.items():
                    if how == "same" and told.wrapper:
                        continue
                    formula = formula.format(factor=told.factor)
                    code = f"poisoned(FIX, {file!r}, {name!r}, {place!r}, {formula!r})"
                    label = f"{name}{f'[{place}]' if place else ''}: {how}"
                    yield Mutant(kind="poisoned", name=label, side=None if how == "same" else "patched", make=_appended(code))


def _wrong(told: Mutants) -> Iterator[Mutant]:
    for each in told.wrong:
        make = _edited("fix.py", each.edits)
        yield Mutant(kind="wrong fix", name=each.name, side="patched", make=make, raises=each.raises, at=each.at)


def _blunted(told: Mutants) -> Iterator[Mutant]:
    for each in told.blunt:
        yield Mutant(kind="blunted", name=each.name, side=each.side, make=_edited(each.file, each.edits), at=each.at)


def _appended(expression: str) -> Callable[[Path], None]:
    """Have fix.py end in another ``FIX``."""

    def make(folder: Path) -> None:
        with (folder / "fix.py").open("a", encoding="utf-8") as file:
            file.write(
                f"\nfrom common.dev.mutants import poisoned  # noqa\nfrom common.run.overlay import drop  # noqa\n\nFIX = {expression}\n"
            )

    return make


def _edited(name: str, edits: dict[str, str]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        if not (folder / name).is_file():
            raise UserError(f"{folder.name}/mutants.toml: there is no {name} beside it.")
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in edits.items():
            if old not in text:
                raise UserError(f"{folder.name}/mutants.toml: {name} does not hold {old!r}.")
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")

    return make


def poisoned(fix: Fix, file: str, function: str, place: str, formula: str) -> Fix:
    """``fix``, and a wrapper around one function of ``file`` that puts ``formula`` of ``value`` in place of what it returns."""
    owner, _, name = function.rpartition(".")
    target = owner or "sys.modules[__name__]"
    code = f"""

def _poison(owner, name):
    import functools, inspect
    before = inspect.getattr_static(owner, name)
    function = before.__func__ if isinstance(before, (staticmethod, classmethod)) else before

    @functools.wraps(function)
    def wrapped(*given, **named):
        found = function(*given, **named)
        place = {place!r}
        change = lambda value: {formula} if value is not None else None
        if place == "":
            return change(found)
        if not isinstance(found, (tuple, list)):  # it returns one where less is asked for
            return change(found) if place == "0" else found
        found = list(found)
        found[int(place)] = change(found[int(place)])
        return tuple(found)

    setattr(owner, name, type(before)(wrapped) if isinstance(before, (staticmethod, classmethod)) else wrapped)


import sys
_poison({target}, {name!r})
"""
    more = Transform("poison", lambda source: source + code)
    return {**fix, file: [*fix.get(file, ()), more]}


def kept(pack: str, digest: str) -> list[Outcome]:
    """What a call that was stopped had found of a pack's scripts and mutants, which ``digest`` stands for."""
    file, found = _journal(pack, digest), []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        with suppress(msgspec.DecodeError):  # the last one, which was being written
            found.append(msgspec.json.decode(line, type=Outcome))
    return [outcome for outcome in found if outcome.killed]


def keep(outcome: Outcome, digest: str) -> None:
    file = _journal(outcome.pack, digest)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as journal:
        journal.write(msgspec.json.encode(outcome) + b"\n")


def forget(pack: str, digest: str) -> None:
    _journal(pack, digest).unlink(missing_ok=True)


def _journal(pack: str, digest: str) -> Path:
    return CACHE / "mutants" / f"{pack}-{digest}.jsonl"


def run(
    packs: Sequence[Pack],
    *,
    jobs: int,
    done: Callable[[Outcome], None],
    source: Path | None = None,
    only: str = "",
    before: Sequence[Outcome] = (),
) -> list[Outcome]:
    """Run the mutants of some packs whose names hold ``only``, but for those of ``before``; ``done`` is told of each as it ends.

    ``source`` is a clone, for variants that are commits.
    """
    found = [*before]
    ended_before = {(outcome.pack, outcome.kind, outcome.name) for outcome in before}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(jobs) as executor:
        work = [
            (pack, told, [mutant for mutant in mutants if (pack.name, mutant.kind, mutant.name) not in ended_before])
            for pack, (told, mutants) in ((pack, of(pack, only)) for pack in packs)
        ]
        stop = threading.Event()
        try:
            started = []
            for pack, told, mutants in work:
                for at in dict.fromkeys(mutant.at for mutant in mutants):
                    mine = [mutant for mutant in mutants if mutant.at == at]
                    started.append((mine, executor.submit(_released, pack, told, at, Path(scratch), jobs, source, stop)))
            # All of them before the first mutant: a commit that is nowhere is said at once, not after an hour.
            for mine, (plan, release, unpatched) in [(mine, next(ended([first])).result()) for mine, first in started]:
                for future in [executor.submit(_run, plan, release, unpatched, mutant, stop) for mutant in mine]:
                    found.append(next(ended([future])).result())
                    done(found[-1])
        except BaseException:  # Ctrl-C among them: what runs is ended, what waits is not begun.
            stop.set()
            executor.shutdown(wait=True, cancel_futures=True)
            raise
    return found


def _released(
    pack: Pack, told: Mutants, at: str, place: Path, jobs: int, source: Path | None, stop: threading.Event
) -> tuple[Plan, Release, Row]:
    """How the pack is run, on which release, and that release as it is."""
    variant = at if at in pack.variants else "" if at else told.variant
    own = pack.variants.get(variant)
    lane = lanes.choose(pack, own.lane if own else None)
    wheels = {}
    if own and own.source:
        wheel = sources.wheel(pack, variant, source, CACHE)
        wheels = {environment.read_wheel(wheel, pack.package)[1]: wheel}
    plan = plans.planned(
        pack,
        variant,
        lane,
        threads=plans.threads_each(jobs),
        results=place / pack.name / (at or "first"),
        machine="mutants",
        cache=CACHE,
        wheels=wheels,
    )
    wanted = (at if at and not variant else told.release) or pack.shown_on()
    release = Release(version=next(iter(wheels)), file="", sha256="") if wheels else choose(pack, wanted, CACHE)[0][0]
    return plan, release, runner.run_unpatched(plan, release, stop=stop)


def _run(plan: Plan, release: Release, unpatched: Row, mutant: Mutant, stop: threading.Event) -> Outcome:
    place = plan.results / uuid.uuid4().hex[:12]
    # All packs: a fix may take edits from another's.
    shutil.copytree(plan.pack.folder.parent, place / "packs", ignore=shutil.ignore_patterns("__pycache__"))
    folder = place / "packs" / plan.pack.folder.name
    mutant.make(folder)
    if mutant.side == "patched":
        _end_at_the_first_failure(folder)
    changed = replace(plan, pack=load(folder).varied(plan.variant, plan.lane), results=place / "results")
    if mutant.side == "unpatched":
        row = runner.run_unpatched(changed, release, stop=stop)
    else:
        row = runner.run_release(changed, release, before=unpatched, stop=stop)[1]
    shutil.rmtree(place, ignore_errors=True)
    saw = re.sub(r"\s+", " ", str(row.verdict))
    killed = row.as_expected if mutant.side is None else _noticed(row, mutant)
    if mutant.side == "unpatched" and history.turned(*(history.rows(each.verdict.metrics) for each in (unpatched, row))):
        killed, saw = True, "other rows of the contract than the release's"
    if row.verdict.outcome in NOTHING and not killed and mutant.side is not None:
        saw = f"shows nothing, for it did not run to its end ({saw})"
    return Outcome(pack=plan.pack.name, kind=mutant.kind, name=mutant.name, killed=killed, saw=saw)


def _end_at_the_first_failure(folder: Path) -> None:
    """Have the report blocks of a pack's scripts end at the first check that fails: one is enough, and a whole check may take minutes."""
    last = '{words[not ok]:<8} {name}{shown}", flush=True)\n'
    for script in folder.glob("*.py"):
        text = script.read_text(encoding="utf-8")
        # Not before the script has said where it runs: a verdict without that is none.
        end = '    if not ok and role != "signature" and FACTS["evidence"] != "none":\n        finish("CHANGED", name)\n'
        script.write_text(text.replace(last, last + end), encoding="utf-8")


#: Verdicts on the edit or the machine, which say nothing of the checks: it could not be applied, or was stopped.
NOTHING = ("ERROR", "INFRA", "UNTESTABLE")


def _noticed(row: Row, mutant: Mutant) -> bool:
    """Whether a pack has seen that something is wrong: a check failed, or where that will do, something raised.

    A fix that does not apply, or a run that the machine broke, shows nothing.
    """
    verdict = row.verdict
    # The second is a script without a report block, which does not say CHANGED itself.
    raised = re.fullmatch(
        r"(validate: )?\w+(Error|Exception)|.* printed no sentinel; .*\w+(Error|Exception):.*", verdict.reason
    )
    if row.as_expected or (raised and not mutant.raises):
        return False
    return (
        raised is not None
        or verdict.reason.endswith("margin")  # a check failed, by less than ten times its limit
        or verdict.outcome in ("REPRODUCED", "CHANGED")
        or (mutant.kind == "blunted" and (verdict.outcome == "ABSENT" or verdict.reason.startswith(NOT_RIGHT)))
    )
