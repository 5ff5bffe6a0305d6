"""Which known bugs a set of installed versions has, from results/timeline.json alone: no network, no receipt is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from common.errors import UserError
from common.packs.pack import NO_FAULT
from common.publish.timeline import Entry, Release, Run, Timeline
from common.store import history
from common.store.cell import order


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is known of one bug in one installed version. ``status``: affected, unaffected or unknown."""

    pack: str
    title: str
    kind: str
    package: str
    version: str
    status: str
    #: Of an unknown one: why.
    why: str
    matters: str
    workaround: str
    #: The best run's level and receipt; "none" and "" where there is no run.
    evidence: str
    receipt: str
    #: Whether the pack's fix was seen to cure this very release.
    cured: bool
    #: The nearest releases that were seen without the bug: newer, older.
    newer: str
    older: str
    #: Which other packs' bugs those two have.
    newer_has: tuple[str, ...] = ()
    older_has: tuple[str, ...] = ()

    def right_in(self) -> str:
        asked = (self.newer, "newer", self.newer_has), (self.older, "older", self.older_has)
        named = [f"{v} ({where}{', which has those of ' * bool(has)}{', '.join(has)})" for v, where, has in asked if v]
        return ", ".join(named) or "no release that was run"


def load(timeline: Path) -> list[Entry]:
    """The packs about faults: not those about how code is written, and not the self-test."""
    try:
        index = msgspec.json.decode(timeline.read_bytes(), type=Timeline)
    except OSError as error:
        raise UserError(f"{timeline} cannot be read ({error.strerror}): `python -m common tables` writes it.") from error
    except msgspec.MsgspecError as error:
        raise UserError(f"{timeline} is not a timeline: {error}. `python -m common tables` writes it anew.") from error
    return [entry for entry in index.packs if entry.kind not in NO_FAULT]


def _best(release: Release) -> Run | None:
    return history.best(run for run in release.runs if run.side == "unpatched")


#: Of several versions that are asked for, what is said of the worst counts.
_WORST = ("affected", "unknown", "unaffected")


def findings(
    index: Iterable[Entry],
    versions: Mapping[str, str],
    open_: Mapping[str, str] | None = None,
    several: Mapping[str, Sequence[str]] | None = None,
) -> list[Finding]:
    """One for each pack about a package that is installed, or wanted in no one version (``open_``: name -> what is asked for) or in
    more than one (``several``); of one whose nightly build is installed nothing is known.
    """
    found, entries = [], list(index)
    for entry in entries:
        name = canonicalize_name(entry.package)
        if name in versions:
            found.append(_finding(entry, versions[name]))
        elif several and name in several:
            worst = min((_finding(entry, version) for version in several[name]), key=lambda f: _WORST.index(f.status))
            why = f"{', '.join(several[name])} are asked for"
            found.append(replace(worst, why=f"{worst.why}; {why}" if worst.why else why))
        elif open_ and name in open_:
            found.append(_told(entry, open_[name], "unknown", "which version is not said", None))
        if entry.nightly and (version := versions.get(canonicalize_name(entry.nightly))):
            found.append(
                _told(entry, version, "unknown", f"{entry.nightly} is not what was run: {entry.package}'s releases are", None)
            )
    found = [replace(f, newer_has=_wrong(entries, f, f.newer), older_has=_wrong(entries, f, f.older)) for f in found]
    return sorted(found, key=lambda f: (f.package, f.pack))


def _wrong(entries: Sequence[Entry], finding: Finding, version: str) -> tuple[str, ...]:
    """The other packs about a package that saw their bug in a release of it."""
    others = [entry for entry in entries if version and entry.package == finding.package and entry.pack != finding.pack]
    runs = {entry.pack: _best(r) for entry in others for r in entry.releases if r.version == version}
    return tuple(pack for pack, run in runs.items() if run and run.outcome == "REPRODUCED")


def _finding(entry: Entry, version: str) -> Finding:
    try:
        public = Version(version)
    except InvalidVersion:
        return _told(entry, version, "unknown", "its version is not one of PEP 440", None)
    at = next((r for r in entry.releases if order(r.version) == public), None)
    run = _best(at) if at else None
    if at is None or run is None:
        why = f"it was not run; {entry.releases[-1].version} is the newest that was"
        if public.local:
            base = _finding(entry, public.public)
            if base.status == "affected":  # as are its builds, as far as anybody knows
                return replace(base, version=version, why=f"a local build of {public.public}, which was run")
            why = f"a local build; {public.public} is {base.status}" if base.receipt else why
        return _told(entry, version, "unknown", why, None)
    if run.outcome == "REPRODUCED":
        status, why = "affected", ""
    elif run.outcome == "ABSENT":
        status, why = "unaffected", ""
    elif run.outcome == "UNTESTABLE" and run.reason.partition(" ")[0] == "no-api":
        earlier = (best for r in entry.releases if order(r.version) < public and (best := _best(r)))
        if any(best.outcome == "REPRODUCED" for best in earlier):
            status, why = "unknown", "the API of the bug is gone or has another name"
        else:
            status, why = "unaffected", "the API of the bug is not in it"
    elif run.outcome == "CHANGED":
        status, why = "unknown", f"something else happens in it: {run.reason}"
    else:
        status, why = "unknown", f"it was inconclusive: {run.outcome}{f': {run.reason}' if run.reason else ''}"
    if status != "unknown" and (run.stale or run.flaky):
        why = "seen with an earlier script" if run.stale else f"{run.agree} of {run.runs} runs"
        status = "unknown" if status == "unaffected" else status
    cured = any(r.side == "patched" and r.outcome == "ABSENT" and r.machine == run.machine and not r.stale for r in at.runs)
    return _told(entry, version, status, why, run, cured)


def _told(entry: Entry, version: str, status: str, why: str, run: Run | None, cured: bool = False) -> Finding:
    newer = older = ""
    if status == "affected":
        right = [r.version for r in entry.releases if (best := _best(r)) and best.outcome == "ABSENT" and not best.stale]
        finals = [v for v in right if not order(v).is_prerelease] or right
        newer = next((v for v in finals if order(v) > order(version)), "")
        older = next((v for v in reversed(finals) if order(v) < order(version)), "")
    return Finding(
        pack=entry.pack,
        title=entry.title,
        kind=entry.kind,
        package=entry.package,
        version=version,
        status=status,
        why=why,
        matters=entry.matters,
        workaround=entry.workaround,
        evidence=run.evidence if run else "none",
        receipt=run.receipt if run else "",
        cured=cured,
        newer=newer,
        older=older,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgrade:
    """What another version of some packages would change."""

    fixed: list[Finding]
    brought: list[Finding]
    kept: list[Finding]
    #: What is not known of the versions that would come.
    unknown: list[Finding]


def upgrade(index: list[Entry], before: Iterable[Finding], wanted: Mapping[str, str]) -> Upgrade:
    """``before`` are the `findings` of today; ``wanted`` may name packages that are not installed yet."""
    after = findings(index, wanted)
    was = {f.pack: f for f in before if f.status == "affected"}
    return Upgrade(
        fixed=[was[f.pack] for f in after if f.pack in was and f.status == "unaffected"],
        brought=[f for f in after if f.status == "affected" and f.pack not in was],
        kept=[f for f in after if f.status == "affected" and f.pack in was],
        unknown=[f for f in after if f.status == "unknown"],
    )
