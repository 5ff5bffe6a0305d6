"""Which release to pin, and what is wrong with the others: from the stored runs, as text, constraints, JSON and a badge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from common.packs.pack import Pack
from common.store import history
from common.store.cell import order
from common.store.history import History, best


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """One release: the packs whose bug it has, those whose bug it does not have, and those that cannot tell."""

    version: str
    wrong: Sequence[str] = ()
    right: Sequence[str] = ()
    untold: Mapping[str, str] = field(default_factory=dict)
    #: Why it is not to be taken whatever the packs say: yanked, or gone from the index.
    barred: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """``pin`` is the newest release that no pack has found wrong, None where there is none. ``releases``: newest first."""

    package: str
    pin: str | None
    titles: Mapping[str, str]
    releases: Sequence[Verdicts]

    def to_dict(self) -> dict[str, Any]:
        return {
            "package": self.package,
            "pin": self.pin,
            "constraint": self._excluded([r.version for r in reversed(self.releases) if r.wrong]),
            "packs": dict(self.titles),
            "releases": [
                {
                    "version": r.version,
                    "wrong": list(r.wrong),
                    "right": list(r.right),
                    "untold": dict(r.untold),
                    "barred": r.barred or None,
                }
                for r in self.releases
            ],
        }

    def constraints(self) -> Iterator[tuple[str, str]]:
        """Lines for pip's or uv's ``-c``, each with its reason: the releases that a pack has found wrong."""
        for pack, title in self.titles.items():
            versions = [r.version for r in reversed(self.releases) if pack in r.wrong]
            if versions:
                yield self._excluded(versions), f"{pack}: {title}"

    def _excluded(self, versions: Iterable[str]) -> str:
        return f"{self.package}{','.join(f'!={version}' for version in versions)}"


def advise(package: str, packs: Iterable[Pack], stored: History, *, offered: Mapping[str, bool] | None = None) -> Advice:
    """What the stored runs say of each release of ``package``.

    ``packs`` are those about it; the same ones are about its nightlies. One of kind ``refactor`` is about how the code is
    written: a release that shows it is not wrong.
    ``offered`` maps each release on the index to whether it was yanked; without it the index is not gone by.
    """
    about = [pack for pack in packs if package in (pack.package, pack.nightly) and pack.kind != "refactor"]
    verdicts: dict[str, dict[str, history.Seen]] = {}
    for pack in about:
        for version, sides in history.releases(stored.of(pack.name, package)).items():
            if seen := best(sides.get("unpatched", ())):
                verdicts.setdefault(version, {})[pack.name] = seen
    releases = [
        Verdicts(
            version=version,
            wrong=[name for name, seen in found.items() if seen.outcome == "REPRODUCED"],
            right=[name for name, seen in found.items() if seen.outcome == "ABSENT" and not seen.flaky],
            untold={
                name: seen.word if seen.flaky else str(seen.verdict)
                for name, seen in found.items()
                if seen.outcome not in ("REPRODUCED", "ABSENT") or (seen.flaky and seen.outcome == "ABSENT")
            },
            barred=_barred(version, offered),
        )
        for version, found in sorted(verdicts.items(), key=lambda item: order(item[0]), reverse=True)
    ]
    good = [r for r in releases if r.right and not r.wrong and not r.barred]
    # A pre-release is nobody's answer to "which one should I pin" where there is another.
    pin = next((r.version for r in good if not order(r.version).is_prerelease), good[0].version if good else None)
    return Advice(package=package, pin=pin, titles={pack.name: pack.title for pack in about}, releases=releases)


def _barred(version: str, offered: Mapping[str, bool] | None) -> str:
    if offered is None:
        return ""
    return "no longer on the index" if version not in offered else "yanked by its publisher" if offered[version] else ""


def text(advice: Advice) -> Iterator[str]:
    """The advice in plain lines."""
    if not advice.titles:
        yield f"{advice.package}: no pack looks for a fault in it; those about it are about how it is written."
        return
    if not advice.releases:
        yield f"{advice.package}: no release has been run."
        return
    if advice.pin is None:
        yield f"{advice.package}: no release that was run is free of the bugs that the packs look for."
    else:
        yield f"{advice.package}: pin {advice.package}=={advice.pin}, the newest release without a bug that the packs look for."
    for name, title in advice.titles.items():
        yield f"  {name}  {title}"
    for names, versions in _alike(advice):
        yield f"  {versions}: {names}"


def _alike(advice: Advice) -> Iterator[tuple[str, str]]:
    """Neighbouring releases of which the same is to be said, newest first."""
    groups: list[tuple[str, list[str]]] = []
    for release in advice.releases:
        said = state(release)
        if not groups or groups[-1][0] != said:
            groups.append((said, []))
        groups[-1][1].append(release.version)
    for said, versions in groups:
        yield said, versions[0] if len(versions) == 1 else f"{versions[-1]} – {versions[0]} ({len(versions)} releases)"


def state(release: Verdicts) -> str:
    """What is to be said of one release."""
    parts = [f"wrong ({', '.join(release.wrong)})"] if release.wrong else []
    parts += [f"not told ({', '.join(f'{name}: {why}' for name, why in release.untold.items())})"] if release.untold else []
    parts += [release.barred] if release.barred else []
    return "; ".join(parts) or "right"


def constraints(advices: Iterable[Advice]) -> str:
    """A constraints file; each line is within what ``pip install -c`` reads, the reason in a comment."""
    lines = ["# Releases that a reproducer pack has found wrong. Use: pip install -c constraints.txt PACKAGE"]
    for advice in advices:
        if advice.pin:
            lines.append(f"# {advice.package}: the newest right release is {advice.pin}")
        lines += [f"{constraint}  # {reason}" for constraint, reason in advice.constraints()]
    return "\n".join(lines) + "\n"


def badge(advice: Advice) -> str:
    """An SVG badge: the release to pin, green where it is the newest one that was run."""
    label = advice.package
    runs = [r.version for r in advice.releases]
    value = f"pin {advice.pin}" if advice.pin else "no right release"
    colour = "#a40e26" if advice.pin is None else "#176f2c" if advice.pin == runs[0] else "#7d4e00"
    # No font is wider than 7 px a character at this size on the average; the text is centred in what there is.
    left, right = (round(7 * len(word)) + 10 for word in (label, value))
    width = left + right
    name = escape(f"{label}: {value}")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}">
<title>{name}</title>
<rect width="{width}" height="20" rx="3" fill="#424a53"/>
<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1 -3 3h-{right - 3}z" fill="{colour}"/>
<g fill="#fff" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2:g}" y="14">{escape(label)}</text>
<text x="{left + right / 2:g}" y="14">{escape(value)}</text>
</g>
</svg>
"""
