"""The example of docs/adding-a-pack.md: a pack about a package that needs no GPU and no torch."""

import pytest
from helpers import ROOT, facts_of
from packaging.version import Version
from test_pack import check_contract

from common import files
from common.cli import author
from common.dev import mutants
from common.install import lanes, releases
from common.packs import reportblock
from common.packs.pack import load
from common.run import plan as plans
from common.run import runner
from common.store import audit

FOLDER = ROOT / "docs/example/pack98_humanize_rollover"


def test_it_keeps_the_contract():
    check_contract(FOLDER)
    for script in ("repro.py", "validate.py"):
        assert reportblock.blocks((FOLDER / script).read_text()) == {"report": reportblock.TEXT}


@pytest.fixture
def plan(tmp_path):
    return plans.planned(load(FOLDER), "", "cpu", results=tmp_path)


@pytest.mark.network
def test_every_release_shows_what_it_is_expected_to_and_the_block_is_proposed(plan):
    known = [r for r in releases.of(plan.pack, files.CACHE)[0] if Version(r.version) <= Version("4.17.0")]
    rows = [row for release in known for row in runner.run_release(plan, release)]
    assert [str(row.cell) for row in rows if not row.as_expected] == []
    assert {facts_of(row).evidence for row in rows if row.ran} == {"device:cpu"}
    told = list(author.proposed(rows))
    assert told[0] == 'pinned = ["4.15.0", "4.16.0"]'
    assert [line.partition(" = ")[0] for line in told[3:]] == ['"<4.16.0"', '">=4.16.0"']


@pytest.mark.network
def test_every_mutant_is_noticed(plan):
    assert lanes.choose(plan.pack) == "cpu"
    found = mutants.run([plan.pack], jobs=2, done=lambda outcome: None)
    assert [outcome.name for outcome in found if not outcome.killed] == []
    assert len(found) == 7


@pytest.mark.network
def test_its_receipts_are_sound(plan):
    release = next(r for r in releases.of(plan.pack, files.CACHE)[0] if r.version == "4.15.0")
    for row in runner.run_release(plan, release):
        assert list(audit.regrade(row.receipt)) == []
        assert list(audit.verify(row.receipt, audit.Published(files.CACHE))) == []
