"""Which release has which bug, as matrix, JSON, OSV and feed; which one to pin."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import msgspec
import pytest
from helpers import FACTS, ROOT, judged, make_log
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from packaging.requirements import Requirement

from common.files import RESULTS
from common.packs.pack import NO_FAULT, all_packs, find
from common.publish import pins, timeline
from common.run import regress
from common.store import history
from common.store.cell import Cell
from common.store.grade import Verdict
from common.store.history import History, Seen

PACK = find("pack09")
ABSENT = {**FACTS, "verdict": "ABSENT", "checks": [FACTS["checks"][0], judged(FACTS["checks"][1], error=1e-7)]}


def seen(version, outcome="REPRODUCED", *, side="unpatched", machine="here", evidence="interpreter", stale=False, dist=None):
    return Seen(
        path=Path(f"results/{machine}/pack09/x-{version}.{side}.json"),
        machine=machine,
        cell=Cell(pack="pack09", dist=dist or PACK.package, version=version, side=side),
        lane="triton-interpreter",
        verdict=Verdict(outcome=outcome, evidence="none" if outcome == "UNTESTABLE" else evidence),
        stopped=None,
        started=f"2026-11-21T00:00:{int(version.rpartition('.')[2]):02d}Z",
        stale=stale,
        sha256="0" * 64,
        log_name="x.log",
        log_sha256="0" * 64,
        patch=None,
    )


#: R reproduced, A absent, C changed, U untestable; one letter a release.
OUTCOMES = {"R": "REPRODUCED", "A": "ABSENT", "C": "CHANGED", "U": "UNTESTABLE"}


def runs_of(letters):
    return [seen(f"0.{i}", OUTCOMES[letter]) for i, letter in enumerate(letters)]


def of(letters):
    return History(runs=runs_of(letters))


@pytest.mark.parametrize(
    ("letters", "wrong"),
    [
        ("AAA", []),
        ("ARRA", [("0.1", "0.2", "0.3")]),
        ("RRCCRA", [("0.0", "0.1", None), ("0.4", "0.4", "0.5")]),
        ("ARARR", [("0.1", "0.1", "0.2"), ("0.3", "0.4", None)]),
        ("RUA", [("0.0", "0.0", "0.2")]),
        ("", []),
    ],
)
def test_stretches(letters, wrong):
    assert [(s.first, s.last, s.fixed) for s in history.stretches(runs_of(letters))] == wrong


@given(st.text(alphabet="RACU", max_size=30))
def test_stretches_hold_just_the_wrong_releases(letters):
    found = history.stretches(runs_of(letters))
    assert [v for s in found for v in s.versions] == [f"0.{i}" for i, letter in enumerate(letters) if letter == "R"]
    document = timeline.osv(PACK, runs_of(letters))
    assert (document is None) == ("R" not in letters)
    if document:
        affected = document["affected"][0]
        assert affected["versions"] == [v for s in found for v in s.versions]
        # By OSV's own rules, the events say the same of each release that was told.
        for i, letter in enumerate(letters):
            if letter in "RA":
                assert osv_affects(affected["ranges"], i) == (letter == "R"), (letters, i, affected["ranges"])


def osv_affects(ranges, i):
    """https://ossf.github.io/osv-schema/#evaluation"""
    for events in (r["events"] for r in ranges):
        vulnerable = False
        for event in sorted(events, key=lambda e: (int(next(iter(e.values()))[2:]), "last_affected" in e)):
            at = int(next(iter(event.values()))[2:])
            if "introduced" in event and i >= at:
                vulnerable = True
            elif ("fixed" in event and i >= at) or ("last_affected" in event and i > at):
                vulnerable = False
        if vulnerable:
            return True
    return False


@pytest.mark.parametrize(
    ("letters", "told"),
    [
        ("AUR", ["broken 0.1", "regressed 0.2"]),
        ("RUA", ["broken 0.1", "fixed 0.2"]),
        ("RCA", ["broken 0.1", "fixed 0.2"]),
        ("AUUA", ["broken 0.1"]),
        ("UR", []),
        ("ACR", ["broken 0.1", "regressed 0.2"]),
    ],
)
def test_a_change_is_told_past_releases_that_tell_nothing(letters, told):
    assert [f"{c.kind} {c.cell.version}" for c in history.transitions(runs_of(letters))] == told


@pytest.mark.parametrize(
    ("letters", "told"), [("RCR", ["regressed"]), ("RUA", ["fixed"]), ("AUR", ["regressed"]), ("AUA", []), ("RU", ["broken"])]
)
def test_a_new_release_is_compared_past_those_that_tell_nothing(letters, told):
    runs = runs_of(letters)
    compared = regress._Before._neighbours(SimpleNamespace(started=["pack09"]), runs[-1], History(runs=runs))
    changes = filter(None, (history.changed(was, runs[-1]) for was in compared))
    assert [change.kind for change in changes][:1] == told


@pytest.mark.parametrize("machine", ["a", "z"])
def test_of_machines_that_do_not_agree_the_one_with_the_bug_counts(machine):
    runs = [seen("1.0", "ABSENT", machine="m"), seen("1.0", "REPRODUCED", machine=machine)]
    assert history.best(runs).machine == machine
    assert pins.advise(PACK.package, [PACK], History(runs=runs)).pin is None
    stronger = [seen("1.0", "ABSENT", machine="m", evidence="device:sm_90"), runs[1]]
    assert history.best(stronger).machine == "m"


@given(st.text(alphabet="RACU", max_size=20))
def test_the_advice_is_never_a_wrong_release(letters):
    advice = pins.advise(PACK.package, [PACK], of(letters))
    right = [i for i, letter in enumerate(letters) if letter == "A"]
    assert advice.pin == (f"0.{right[-1]}" if right else None)
    assert [line for line, _ in advice.constraints()] == ([f"{PACK.package}=={advice.pin}"] if right else [])
    for line in pins.constraints([advice]).splitlines():
        if not line.startswith("#"):
            Requirement(line.partition("  #")[0])
    ET.fromstring(pins.badge(advice)) if advice.releases else None


def test_a_yanked_or_deleted_release_is_not_advised():
    advice = pins.advise(PACK.package, [PACK], of("AAA"), offered={"0.0": False, "0.1": True})
    assert advice.pin == "0.0"
    assert [pins.state(r) for r in advice.releases] == ["no longer on the index", "yanked by its publisher", "right"]


def test_what_is_not_known_is_not_advised_and_what_has_no_such_api_is():
    other = replace(PACK, folder=PACK.folder.with_name("pack77_other"))

    def advised(outcome, **given):
        runs = (
            [seen("1.0"), seen("1.0", **given)] if outcome is None else [seen("1.0", "ABSENT"), replace_pack(outcome, **given)]
        )
        return pins.advise(PACK.package, [PACK, other], History(runs=runs)).pin

    def replace_pack(outcome, reason=""):
        one = seen("1.0", outcome)
        return replace(one, cell=replace(one.cell, pack="pack77"), verdict=replace(one.verdict, reason=reason))

    assert advised("UNTESTABLE", reason="no-api") == "1.0"
    # After a release that had the bug, what is not found may have another name.
    runs = [replace_pack("UNTESTABLE", reason="no-api"), seen("1.0", "ABSENT"), seen("0.9", "ABSENT")]
    had = replace(runs[0], cell=replace(runs[0].cell, version="0.9"), verdict=Verdict(outcome="REPRODUCED", evidence="source"))
    advice = pins.advise(PACK.package, [PACK, other], History(runs=[*runs, had]))
    assert advice.pin is None
    assert pins.state(advice.releases[0]) == "not known (pack77: its API is gone or has another name)"
    lacking = pins.Verdicts(version="1.0", untold={"pack77": pins.NO_API})
    assert pins.state(lacking) == "without the API of pack77", "which nobody found right"
    assert advised("UNTESTABLE", reason="import") is None
    assert advised("UNTESTABLE", reason="no-device") is None
    assert advised("CHANGED") is None
    assert advised("ABSENT") == "1.0"
    assert pins.advise(PACK.package, [PACK, other], History(runs=[seen("1.0", "ABSENT")])).pin is None, "pack77 never ran on it"
    only = pins.advise(PACK.package, [PACK, other], History(runs=[seen("1.0", "ABSENT")]), only={PACK.name})
    assert (only.pin, len(only.reasons)) == ("1.0", 1)
    stale = pins.advise(PACK.package, [PACK], History(runs=[replace(seen("1.0", "ABSENT"), stale=True)]))
    assert stale.pin is None


@pytest.fixture(scope="module")
def recorded():
    """All that is recorded: some seconds."""
    packs = [pack for pack in all_packs() if pack.kind != "selftest"]
    return packs, history.load(RESULTS, packs)


def test_the_committed_records_advise_one_exact_version_or_say_why_not(recorded):
    packs, stored = recorded
    for package in {pack.package for pack in packs}:
        advice = pins.advise(package, packs, stored)
        assert (advice.pin is None) == bool(advice.to_dict()["refused"])
        for pack in packs if advice.pin else ():
            if pack.package == package and pack.kind not in NO_FAULT:
                found = history.best(
                    s for s in stored.of(pack.name, package) if s.version == advice.pin and s.side == "unpatched"
                )
                assert str(found.verdict) in ("ABSENT", "UNTESTABLE: no-api")
    tilelang = pins.advise("tilelang", packs, stored, only={"pack21"})
    assert (tilelang.pin, tilelang.goes_with) == ("0.1.12", ["apache-tvm-ffi==0.1.11"])
    # Advice is joint where one package compiles another's kernels: pack31 runs mamba-ssm's beside tilelang.
    both = {package: pins.advise(package, packs, stored, only={"pack31"}) for package in ("tilelang", "mamba-ssm")}
    assert both["tilelang"].beside == ["mamba-ssm==2.3.2.post1"]
    # What pip could not resolve, for mamba-ssm asks for another tilelang, is said and is no constraint; so is a bug in it.
    assert both["mamba-ssm"].beside == ["tilelang==0.1.12 (wrong there: pack30) and apache-tvm-ffi==0.1.11"]
    assert "mamba-ssm" not in pins.constraints([both["tilelang"]])
    assert "# tilelang 0.1.12 has bugs that were not asked about: pack30" in pins.constraints([both["tilelang"]])
    assert pins.constraints([both["tilelang"]]).startswith("# The newest releases without the bugs of pack31.")
    assert (
        "no pack that was named looks for a fault in it" in pins.advise("mamba-ssm", packs, stored, only={"pack04"}).refusal()
    )


def test_a_pre_release_is_advised_only_where_there_is_no_other():
    runs = [seen("1.0", "ABSENT"), seen("1.1rc.1", "ABSENT")]
    assert pins.advise(PACK.package, [PACK], History(runs=runs)).pin == "1.0"
    assert pins.advise(PACK.package, [PACK], History(runs=runs[1:])).pin == "1.1rc.1"


@pytest.mark.parametrize(
    ("runs", "drawn"),
    [
        ([seen("0.1")], "● I"),
        ([seen("0.1"), seen("0.1", "ABSENT", side="patched")], "●→○ I"),
        ([seen("0.1"), seen("0.1", "ABSENT", side="patched", stale=True)], "● I"),
        ([seen("0.1", machine="a"), seen("0.1", machine="b"), seen("0.1", "ABSENT", side="patched", machine="b")], "●→○ I"),
        ([seen("0.1", "MEASURED")], "# I"),
        ([seen("0.1"), seen("0.1", machine="gpu", evidence="device:sm_90")], "● D"),
        ([seen("0.1"), seen("0.1", "ABSENT", machine="gpu", evidence="device:sm_90")], "○ D ● I"),
        ([seen("0.1", stale=True)], "(● I)"),
        ([seen("0.1"), seen("0.1", "ABSENT", machine="gpu", evidence="device:sm_90", stale=True)], "● I"),
        ([seen("0.1", "UNTESTABLE")], "?"),
        ([seen("0.1", "CHANGED")], "~ I"),
        ([], ""),
    ],
)
def test_a_cell_of_the_matrix(runs, drawn):
    assert timeline.glyph(history.releases(runs).get("0.1", {})) == drawn


def test_the_matrix_shows_what_came_back():
    stored = History(runs=[seen("0.1"), seen("0.2", "CHANGED"), seen("0.3"), seen("0.10", "ABSENT")])
    text = timeline.markdown([PACK], stored)
    assert "First bad 0.1, last bad 0.3, first good 0.10. It came twice" in text
    assert "Fix: commit 9ac26bb8, first released in 0.8.2." in text
    rows = [line for line in text.splitlines() if line.startswith("| 0") and line.count("|") == 3]
    assert rows == ["| 0.10 | ○ I |", "| 0.3 | ● I |", "| 0.2 | ~ I |", "| 0.1 | ● I |"]
    assert "<table>" in MarkdownIt("gfm-like", {"linkify": False}).render(text)


def test_a_receipt_that_cannot_be_read_is_named_and_hides_no_other(tmp_path, store):
    store(tmp_path, version="0.6.5").write_text("{")
    store(tmp_path, version="0.7.0")
    stored = history.load(tmp_path, [PACK])
    assert [s.version for s in stored.runs] == ["0.7.0"]
    text = timeline.markdown([PACK], stored)
    assert "**Not counted:** pack09/liger-kernel-0.6.5.unpatched.json. " in text
    assert str(tmp_path) not in text


def test_json_is_as_its_schema_says_and_names_receipts_that_are_there():
    stored = history.load(ROOT / "results", [PACK])
    document = timeline.document([PACK], stored)
    for release in document.packs[0].releases:
        for run in release.runs:
            assert (ROOT / "results" / run.receipt).is_file()
    written = (ROOT / "results" / "timeline.json").read_text()
    assert msgspec.json.decode(written, type=timeline.Timeline).packs
    with pytest.raises(msgspec.ValidationError, match="schema"):
        msgspec.json.decode(written.replace('"schema": 1', '"schema": 2'), type=timeline.Timeline)


def test_every_osv_file_keeps_the_schema_that_it_names(recorded):
    """https://github.com/ossf/osv-schema, validation/schema.json of main at 51b8156 (Apache License 2.0); 1.7.5 does not know x_ yet."""
    schema = json.loads((ROOT / "tests/data/osv-schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    packs, stored = recorded
    documents = [timeline.osv(pack, stored.of(pack.name, pack.package)) for pack in packs if stored.of(pack.name, pack.package)]
    assert len(list(filter(None, documents))) > 10
    for document in filter(None, documents):
        check.validate(document)
        assert document["schema_version"] == "1.7.5"


def test_the_history_of_liger_kernel_as_osv():
    stored = history.load(ROOT / "results", [PACK])
    document = timeline.osv(PACK, stored.of("pack09", PACK.package))
    assert [r["events"] for r in document["affected"][0]["ranges"]] == [
        [{"introduced": "0.6.3"}, {"fixed": "0.8.2"}],
        [{"introduced": "0.5.3"}, {"last_affected": "0.5.8"}],
    ]
    assert document["affected"][0]["package"]["ecosystem"] == "PyPI"


def test_the_feed_has_an_entry_for_each_change_with_an_id_that_stays():
    stored = History(runs=[*runs_of("ARA"), seen("0.7", dist="liger-kernel-nightly")])
    space = {"a": "http://www.w3.org/2005/Atom"}
    feed = ET.fromstring(timeline.atom([PACK], stored).encode())
    entries = feed.findall("a:entry", space)
    assert [e.find("a:title", space).text for e in entries] == [
        "fixed: liger-kernel 0.2, pack09",
        "regressed: liger-kernel 0.1, pack09",
    ]
    again = ET.fromstring(
        timeline.atom([PACK], History(runs=[replace(r, started="2027-01-01T00:00:00Z") for r in stored.runs]))
    )
    ids = [{e.find("a:id", space).text for e in f.findall("a:entry", space)} for f in (feed, again)]
    assert ids[0] == ids[1]
    assert feed.find("a:updated", space).text == "2026-11-21T00:00:02Z"


@pytest.mark.parametrize("side", ["unpatched", "patched"])
def test_every_pair_of_outcomes_has_its_word(side):
    told = {(b, a): history.change(side, b, a) for b in OUTCOMES.values() for a in OUTCOMES.values()}
    assert told["ABSENT", "REPRODUCED"] == told["CHANGED", "REPRODUCED"] == "regressed"
    assert told["UNTESTABLE", "REPRODUCED"] is None, "that it was inconclusive before is no regression"
    assert told["REPRODUCED", "ABSENT"] == "fixed"
    assert told["ABSENT", "UNTESTABLE"] == told["REPRODUCED", "CHANGED"] == "broken"
    assert told["UNTESTABLE", "ABSENT"] is None
    assert all(told[o, o] is None for o in OUTCOMES.values())


def test_pins_command(cli, tmp_path, store):
    store(tmp_path / "r", version="0.7.0")
    for version in ("0.8.2",):
        log = make_log({**ABSENT, "version": version}, sentinel="BUG_ABSENT", exit=0)
        store(tmp_path / "r", version=version, log=log.replace('"version": "1.0"', f'"version": "{version}"'))
    env = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple/"}
    where = ("--results", tmp_path / "r", "--output", tmp_path / "constraints.txt")
    done = cli("pins", "liger-kernel", *where, "--pack", "pack09", env=env)
    assert done.returncode == 0, done.stderr
    assert "liger-kernel: pin liger-kernel==0.8.2" in done.stdout
    assert "0.7.0: wrong (pack09)" in done.stdout
    assert "is not known as such" in done.stdout
    assert "liger-kernel==0.8.2  # pack09: absent (interpreter, " in (tmp_path / "constraints.txt").read_text()
    found = json.loads(cli("pins", "--json", *where, "--pack", "pack09", env=env).stdout)
    liger = next(advice for advice in found if advice["package"] == "liger-kernel")
    assert (liger["pin"], liger["refused"]) == ("0.8.2", None)
    done = cli("pins", "torchao", *where, env=env)
    assert done.returncode == 1
    assert "torchao: none can be advised: no release has been run" in done.stdout
    done = cli("pins", "numpy", *where)
    assert done.returncode == 2
    assert "No pack is about 'numpy'" in done.stderr


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("mine.txt", "mine.txt is there, and was not written by this command"),
        ("folder", "folder is a folder"),
        ("nowhere/mine.txt", "nowhere/mine.txt is in a folder that does not exist"),
    ],
)
def test_no_file_of_the_users_is_written_over(cli, tmp_path, output, said):
    (tmp_path / "mine.txt").write_text("torch==2.13.0\n")
    (tmp_path / "folder").mkdir()
    for command in (
        ("pins", "liger-kernel", "--output"),
        ("review", "liger-kernel", "--source", ".", "--base", "a", "--junit"),
    ):
        done = cli(*command, tmp_path / output)
        assert done.returncode == 2
        assert said in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "torch==2.13.0\n"


def test_review_says_which_pack_is_about_something_else(cli):
    done = cli("review", "liger-kernel", "--source", ".", "--base", "a", "--pack", "pack09", "--pack", "pack08")
    assert done.returncode == 2
    assert "pack08 is not about liger-kernel" in done.stderr


def test_what_is_only_about_style_bars_no_release(tmp_path):
    clarity = replace(PACK, kind="refactor")
    advice = pins.advise(PACK.package, [clarity], of("RR"))
    assert (advice.pin, list(advice.constraints()), list(advice.releases)) == (None, [], [])
    assert "no pack looks for a fault" in next(pins.text(advice))
    assert timeline.osv(clarity, runs_of("RR")) is None
