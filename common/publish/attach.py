"""The text and the files to attach to an upstream issue, from stored receipts. A person reads it, signs it and files it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import msgspec

from common.errors import UserError
from common.files import CACHE, write_atomically
from common.packs.pack import Pack
from common.scrub import Scrubber, md, plain
from common.store import history
from common.store.grade import strength
from common.store.history import Range, Seen, ranges, strongest

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


def write(pack: Pack, results: Path, *, machine: str | None = None, template: str | None = None) -> list[Path]:
    """Write ``results/attach/PACK.md`` and the folder of files beside it; returns their paths."""
    if template is not None and template not in TEMPLATES:
        raise UserError(f"There is no bug template for {template!r}; there are {', '.join(TEMPLATES)}.")
    runs = load(pack, results, machine)
    target = results / "attach" / f"{pack.name}.md"
    text = render(pack, runs, template=template)
    write_atomically(target, text)
    return [target, *_files(pack, runs, results / "attach" / pack.name)]


def load(pack: Pack, results: Path, machine: str | None) -> list[Seen]:
    """The stored runs of one machine; by default of the one with the strongest evidence."""
    stored = history.load(results, [pack])
    for error in stored.unreadable.values():
        raise error
    found = stored.by_machine(pack.name, pack.package)
    if not found:
        raise UserError(f"There is no receipt of {pack.name} in {results}: run 'nox -s {pack.name}' first.")
    if machine is not None and machine not in found:
        raise UserError(f"There is no receipt of {pack.name} from {machine!r}; there are from {', '.join(sorted(found))}.")
    return found[machine or max(sorted(found), key=lambda name: strength(strongest(found[name])))]


def render(pack: Pack, runs: Sequence[Seen], *, template: str | None = None) -> str:
    """The comment's Markdown, at most `LIMIT` characters: logs are cut first, and say so."""
    found = ranges(runs)
    # The release that the text speaks of: the newest wrong one, of those whose log and files are attached where there is one.
    wrong = [seen for seen in runs if seen.outcome == "REPRODUCED"]
    newest = ([seen for seen in wrong if seen.version in pack.pinned] or wrong or list(runs))[-1]
    script = pack.script.read_text(encoding="utf-8")
    readme = (pack.folder / "README.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(fenced=fenced, md=md)
    scrub = Scrubber()
    facts = newest.document().facts
    pinned = [(seen, seen.log()) for seen in runs if seen.version in pack.pinned]
    shown = [(seen, log) for seen, log in pinned if log.count("\n") > 2]
    for budget in (24_000, 12_000, 6_000, 2_000, 500, 0):
        logs = [(seen, *_tail(log, budget // max(1, len(shown)))) for seen, log in shown]
        text = scrub(
            environment.get_template("attach.md.j2").render(
                pack=pack,
                ranges=found,
                summary=summary(pack, found, runs),
                evidence=strongest(runs),
                newest=facts,
                environment=facts.environment,
                subjects=[
                    msgspec.to_builtins(seen.document().subject[0])
                    for seen in runs
                    if seen.side == "unpatched" and seen.version in pack.pinned
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


def _files(pack: Pack, runs: Sequence[Seen], folder: Path) -> list[Path]:
    """Script, diff of the fix, receipts and logs of the pinned releases, ready to be dragged into a comment."""
    shutil.rmtree(folder, ignore_errors=True)
    scrub = Scrubber()
    files = [(pack.script.name, pack.script.read_text(encoding="utf-8"))]
    pinned = [seen for seen in runs if seen.version in pack.pinned]
    for seen in pinned:
        files += [(seen.path.name, seen.path.read_text(encoding="utf-8")), (seen.log_name, seen.log())]
        if patch := seen.patch:
            name, sha256 = patch
            diff = CACHE / "diffs" / f"{sha256}.diff"
            if not diff.is_file() or hashlib.sha256(diff.read_bytes()).hexdigest() != sha256:
                raise UserError(f"The diff {name} of the fix is not at hand: run 'nox -s {pack.name}' once, which makes it.")
            files.append((name, diff.read_text(encoding="utf-8")))
    for name, text in files:
        write_atomically(folder / name, scrub(text))
    return [folder / name for name, _ in files]
