"""The contract of the loss: bugs that are known show in the right releases, and the table says what the records say."""

import json
import os
import shutil
import subprocess

import pytest
from helpers import ROOT, installed

from common import files
from common.cli import main, report
from common.packs import reportblock
from common.packs.pack import all_packs, find
from common.publish import contract
from common.run.plan import Row
from common.store import history
from common.store.grade import grade


@pytest.fixture(scope="module")
def columns():
    packs = [pack for pack in all_packs() if pack.kind == "claim"]
    return {column.pack.package: column for column in contract.columns(packs, history.load(ROOT / "results", packs))}


@pytest.mark.parametrize(
    ("package", "row", "wrong"),
    [
        ("liger-kernel", "softcap", ["0.4.1 – 0.8.3"]),  # the facts' S
        ("liger-kernel", "column-major input", ["0.0.0 – 0.8.4"]),  # the facts' N
        ("liger-kernel", "bias, no_grad", ["0.6.3 – 0.7.0"]),  # E
        ("liger-kernel", "none, weighted tokens", ["0.3.0 – 0.8.1"]),  # pack09
        ("liger-kernel", "frozen input", ["0.6.3 – 0.8.5"]),  # pack17
        ("liger-kernel", "second backward", ["0.0.0 – 0.8.5"]),  # pack18
        ("transformer-engine", "none, weighted tokens", ["2.2.0 – 2.7.0"]),  # #2139
        ("transformer-engine", "none, a gradient of stride 0", ["2.2.0 – 2.4.0", "2.8.0 – 2.10.0"]),  # #2402
        ("transformer-engine", "mean, labels ignored", ["2.4.0 – 2.11.0"]),  # #2476
        ("transformer-engine", "fp16, confident labels", ["2.2.0 – 2.17.1"]),  # #3193
        ("fla-core", "softcap", ["0.5.0 – 0.5.2"]),
        ("cut-cross-entropy", "softcap", ["24.11.3 – 25.1.1"]),  # pack37
        ("megatron-core", "second backward", []),
    ],
)
def test_bugs_that_are_known_show_in_the_right_releases(columns, package, row, wrong):
    assert [f"{first} – {last}" for first, last in columns[package].wrong(row)] == wrong


def test_a_stretch_holds_no_release_that_was_not_measured(columns):
    for column in columns.values():
        for row, results in column.rows.items():
            wrong = {result.version for result in results if result.ok is False}
            for first, last in column.wrong(row):
                assert set(column.runs[column.runs.index(first) : column.runs.index(last) + 1]) <= wrong


def test_the_rows_are_alike_in_each_implementation(columns):
    rows = contract.rows(list(columns.values()))
    for column in columns.values():
        assert set(column.rows) == set(rows)


@pytest.mark.parametrize(
    ("before", "after", "turns"),
    [
        ({"mean": True, "sum": True}, {"mean": True, "sum": False}, {"sum": False}),
        ({"mean": False, "sum": True}, {"mean": True, "sum": False}, {"mean": True, "sum": False}),
        ({"mean": False}, {"mean": True}, {"mean": True}),
        ({"mean": True}, {"mean": None}, {}),  # it was not asked
        ({"mean": None}, {"mean": False}, {}),
        ({}, {"mean": False}, {}),
        ({"mean": True}, {}, {}),
    ],
)
def test_a_row_that_turns_is_a_change(before, after, turns):
    assert history.turned(before, after) == turns


def of_pack32():
    return {
        seen.version: seen
        for seen in history.load(files.RESULTS, [find("pack32")]).runs
        if seen.side == "unpatched" and seen.machine == "linux-x86_64-cpu" and seen.outcome == "MEASURED"
    }


def test_changes_of_a_contract_name_the_rows():
    told = {str(change): change.kind for change in history.transitions(of_pack32().values())}
    assert (
        "pack32 liger-kernel 0.8.5 unpatched: now right: column-major input; column-major weight, unlike 0.8.4, interpreter"
    ) in told
    change = history.changed(of_pack32()["0.8.4"], of_pack32()["0.8.5"])
    assert change.shown == of_pack32()["0.8.5"].shown, "by which regress tells whether its runs agree"
    mixed = [text for text in told if "now wrong: " in text and "now right: " in text]
    assert mixed
    assert {told[text] for text in mixed} == {"regressed"}


def test_a_run_is_compared_with_its_record_row_by_row():
    runs = of_pack32()
    older, newer = runs["0.8.4"], runs["0.8.5"]
    assert newer.shown.startswith("MEASURED, wrong in: ")
    assert set(history.turned(older.rows, newer.rows).values()) == {True}
    verdict = grade(older.log())
    row = Row(
        cell=newer.cell,
        verdict=verdict,
        expected="MEASURED",
        why="",
        seconds=1.0,
        receipt=older.path,
        ran=True,
        environment=None,
        message="",
    )
    told = list(map(str, report.compared([row], history.History(runs=[newer]), keep=True)))
    assert told[0].startswith(f"≠ 0.8.5 unpatched: {older.shown}, and recorded is {newer.shown} on ")


def test_the_command(capsys, tmp_path):
    # One release, for all of them take some seconds each time; the whole table is made by `tables --check`.
    for path in (*(ROOT / "results").glob("*/machine.json"), *(ROOT / "results").glob("*/pack32/liger-kernel-0.8.5.*")):
        there = tmp_path / path.relative_to(ROOT / "results")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    where = "--results", str(tmp_path)
    assert main(["contract", *where]) == 0
    table = capsys.readouterr().out
    assert "none, weighted tokens" in table
    assert main(["contract", *where, "--row", "frozen input"]) == 0
    assert "a gradient is missing" in capsys.readouterr().out
    assert main(["contract", *where, "--json", "--row", "frozen input"]) == 0
    told = json.loads(capsys.readouterr().out)["frozen input"]["liger-kernel"]["0.8.5"]
    assert told["ok"] is False
    assert (ROOT / "results" / told["receipt"]).is_file()
    assert main(["contract", *where, "--row", "frozen inputs"]) == 2
    assert "did you mean 'frozen input'?" in capsys.readouterr().err


def test_no_records(capsys, tmp_path):
    assert main(["contract", "--results", str(tmp_path)]) == 2
    assert "run nox -s pack32 -- --record first" in capsys.readouterr().err


def test_a_block_is_brought_up_to_date_wherever_it_stands(tmp_path):
    script = tmp_path / "repro.py"
    for name, text in reportblock.TEXTS.items():
        script.write_text("import torch\n\n" + text.replace("\n", "\n# old\n", 1))
        assert reportblock.written([script])[script] == "import torch\n\n" + text, name


SCRIPT = """
import math, os, subprocess, sys, threading
import torch
import torch.nn.functional as F
device = "cpu"

{block}

{report}

def release():
    FACTS.update(file="x", version="1")
    def loss(x, w, y, b=None, **given):
        if (y == 70).any():
            os.abort()
        if given.get("label_smoothing"):
            raise NotImplementedError("no label_smoothing")
        return eager(x, w, y, b, **given)
    return loss

contract(release)
"""


@pytest.mark.network
def test_a_row_that_dies_takes_no_other_with_it(tmp_path):
    pack = find("pack32")
    there = installed(pack, pack.pinned[-1])  # with torch
    script = tmp_path / "repro.py"
    script.write_text(SCRIPT.format(block=reportblock.TEXTS["contract"], report=reportblock.TEXT))
    done = subprocess.run([there.python, script], capture_output=True, text=True, env=os.environ, timeout=120)
    told = json.loads(done.stdout.splitlines()[-2])["metrics"]
    assert told["a label of V"]["saw"].startswith("died")
    assert told["a label of -1"]["ok"] and told["mean"]["ok"]
    assert told["label smoothing"] == {"ok": None, "error": None, "saw": "no label_smoothing"}
