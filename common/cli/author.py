"""What the author of a pack asks for besides a run: an [expected] block, the fix's diff, one side on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.syntax import Syntax

from common.errors import UserError
from common.install.releases import Release
from common.packs.pack import Pack
from common.run import runner
from common.run.plan import Plan, Row


def proposed(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of `pinned` and `[expected]` that the runs of ``rows`` would be as expected by: neighbours that show the same are one range."""
    of_releases = [row for row in rows if row.cell.side == "unpatched" and row.receipt and not row.cell.variant]
    shown = sorted(of_releases, key=lambda row: Version(row.cell.version))
    if not shown and any(row.cell.variant for row in rows):
        raise UserError("[expected] is of runs without arguments, and these had some: leave them out.")
    if not shown:
        raise UserError("No release could be run, so that nothing can be proposed.")
    versions = [Version(row.cell.version) for row in shown]
    pieces = [list(same) for _, same in groupby(shown, key=lambda row: str(row.verdict))]
    ranges, at = [], 0
    for piece in pieces:
        first, last, after = versions[at], versions[at + len(piece) - 1], versions[at + len(piece) :]
        at += len(piece)
        # An upper bound of 1.0 leaves out 1.0rc1, which may be in this range.
        for high in (f"<{after[0]}", f"<={last}") if after else ("",):
            found = ",".join(filter(None, (f">={first}" if first != versions[0] or not after else "", high)))
            if all(SpecifierSet(found).contains(v, prereleases=True) == (first <= v <= last) for v in versions):
                break
        ranges.append((found, piece))
    bad = [row.cell.version for row in shown if row.verdict.outcome == "REPRODUCED"]
    good = [
        row.cell.version
        for row in shown
        if row.verdict.outcome == "ABSENT" and bad and Version(row.cell.version) > Version(bad[-1])
    ]
    if bad:
        yield f"pinned = [{', '.join(map(_quoted, [bad[-1], *good[:1]]))}]"
        yield ""
    if {str(row.verdict) for row in shown} == {"UNTESTABLE: import"}:
        yield f"# No release can be imported ({shown[-1].message.rstrip('.')}): does 'requires' lack something?"
    yield "[expected]"
    for found, piece in ranges:
        row = piece[-1]
        said = {"REPRODUCED": ", ".join(row.verdict.failed[:1]), "ABSENT": "all checks hold"}.get(row.verdict.outcome)
        why = f"TO WRITE; in {len(piece)} release(s): {said or row.message or row.verdict.reason}"
        yield f"{_quoted(found)} = {{ verdict = {_quoted(str(row.verdict))}, why = {_quoted(why)} }}"


def _quoted(text: str) -> str:
    """A basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def diff(plan: Plan, release: Release, out: Console) -> None:
    """Print what the pack's fix changes in one release: colour on a terminal, a plain diff in a pipe."""
    if not plan.pack.fix.is_file():
        raise UserError(f"{plan.pack.name} has no fix.py.")
    try:
        text = runner.fix_of(plan, release)
    except UserError as error:
        if (known := plan.pack.expectation(release.version)) is None or known.outcome == "REPRODUCED":
            raise
        raise UserError(
            f"{plan.pack.name}'s fix is for affected releases, and {release.version} is not known as one: {known.verdict} ({known.why})."
        ) from error
    if out.is_terminal:
        out.print(Syntax(text, "diff", background_color="default"))
    else:
        print(text, end="")


def one(pack: Pack, chosen: Sequence[Release], option: str, *, named: bool) -> Release:
    """The one release that an option is about: the newest pinned one that shows the bug, where none is named."""
    if named and len(chosen) != 1:
        raise UserError(f"{option} is for one release, and {len(chosen)} were named.")
    wrong = [r for r in chosen if (e := pack.expectation(r.version)) and e.outcome == "REPRODUCED"]
    return (wrong or list(chosen))[-1]
