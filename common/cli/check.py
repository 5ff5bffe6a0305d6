"""``check``: which known bugs what is installed has."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.utils import canonicalize_name
from rich.text import Text

from common.cli import common, report
from common.errors import UserError
from common.files import RESULTS
from common.install import stack
from common.packs.pack import numbered
from common.publish import affected, formats
from common.publish.affected import Finding, Upgrade
from common.publish.formats import Report
from common.scrub import plain

HELP = "report the known bugs of the installed packages"
DESCRIPTION = """Report which of the bugs that packs reproduce affect the installed versions, from the stored receipts, without a network:
whom each matters to, on what evidence, what to do about it and which release is right; then what is not known. Reads the environment of
the python on your PATH, or FILE: requirements.txt, constraints.txt, the output of pip freeze, uv.lock, pylock.toml, poetry.lock, pdm.lock; - is standard input.
Exits with 0 where none is known, 1 where one is, 2 at a mistake."""
FORMATS = {"json": formats.to_json, "sarif": formats.sarif, "junit": formats.junit, "markdown": formats.markdown}


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument(
        "file", nargs="*", metavar="FILE", help="requirements, constraints, pip freeze, or a lock file; - for standard input"
    )
    parser.add_argument("--python", type=Path, metavar="PATH", help="an interpreter, or the folder of a virtual environment")
    parser.add_argument(
        "--upgrade",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="which bugs that upgrade would fix and introduce; may be repeated",
    )
    parser.add_argument("--pack", action="append", metavar="PACK", help="only this pack's bug; may be repeated")
    form = parser.add_mutually_exclusive_group()
    for name, words in (("json", "JSON"), ("sarif", "SARIF 2.1.0"), ("junit", "JUnit's XML"), ("markdown", "a Markdown table")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=f"{words} on standard output")
    common.results_option(parser, "where timeline.json is (default: results/)")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    there = common.called_from()
    upgrades = [stack.pinned(text) for text in options.upgrade]
    wanted = dict(upgrades)
    if len(wanted) < len(upgrades):
        raise UserError("--upgrade names a package twice: give one version of each.")
    index = affected.load(_index(options.results))
    if options.pack:
        chosen = set(map(numbered, options.pack))
        if strange := sorted(chosen - {entry.pack for entry in index}):
            raise UserError(f"{strange[0]} is not a pack about a bug: {', '.join(sorted({e.pack for e in index}))} are.")
        index = [entry for entry in index if entry.pack in chosen]
    known = {str(canonicalize_name(entry.package)) for entry in index}
    if strange := sorted(wanted.keys() - known):
        raise UserError(f"No pack is about {strange[0]}; there are packs about {', '.join(sorted(known))}.")
    if wanted and options.form not in (None, "json"):
        raise UserError(f"--{options.form} is about what is installed: with --upgrade there are text and --json.")
    found = _stack(options, there)
    findings = affected.findings(index, found.versions, found.open, found.several)
    change = affected.upgrade(index, findings, wanted) if wanted else None
    told = Report(stack=found, findings=findings, upgrade=change)
    bad = bool(told.upgrade.brought or told.upgrade.kept) if told.upgrade else bool(told.having("affected"))
    if options.form:
        print(FORMATS[options.form](told))
    else:
        out = report.console()
        for line in _upgraded(told.upgrade, wanted) if told.upgrade else _lines(told, known):
            out.print(line, soft_wrap=True)
    return common.SURPRISE if bad else common.OK


def _index(results: Path | None) -> Path:
    """timeline.json of this checkout; a wheel, which has no results/, brings its own."""
    own, recorded = Path(__file__).parent.parent / "timeline.json", (results or RESULTS) / "timeline.json"
    return own if results is None and own.is_file() and not recorded.is_file() else recorded


def _stack(options: argparse.Namespace, there: Path) -> stack.Stack:
    if options.file and options.python:
        raise UserError("Give files, or --python, not both.")
    if options.file:
        return stack.merged([_stdin() if file == "-" else stack.of_file(there / file) for file in options.file])
    if options.python:
        return stack.of_python(there / options.python)
    python = os.environ.get("REPRODUCER_PYTHON")
    if python == "":
        raise UserError("There is no python3 on your PATH: name one with --python, or a file of requirements.")
    return stack.of_python(Path(python or sys.executable))


def _stdin() -> stack.Stack:
    if not (text := sys.stdin.read()).strip():
        raise UserError("Standard input is empty: did what should have listed the packages fail?")
    return stack.of_lines(text.splitlines())


def _lines(told: Report, known: set[str]) -> Iterator[Text]:
    stack_, bad, unknown = told.stack, told.having("affected"), told.having("unknown")
    about = sorted({f.package for f in told.findings})
    yield Text(
        f"{stack_.place}: {stack_.total} distribution{'s' * (stack_.total != 1)}, packs know {len(about)} of them", "bold"
    )
    for name, asked in stack_.open.items():
        if not asked:
            place, line = stack_.lines[name]
            yield Text(plain(f"? {place}:{line} names no package ({name}): nothing is said of it", None), "yellow")
    if not about:
        yield Text(f"None is among what packs are about: {', '.join(sorted(known))}.")
        return
    for finding in bad:
        yield from _block(finding, "✗", "red")
    if unknown:
        yield Text("Not known:", "yellow")
    yield from _unknown(unknown)
    right = len(told.having("unaffected"))
    count = f"{len(bad)} known bug{'s' * (len(bad) != 1)}, {len(unknown)} not known, {right} seen not to be there."
    yield Text(("✗ " if bad else "✓ ") + count, "red" if bad else "green")


def _block(finding: Finding, mark: str, colour: str) -> Iterator[Text]:
    yield Text(plain(f"{mark} {finding.pack}  {finding.package} {finding.version}  {finding.title}", None), colour)
    evidence = f"{finding.evidence}{f', {finding.why}' if finding.why else ''}"
    for name, value in (
        ("matters for", finding.matters),
        ("workaround", finding.workaround),
        ("right in", finding.right_in()),
        ("evidence", f"{evidence}; results/{finding.receipt}"),
        ("fix", f"FIX_VALIDATED: nox -s {finding.pack} -- --release {finding.version}" if finding.cured else ""),
    ):
        if value:
            yield Text(plain(f"    {name:<12} {value}", None))


def _unknown(findings: Iterable[Finding]) -> Iterator[Text]:
    """What is not known of one version for one reason is one line."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for f in findings:
        alike.setdefault((f.package, f.version, f.why), []).append(f.pack)
    for (package, version, why), packs in alike.items():
        yield Text(plain(f"? {package} {version}, {', '.join(packs)}: {why}", None), "yellow")


def _upgraded(change: Upgrade, wanted: dict[str, str]) -> Iterator[Text]:
    yield Text(", ".join(f"{name} {version}" for name, version in wanted.items()) + ":", "bold")
    for what, findings, colour in (
        ("fixes", change.fixed, "green"),
        ("brings", change.brought, "red"),
        ("keeps", change.kept, "red"),
    ):
        for finding in findings:
            if what == "fixes":
                yield Text(plain(f"✓ fixes {finding.pack}  {finding.title}", None), colour)
            else:
                yield from _block(finding, f"✗ {what}", colour)
    yield from _unknown(change.unknown)
    if not (change.fixed or change.brought or change.kept or change.unknown):
        yield Text("✓ No known bug goes or comes.", "green")
