"""What is recorded is what the packs expect: a text that follows one, and a table that follows the other, cannot contradict each other."""

from collections import defaultdict
from pathlib import Path

from helpers import ROOT

from common.packs.pack import load
from common.run import plan
from common.store import history


def disagreements(packs, results):
    found = defaultdict(list)
    by_name = {pack.name: pack for pack in packs}
    for seen in history.load(results, packs).runs:
        if seen.cell.variant or seen.stopped == "skipped":
            continue
        given = plan.Plan(pack=by_name[seen.cell.pack], lane=seen.lane, results=results, machine=seen.machine, cache=Path())
        expected, _ = plan.expected(given, seen.version, seen.side)
        if not seen.verdict.meets(expected):
            found[seen.cell.pack].append(f"{seen.version} {seen.side} on {seen.machine}: {seen.verdict}, expected {expected}")
    return dict(found)


def test_every_record_shows_what_its_pack_expects():
    packs = [load(folder) for folder in sorted((ROOT / "packs").glob("pack[0-9][0-9]_*"))]
    assert disagreements(packs, ROOT / "results") == {}
