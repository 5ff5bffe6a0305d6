"""``verify``: check stored receipts: schema, hashes of logs and wheels, nothing private."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from common.cli import common, report
from common.files import CACHE, RESULTS
from common.store import audit

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
    known = audit.Known(commits, results)

    def look(path: Path) -> Iterator[str]:
        reviewed = path.resolve().relative_to(results).parts[0] == "review"
        return audit.verify(path, published, reviewed=reviewed, known=known)

    return common.look_at(options, look, "not sound", published.warnings)
