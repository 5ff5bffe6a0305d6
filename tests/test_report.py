"""What is printed when runs have ended: it fits a terminal of 80 columns, and says the same as the receipts."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from common.cli import report
from common.files import RESULTS
from common.packs.pack import all_packs
from common.run.plan import Row
from common.store import history
from common.store.grade import grade

PACKS = [pack for pack in all_packs() if pack.kind != "selftest"]


def rows_of(pack):
    """The stored runs of the pinned releases, as rows."""
    for seen in history.load(RESULTS, [pack]).runs:
        if seen.version in pack.pinned and not seen.cell.variant and seen.machine.endswith("cpu"):
            yield Row(
                cell=seen.cell,
                verdict=grade(seen.log()),
                expected=seen.outcome,
                why="",
                seconds=seen.document().facts.seconds,
                receipt=seen.path,
                ran=seen.stopped not in ("skipped", "nothing-to-patch"),
                environment=None,
                message="",
            )


def printed(part, width):
    out = io.StringIO()
    Console(width=width, file=out, highlight=False).print(part)
    return out.getvalue()


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name)
def test_a_table_of_80_columns_breaks_at_spaces_alone(pack):
    rows = list(rows_of(pack))
    narrow, wide = (printed(report.table(rows, pack.name), width) for width in (80, 180))
    assert max(map(len, narrow.splitlines())) <= 80
    # A column of a narrow table, read downwards, has the words of the wide one.
    words = [sorted(re.findall(r"[^\s─]+", text)) for text in (narrow, wide)]
    assert words[0] == words[1]


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name)
def test_each_proof_is_a_line(pack):
    rows = list(rows_of(pack))
    proofs = sum(len(row.verdict.proofs) for row in rows)
    lines = printed(report.proofs(rows), 80).splitlines()
    assert sum(bool(re.match(r"  \d\. ", line)) for line in lines) == proofs
    assert len(lines) <= proofs + len(rows)
    assert all(len(line) <= 80 for line in lines)
    whole = printed(report.proofs(rows, whole=True), 180)
    for name in (name for row in rows for name in re.findall(r"\w+", row.verdict.proofs.get("control", ""))):
        assert name in whole, "--proofs lists the controls"


def test_what_a_pack_claims_is_said():
    rows = list(rows_of(next(pack for pack in PACKS if pack.name == "pack04")))
    assert list(report.claims(rows)) == [], "of a lane that computes in another dtype: no word of bits"
    rows = [replace(row, verdict=replace(row.verdict, claims=("BITWISE_IDENTICAL",))) for row in rows]
    said = [str(line) for line in report.claims(rows)]
    assert said[-1] == "✓ 2.3.2.post1 patched: BITWISE_IDENTICAL"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (2.1e-7, "2.1e-7"), (1e-5, "1e-5"), (1.9, "1.9"), (0.0, "0"), (3e20, "3e20"), (0.5, "0.5")]
)
def test_numbers_are_short(value, text):
    assert report.number(value) == text


def test_what_an_earlier_script_showed_is_told_apart():
    pack = next(each for each in PACKS if each.name == "pack09")
    rows = list(rows_of(pack))
    seen = [run for run in history.load(RESULTS, [pack]).runs if run.cell in {row.cell for row in rows}]
    for stale, told in ((False, ";"), (True, f" ({len(rows)} with an earlier script);")):
        recorded = history.History(runs=[replace(run, stale=stale) for run in seen])
        *_, last = map(str, report.compared(rows, recorded, keep=True))
        assert last.startswith(f"{len(rows)} of {len(rows)} sides as recorded in results/{told}")
