"""The text and the files to attach to an upstream issue, from stored receipts. A person reads it, signs it and files it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from packaging.version import Version

from common import lanes, receipt
from common.errors import UserError
from common.files import write_atomically
from common.grade import strength
from common.pack import Pack
from common.runner import CACHE
from common.scrub import Scrubber

#: GitHub's limit for a comment, in characters.
LIMIT = 65_536
#: A script up to this many lines stands in the comment; a longer one is a file beside it.
INLINE = 40

#: The headings of each upstream's bug template, as of 2026-11, and what goes under each.
TEMPLATES: Mapping[str, Sequence[tuple[str, str]]] = {
    "liger-kernel": (("### 🐛 Describe the bug", "describe"), ("### Reproduce", "reproduce"), ("### Versions", "versions")),
    "tilelang": (
        ("### What version of TileLang are you using?", "release"),
        ("### System information", "versions"),
        ("### Problem description", "describe"),
        ("### Reproducible example code", "reproduce"),
        ("### Expected behavior", "expected"),
    ),
    "transformer-engine": (
        ("**Describe the bug**", "describe"),
        ("**Steps/Code to reproduce bug**", "reproduce"),
        ("**Expected behavior**", "expected"),
        ("**Environment overview**", "install"),
        ("**Environment details**", "versions"),
        ("**Device details**", "device"),
        ("**Additional context**", "context"),
    ),
    "megatron-core": (
        ("**Describe the bug**", "describe"),
        ("**Steps/Code to reproduce bug**", "reproduce"),
        ("**Expected behavior**", "expected"),
        ("**Additional context**", "versions"),
    ),
    "mamba-ssm": (("### Describe the bug", "describe"), ("### Reproduce", "reproduce"), ("### Versions", "versions")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One stored run, with its receipt and log."""

    path: Path
    facts: Mapping[str, Any]
    subject: Mapping[str, Any]
    stale: bool
    log: str


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

    @property
    def name(self) -> str:
        return self.first if self.count == 1 else f"{self.first} – {self.last} ({self.count} releases)"


def write(pack: Pack, results: Path, *, machine: str | None = None, template: str | None = None) -> list[Path]:
    """Write ``results/attach/PACK.md`` and the folder of files beside it; returns their paths."""
    if template is not None and template not in TEMPLATES:
        raise UserError(f"There is no bug template for {template!r}; there are {', '.join(TEMPLATES)}.")
    runs = load(pack, results, machine)
    target = results / "attach" / f"{pack.name}.md"
    text = render(pack, runs, template=template)
    write_atomically(target, text)
    return [target, *_files(pack, runs, results / "attach" / pack.name)]


def by_machine(pack: Pack, results: Path) -> dict[str, list[Seen]]:
    """The stored runs of each machine, without variants, in order of release and side."""
    found: dict[str, list[Seen]] = {}
    for path in receipt.stored(results, pack.name):
        document = receipt.read(path)
        facts = document["predicate"]["reproducer"]
        if facts["variant"]:
            continue
        stale = receipt.is_stale(document, pack, lanes.files(facts["lane"]))
        seen = Seen(path=path, facts=facts, subject=document["subject"][0], stale=stale, log=receipt.read_log(path, document))
        found.setdefault(path.parent.parent.name, []).append(seen)
    for runs in found.values():
        runs.sort(key=lambda seen: (Version(seen.facts["version"]), seen.facts["side"] == "patched"))
    return found


def load(pack: Pack, results: Path, machine: str | None) -> list[Seen]:
    """The stored runs of one machine; by default of the one with the strongest evidence."""
    found = by_machine(pack, results)
    if not found:
        raise UserError(f"There is no receipt of {pack.name} in {results}: run 'nox -s {pack.name}' first.")
    if machine is not None and machine not in found:
        raise UserError(f"There is no receipt of {pack.name} from {machine!r}; there are from {', '.join(sorted(found))}.")
    return found[machine or max(sorted(found), key=lambda name: strength(strongest(found[name])))]


def strongest(runs: Iterable[Seen]) -> str:
    """The strongest evidence level among some runs."""
    return max((str(seen.facts["evidence"]) for seen in runs), key=strength)


def ranges(runs: Iterable[Seen]) -> list[Range]:
    """Releases in order, neighbours with the same verdicts taken together; histories that go back and forth stay so."""
    cells: dict[str, dict[str, Seen]] = {}
    for seen in runs:
        cells.setdefault(seen.facts["version"], {})[seen.facts["side"]] = seen
    found = []
    for _, group in groupby(
        cells.items(), key=lambda item: tuple(_word(item[1].get(side)) for side in ("unpatched", "patched"))
    ):
        items = list(group)
        sides = [seen for _, both in items for seen in both.values()]
        first = [both["unpatched"].facts for _, both in items if "unpatched" in both]
        second = [both["patched"].facts for _, both in items if "patched" in both]
        found.append(
            Range(
                first=items[0][0],
                last=items[-1][0],
                count=len(items),
                unpatched=_word(items[0][1].get("unpatched")),
                patched=_word(items[0][1].get("patched")),
                bug=_span(f["bug_error"] for f in first),
                limit=_span(f["limit"] for f in first),
                control=_span(f["control_error"] for f in first),
                fixed=_span(f["bug_error"] for f in second),
                stale=any(seen.stale for seen in sides),
            )
        )
    return found


def _word(seen: Seen | None) -> str:
    if seen is None:
        return "–"
    facts = seen.facts
    if facts["stopped"] == "skipped":
        return "not run"
    words = {
        "REPRODUCED": "BUG_REPRODUCED",
        "ABSENT": "FIX_VALIDATED" if facts["side"] == "patched" else "BUG_ABSENT",
        "NOTHING_TO_PATCH": "nothing to patch",
    }
    if facts["outcome"] in words:
        return words[facts["outcome"]]
    return f"{facts['outcome']}: {facts['reason']}" if facts["reason"] else str(facts["outcome"])


def _span(values: Iterable[float | None]) -> str:
    numbers = sorted(value for value in values if value is not None)
    if not numbers:
        return "–"
    low, high = f"{numbers[0]:.1e}", f"{numbers[-1]:.1e}"
    return low if low == high else f"{low} … {high}"


def render(pack: Pack, runs: Sequence[Seen], *, template: str | None = None) -> str:
    """The comment's Markdown, at most `LIMIT` characters: logs are cut first, and say so."""
    found = ranges(runs)
    # The release that the text speaks of: the newest wrong one, of those whose log and files are attached where there is one.
    wrong = [seen for seen in runs if seen.facts["outcome"] == "REPRODUCED"]
    newest = ([seen for seen in wrong if seen.facts["version"] in pack.pinned] or wrong or list(runs))[-1]
    script = pack.script.read_text(encoding="utf-8")
    readme = (pack.folder / "README.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["fenced"] = fenced
    scrub = Scrubber()
    shown = [seen for seen in runs if seen.facts["version"] in pack.pinned and seen.log.count("\n") > 2]
    for budget in (24_000, 12_000, 6_000, 2_000, 500, 0):
        logs = [(seen, *_tail(seen.log, budget // max(1, len(shown)))) for seen in shown]
        text = scrub(
            environment.get_template("attach.md.j2").render(
                pack=pack,
                ranges=found,
                summary=summary(pack, found, runs),
                evidence=strongest(runs),
                newest=newest.facts,
                environment=newest.facts["environment"],
                subjects=[
                    seen.subject for seen in runs if seen.facts["side"] == "unpatched" and seen.facts["version"] in pack.pinned
                ],
                script=script if script.count("\n") <= INLINE else None,
                lines=script.count("\n"),
                logs=logs,
                claimed=section(readme, "Scope claimed"),
                not_claimed=section(readme, "Scope NOT claimed"),
                trigger=section(readme, "Trigger"),
                expected=section(readme, "Fix"),
                stale=any(seen.stale for seen in runs),
                headings=TEMPLATES[template] if template else (),
            )
        )
        if len(text) <= LIMIT:
            return text
    raise UserError(
        f"The comment for {pack.name} has {len(text)} characters without any log, over the host's {LIMIT}: shorten its README.md."
    )


def summary(pack: Pack, found: Sequence[Range], runs: Sequence[Seen]) -> str:
    """One sentence: where the bug is, where it is not, whether the fix cures it."""
    parts = []
    for word, verb in (("BUG_REPRODUCED", "reproduced in"), ("BUG_ABSENT", "absent in")):
        names = [r.first if r.count == 1 else f"{r.first}–{r.last}" for r in found if r.unpatched == word]
        if names:
            parts.append(f"{verb} {pack.package} {', '.join(names)}")
    if any(r.patched == "FIX_VALIDATED" for r in found):
        parts.append(
            "cured by the fix"
            if all(r.patched == "FIX_VALIDATED" for r in found if r.unpatched == "BUG_REPRODUCED")
            else "cured by the fix in some releases only"
        )
    return "; ".join(parts) or "no release shows the bug or its absence"


def section(markdown: str, heading: str) -> str:
    """The text under a second-level heading of a pack's README, without the heading."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", markdown, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _tail(log: str, budget: int) -> tuple[str, int]:
    """The end of a log within ``budget`` characters, free of colour codes, and how many lines were left out."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log)
    plain = re.sub(r"[^\S\n]*\r(?!\n)", "\n", plain)
    lines = plain.splitlines()
    kept: list[str] = []
    for line in reversed(lines):
        if budget < len(line) + 1:
            break
        budget -= len(line) + 1
        kept.append(line)
    return "\n".join(reversed(kept)), len(lines) - len(kept)


def _files(pack: Pack, runs: Sequence[Seen], folder: Path) -> list[Path]:
    """Script, diff of the fix, receipts and logs of the pinned releases, ready to be dragged into a comment."""
    shutil.rmtree(folder, ignore_errors=True)
    scrub = Scrubber()
    files = [(pack.script.name, pack.script.read_text(encoding="utf-8"))]
    pinned = [seen for seen in runs if seen.facts["version"] in pack.pinned]
    for seen in pinned:
        files += [(seen.path.name, seen.path.read_text(encoding="utf-8")), (seen.facts["log"]["name"], seen.log)]
        if patch := seen.facts["patch"]:
            diff = CACHE / "diffs" / f"{patch['sha256']}.diff"
            if not diff.is_file() or hashlib.sha256(diff.read_bytes()).hexdigest() != patch["sha256"]:
                raise UserError(
                    f"The diff {patch['name']} of the fix is not at hand: run 'nox -s {pack.name}' once, which makes it."
                )
            files.append((patch["name"], diff.read_text(encoding="utf-8")))
    for name, text in files:
        write_atomically(folder / name, scrub(text))
    return [folder / name for name, _ in files]
