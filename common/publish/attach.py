"""The text and the files to attach to an upstream issue, from stored receipts. A person reads it, signs it and files it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import jinja2
import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from common.errors import UserError
from common.files import CACHE, write_atomically
from common.packs import scaffold
from common.packs.pack import Pack
from common.scrub import Scrubber, md, plain
from common.store import history
from common.store.cell import Cell
from common.store.history import Range, Seen, best, ranges

#: GitHub's limit for a comment, in characters.
LIMIT = 65_536
#: A script, and a diff, up to this many lines stand in the comment; longer ones are files beside it.
INLINE, INLINE_DIFF = 40, 60
#: Checks in a row that are ok: so many are shown.
PASSED = 12
#: What a pack's README has to say before it is filed, in words of its own.
HEADINGS = ("Trigger", "Fix", "Scope claimed", "Scope NOT claimed")

#: The headings of each upstream's bug template, as of 2026-11, and what goes under each.
TEMPLATES: Mapping[str, Sequence[tuple[str, str]]] = {
    "deep-gemm": (
        ("### Bug Description", "describe"),
        ("### Steps to Reproduce", "reproduce"),
        ("### Expected Behavior", "expected"),
        ("### Environment", "versions"),
        ("### Additional Context", "fix"),
    ),
    "liger-kernel": (
        ("### 🐛 Describe the bug", "describe"),
        ("### Reproduce", "reproduce"),
        ("### Versions", "versions"),
    ),
    "mamba-ssm": (("### Describe the bug", "describe"), ("### Reproduce", "reproduce"), ("### Versions", "versions")),
    "megatron-core": (
        ("**Describe the bug**", "describe"),
        ("**Steps/Code to reproduce bug**", "reproduce"),
        ("**Expected behavior**", "expected"),
        ("**Additional context**", "fix"),
    ),
    "tilelang": (
        ("### What version of TileLang are you using?", "release"),
        ("### System information", "versions"),
        ("### Problem description", "describe"),
        ("### Reproducible example code", "reproduce"),
        ("### Expected behavior", "expected"),
        ("### Additional context", "fix"),
    ),
    "torchao": (("### Description", "describe"), ("### Steps to reproduce", "reproduce"), ("### Environment", "versions")),
    "transformer-engine": (
        ("**Describe the bug**", "describe"),
        ("**Steps/Code to reproduce bug**", "reproduce"),
        ("**Expected behavior**", "expected"),
        ("**Environment overview**", "install"),
        ("**Environment details**", "versions"),
        ("**Device details**", "device"),
        ("**Additional context**", "fix"),
    ),
}


def write(
    pack: Pack,
    results: Path,
    *,
    remade: Callable[[Pack, str, str], str],
    machine: str | None = None,
    template: str | None = None,
) -> list[Path]:
    """Write ``results/attach/PACK.md`` and the folder of files beside it; returns their paths.

    ``remade`` gives the fix's diff on a release, in a lane, where the cache has it no more.
    """
    if template is not None and template not in TEMPLATES:
        raise UserError(f"There is no bug template for {template!r}; there are {', '.join(TEMPLATES)}.")
    runs, commits = load(pack, results, machine)
    told = _told_of(pack, [*runs, *commits])
    patch = told.of("patched")
    diff = _diff(pack, patch, remade) if patch is not None and patch.patch else None
    target = results / "attach" / f"{pack.name}.md"
    write_atomically(target, render(pack, runs, commits, diff, template=template))
    return [target, *_files(pack, [*runs, *commits], told, diff, results / "attach" / pack.name)]


def load(pack: Pack, results: Path, machine: str | None) -> tuple[list[Seen], list[Seen]]:
    """The stored runs of the pack's releases and of the commits that it names, of every machine or of one."""
    stored = history.load(results, [pack])
    for error in stored.unreadable.values():
        raise error
    runs, commits = stored.of(pack.name, pack.package), stored.of_commits(pack)
    found = sorted({seen.machine for seen in [*runs, *commits]})
    if not found and pack.kind == "selftest":
        raise UserError(f"{pack.name} is the self-test, about no upstream: there is nothing to attach.")
    if not found:
        raise UserError(f"There is no receipt of {pack.name} in {results}: run 'nox -s {pack.name} -- --record' first.")
    if machine is not None and machine not in found:
        raise UserError(f"There is no receipt of {pack.name} from {machine!r}; there are from {', '.join(found)}.")
    return [s for s in runs if machine in (None, s.machine)], [s for s in commits if machine in (None, s.machine)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The release (or commit) that the text speaks of, by its best run: the newest wrong one, of those that are pinned where one is."""

    seen: Seen
    runs: Sequence[Seen]

    def of(self, side: str) -> Seen | None:
        """The best run of one of its sides on the machine of ``seen``."""
        cell = replace(self.seen.cell, side=side)
        return best(s for s in self.runs if s.cell == cell and s.machine == self.seen.machine)

    @property
    def sides(self) -> list[Seen]:
        return [seen for side in ("unpatched", "patched") if (seen := self.of(side)) is not None]


def _told_of(pack: Pack, runs: Sequence[Seen]) -> Told:
    by_cell: dict[Cell, list[Seen]] = {}
    for seen in runs:
        if seen.side == "unpatched":
            by_cell.setdefault(seen.cell, []).append(seen)
    # A machine that ran the fix, too, before one that did not.
    ran = {(s.cell.version, s.cell.variant, s.machine) for s in runs if s.side == "patched" and s.stopped != "skipped"}
    both = {
        cell: [s for s in seen if (cell.version, cell.variant, s.machine) in ran and not s.stale]
        for cell, seen in by_cell.items()
    }
    chosen = [found for cell, seen in by_cell.items() if (found := best(both[cell] or seen)) is not None] or list(runs)
    of_releases = [seen for seen in chosen if not seen.cell.variant] or chosen
    wrong = [seen for seen in of_releases if seen.outcome == "REPRODUCED"]
    at_commits = [seen for seen in chosen if seen.cell.variant and seen.outcome == "REPRODUCED"]
    pinned = [seen for seen in wrong if seen.version in pack.pinned]
    return Told(seen=(pinned or wrong or at_commits or of_releases)[-1], runs=runs)


def render(
    pack: Pack,
    runs: Sequence[Seen],
    commits: Sequence[Seen] = (),
    diff: tuple[str, str] | None = None,
    *,
    template: str | None = None,
) -> str:
    """The comment's Markdown, at most `LIMIT` characters: logs are cut first, and say so. ``diff``: its name and text."""
    told = _told_of(pack, [*runs, *commits])
    found = ranges(runs)
    script = pack.script.read_text(encoding="utf-8")
    readme = (pack.folder / "README.md").read_text(encoding="utf-8")
    skeleton = scaffold.README.read_text(encoding="utf-8")
    if unwritten := [heading for heading in HEADINGS if section(readme, heading) in ("", section(skeleton, heading))]:
        raise UserError(
            f"{pack.folder.name}/README.md has no words of its own under {', '.join(unwritten)}: write them, then attach it."
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(fenced=fenced, levels=_levels, md=md)
    scrub = Scrubber()
    facts = told.seen.document().facts
    shown = [(seen, log) for seen in told.sides if (log := _readable(seen.log()))]
    for budget in (24_000, 12_000, 6_000, 2_000, 500, 0):
        logs = [(seen, *_tail(log, budget // max(1, len(shown)))) for seen, log in shown]
        text = scrub(
            environment.get_template("attach.md.j2").render(
                pack=pack,
                ranges=found,
                commits=_rows(pack, commits),
                verdict=lead(readme),
                summary=summary(pack, found, commits),
                newest=facts,
                environment=facts.environment,
                subjects=[msgspec.to_builtins(told.seen.document().subject[0])],
                script=script if script.count("\n") <= INLINE else None,
                lines=script.count("\n"),
                logs=logs,
                claimed=_linked(section(readme, "Scope claimed"), readme),
                not_claimed=_linked(section(readme, "Scope NOT claimed"), readme),
                trigger=_linked(section(readme, "Trigger"), readme),
                fix=_linked(section(readme, "Fix"), readme),
                diff=diff,
                inline_diff=diff is not None and diff[1].count("\n") <= INLINE_DIFF,
                pinned={canonicalize_name(Requirement(each).name) for each in pack.at(told.seen.version).requires},
                stale=any(seen.stale for seen in told.sides),
                headings=TEMPLATES[template] if template else (),
            )
        )
        if len(text) <= LIMIT:
            return text
    raise UserError(
        f"The comment for {pack.name} has {len(text)} characters without any log, over the host's {LIMIT}: shorten its README.md."
    )


def summary(pack: Pack, found: Sequence[Range], commits: Sequence[Seen] = ()) -> str:
    """Sentences: where the bug is, where it is not, and whether the fix works, each with its evidence."""
    parts = []
    for outcome, verb in (("BUG_REPRODUCED", "Reproduced in"), ("BUG_ABSENT", "Absent in")):
        names = [
            f"{_range(r)} ({_by(r)}{r.unpatched.partition(';')[1]}{r.unpatched.partition(';')[2]})"
            for r in found
            if r.unpatched.partition(";")[0] == outcome
        ]
        word = "REPRODUCED" if outcome == "BUG_REPRODUCED" else "ABSENT"
        levels: dict[str, list[str]] = {}
        for commit, s, _ in _rows(pack, commits):
            levels.setdefault(commit[:8], []).extend([s.evidence] if s.outcome == word else [])
        names += [f"commit {commit} ({', '.join(dict.fromkeys(seen))})" for commit, seen in levels.items() if seen]
        parts += [f"{verb} {pack.package} {', '.join(names)}."] if names else []
    wrong = {_range(r): r.patched for r in found if r.unpatched.startswith("BUG_REPRODUCED")}
    for commit, s, fixed in _rows(pack, commits):
        if s.outcome == "REPRODUCED":
            wrong[f"commit {commit[:8]}"] = fixed
    cured = [name for name, word in wrong.items() if word == "FIX_VALIDATED"]
    if cured:
        parts.append("The fix below fixes it " + ("there." if len(cured) == len(wrong) else f"in {', '.join(cured)}."))
    return " ".join(parts) or "No release shows the bug or its absence."


def _rows(pack: Pack, commits: Sequence[Seen]) -> list[tuple[str, Seen, str]]:
    """For each run of a commit as released: the commit, the run, and what the fix came to on the same machine."""
    rows = []
    for seen in commits:
        if seen.side == "unpatched":
            told = Told(seen=seen, runs=commits).of("patched")
            rows.append((pack.variants[seen.cell.variant].source or "", seen, told.word if told else "–"))
    return rows


def _range(found: Range) -> str:
    return found.first if found.count == 1 else f"{found.first} – {found.last}"


def _by(found: Range) -> str:
    return ", ".join(_levels(found)) or "no evidence"


def _levels(found: Range) -> dict[str, list[str]]:
    """Evidence level -> the machines that it was seen on, strongest first."""
    levels: dict[str, list[str]] = {}
    for level, machine in found.evidence:
        levels.setdefault(level, []).append(machine)
    return levels


def _readable(log: str) -> str:
    """What the scripts said, without the lines that are for programs; of many checks that are ok, and of warnings alike, the first ones."""

    def kind(line: str) -> str | None:
        if re.match(r"(control|trigger) +ok ", line):
            return "ok"
        return re.sub(r"\d+", "", line) if "Warning" in line else None

    shown: list[str] = []
    for key, group in groupby((line for line in log.splitlines() if not line.startswith('{"')), kind):
        lines = list(group)
        kept = lines if key is None else lines[: PASSED if key == "ok" else 1]
        shown += kept
        if more := len(lines) - len(kept):
            shown.append(f"… {more} more that {'are ok' if key == 'ok' else 'say the same'}, see the attached log")
    return "\n".join(shown)


def _linked(text: str, readme: str) -> str:
    """Markdown without links that lead nowhere outside the repository: their text stays; and those by reference written out."""
    known = dict(re.findall(r"^\[([^\]]+)\]: (\S+)", readme, re.MULTILINE))
    text = re.sub(r"^\[[^\]]+\]: \S+\n?", "", text, flags=re.MULTILINE).strip()

    def link(words: str, target: str) -> str:
        return f"[{words}]({target})" if re.match(r"https?://", target) else words

    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", lambda m: link(m[1], m[2]), text)
    return re.sub(r"\[([^\]]+)\](?![(\]])", lambda m: link(m[1], known[m[1]]) if m[1] in known else m[0], text)


def lead(readme: str) -> str:
    """The paragraph under the title of a pack's README: the verdict, in bold."""
    return _linked(readme.partition("\n\n")[2].partition("\n\n")[0], readme)


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
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log)
    text = re.sub(r"[^\S\n]*\r(?!\n)", "\n", text)
    lines = [plain(line, None) for line in text.splitlines()]
    kept: list[str] = []
    for line in reversed(lines):
        if budget < len(line) + 1:
            break
        budget -= len(line) + 1
        kept.append(line)
    return "\n".join(reversed(kept)), len(lines) - len(kept)


def _diff(pack: Pack, seen: Seen, remade: Callable[[Pack, str, str], str]) -> tuple[str, str]:
    """Name and text of the diff that a run was made with; from the cache, or made once more from the release."""
    assert seen.patch is not None
    name, sha256 = seen.patch
    kept = CACHE / "diffs" / f"{sha256}.diff"
    if kept.is_file() and hashlib.sha256(kept.read_bytes()).hexdigest() == sha256:
        return name, kept.read_text(encoding="utf-8")
    if seen.cell.variant:
        raise UserError(
            f"The diff {name} is of a commit: run 'nox -s {pack.name} -- --variant {seen.cell.variant}', which makes it."
        )
    text = remade(pack, seen.version, seen.lane)
    if hashlib.sha256(text.encode()).hexdigest() != sha256:
        raise UserError(
            f"fix.py has changed since {seen.path.name} was made: run 'nox -s regress -- --pack {pack.name}' first."
        )
    write_atomically(kept, text)
    return name, text


def _files(pack: Pack, runs: Sequence[Seen], told: Told, diff: tuple[str, str] | None, folder: Path) -> list[Path]:
    """Script, diff of the fix, receipts and logs of the pinned releases and of what is told, ready to be dragged into a comment."""
    shutil.rmtree(folder, ignore_errors=True)
    scrub = Scrubber()
    files = {pack.script.name: pack.script.read_text(encoding="utf-8")}
    if pack.validate:
        files[Path(pack.validate).name] = (pack.folder / pack.validate).read_text(encoding="utf-8")
    if diff is not None:
        files[diff[0]] = diff[1]
    mine = [seen for seen in runs if seen.machine == told.seen.machine and seen.version in pack.pinned]
    for seen in {seen.path: seen for seen in [*told.sides, *mine]}.values():
        files[seen.path.name] = seen.path.read_text(encoding="utf-8")
        files[seen.log_name] = seen.log()
    for name, text in files.items():
        write_atomically(folder / name, scrub(text))
    return [folder / name for name in files]
