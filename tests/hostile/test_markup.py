"""What a log or a receipt says is shown as text: no markup, mention, image, link or control code of its own."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import msgspec
import pytest
from helpers import FACTS, make_log

from common.errors import UserError
from common.packs import pack
from common.packs.pack import find
from common.publish import attach, site, timeline
from common.scrub import md, plain
from common.store import history
from common.store.grade import grade

pytestmark = pytest.mark.hostile

PACK = find("pack09")
EVIL = [
    "![x](https://evil.example/x.png)",
    "<img src=x onerror=alert(1)>",
    "@torvalds @org/team",
    "owner/name#12 GH-3",
    "[click](javascript:alert(1))",
    "https://evil.example",
    "| a | b |",
    "</details><script>alert(1)</script>",
    "`code` **bold** _x_ ~~y~~",
    "\x1b[31mred\x1b]0;title\x07",
    "a\u202egnp.exe",
    "\u0000\u0001\u009b31m",
    "# heading",
    "&#64;torvalds",
]


def of(reason):
    return make_log({**FACTS, "verdict": "CHANGED", "version": "0.7.0"}, sentinel=f"CHANGED: {reason}", exit=125).replace(
        '"version": "1.0"', '"version": "0.7.0"'
    )


@pytest.mark.parametrize("evil", EVIL)
def test_a_reason_is_text_wherever_it_is_shown(evil, tmp_path, store):
    log = of(evil)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", str(grade(log)))
    path = store(tmp_path, log=log)
    # And as somebody may have written it into a receipt by hand.
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"]["reason"] = evil
    path.write_text(json.dumps(document))
    stored = history.load(tmp_path, [PACK])
    for text in (timeline.markdown([PACK], stored), attach.render(PACK, stored.runs)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        outside = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        for word in ("![x]", "<img", "@torvalds", "javascript:", "evil.example", "<script", "**bold**", "&#64;", "name#12"):
            assert word not in outside, outside
    feed = timeline.atom([PACK], stored)
    ET.fromstring(feed.split("?>", 1)[1])
    msgspec.json.encode(timeline.document([PACK], stored))


@pytest.mark.parametrize("evil", EVIL)
def test_names_of_checks_and_files_are_plain(evil):
    facts = {**FACTS, "checks": [{**c, "name": evil} for c in FACTS["checks"]], "metrics": {evil: evil}}
    verdict = grade(make_log(facts))
    shown = json.dumps([verdict.passed, verdict.failed, dict(verdict.proofs), verdict.metrics], ensure_ascii=False)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", shown)


@pytest.mark.parametrize("evil", EVIL)
def test_the_site_escapes(evil, tmp_path, store):
    pytest.importorskip("matplotlib")
    path = store(tmp_path, log=of("x"))
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"].update(reason=evil, lane="triton-interpreter")
    path.write_text(json.dumps(document))
    site.build([PACK], history.load(tmp_path, [PACK]), tmp_path / "site")
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        assert "<img src=x" not in text
        assert "<script>alert" not in text
        assert "\x1b" not in text


@pytest.mark.parametrize("evil", EVIL)
def test_md_is_idle_on_ordinary_words_and_fences_the_rest(evil):
    for word in ("CHANGED: scalar", "UNTESTABLE: no-api", "BUG_REPRODUCED", "2.14.0 (3 releases)", "nothing to patch"):
        assert md(word) == word
    if md(evil).isalnum() or md(evil) == "agnp.exe":
        return  # Nothing is left of it.
    assert md(evil).startswith("`") and md(evil).endswith("`")
    assert "`" not in md(evil)[1:-1]
    assert "|" not in md(evil)


@pytest.mark.parametrize(
    "thread", ["javascript:alert(1)", "data:text/html,x", "//evil.example", "https://x'><script>", "x y#1", "a/b#1 @me"]
)
def test_a_thread_is_an_issue_or_an_address(thread, tmp_path):
    folder = tmp_path / "pack98_x"
    folder.mkdir()
    text = (PACK.folder / "pack.toml").read_text()
    (folder / "pack.toml").write_text(
        re.sub(r"^threads = .*$", lambda _: f"threads = [{json.dumps(thread)}]", text, flags=re.MULTILINE)
    )
    with pytest.raises(UserError, match="threads"):
        pack.load(folder)


def test_errors_reach_the_terminal_without_control_codes(capsys):
    from common.cli.common import complain

    complain("bad \x1b[31mname\x1b]0;t\x07 \x9b31m")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", capsys.readouterr().err)


def test_a_log_in_the_comment_has_no_control_codes():
    assert attach._tail("a\x1b[31mb\x1b]0;t\x07c\x9b31m\u202ed\n", 1000)[0].isprintable()


def test_svg_labels_are_no_formulas(tmp_path, store):
    from common.publish import plot

    pytest.importorskip("matplotlib")
    log = make_log(
        {**FACTS, "version": "0.7.0", "metrics": {"S=2048, GiB": {"y": 1.0}, "S=1024, GiB": {"$\\frac{1}{0$": 1.0, "x": "NaN"}}}
    )
    path = store(tmp_path, log=log.replace('"version": "1.0"', '"version": "0.7.0"'))
    seen = history.load(tmp_path, [PACK]).runs[0]
    assert path.is_file()
    patched = replace(
        seen, cell=replace(seen.cell, side="patched", variant="v"), verdict=replace(seen.verdict, outcome="MEASURED")
    )
    assert dict(plot.curves([patched], "title")) == {}
    log = log.replace(', \\"x\\": \\"NaN\\"', "").replace(', "x": "NaN"', "")
    path = store(tmp_path, log=log.replace('"version": "1.0"', '"version": "0.7.0"'))
    seen = history.load(tmp_path, [PACK]).runs[0]
    patched = replace(
        seen, cell=replace(seen.cell, side="patched", variant="v"), verdict=replace(seen.verdict, outcome="MEASURED")
    )
    assert "<svg" in dict(plot.curves([patched], "title"))["memory"]


def test_plain_keeps_what_people_write():
    assert plain("größer → 3 × 10⁻⁵, 日本") == "größer → 3 × 10⁻⁵, 日本"
    assert len(plain("x" * 1000)) == 200


def test_the_last_line_of_a_script_that_prints_no_verdict_is_plain():
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", str(grade(make_log(body=["\x1b]0;pwned\x07"], exit=1))))
    two = ["CHANGED: \x1b[31ma", "CHANGED: \x1b[31mb"]
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", str(grade(make_log(body=two, exit=125))))


@pytest.mark.parametrize("word", ["GH-3", "9ac26bb8" * 5, "0123abc"])
def test_what_github_links_by_itself_is_code(word):
    assert md(word) == f"`{word}`"


def test_brackets_are_no_markup_of_the_terminal(cli, tmp_path):
    done = cli("run", "pack00", "--release", "1.0", "--results", tmp_path / "[" / "x]", results=False)
    assert done.returncode == 0, done.stdout + done.stderr
