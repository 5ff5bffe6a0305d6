"""The static site: an overview, a page for each pack, upstream and release, from the stored receipts. Opens from disk."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import msgspec
from markupsafe import Markup

from common.errors import UserError, writing
from common.files import CACHE
from common.install import releases
from common.packs.pack import Pack
from common.publish import contract, pins, plot, timeline
from common.publish.attach import lead, section
from common.store import history
from common.store.cell import order
from common.store.grade import EVIDENCE
from common.store.history import History, Seen, best, strongest

TEMPLATES = Path(__file__).parent / "templates" / "site"
#: Tells a folder that this module made, and may so replace, from one that it did not.
MARK = ".reproducer-site"
#: Newest releases in a row of the overview; the upstream's page has all.
COLUMNS = 40
#: Changes on the overview; the feed has all.
CHANGES = 50

_SAID = {
    "REPRODUCED": "affected",
    "ABSENT": "not affected",
    "CHANGED": "behaves differently",
    "UNTESTABLE": "inconclusive",
    "MEASURED": "measured",
    "ERROR": "harness failed",
}


#: Sign, colour and meaning of what stands in a cell.
_KEY = (
    ("●", "reproduced", "affected"),
    ("●→○", "reproduced", "affected, and the pack's fix is validated"),
    ("○", "absent", "not affected"),
    ("~", "changed", "behaves differently"),
    ("?", "untestable", "inconclusive"),
    ("#", "", "measured, not about a bug"),
    ("≈", "", "flaky: its runs differ"),
    ("S I C D", "", "evidence: source, interpreter, codegen, device"),
    ("( )", "", "stale: the script or the fix has changed since"),
    ("blank", "", "never run"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A cell of a matrix: what is seen and what is read out."""

    text: str
    label: str
    kind: str
    stale: bool
    said: str
    why: str


def build(
    packs: Sequence[Pack], stored: History, output: Path, *, base_url: str | None = None, done: Any = lambda page: None
) -> int:
    """Write the site to ``output``; a kill leaves the old one or the new one. Returns the number of pages.

    ``base_url`` is where the checkout can be browsed (https://github.com/OWNER/NAME/blob/main): links of READMEs lead there.
    """
    if output.exists() and not (output / MARK).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not a site made by this command: give another folder with --output.")
    part = output.with_name(f"{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with writing(part, "--output"):
        (part / "plots").mkdir(parents=True)
        for folder in ("badges", "osv"):
            (part / folder).mkdir()
        pages = 0
        for name, text in _pages(packs, stored, base_url):
            (part / name).write_text(text, encoding="utf-8")
            pages += name.endswith(".html")
            done(name)
        _records(part, stored)
        (part / MARK).write_text("", encoding="utf-8")
        shutil.rmtree(output, ignore_errors=True)
        part.replace(output)
    return pages


def _pages(packs: Sequence[Pack], stored: History, base_url: str | None) -> Iterator[tuple[str, str]]:
    """Name and text of each file, one at a time, so that memory does not grow with their number."""
    about = timeline.packages(packs, stored)
    matrix = {
        (pack.name, package): history.releases(stored.of(pack.name, package))
        for package, those in about.items()
        for pack in those
    }
    found = contract.columns(packs, stored)
    render = _renderer(about, stored, base_url, has_contract=bool(found))
    advices = {package: pins.advise(package, those, stored) for package, those in about.items()}
    for name in ("style.css", "app.js"):
        yield name, (TEMPLATES / name).read_text(encoding="utf-8")
    yield "timeline.json", msgspec.json.encode(timeline.document(packs, stored)).decode()
    yield "feed.xml", timeline.atom(packs, stored)
    yield "index.html", _overview(about, matrix, advices, packs, stored, render)
    if found:
        yield "contract.html", render("contract", "contract.html", columns=found, rows=contract.rows(found), said=contract.said)
    for package, those in about.items():
        if advices[package].releases:
            yield f"badges/{package}.svg", pins.badge(advices[package])
        yield from _upstream(package, those, matrix, advices[package], render)
    for pack in packs:
        dists = [package for package, those in about.items() if pack in those]
        if dists:
            yield from _pack(pack, dists, matrix, stored, render, base_url)


def _records(site: Path, stored: History) -> None:
    """Receipts and logs beside the pages, for each verdict is to be one click from what it rests on."""
    for seen in stored.runs:
        folder = site / record(seen).rpartition("/")[0]
        folder.mkdir(parents=True, exist_ok=True)
        for file, name in ((seen.path, seen.path.name), (seen.path.with_name(seen.log_name), f"{seen.log_name}.txt")):
            if file.is_file():
                shutil.copyfile(file, folder / name)


def record(seen: Seen) -> str:
    """Where a receipt is on the site."""
    return f"receipts/{seen.machine}/{seen.cell.pack}/{seen.path.name}"


def log(seen: Seen) -> str:
    """Its log: as .txt, which browsers show."""
    return f"receipts/{seen.machine}/{seen.cell.pack}/{seen.log_name}.txt"


def _renderer(about: Mapping[str, Sequence[Pack]], stored: History, base_url: str | None, *, has_contract: bool) -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        upstream_page=upstream_page,
        release_page=lambda seen: release_page(seen.cell.dist, seen.version),
        record=lambda seen: quote(record(seen)) if seen.path.is_file() else "",
        log=lambda seen: quote(log(seen)) if seen.path.with_name(seen.log_name).is_file() else "",
        release_of=lambda pair: release_page(*pair),
        thread_url=timeline.thread_url,
    )
    environment.globals.update(
        packages=list(about),
        key_of_cells=_KEY,
        count=len(stored.runs),
        newest=max((seen.started for seen in stored.runs), default=""),
        base_url=base_url.rstrip("/") if base_url else None,
        has_contract=has_contract,
    )

    def render(template: str, here: str, **given: Any) -> str:
        return environment.get_template(f"{template}.html.j2").render(here=here, **given)

    return render


def upstream_page(package: str) -> str:
    return f"upstream-{quote(package, safe='')}.html"


def release_page(package: str, version: str) -> str:
    # "+" of a local version and "!" of an epoch are legal in file names, but not plain in addresses.
    return f"release-{quote(f'{package}-{version}', safe='')}.html".replace("%", "_")


def _drawn(pack: Pack, version: str, sides: Mapping[str, Sequence[Seen]]) -> Drawn | None:
    seen = best(sides.get("unpatched", ()))
    if seen is None:
        return None
    said = _SAID.get(seen.outcome, seen.outcome)
    said += ", fix validated" if history.cured(seen, sides) else ""
    said += "" if seen.evidence == "none" else f", evidence {seen.evidence}"
    said += ", stale" if seen.stale else ""
    why = _why(pack, seen)
    return Drawn(
        text=timeline.glyph(sides),
        label=f"{pack.name}, {seen.cell.dist} {version}: {said}: {why}",
        kind=seen.outcome.lower(),
        stale=seen.stale,
        said=said,
        why=why,
    )


def _why(pack: Pack, seen: Seen) -> str:
    """The reason that the pack gives for what it expects of a release, or else that of the verdict."""
    expectation = pack.expectation(seen.version)
    if expectation and seen.verdict.meets(expectation.verdict):
        return expectation.why
    return seen.verdict.reason or "not as its pack expects"


def _overview(
    about: Mapping[str, Sequence[Pack]],
    matrix: Mapping[tuple[str, str], dict[str, dict[str, list[Seen]]]],
    advices: Mapping[str, pins.Advice],
    packs: Sequence[Pack],
    stored: History,
    render: Any,
) -> str:
    groups: list[dict[str, Any]] = []
    for package, those in about.items():
        versions = _versions(package, those, matrix)
        shown = versions[:COLUMNS]
        rows_of: list[dict[str, Any]] = []
        for pack in those:
            found = matrix[pack.name, package]
            newest = best(found[next(v for v in versions if v in found)].get("unpatched", ()))
            rows_of.append(
                {
                    "pack": pack,
                    "evidence": strongest(stored.of(pack.name, package)).partition(":")[0],
                    "newest": _SAID.get(newest.outcome, newest.outcome) if newest else "",
                    "cells": [_drawn(pack, version, found.get(version, {})) for version in shown],
                    "text": _searched(pack, package, found),
                }
            )
        groups.append(
            {
                "package": package,
                "versions": shown,
                "more": len(versions) - len(shown),
                "rows": rows_of,
                "advice": advices[package],
            }
        )
    rows: list[Any] = [row for group in groups for row in group["rows"]]
    filters = [
        ("upstream", "Upstream", list(about)),
        ("kind", "Kind", sorted({row["pack"].kind for row in rows})),
        ("evidence", "Evidence", [level for level in EVIDENCE if level in {row["evidence"] for row in rows}]),
        ("verdict", "Newest release", [word for word in _SAID.values() if word in {row["newest"] for row in rows}]),
    ]
    return str(
        render(
            "index",
            "index.html",
            groups=groups,
            filters=filters,
            unreadable=len(stored.unreadable),
            changes=list(islice(timeline.changes(packs, stored), CHANGES)),
        )
    )


def _searched(pack: Pack, package: str, versions: Iterable[str]) -> str:
    """All that a pack is found by: names of the package, releases, and threads as they are written and as addresses."""
    words = [
        pack.name,
        pack.title,
        package,
        pack.imports,
        pack.upstream,
        pack.kind,
        pack.matters,
        *versions,
        *pack.fixed.values(),
    ]
    for thread in pack.threads:
        name, _, number = thread.partition("#")
        words += [thread, *(f"https://github.com/{name}/{kind}/{number}" for kind in ("issues", "pull") if number)]
    return " ".join(words).lower()


def _versions(
    package: str, packs: Sequence[Pack], matrix: Mapping[tuple[str, str], dict[str, dict[str, list[Seen]]]]
) -> list[str]:
    """The releases that were run, newest first."""
    return sorted({version for pack in packs for version in matrix[pack.name, package]}, key=order, reverse=True)


def _upstream(
    package: str,
    packs: Sequence[Pack],
    matrix: Mapping[tuple[str, str], dict[str, dict[str, list[Seen]]]],
    advice: pins.Advice,
    render: Any,
) -> Iterator[tuple[str, str]]:
    said = {release.version: pins.state(release) for release in advice.releases}
    released = _released(package)
    versions = _versions(package, packs, matrix)
    rows = [
        (
            version,
            [_drawn(pack, version, matrix[pack.name, package].get(version, {})) for pack in packs],
            said.get(version, ""),
            released.get(version, ""),
        )
        for version in versions
    ]
    page = upstream_page(package)
    yield (
        page,
        render(
            "upstream", page, package=package, packs=packs, advice=advice, constraints=list(advice.constraints()), rows=rows
        ),
    )
    for i, version in enumerate(versions):
        runs = [seen for pack in packs for side in matrix[pack.name, package].get(version, {}).values() for seen in side]
        page = release_page(package, version)
        yield (
            page,
            render(
                "release",
                page,
                package=package,
                version=version,
                packs=[
                    (pack, _drawn(pack, version, matrix[pack.name, package][version]))
                    for pack in packs
                    if version in matrix[pack.name, package]
                ],
                runs=runs,
                released=released.get(version, ""),
                said=said.get(version) or "not told",
                older=versions[i + 1] if i + 1 < len(versions) else None,
                newer=versions[i - 1] if i else None,
            ),
        )


def _released(package: str) -> dict[str, str]:
    """The day of each release and whether it was yanked since, as the index has it; nothing where it does not answer."""
    try:
        known, _ = releases.releases(package, CACHE)
    except UserError:
        return {}
    return {r.version: (r.uploaded or "")[:10] + (" (yanked)" if r.yanked else "") for r in known}


def _pack(
    pack: Pack,
    packages: Sequence[str],
    matrix: Mapping[tuple[str, str], dict[str, dict[str, list[Seen]]]],
    stored: History,
    render: Any,
    base_url: str | None,
) -> Iterator[tuple[str, str]]:
    parts = []
    for package in packages:
        runs = stored.of(pack.name, package)
        every = [seen for seen in stored.runs if (seen.cell.pack, seen.cell.dist) == (pack.name, package)]
        newest = next(
            (seen for sides in reversed(matrix[pack.name, package].values()) if (seen := best(sides.get("unpatched", ())))),
            None,
        )
        affected = ", ".join(s.first if s.first == s.last else f"{s.first} – {s.last}" for s in history.stretches(runs))
        commits = list(_commits(pack, every))
        plots = []
        for machine, there in stored.by_machine(pack.name, package).items():
            if svg := plot.errors(there, f"{pack.name}, {package}, {machine}"):
                name = f"plots/{pack.name}-{package}-{machine}.svg"
                yield name, svg
                plots.append((name, machine, "errors"))
            for unit, svg in plot.metrics(there, f"{pack.name}, {package}, {machine}"):
                name = f"plots/{pack.name}-{package}-{machine}-{unit}.svg"
                yield name, svg
                plots.append((name, machine, unit))
        for machine in dict.fromkeys(seen.machine for seen in every):
            mine = [seen for seen in every if seen.machine == machine]
            for figure, svg in plot.curves(mine, f"{pack.name}, {package}, {machine}"):
                name = f"plots/{pack.name}-{package}-{machine}-{re.sub(r'[^a-z0-9]+', '-', figure)}.svg"
                yield name, svg
                plots.append((name, machine, figure))
        osv = timeline.osv(pack, runs)
        osv_name = f"osv/{osv['id']}.json" if osv else None
        if osv_name:
            yield osv_name, json.dumps(osv, indent=1, ensure_ascii=False)
        parts.append(
            {
                "package": package,
                "kind": newest.outcome.lower() if newest and (affected or not commits) else "reproduced" if commits else "",
                "status": _status(pack, newest) if affected or not commits else f"In no release; seen at {commits[0]}.",
                "summary": timeline.summary(pack, runs),
                "affected": affected,
                "evidence": timeline.evidence_of(runs) or strongest(every),
                "variants": sorted(
                    (seen for seen in every if seen.cell.variant),
                    key=lambda seen: (seen.cell.variant, order(seen.version), seen.machine, seen.side == "patched"),
                ),
                "commits": commits,
                "plots": plots,
                "runs": sorted(
                    runs, key=lambda seen: (order(seen.version), seen.machine, seen.side != "patched"), reverse=True
                ),
                "osv": osv_name,
            }
        )
    page = f"{pack.name}.html"
    yield (
        page,
        render(
            "pack",
            page,
            pack=pack,
            parts=parts,
            commit_url=timeline.commit_url(pack),
            script=pack.script.read_text(encoding="utf-8"),
            lead=_lead(pack),
            fixes=pack.fix.is_file(),
            diffs=list(_diffs(pack, stored)),
            sections=list(_sections(pack, base_url)),
        ),
    )


def _diffs(pack: Pack, stored: History) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The fix's diff of the newest release that it cures, by lines and their kinds, where it was made on this machine."""
    cured = [
        s
        for s in stored.of(pack.name, pack.package)
        if s.side == "patched" and s.outcome == "ABSENT" and s.patch and not s.stale
    ]
    for seen in sorted(cured, key=lambda seen: order(seen.version))[-1:]:
        kept = CACHE / "diffs" / f"{seen.patch[1] if seen.patch else ''}.diff"
        if kept.is_file():
            lines = kept.read_text(encoding="utf-8").splitlines()
            yield f"{seen.cell.dist} {seen.version}", [(_line_kind(line), line) for line in lines]


def _line_kind(line: str) -> str:
    kinds = {"+++": "file", "---": "file", "@@": "at", "+": "add", "-": "del"}
    return next((kind for sign, kind in kinds.items() if line.startswith(sign)), "same")


def _commits(pack: Pack, runs: Sequence[Seen]) -> Iterator[str]:
    """The commits between releases that were run, with what was seen; they are in no release, so in no matrix."""
    for name in (name for name, variant in pack.variants.items() if variant.source):
        sides = [
            best(seen for seen in runs if (seen.cell.variant, seen.side) == (name, side)) for side in ("unpatched", "patched")
        ]
        if sides[0]:
            yield f"{name}: " + ", ".join(f"{seen.word} ({seen.machine})" for seen in sides if seen)


def _status(pack: Pack, newest: Seen | None) -> str:
    if newest is None:
        return "Never run as released."
    if str(newest.verdict) == "UNTESTABLE: no-api":
        return f"What has the bug is not in {newest.version}, the newest release that was run."
    said = _SAID.get(newest.outcome, newest.outcome)
    if pack.kind == "refactor" and newest.outcome in ("REPRODUCED", "ABSENT"):  # no bug is meant
        said = "still so" if newest.outcome == "REPRODUCED" else "no longer so"
    return f"{said.capitalize()} in {newest.version}, the newest release that was run."


def _lead(pack: Pack) -> Markup:
    """The README's bold summary."""
    from markdown_it import MarkdownIt

    text = lead((pack.folder / "README.md").read_text(encoding="utf-8"))
    return Markup(MarkdownIt("commonmark", {"html": False}).renderInline(text.strip("*")))


def _sections(pack: Pack, base_url: str | None) -> Iterator[tuple[str, Markup]]:
    """What the pack's README says of trigger, fix and scope; raw HTML in it stays text, links into the checkout lead there."""
    from markdown_it import MarkdownIt

    there = f'<a href="{base_url.rstrip("/")}/packs/{pack.folder.name}/\\1">\\2</a>' if base_url else r"\2"
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    readme = (pack.folder / "README.md").read_text(encoding="utf-8")
    for heading in ("Trigger", "Fix", "Scope claimed", "Scope NOT claimed"):
        if text := section(readme, heading):
            html = re.sub(r'<a href="(?!https?:|#)([^"]*)">(.*?)</a>', there, render(text))
            html = re.sub(r"<th( [^>]*)?></th>", "<td></td>", html)
            before, *tables = html.split("<table>")
            html = before + "".join(
                f'<div class="scroll" role="region" aria-label="{heading}, table {i}" tabindex="0"><table>'
                + table.replace("</table>", "</table></div>", 1)
                for i, table in enumerate(tables, 1)
            )
            yield heading, Markup(html)
