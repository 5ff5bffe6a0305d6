"""What `check` found, for other programs: JSON, SARIF 2.1.0, JUnit's XML, and Markdown for the summary of a CI job."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common import __version__
from common.install.stack import Stack
from common.publish.affected import Finding, Upgrade
from common.scrub import md


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    stack: Stack
    findings: Sequence[Finding]
    upgrade: Upgrade | None = None

    def having(self, status: str) -> list[Finding]:
        return [f for f in self.findings if f.status == status]


def to_json(report: Report) -> str:
    document: dict[str, Any] = {
        "source": report.stack.place,
        "distributions": report.stack.total,
        **{status: [asdict(f) for f in report.having(status)] for status in ("affected", "unknown", "unaffected")},
    }
    if report.upgrade:
        document["upgrade"] = asdict(report.upgrade)
    return json.dumps(document, indent=1, ensure_ascii=False)


def sentence(finding: Finding) -> str:
    """One finding in one line."""
    if finding.status != "affected":
        return f"{finding.package} {finding.version}, {finding.pack}: not known, for {finding.why}"
    parts = [f"{finding.package} {finding.version}: {finding.title}"]
    parts += [f"It matters for: {finding.matters}"] if finding.matters else []
    parts += [f"Workaround: {finding.workaround}"] if finding.workaround else []
    parts += [f"Right in: {finding.right_in()}", f"Evidence: {finding.evidence}"]
    return ". ".join(parts)


def sarif(report: Report) -> str:
    """https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html; what is not known is a note."""
    told = [*report.having("affected"), *report.having("unknown")]
    rules = {f.pack: f for f in told}
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "reproducer-packs",
                        "version": __version__,
                        "rules": [
                            {
                                "id": f.pack,
                                "shortDescription": {"text": f.title},
                                "fullDescription": {"text": f"{f.title}. It matters for: {f.matters or 'all who call it'}."},
                                "help": {"text": f.workaround or "Take a release that was seen without it."},
                            }
                            for f in rules.values()
                        ],
                    }
                },
                "results": [
                    {
                        "ruleId": f.pack,
                        "level": "warning" if f.status == "affected" else "note",
                        "message": {"text": sentence(f)},
                        "locations": [_location(report.stack, f)],
                        "partialFingerprints": {"finding/v1": f"{f.pack}/{f.package}/{f.version}"},
                    }
                    for f in told
                ],
            }
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def _location(stack: Stack, finding: Finding) -> dict[str, Any]:
    if stack.lines.get(finding.package, ("standard input", 0))[0] == "standard input":  # An environment has no lines, either.
        return {"logicalLocations": [{"name": finding.package, "kind": "module"}], "message": {"text": stack.place}}
    name, line = stack.lines[finding.package]
    place = Path(name)
    here = Path(os.environ.get("REPRODUCER_CWD") or Path.cwd())  # under nox the process stands elsewhere
    if place.is_absolute() and place.is_relative_to(here):
        place = place.relative_to(here)
    return {"physicalLocation": {"artifactLocation": {"uri": quote(place.as_posix())}, "region": {"startLine": line}}}


def junit(report: Report) -> str:
    """A test case for each pack and package: a failure where it is affected, skipped where it is not known."""
    affected, unknown = report.having("affected"), report.having("unknown")
    counts = {"tests": len(report.findings), "failures": len(affected), "errors": 0, "skipped": len(unknown)}
    suite = ET.Element("testsuite", {"name": "reproducer-packs check", **{k: str(v) for k, v in counts.items()}, "time": "0"})
    for finding in report.findings:
        case = ET.SubElement(suite, "testcase", classname=finding.package, name=f"{finding.pack} {finding.version}", time="0")
        if finding.status == "affected":
            ET.SubElement(case, "failure", message=finding.title).text = sentence(finding)
        elif finding.status == "unknown":
            ET.SubElement(case, "skipped", message=finding.why)
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode")


def markdown(report: Report) -> str:
    return "\n".join(_markdown(report))


def _markdown(report: Report) -> Iterator[str]:
    affected, unknown = report.having("affected"), report.having("unknown")
    yield f"### {len(affected)} known bug{'s' * (len(affected) != 1)} in what is installed"
    if affected:
        yield "\n| package | what breaks | it matters for | evidence | workaround | right in |\n|---|---|---|---|---|---|"
    for f in affected:
        cells = (f"{f.package} {f.version}", f"{f.pack}: {f.title}", f.matters, f.evidence, f.workaround or "–", f.right_in())
        yield f"| {' | '.join(md(cell) for cell in cells)} |"
    if unknown:
        yield f"\n<details><summary>{len(unknown)} not known</summary>\n"
        yield from (f"- {md(sentence(f))}" for f in unknown)
        yield "\n</details>"
