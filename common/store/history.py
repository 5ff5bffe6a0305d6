"""What the stored receipts say of each release: read once, kept small, in order of release. Every table is made from this."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from sys import intern
from typing import Any, Protocol, TypeVar

from common.errors import UserError
from common.install import lanes
from common.packs import reportblock
from common.packs.pack import Pack
from common.scrub import plain
from common.store import receipt
from common.store.cell import Cell, order
from common.store.grade import Verdict, strength
from common.store.receipt import Receipt


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One stored run, without its log and its list of distributions, which `log` and `document` read again."""

    path: Path
    machine: str
    cell: Cell
    lane: str
    verdict: Verdict
    stopped: str | None
    started: str
    stale: bool
    sha256: str
    log_name: str
    log_sha256: str
    #: Name and sha256 of the diff that was run.
    patch: tuple[str, str] | None
    #: How often the cell was run for this record, and how many of the runs show what it says.
    runs: int = 1
    agree: int = 1

    @property
    def flaky(self) -> bool:
        return self.agree < self.runs

    @property
    def version(self) -> str:
        return self.cell.version

    @property
    def side(self) -> str:
        return self.cell.side

    @property
    def outcome(self) -> str:
        return self.verdict.outcome

    @property
    def evidence(self) -> str:
        return self.verdict.evidence

    @property
    def word(self) -> str:
        """The verdict in the words of a script's last line."""
        if self.stopped == "skipped":
            return "not run"
        word = said(self.verdict, self.side)
        return f"{word} (flaky: {self.agree} of {self.runs} runs)" if self.flaky else word

    @property
    def rows(self) -> dict[str, bool | None]:
        return rows(self.verdict.metrics)

    @property
    def shown(self) -> str:
        """Its word, and which rows of the contract are wrong."""
        return _with_rows(self.word, self.rows)

    def document(self) -> Receipt:
        return receipt.read(self.path)

    def log(self) -> str:
        return receipt.read_log(self.path, self.document())


def said(verdict: Verdict, side: str) -> str:
    words = {
        "REPRODUCED": "BUG_REPRODUCED",
        "ABSENT": "FIX_VALIDATED" if side == "patched" else "BUG_ABSENT",
        "NOTHING_TO_PATCH": "nothing to patch",
        "NOTHING_TO_FIX": "NOTHING_TO_FIX: the controls still hold",
    }
    return words.get(verdict.outcome) or str(verdict)


def rows(metrics: Mapping[str, Any]) -> dict[str, bool | None]:
    """The rows of the contract of the loss among what a script measured: right, wrong, or None where nothing was asked; docs/contract.md."""
    return {row: told["ok"] for row, told in metrics.items() if isinstance(told, dict) and {"ok", "saw"} <= told.keys()}


def shown(verdict: Verdict, side: str) -> str:
    """`said`, and which rows of the contract are wrong."""
    return _with_rows(said(verdict, side), rows(verdict.metrics))


def _with_rows(word: str, rows: Mapping[str, bool | None]) -> str:
    wrong = sorted(row for row, ok in rows.items() if ok is False)
    return f"{word}, wrong in: {'; '.join(wrong)}" if wrong else word


@dataclass(frozen=True, kw_only=True)
class History:
    """Stored runs in order of pack, package, release, side and machine; ``unreadable`` says what is wrong with those that are not whole."""

    runs: Sequence[Seen] = ()
    unreadable: Mapping[Path, UserError] = field(default_factory=dict)

    @cached_property
    def _by_subject(self) -> dict[tuple[str, str], list[Seen]]:
        found: dict[tuple[str, str], list[Seen]] = defaultdict(list)
        for seen in self.runs:
            if not seen.cell.variant:  # Variants answer other questions than "which release".
                found[seen.cell.pack, seen.cell.dist].append(seen)
        return found

    def of(self, pack: str, dist: str) -> list[Seen]:
        """The runs of a pack on a package, nightlies being a package of their own."""
        return self._by_subject.get((pack, dist), [])

    def of_commits(self, pack: Pack) -> list[Seen]:
        """The runs of the commits that a pack's variants name."""
        named = {name for name, variant in pack.variants.items() if variant.source}
        return [seen for seen in self.runs if seen.cell.pack == pack.name and seen.cell.variant in named]

    def by_machine(self, pack: str, dist: str) -> dict[str, list[Seen]]:
        found: dict[str, list[Seen]] = defaultdict(list)
        for seen in self.of(pack, dist):
            found[seen.machine].append(seen)
        return dict(sorted(found.items()))


def load(results: Path, packs: Iterable[Pack]) -> History:
    """All stored runs of ``packs``. One that cannot be read does not hide the others."""
    known = {pack.name: pack for pack in packs}
    freshness = _Freshness()
    runs: list[Seen] = []
    unreadable: dict[Path, UserError] = {}
    for path in receipt.stored(results):
        if path.parent.name not in known:
            continue
        try:
            document = receipt.read(path)
            receipt.check_place(path, document)
            runs.append(_seen(path, document, known[path.parent.name], freshness))
        except UserError as error:
            unreadable[path] = error
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            unreadable[path] = UserError(
                f"The receipt {path} cannot be read ({type(error).__name__}): delete it and run its cell again."
            )
    unreadable |= {path: UserError(sentence) for path, sentence in receipt.strays(results).items()}
    runs.sort(key=lambda seen: (seen.cell.order, seen.machine))
    return History(runs=runs, unreadable=unreadable)


def _seen(path: Path, document: Receipt, pack: Pack, freshness: _Freshness) -> Seen:
    facts = document.facts
    own = [run.word for run in facts.runs or () if run.log.sha256 == facts.log.sha256]
    return Seen(
        path=path,
        # The same few words in every receipt: one copy of each is enough.
        machine=intern(path.parent.parent.name),
        cell=Cell(**{name: intern(getattr(facts, name)) for name in ("pack", "dist", "version", "side", "variant")}),
        lane=intern(facts.lane),
        verdict=Verdict(
            outcome=intern(facts.outcome),
            reason=intern(plain(facts.reason)),
            evidence=intern(facts.evidence),
            bug_error=facts.bug_error,
            limit=facts.limit,
            control_error=facts.control_error,
            claims=tuple(facts.claims),
            metrics={row: facts.metrics[row] for row in rows(facts.metrics)},
        ),
        stopped=facts.stopped,
        started=facts.started,
        stale=freshness.is_stale(document, pack),
        sha256=document.subject[0].digest.sha256 or "",
        log_name=facts.log.name,
        log_sha256=facts.log.sha256,
        patch=(facts.patch.name, facts.patch.sha256) if facts.patch else None,
        runs=len(facts.runs or ()) or 1,
        agree=[run.word for run in facts.runs or ()].count(own[0]) if own else 0 if facts.runs else 1,
    )


#: sha256 of common/transforms.py from 2026-11-23 on.
_TRANSFORMS = "277546333207cce3020e9be8443b29d70a5b4c1abdb305c58d5a2590aca4eddc"


class _Freshness:
    """Today's hashes of each pack, side and lane, taken once."""

    def __init__(self) -> None:
        self._today: dict[tuple[str, ...], dict[str, str]] = {}

    def is_stale(self, document: Receipt, pack: Pack) -> bool:
        facts = document.facts
        held = pack.varied(facts.variant, facts.lane).at(facts.version)
        key = (pack.name, facts.side, facts.lane, facts.variant, *held.requires)
        if key not in self._today:
            known = facts.lane in lanes.known()
            # A lane that is gone cannot be run again as it was: what was seen there is stale.
            of_lanes = lanes.files_of(held, facts.lane, facts.side, facts.variant) if known else []
            self._today[key] = held.hashes(facts.side, of_lanes, facts.variant) if known else {}
        today = self._today[key]
        was = {n: today.get(n, d) if d in reportblock.EARLIER.get(n, ()) else d for n, d in document.hashes.items()}
        if "transforms" in today:  # Receipts of before it was kept rest on what it was then.
            was.setdefault("transforms", _TRANSFORMS)
        return was != today


def strongest(runs: Iterable[Seen]) -> str:
    """The strongest evidence level among some runs."""
    return max((seen.evidence for seen in runs), key=strength, default="none")


class Judged(Protocol):
    """What the choice between several runs of one cell goes by."""

    @property
    def stale(self) -> bool: ...
    @property
    def flaky(self) -> bool: ...
    @property
    def evidence(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def machine(self) -> str: ...


JudgedT = TypeVar("JudgedT", bound=Judged)


def best(runs: Iterable[JudgedT]) -> JudgedT | None:
    """The run to go by for one cell: a fresh one before a stale one, a sound before a flaky, then the strongest evidence.

    Of machines that do not agree, one that shows the bug counts, then one that does not know: nobody is told that it is not there.
    """

    def weight(seen: JudgedT) -> tuple[bool, bool, int, bool, bool, str]:
        level = not seen.stale, not seen.flaky, strength(seen.evidence)
        return *level, seen.outcome == "REPRODUCED", seen.outcome != "ABSENT", seen.machine

    return max(runs, key=weight, default=None)


def cured(seen: Seen, sides: Mapping[str, Iterable[Seen]]) -> bool:
    """Whether the fix cures what ``seen`` shows, on the same machine; a run of an earlier fix says nothing of today's."""
    return seen.outcome == "REPRODUCED" and any(
        s.outcome == "ABSENT" and s.machine == seen.machine and s.stale <= seen.stale for s in sides.get("patched", ())
    )


def releases(runs: Iterable[Seen]) -> dict[str, dict[str, list[Seen]]]:
    """release -> side -> the runs of it, oldest release first."""
    found: dict[str, dict[str, list[Seen]]] = {}
    for seen in sorted(runs, key=lambda seen: order(seen.version)):
        found.setdefault(seen.version, {}).setdefault(seen.side, []).append(seen)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A cell (or a release beside the one before it) that shows something else than before."""

    kind: str
    cell: Cell
    before: str
    before_version: str
    after: str
    evidence: str
    machine: str
    #: `shown` of the run after, by which runs are told apart.
    shown: str
    #: Rows of the contract that turned, and whether each is right now.
    turned: Mapping[str, bool] = field(default_factory=dict, hash=False)
    runs: int = 1
    agree: int = 1

    def __str__(self) -> str:
        return f"{self.cell}: {self.told}"

    @property
    def told(self) -> str:
        """What changed, without of what."""
        other = self.before_version != self.cell.version
        named = {word: "; ".join(r for r, ok in self.turned.items() if ok is right) for word, right in _TURNED}
        rows = " · ".join(f"now {word}: {found}" for word, found in named.items() if found)
        if self.before == self.after:
            text = rows + (f", unlike {self.before_version}" if other else "")
        else:
            since = f" in {self.before_version}" if other else ""
            text = f"{self.before or 'not seen before'}{since} → {self.after}" + (f" ({rows})" if rows else "")
        count = f" ({self.agree} of {self.runs} runs)" if self.runs > 1 else ""
        return f"{text}{count}" + (f", {self.evidence}" if self.evidence != "none" else "")

    def to_dict(self) -> dict[str, Any]:
        rest = asdict(self)
        return {"text": str(self), **rest.pop("cell"), **{name: value for name, value in rest.items() if name != "shown"}}


_TURNED = (("wrong", False), ("right", True))


def change(side: str, before: str, after: str) -> str | None:
    """The kind of change between two outcomes, None for none worth a word; after https://github.com/rust-lang/crater's report.

    Where nothing could be told before, nothing has regressed: the bug may have been there.
    """
    told = ("REPRODUCED", "ABSENT")
    if before == after or not before or "NOTHING_TO_PATCH" in (before, after):
        return None
    if after == "REPRODUCED":
        return "regressed" if before in ("ABSENT", "CHANGED") else None
    if after == "ABSENT":
        return "fixed" if before == "REPRODUCED" else None
    return "broken" if before in told else None


def turned(before: Mapping[str, bool | None], after: Mapping[str, bool | None]) -> dict[str, bool]:
    """The rows that went from right to wrong, or back, and what they are now."""
    return {row: ok for row, ok in sorted(after.items()) if ok is not None and before.get(row) is (not ok)}


class Before(Protocol):
    """What a run showed, as a change is told from it."""

    @property
    def outcome(self) -> str: ...
    @property
    def word(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def rows(self) -> Mapping[str, bool | None]: ...


def changed(before: Before, seen: Seen) -> Change | None:
    """The change from ``before`` to ``seen``: of the outcome, or of rows of the contract. None for none worth a word."""
    turns = turned(before.rows, seen.rows)
    kind = change(seen.side, before.outcome, seen.outcome)
    if kind is None and turns:
        kind = "fixed" if all(turns.values()) else "regressed"
    if kind is None:
        return None
    return Change(
        kind=kind,
        cell=seen.cell,
        before=before.word,
        before_version=before.version,
        after=seen.word,
        evidence=seen.evidence,
        machine=seen.machine,
        shown=seen.shown,
        turned=turns,
    )


def transitions(runs: Iterable[Seen]) -> Iterator[Change]:
    """What changed from release to release, going by the best run of each, as released; past releases that told nothing."""
    before: Seen | None = None
    known: Seen | None = None
    for sides in releases(runs).values():
        if seen := best(sides.get("unpatched", ())):
            if told := (before and changed(before, seen)) or (known and changed(known, seen) if is_told(seen) else None):
                yield told
            before = seen
            known = seen if is_told(seen) else known


def is_told(seen: Before) -> bool:
    """Whether a run says something of what the pack asks."""
    return seen.outcome in ("REPRODUCED", "ABSENT", "MEASURED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Neighbouring releases that have the bug. ``fixed`` is the first one after them seen without it; None where none is."""

    first: str
    last: str
    fixed: str | None
    versions: tuple[str, ...]
    #: Whether the releases up to the next piece show something else, or were only inconclusive.
    left: bool
    #: The release after the last, whatever it shows; None where it is the newest.
    next: str | None


def stretches(runs: Iterable[Seen]) -> list[Stretch]:
    """Where the bug was, in as many pieces as it came. Inconclusive releases end a piece and do not fix it."""
    told = [
        (version, seen) for version, sides in releases(runs).items() if (seen := best(sides.get("unpatched", ()))) is not None
    ]
    found: list[Stretch] = []
    groups = [(wrong, list(group)) for wrong, group in groupby(told, key=lambda item: item[1].outcome == "REPRODUCED")]
    for i, (wrong, group) in enumerate(groups):
        if not wrong:
            continue
        versions = tuple(version for version, _ in group)
        after = groups[i + 1][1] if i + 1 < len(groups) else []
        ended = next((item for item in after if item[1].outcome == "ABSENT" and not item[1].flaky), None)
        found.append(
            Stretch(
                first=versions[0],
                last=versions[-1],
                fixed=ended[0] if ended else None,
                versions=versions,
                left=any(seen.outcome in ("ABSENT", "CHANGED") for _, seen in after),
                next=after[0][0] if after else None,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Neighbouring releases that show the same."""

    first: str
    last: str
    count: int
    unpatched: str
    patched: str
    bug: str
    limit: str
    control: str
    fixed: str
    stale: bool
    #: Evidence and machine of each run that says so, of every release of the range; the strongest first.
    evidence: tuple[tuple[str, str], ...] = ()
    #: How many runs as released show it.
    runs: int = 0

    @property
    def name(self) -> str:
        return self.first if self.count == 1 else f"{self.first} – {self.last} ({self.count} releases)"


def ranges(runs: Iterable[Seen]) -> list[Range]:
    """Releases in order; neighbours with the same verdicts, seen at the same levels on the same machines, are taken together.

    So no range bridges a release that was not run as the others were, and histories that go back and forth stay so.
    """
    found = []
    by_release = releases(runs)
    sides = {version: _pair(both) for version, both in by_release.items()}

    def key(item: tuple[str, dict[str, Seen | None]]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        version, both = item
        first, second = both.get("unpatched"), both.get("patched")
        words = first.word if first else "–"
        seen = [s for s in by_release[version].get("unpatched", ()) if first and s.stale == first.stale]
        told = sorted({s.outcome: s for s in seen if s.outcome in ("REPRODUCED", "ABSENT")}.values(), key=lambda s: s.outcome)
        words += "".join(f"; {s.word} on {s.machine}" for s in told if first and s.outcome != first.outcome)
        alike = [s for s in seen if first and s.word == first.word and s.evidence != "none"]
        # Where the fix came to something else, or was not run, only the first side counts.
        fixed = {s.machine for s in by_release[version].get("patched", ()) if second and s.word == second.word}
        alone = sorted({f"{s.evidence} on {s.machine}" for s in alike if second and s.machine not in fixed})
        words += f"; as released alone: {', '.join(alone)}" if alone else ""
        by = {(s.evidence, s.machine) for s in alike if second is None or s.machine in fixed}
        return words, second.word if second else "–", tuple(sorted(by, key=lambda pair: (-strength(pair[0]), pair[1])))

    for (unpatched, patched, evidence), group in groupby(sides.items(), key=key):
        items = list(group)
        first = [seen.verdict for _, both in items if (seen := both.get("unpatched"))]
        second = [seen.verdict for _, both in items if (seen := both.get("patched"))]
        found.append(
            Range(
                first=items[0][0],
                last=items[-1][0],
                count=len(items),
                unpatched=unpatched,
                patched=patched,
                bug=_span(
                    (v.bug_error for v in first if not v.is_by_exact_checks),
                    *(["not finite"] if any(v.limit and v.bug_error is None for v in first) else []),
                    *(["exact"] if any(v.is_by_exact_checks for v in first) else []),
                ),
                limit=_span(v.limit for v in first),
                control=_span(v.control_error for v in first),
                fixed=_span(v.bug_error for v in second),
                stale=any(seen.stale for _, both in items for seen in both.values() if seen),
                evidence=evidence,
                runs=sum(
                    seen.word == best_.word
                    for version, both in items
                    if (best_ := both.get("unpatched"))
                    for seen in by_release[version]["unpatched"]
                    if seen.stale == best_.stale
                ),
            )
        )
    return found


def _pair(both: Mapping[str, Sequence[Seen]]) -> dict[str, Seen | None]:
    """Both sides of a release from one machine: the one to go by of those that ran both, where there are any."""
    first, second = both.get("unpatched", ()), both.get("patched", ())
    ran = {seen.machine for seen in second if seen.stopped != "skipped"}
    chosen = best(s for s in first if s.machine in ran and not s.stale) or best(first)
    return {"unpatched": chosen, "patched": best(s for s in second if chosen and s.machine == chosen.machine)}


def _span(values: Iterable[float | None], *others: str) -> str:
    numbers = sorted(value for value in values if value is not None)
    words = list(dict.fromkeys([f"{numbers[0]:.1e}", f"{numbers[-1]:.1e}"] if numbers else []))
    return ", ".join([*([" … ".join(words)] if words else []), *others]) or "–"
