"""``verify``: check stored receipts: schema, hashes of logs and wheels, nothing private."""

from __future__ import annotations

import argparse

from common.cli import common
from common.files import CACHE
from common.store import audit

HELP = "check stored receipts: schema, hashes of logs and wheels, nothing private"
DESCRIPTION = f"{HELP.capitalize()}."
arguments = common.results_only


def call(options: argparse.Namespace, extra: list[str]) -> int:
    published = audit.Published(CACHE)
    return common.look_at(options, lambda path: audit.verify(path, published), "not sound", published.warnings)
