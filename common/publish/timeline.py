"""Which release has which bug: the stored runs as a matrix for people, and as JSON, OSV and Atom for machines."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from msgspec import UNSET, Meta, Struct, UnsetType

from common.packs.pack import NO_FAULT, Pack
from common.scrub import md
from common.store import history
from common.store.cell import order
from common.store.grade import strength
from common.store.history import History, Seen, Stretch, best, ranges, stretches, strongest

#: How a verdict is drawn; the letter beside it is the first of its evidence level.
GLYPH = {"REPRODUCED": "●", "ABSENT": "○", "CHANGED": "~", "UNTESTABLE": "?", "MEASURED": "#", "ERROR": "!"}
LEGEND = (
    "● affected · ●→○ affected, and the pack's fix is validated · ○ not affected · ~ behaves differently · ? inconclusive · "
    "# measured, no bug is meant · ! the harness failed · ≈ flaky, its runs differ · blank: never run. "
    "Letters, weakest evidence first: S source, I interpreter, C codegen, D device. In brackets: stale, "
    "the script or the fix has changed since."
)


def packages(packs: Iterable[Pack], stored: History) -> dict[str, list[Pack]]:
    """Each package with receipts, nightlies among them, and the packs that were run on it."""
    found: dict[str, list[Pack]] = {}
    by_name = {pack.name: pack for pack in packs}
    for seen in stored.runs:
        if seen.cell.pack in by_name and by_name[seen.cell.pack] not in found.setdefault(seen.cell.dist, []):
            found[seen.cell.dist].append(by_name[seen.cell.pack])
    return dict(sorted(found.items()))


def glyph(sides: Mapping[str, Sequence[Seen]]) -> str:
    """A cell of the matrix. Machines that do not agree are shown side by side, the strongest evidence first, and of two alike the one with a fix."""
    fresh = [seen for seen in sides.get("unpatched", ()) if not seen.stale] or list(sides.get("unpatched", ()))
    drawn: dict[str, Seen] = {}
    for seen in sorted(fresh, key=lambda seen: (-strength(seen.evidence), not history.cured(seen, sides))):
        drawn.setdefault(seen.outcome, seen)
    words = []
    for seen in drawn.values():
        mark = GLYPH.get(seen.outcome, "!") + ("→○" if history.cured(seen, sides) else "")
        letter = "" if seen.evidence == "none" else f" {seen.evidence[0].upper()}"
        mark += "≈" if seen.flaky else ""
        words.append(f"({mark}{letter})" if seen.stale else f"{mark}{letter}")
    return " ".join(words)


def summary(pack: Pack, runs: Sequence[Seen]) -> str:
    """First bad, last bad, first good; every stretch, for histories that go back and forth."""
    if pack.kind == "claim":
        measured = [seen.version for seen in sorted(runs, key=lambda s: order(s.version)) if seen.outcome == "MEASURED"]
        return f"Measured on {', '.join(dict.fromkeys(measured)) or 'no release'}; no bug is meant."
    wrong = stretches(runs)
    if not wrong:
        return "No release shows the bug."
    told = "; ".join(_stretch(stretch) for stretch in wrong)
    first, last, good = wrong[0].first, wrong[-1].last, wrong[-1].fixed
    text = f"First bad {first}, last bad {last}, {f'first good {good}' if good else 'none good after it'}."
    times = 1 + sum(stretch.left for stretch in wrong[:-1])
    if times > 1:
        text += f" It came {_times(times)}: {told}."
    elif len(wrong) > 1:
        text += f" Releases between were inconclusive: {told}."
    if commit := pack.fixed.get("commit"):
        where = pack.fixed.get("release")
        text += f" Fix: commit {commit}" + (f", first released in {where}." if where else ", not released yet.")
    return text


def evidence_of(runs: Sequence[Seen]) -> str:
    """How many of the affected releases were seen at each level, by the best run of each: "2 device:sm_90, 21 source"."""
    sides = history.releases(runs)
    levels = Counter(
        seen.evidence
        for stretch in stretches(runs)
        for version in stretch.versions
        if (seen := history.best(sides[version].get("unpatched", ())))
    )
    return ", ".join(f"{count} {level}" for level, count in sorted(levels.items(), key=lambda item: -strength(item[0])))


def _times(count: int) -> str:
    return {2: "twice", 3: "three times"}.get(count, f"{count} times")


def _stretch(stretch: Stretch) -> str:
    name = stretch.first if stretch.first == stretch.last else f"{stretch.first} – {stretch.last}"
    return f"{name} (right again in {stretch.fixed})" if stretch.fixed else f"{name} (what follows shows neither)"


def markdown(packs: Sequence[Pack], stored: History) -> str:
    """results/README.md: a matrix for each package, newest release first, and the figures of each pack below."""
    lines = ["# What was seen", "", "Generated from the receipts beside it by `python -m common tables`.", "", LEGEND]
    for path, error in stored.unreadable.items():
        lines += [
            "",
            f"**Not counted:** {md(f'{path.parent.name}/{path.name}')}. {md(str(error).replace(f'The receipt {path}', 'It'))}",
        ]
    for package, about in packages(packs, stored).items():
        lines += ["", f"## {package}", ""]
        runs = {pack.name: stored.of(pack.name, package) for pack in about}
        for pack in about:
            lines.append(
                f"- [{pack.name}](../packs/{pack.folder.name}/README.md) {pack.title}. {summary(pack, runs[pack.name])}"
            )
        lines += ["", f"| release | {' | '.join(pack.name for pack in about)} |", f"|---|{'---|' * len(about)}"]
        by_release = {name: history.releases(seen) for name, seen in runs.items()}
        for version in sorted({v for found in by_release.values() for v in found}, key=order, reverse=True):
            cells = (glyph(by_release[pack.name].get(version, {})) for pack in about)
            lines.append(f"| {version} | {' | '.join(cells)} |")
        for pack in about:
            for machine, seen in stored.by_machine(pack.name, package).items():
                lines += ["", f"<details><summary>{pack.name} on {machine}: {strongest(seen)}, errors</summary>", ""]
                lines += ["| release | as released | with the fix | bug error | limit | control error |"]
                lines += ["|---|---|---|---|---|---|"]
                for row in ranges(seen):
                    stale = " (stale)" if row.stale else ""
                    lines.append(
                        f"| {row.name}{stale} | {md(row.unpatched)} | {md(row.patched)} | {row.bug} | {row.limit} | {row.control} |"
                    )
                lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


class Run(Struct):
    """One stored run. ``runs`` is how often its cell was run, where more than once, and ``agree`` how many show this."""

    machine: str
    side: Literal["unpatched", "patched"]
    outcome: str
    reason: str
    evidence: Annotated[str, Meta(pattern="^(none|source|interpreter|codegen|device:.+)$")]
    stale: bool
    receipt: Annotated[str, Meta(description="path below results/")]
    runs: int | UnsetType = UNSET
    agree: int | UnsetType = UNSET

    @property
    def flaky(self) -> bool:
        return self.runs != self.agree


class Release(Struct):
    version: str
    runs: list[Run]


class Bad(Struct):
    """Neighbouring releases with the bug; ``fixed`` is the first one after them that was seen without it."""

    first: str
    last: str
    fixed: str | None
    versions: tuple[str, ...]


class Entry(Struct, omit_defaults=True):
    """A pack on a package. Stretches and releases are in order, the oldest first."""

    pack: Annotated[str, Meta(pattern="^pack[0-9]{2}$")]
    title: str
    package: Annotated[str, Meta(description="name on PyPI")]
    upstream: Annotated[str, Meta(description="owner/name of the repository")]
    kind: str
    matters: Annotated[str, Meta(description="whom it concerns")]
    workaround: str
    threads: tuple[str, ...]
    fixed: dict[str, str]
    bad: list[Bad]
    releases: list[Release]
    nightly: Annotated[str, Meta(description="name on PyPI of the package's nightly builds")] = ""


class Timeline(Struct, forbid_unknown_fields=True):
    """What each release of each upstream showed."""

    schema: Literal[1]
    packs: list[Entry]


def document(packs: Sequence[Pack], stored: History) -> Timeline:
    """results/timeline.json. Dates are left to the receipts, so that it says only what changed."""
    found = []
    for package, about in packages(packs, stored).items():
        for pack in about:
            runs = stored.of(pack.name, package)
            entry = Entry(
                pack=pack.name,
                title=pack.title,
                package=package,
                upstream=pack.upstream,
                kind=pack.kind,
                matters=pack.matters,
                workaround=pack.workaround,
                threads=pack.threads,
                fixed=dict(pack.fixed),
                bad=[Bad(first=s.first, last=s.last, fixed=s.fixed, versions=s.versions) for s in stretches(runs)],
                releases=[
                    Release(version, [_run(seen) for seen in sides.get("unpatched", []) + sides.get("patched", [])])
                    for version, sides in history.releases(runs).items()
                ],
                nightly=pack.nightly or "" if package == pack.package else "",
            )
            found.append(entry)
    return Timeline(schema=1, packs=found)


def _run(seen: Seen) -> Run:
    return Run(
        machine=seen.machine,
        side=cast(Literal["unpatched", "patched"], seen.side),
        outcome=seen.outcome,
        reason=seen.verdict.reason,
        evidence=seen.evidence,
        stale=seen.stale,
        receipt=f"{seen.machine}/{seen.cell.pack}/{seen.path.name}",
        runs=seen.runs if seen.runs > 1 else UNSET,
        agree=seen.agree if seen.runs > 1 else UNSET,
    )


def osv(pack: Pack, runs: Sequence[Seen]) -> dict[str, Any] | None:
    """The releases with the bug in the OSV schema (https://ossf.github.io/osv-schema/); None where there is none, and for a
    pack about how the code is written, which nobody is affected by.

    A stretch that ends at a release without the bug is an ``introduced`` / ``fixed`` range; one that ends at releases that
    inconclusive, ``introduced`` / ``last_affected``, which OSV wants in a range of its own.
    """
    wrong = stretches(runs)
    if not wrong or pack.kind in NO_FAULT:
        return None
    times = sorted(seen.started for seen in runs)
    newest = max((order(seen.version) for seen in runs), default=None)
    # What follows has to be the release without the bug: one that was inconclusive is in no range.
    closed = [s for s in wrong if s.fixed and s.fixed == s.next]
    ended = [event for s in closed for event in ({"introduced": s.first}, {"fixed": s.fixed})]
    pieces = [ended] if ended else []
    for s in wrong:
        if s not in closed:
            is_open = order(s.last) == newest
            pieces.append([{"introduced": s.first}, *([] if is_open else [{"last_affected": s.last}])])
    dist = runs[0].cell.dist
    return {
        "schema_version": "1.7.5",
        "id": f"x_REPRODUCER-{pack.name.upper()}" + ("" if dist == pack.package else f"-{dist}"),
        "published": times[0],
        "modified": times[-1],
        "summary": pack.title,
        "details": f"{summary(pack, runs)} Evidence of the affected releases: {evidence_of(runs)}.",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": dist, "purl": f"pkg:pypi/{dist}"},
                "ranges": [{"type": "ECOSYSTEM", "events": events} for events in pieces],
                "versions": [version for s in wrong for version in s.versions],
            }
        ],
        "references": [{"type": "REPORT", "url": thread_url(thread)} for thread in pack.threads],
        "database_specific": {"kind": pack.kind, "note": "a correctness report, not a security advisory"},
    }


def thread_url(thread: str) -> str:
    """The address of ``owner/name#number``; GitHub leads from issues to the pull request of that number."""
    name, _, number = thread.partition("#")
    return f"https://github.com/{name}/issues/{number}" if number else thread


def commit_url(pack: Pack) -> str | None:
    commit = pack.fixed.get("commit")
    return f"https://github.com/{pack.upstream}/commit/{commit}" if commit and "/" in pack.upstream else None


def changes(packs: Sequence[Pack], stored: History) -> Iterator[tuple[str, history.Change]]:
    """What changed from release to release in every pack, with when it was seen; the latest seen first."""
    found = []
    for package, about in packages(packs, stored).items():
        for pack in about:
            runs = stored.of(pack.name, package)
            by_version = history.releases(runs)
            for change in history.transitions(runs):
                seen = best(by_version[change.cell.version]["unpatched"])
                found.append((seen.started if seen else "", change))
    yield from sorted(found, key=lambda item: (item[0], item[1].cell.pack, order(item[1].cell.version)), reverse=True)


def atom(packs: Sequence[Pack], stored: History) -> str:
    """A feed of what changed from release to release (RFC 4287). Ids stay the same, so nothing is shown twice."""
    ET.register_namespace("", "http://www.w3.org/2005/Atom")
    space = "{http://www.w3.org/2005/Atom}"
    titles = {pack.name: pack.title for pack in packs}
    told = list(changes(packs, stored))

    def add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
        element = ET.SubElement(parent, f"{space}{tag}", attributes)
        element.text = text or None
        return element

    feed = ET.Element(f"{space}feed")
    add(feed, "id", "tag:reproducer-packs,2026:changes")
    add(feed, "title", "Reproducer packs: what changed from release to release")
    add(feed, "updated", max((when for when, _ in told), default="1970-01-01T00:00:00Z"))
    add(add(feed, "author"), "name", "Reproducer packs")
    add(feed, "link", rel="self", href="feed.xml")
    for when, change in told:
        entry = add(feed, "entry")
        add(entry, "id", f"tag:reproducer-packs,2026:{change.cell.pack}:{change.cell.dist}:{change.cell.version}:{change.kind}")
        add(entry, "title", f"{change.kind}: {change.cell.dist} {change.cell.version}, {change.cell.pack}")
        add(entry, "updated", when)
        add(entry, "summary", f"{titles[change.cell.pack]}. {change}.")
        add(entry, "link", rel="alternate", href=f"{change.cell.pack}.html")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(feed, encoding="unicode") + "\n"
