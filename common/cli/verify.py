"""``verify``: check stored receipts: schema, hashes of logs and wheels, nothing private."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from common.cli import common, report
from common.files import CACHE, RESULTS
from common.publish import tables
from common.store import audit, history

HELP = "check stored receipts: schema, hashes of logs and wheels, nothing private"
DESCRIPTION = f"{HELP.capitalize()}."
arguments = common.results_only


def call(options: argparse.Namespace, extra: list[str]) -> int:
    results = (options.results or RESULTS).resolve()
    packs = common.packs(report.console(stderr=True))
    published = audit.Published(CACHE, {pack.package: pack.index for pack in packs if pack.index})
    commits = {
        (pack.name, name): f"pkg:github/{pack.upstream.lower()}@{v.source}"
        for pack in packs
        for name, v in pack.variants.items()
        if v.source
    }
    unchecked = {(pack.name, name) for pack in packs for name in ("", *pack.variants) if not pack.deep_check(name)}
    known = audit.Known(commits, results, unchecked)

    def look(path: Path) -> Iterator[str]:
        reviewed = path.resolve().relative_to(results).parts[0] == "review"
        return audit.verify(path, published, reviewed=reviewed, known=known)

    ended = common.look_at(options, look, "not sound", published.warnings)
    # check and pins read what is made of the receipts, and not the receipts.
    badges = set((results / "badges").glob("*.svg"))
    there = badges or (results / "timeline.json").is_file()
    made = tables.of_results(results, packs, history.load(results, packs)) if there else {}
    held = {path: path.read_text(encoding="utf-8", errors="replace") for path in {*made, *badges} if path.is_file()}
    other = sorted(path for path in {*made, *badges} if held.get(path) != made.get(path))
    for path in other:
        common.complain(f"✗ {report.where(path)} is not what the receipts give: python -m common tables makes it anew.")
    return common.SURPRISE if other else ended
