"""``regrade``: recompute every verdict from the stored logs, running nothing, and report differences."""

from __future__ import annotations

import argparse

from common.cli import common
from common.store import audit

HELP = "recompute every verdict from the stored logs, running nothing, and report differences"
DESCRIPTION = f"{HELP.capitalize()}."
arguments = common.results_only


def call(options: argparse.Namespace, extra: list[str]) -> int:
    return common.look_at(options, audit.regrade, "graded differently today")
