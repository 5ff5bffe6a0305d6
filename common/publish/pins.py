"""Which release to pin, and what is wrong with the others: from the stored runs, as text, constraints, JSON and a badge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from common.packs.pack import NO_FAULT, Pack
from common.store import history
from common.store.cell import order
from common.store.history import History, best

#: What is said of a release that does not have what the bug is in, and of one after a release that had the bug: what has another name is not gone.
NO_API = "UNTESTABLE: no-api"
MOVED = "its API is gone or has another name"


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
    """``pin`` is the newest release that every pack found right, or without the API that its bug is in; None where there is none.

    ``reasons`` says of each pack what was seen of the pin, at which level and when; ``goes_with`` are requirements that the pin
    was run with, and what packs about other packages advise that run this one beside them. ``releases``: newest first.
    """

    package: str
    pin: str | None
    titles: Mapping[str, str]
    releases: Sequence[Verdicts]
    reasons: Sequence[str] = ()
    goes_with: Sequence[str] = ()
    #: Packs that were not asked about, whose bug the pin has.
    others: Sequence[str] = ()
    #: What packs about other packages, which run this one beside them, were seen to work with; not what it asks for itself.
    beside: Sequence[str] = ()
    #: Whether only some packs were asked about.
    is_partial: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "package": self.package,
            "pin": self.pin,
            "reasons": list(self.reasons),
            "goes_with": list(self.goes_with),
            "others": list(self.others),
            "beside": list(self.beside),
            "refused": None if self.pin else self.refusal(),
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
        """Lines for pip's or uv's ``-c``, each with its reason: the one release that is advised, and what goes with it."""
        if self.pin is not None:
            yield f"{self.package}=={self.pin}", "; ".join(self.reasons)
            for requirement in self.goes_with:
                yield requirement, f"what {self.package} {self.pin} was run with"

    def refusal(self) -> str:
        """Why no release is advised, in one sentence."""
        if not self.titles:
            return f"no pack {'that was named ' if self.is_partial else ''}looks for a fault in it"
        if not self.releases:
            return "no release has been run"
        near = min(
            (r for r in self.releases if r.right and not r.barred), key=lambda r: len(r.wrong) + len(_unknown(r)), default=None
        )
        if near is None:
            return "no release that was run is known to be free of a bug that a pack looks for"
        return f"no release is known to be free of all bugs that the packs look for; of those that a pack found right, the fewest are wrong or not known in {near.version}: {state(near)}"


def advise(
    package: str,
    packs: Iterable[Pack],
    stored: History,
    *,
    offered: Mapping[str, bool] | None = None,
    only: Iterable[str] | None = None,
) -> Advice:
    """What the stored runs say of each release of ``package``.

    ``packs`` are those about it; the same ones are about its nightlies. One of kind ``refactor`` is about how the code is
    written: a release that shows it is not wrong. ``only`` names the packs whose bugs matter.
    ``offered`` maps each release on the index to whether it was yanked; without it the index is not gone by.
    """
    packs = list(packs)
    about = [pack for pack in packs if package in (pack.package, pack.nightly) and pack.kind not in NO_FAULT]
    about = [pack for pack in about if only is None or pack.name in only]
    verdicts: dict[str, dict[str, history.Seen]] = {}
    for pack in about:
        for version, sides in history.releases(stored.of(pack.name, package)).items():
            if seen := best(sides.get("unpatched", ())):
                verdicts.setdefault(version, {})[pack.name] = seen
    # A nightly comes after the releases.
    before = {pack.name for pack in about if package != pack.package and _shown(stored.of(pack.name, pack.package))}
    first = dict.fromkeys(before, Version("0.dev0"))
    for version in sorted(verdicts, key=order):
        for name, seen in verdicts[version].items():
            if seen.outcome == "REPRODUCED":
                first.setdefault(name, order(version))
    releases = [
        _verdicts(version, found, about, offered, first)
        for version, found in sorted(verdicts.items(), key=lambda item: order(item[0]), reverse=True)
    ]
    good = [r for r in releases if r.right and not r.wrong and not r.barred and not _unknown(r)]
    # A pre-release is nobody's answer to "which one should I pin" where there is another.
    pin = next((r.version for r in good if not order(r.version).is_prerelease), good[0].version if good else None)
    reasons = [
        f"{name}: absent ({seen.evidence}, {seen.started[:10]})"
        if seen.outcome == "ABSENT"
        else f"{name}: the API of its bug is not in it"
        for name, seen in verdicts.get(pin or "", {}).items()
    ]
    with_it = [each for pack in about for each in pack.at(pin).requires if each not in pack.requires] if pin else []
    asked = {pack.name for pack in about}
    rest = [
        pack
        for pack in packs
        if package in (pack.package, pack.nightly) and pack.kind not in NO_FAULT and pack.name not in asked
    ]
    others = [
        pack.name
        for pack in rest
        if (seen := best(history.releases(stored.of(pack.name, package)).get(pin or "", {}).get("unpatched", ())))
        and seen.outcome == "REPRODUCED"
    ]
    return Advice(
        package=package,
        pin=pin,
        titles={pack.name: pack.title for pack in about},
        releases=releases,
        reasons=reasons,
        goes_with=[each for each in dict.fromkeys(with_it) if "==" in each],
        others=others,
        beside=list(
            dict.fromkeys([*(each for pack in about for each in pack.beside if pin), *_together(package, packs, stored)])
        ),
        is_partial=only is not None,
    )


def _shown(runs: Iterable[history.Seen]) -> bool:
    return any(seen.outcome == "REPRODUCED" for seen in runs)


def _together(package: str, packs: Iterable[Pack], stored: History) -> Iterator[str]:
    """What other packages' packs that run this one beside them advise: its kernels are compiled by them, say."""
    for pack in packs:
        if package != pack.package and package in [Requirement(each).name for each in pack.beside]:
            other = advise(pack.package, packs, stored, only=[pack.name])
            if other.pin:
                wrong = f" (wrong there: {', '.join(other.others)})" if other.others else ""
                yield " and ".join([f"{pack.package}=={other.pin}{wrong}", *other.goes_with])


def _verdicts(
    version: str,
    found: Mapping[str, history.Seen],
    about: Sequence[Pack],
    offered: Mapping[str, bool] | None,
    first: Mapping[str, Version],
) -> Verdicts:
    untold = {pack.name: "not run" for pack in about if pack.name not in found}
    for name, seen in found.items():
        if seen.outcome == "ABSENT" and (seen.flaky or seen.stale):
            untold[name] = seen.word if seen.flaky else "seen with an earlier script"
        elif seen.outcome not in ("REPRODUCED", "ABSENT"):
            untold[name] = str(seen.verdict)
            if untold[name] == NO_API and name in first and order(version) > first[name]:
                untold[name] = MOVED
    return Verdicts(
        version=version,
        wrong=[name for name, seen in found.items() if seen.outcome == "REPRODUCED"],
        right=[name for name, seen in found.items() if seen.outcome == "ABSENT" and name not in untold],
        untold=untold,
        barred=_barred(version, offered),
    )


def _unknown(release: Verdicts) -> list[str]:
    """The packs that leave it open whether a release has their bug. Where the API is not there the bug cannot be."""
    return [name for name, why in release.untold.items() if why != NO_API]


def _barred(version: str, offered: Mapping[str, bool] | None) -> str:
    if offered is None:
        return ""
    return "no longer on the index" if version not in offered else "yanked by its publisher" if offered[version] else ""


def text(advice: Advice) -> Iterator[str]:
    """The advice in plain lines."""
    if advice.pin is None:
        hint = " Name the bugs that matter to you with --pack." if len(advice.titles) > 1 else ""
        hint += " Each pack's README names a workaround, or a fix." if advice.titles else ""
        yield f"{advice.package}: none can be advised: {advice.refusal()}.{hint}"
    else:
        beside = f" with {', '.join(advice.goes_with)}" if advice.goes_with else ""
        yield f"{advice.package}: pin {advice.package}=={advice.pin}{beside}. {'; '.join(advice.reasons)}."
    if advice.others:
        yield f"  It has bugs that were not asked about: {', '.join(advice.others)}."
    for beside in advice.beside:
        yield f"  Run or lowered beside it, by the evidence above, whatever its own metadata asks for: {beside}."
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
    unknown = ", ".join(f"{name}: {release.untold[name]}" for name in _unknown(release))
    parts += [f"not known ({unknown})"] if unknown else []
    if lacking := [name for name, why in release.untold.items() if why == NO_API]:
        parts.append(f"without the API of {', '.join(lacking)}")
    parts += [release.barred] if release.barred else []
    alone = release.right and not (release.wrong or unknown or release.barred)
    return "; ".join(["right", *parts] if alone else parts) or "right"


#: What a constraints file of ours begins with.
HEADER = "# The newest releases without "


def constraints(advices: Sequence[Advice]) -> str:
    """A constraints file; each line is within what ``pip install -c`` reads, the reason in a comment."""
    asked = sorted({name for advice in advices if advice.is_partial for name in advice.titles})
    what = f"the bugs of {', '.join(asked)}" if asked else "a bug that a reproducer pack looks for"
    lines = [f"{HEADER}{what}. Use: pip install -c constraints.txt PACKAGE"]
    for advice in advices:
        if advice.others:
            lines.append(f"# {advice.package} {advice.pin} has bugs that were not asked about: {', '.join(advice.others)}")
        lines += [f"{constraint}  # {reason}" for constraint, reason in advice.constraints()]
        if advice.pin is None:
            lines.append(f"# {advice.package}: none can be advised: {advice.refusal()}")
    return "\n".join(lines) + "\n"


def badge(advice: Advice) -> str:
    """An SVG badge: the release to pin, green where it is the newest one that was run; else the newest one's known bugs."""
    label, newest = advice.package, advice.releases[0]
    if advice.pin is not None:
        value, colour = f"pin {advice.pin}", "#176f2c" if advice.pin == newest.version else "#7d4e00"
    elif newest.wrong:
        count = len(newest.wrong)
        value, colour = f"{newest.version}: {count} known bug{'s' if count > 1 else ''}", "#a40e26"
    else:
        value, colour = f"{newest.version}: not known", "#57606a"
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
