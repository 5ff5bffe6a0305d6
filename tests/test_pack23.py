"""Pack 23: its README says what the receipts say."""

import re

from common import files
from common.packs.pack import find
from common.store import history

PACK = find("pack23")
COLUMNS = ("FP8 around it", "FP8 inside", "FP8 inside, use_reentrant=False", "eval mode")


def test_the_receipts_are_what_the_readme_says():
    readme = (PACK.folder / "README.md").read_text()
    runs = [s for s in history.load(files.RESULTS, [PACK]).runs if s.machine == "linux-x86_64-cpu"]
    assert not any(s.stale for s in runs)
    judged = {s.version: s for s in runs if s.side == "unpatched" and s.outcome == "REPRODUCED"}
    assert {s.outcome for s in runs if s.side == "patched" and s.version in judged} == {"NOTHING_TO_PATCH"}
    left = list(judged)
    for row in (line for line in readme.splitlines() if line.startswith("| 2.") and "with the fix" not in line):
        named = row.split("|")[1].strip().split(" – ")
        for version in left[left.index(named[0]) : left.index(named[-1]) + 1]:
            metrics = judged[version].document().facts.metrics
            for cell, column in zip(row.split("|")[2:6], COLUMNS, strict=True):
                said = metrics[column]
                assert said.startswith(cell.strip().strip("`")), (version, column)
                if "off by" in said:
                    assert re.search(r"off by (\S+)$", said)[1] in readme
            left.remove(version)
    assert not left
