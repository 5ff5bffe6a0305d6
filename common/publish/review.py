"""What a pull request does to the known bugs of its package: each pack on its base and on its head, as Markdown and as JUnit's XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.run.plan import Row
from common.scrub import md

#: What came of a pack, the worst first. Only what is brought fails a review: the other bugs were there before.
STATES = {
    "brought": "the bug is there, and the base does not show it",
    "changed": "something else happens than on the base",
    "unknown": "inconclusive",
    "kept": "the base has the bug, too",
    "fixed": "the base has the bug",
    "free": "the base does not have the bug, either",
}
#: What the Markdown begins with, and JUnit's XML.
HEADING = "### Known bugs of "
XML = '<?xml version="1.0" encoding="utf-8"?>\n<testsuite name="reproducer-packs '

_MARKS = {"brought": "❌", "changed": "⚠️", "unknown": "⚠️", "kept": "➖", "fixed": "✅", "free": "✅"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One pack on the base and on the head."""

    pack: str
    title: str
    base: Row
    head: Row

    @property
    def state(self) -> str:
        before, after = self.base.verdict.outcome, self.head.verdict.outcome
        told = ("REPRODUCED", "ABSENT")
        if after == "REPRODUCED":
            # Where the base does something else, or lacks the call, the bug has come all the same.
            came = before in ("ABSENT", "CHANGED") or self.base.verdict.reason.partition(" ")[0] == "no-api"
            return "kept" if before == "REPRODUCED" else "brought" if came else "unknown"
        if after == "ABSENT":
            return "fixed" if before == "REPRODUCED" else "free"
        return "changed" if before in told and after == "CHANGED" else "unknown"

    @property
    def why(self) -> str:
        """What is to be said of a state that is neither good nor known to be bad."""
        if self.state not in ("changed", "unknown"):
            return ""
        of_head = self.head.verdict.outcome not in ("REPRODUCED", "ABSENT")
        side = self.head if of_head else self.base
        return f"{'here' if of_head else 'on the base'}, {side.verdict}{f': {side.message}' if side.message else ''}".rstrip(
            "."
        )


def ordered(found: Sequence[Judged]) -> list[Judged]:
    return sorted(found, key=lambda each: (list(STATES).index(each.state), each.pack))


def markdown(package: str, base: str, head: str, found: Sequence[Judged]) -> str:
    return "\n".join(_markdown(package, base, head, found)) + "\n"


def _markdown(package: str, base: str, head: str, found: Sequence[Judged]) -> Iterator[str]:
    counts = {state: sum(each.state == state for each in found) for state in STATES}
    said = {"brought": "brought", "fixed": "fixed", "kept": "still there", "changed": "changed", "unknown": "not known"}
    told = ", ".join(f"{counts[state]} {word}" for state, word in said.items() if counts[state]) or "none brought, none there"
    yield f"{HEADING}{package}: {told}"
    yield ""
    yield f"| | bug | {base} | {head} | evidence |"
    yield "|---|---|---|---|---|"
    for each in ordered(found):
        cells = (f"{each.pack}: {each.title}", str(each.base.verdict), str(each.head.verdict), each.head.verdict.evidence)
        yield f"| {_MARKS[each.state]} | {' | '.join(md(cell) for cell in cells)} |"
    yield ""
    for each in ordered(found):
        if each.why:
            yield f"- {each.pack}: {STATES[each.state]}: {md(each.why)}"
    yield ""
    yield "Each pack's script ran on both as they are. It looks for this bug only: it does not show that a fix breaks nothing else."


def junit(package: str, found: Sequence[Judged]) -> str:
    """A test case for each pack: a failure where the bug is brought, skipped where nothing can be said."""
    states = [each.state for each in found]
    counts = {"tests": len(found), "failures": states.count("brought"), "errors": 0}
    counts["skipped"] = sum(state in ("changed", "unknown") for state in states)
    suite = ET.Element(
        "testsuite", {"name": f"reproducer-packs {package}", **{k: str(v) for k, v in counts.items()}, "time": "0"}
    )
    for each in ordered(found):
        took = f"{each.base.seconds + each.head.seconds:.1f}"
        case = ET.SubElement(suite, "testcase", classname=package, name=f"{each.pack} {each.title}", time=took)
        if each.state == "brought":
            ET.SubElement(case, "failure", message=STATES["brought"]).text = f"{each.base.verdict} → {each.head.verdict}"
        elif each.state in ("changed", "unknown"):
            ET.SubElement(case, "skipped", message=f"{STATES[each.state]}: {each.why or each.head.verdict}")
    ET.indent(suite)
    return XML.partition("\n")[0] + "\n" + ET.tostring(suite, encoding="unicode") + "\n"
