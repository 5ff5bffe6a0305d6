"""What is attached fits a comment, renders, holds no secret and overstates nothing."""

import re
import shutil

import pytest
from helpers import FACTS, judged, make_log
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from common.errors import UserError
from common.files import RESULTS
from common.packs.pack import all_packs, find, load
from common.publish import attach
from common.store import history, receipt

MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
PACK = find("pack09")


def write(*given, **options):
    """No diff is made anew here: the cache has none to be made."""
    return attach.write(*given, remade=None, **options)


def log_of(version, **changes):
    facts = {**FACTS, "version": version, **changes}
    return make_log(facts).replace('"version": "1.0"', f'"version": "{version}"')


def skipped(version):
    return make_log(body=[], exit=None, side="patched", stopped="nothing-to-patch", message="ABSENT").replace(
        '"1.0"', f'"{version}"'
    )


def test_the_top_is_the_verdict_then_the_table(tmp_path, store):
    store(tmp_path, version="0.6.5")
    store(tmp_path, version="0.7.0")
    text = write(PACK, tmp_path)[0].read_text()
    assert text.startswith("**`LigerFusedLinearCrossEntropyFunction"), "the README's bold line"
    assert "Reproduced in liger-kernel 0.6.5 – 0.7.0 (interpreter)." in text
    assert (
        "| 0.6.5 – 0.7.0 (2 releases) | BUG_REPRODUCED | – | interpreter on test-machine | 2 | 5.0e-01 | 1.0e-05 | – |" in text
    )
    assert "(stale)" not in text
    assert "Threads: linkedin/Liger-Kernel#968" in text
    assert "<table>" in MARKDOWN.render(text)
    assert '{"' not in text, "what is for programs is in the receipts"


def test_every_machine_counts_and_no_range_bridges_a_release_that_was_not_run_there(tmp_path, store):
    for version in ("0.6.5", "0.7.0", "0.8.0"):
        store(tmp_path, version=version)
    for version in ("0.6.5", "0.8.0"):
        strong = log_of(version, evidence="device:sm_90").replace("triton-interpreter", "device")
        store(tmp_path, machine="gpu", version=version, log=strong)
    text = write(PACK, tmp_path)[0].read_text()
    table = text.partition("|---|")[2].partition("Errors are relative")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| 0.")]
    assert [(row[0], row[3]) for row in rows] == [
        ("| 0.6.5", "device:sm_90 on gpu, interpreter on test-machine"),
        ("| 0.7.0", "interpreter on test-machine"),
        ("| 0.8.0", "device:sm_90 on gpu, interpreter on test-machine"),
    ]
    assert "0.7.0 (interpreter)" in text


def test_a_machine_that_did_not_run_the_fix_lends_it_no_evidence(tmp_path, store):
    store(tmp_path, machine="cpu")
    absent = {
        **FACTS,
        "verdict": "ABSENT",
        "checks": [FACTS["checks"][0], judged(FACTS["checks"][1], error=1e-7)],
    }
    fixed = make_log(
        {**absent, "file": "<overlay>/toy/__init__.py", "version": "0.7.0"}, sentinel="FIX_VALIDATED", exit=0, side="patched"
    )
    store(tmp_path, machine="cpu", side="patched", log=fixed.replace('"version": "1.0"', '"version": "0.7.0"'))
    store(tmp_path, machine="gpu")
    text = write(PACK, tmp_path)[0].read_text()
    assert "| BUG_REPRODUCED; as released alone: interpreter on gpu | FIX_VALIDATED | interpreter on cpu | 2 |" in text
    assert len(list((tmp_path / "attach" / PACK.name).glob("*.patched.json"))) == 1


def test_machines_that_disagree_are_told(tmp_path, store):
    store(tmp_path, version="0.7.0")
    right = log_of("0.7.0", verdict="ABSENT", evidence="device:sm_90").replace("triton-interpreter", "device")
    right = (
        right.replace("BUG_REPRODUCED", "BUG_ABSENT")
        .replace('"exit": 10', '"exit": 0')
        .replace('"error": 0.5, "limit": 1e-05, "ok": false', '"error": 1e-08, "limit": 1e-05, "ok": true')
    )
    path = store(tmp_path, machine="gpu", version="0.7.0", log=right)
    assert receipt.read(path).facts.outcome == "ABSENT"
    assert "| 0.7.0 | BUG_ABSENT; BUG_REPRODUCED on test-machine |" in write(PACK, tmp_path)[0].read_text()


def test_links_lead_somewhere_or_are_words():
    readme = "# x\n\n[#1]: https://github.com/o/r/issues/1\n[pack08]: ../pack08/README.md\n"
    text = "See [validate.py](validate.py), [docs](https://o.r/d), [#1], [pack08] and x[0].\n\n[#1]: https://github.com/o/r/issues/1\n"
    assert attach._linked(text, readme) == (
        "See validate.py, [docs](https://o.r/d), [#1](https://github.com/o/r/issues/1), pack08 and x[0]."
    )


@pytest.mark.parametrize("pack", all_packs(), ids=lambda pack: pack.name)
def test_the_committed_records_make_a_text_of_what_each_release_showed(pack, tmp_path):
    """Each range of the text is in the receipts: as many releases, at the levels and on the machines that it names."""
    if pack.kind == "selftest":
        return
    runs, commits = attach.load(pack, RESULTS, None)
    text = attach.render(pack, runs, commits)
    assert len(text) <= attach.LIMIT
    assert not re.search(r"\]\((?!https?://)", text), "a link that leads nowhere"
    by_release = history.releases(runs)
    assert sum(found.count for found in history.ranges(runs)) == len(by_release)
    for found in history.ranges(runs):
        names = list(by_release)
        for version in names[names.index(found.first) : names.index(found.last) + 1]:
            seen = {(s.evidence, s.machine) for s in by_release[version].get("unpatched", ()) if s.evidence != "none"}
            assert set(found.evidence) <= seen
    assert {s.word for s in commits if s.side == "unpatched"} <= set(re.findall(r"\w+(?:: [\w-]+)?", text)) | {""}


def test_a_history_that_goes_back_and_forth_stays_so(tmp_path, store):
    for version in ("0.5.8", "0.6.3"):
        store(tmp_path, version=version)
    store(
        tmp_path,
        version="0.6.0",
        log=log_of("0.6.0", verdict="CHANGED")
        .replace("BUG_REPRODUCED", "CHANGED: scalar")
        .replace('"exit": 10', '"exit": 125'),
    )
    found = history.ranges(attach.load(PACK, tmp_path, None)[0])
    assert [(r.name, r.unpatched) for r in found] == [
        ("0.5.8", "BUG_REPRODUCED"),
        ("0.6.0", "CHANGED: scalar"),
        ("0.6.3", "BUG_REPRODUCED"),
    ]


def test_files_beside_the_text(tmp_path, store):
    store(tmp_path)
    files = write(PACK, tmp_path)
    names = [path.name for path in files]
    assert names[:2] == ["pack09.md", "repro.py"]
    assert "liger-kernel-0.7.0.unpatched.json" in names
    assert all(path.is_file() for path in files)
    assert (tmp_path / "attach" / "pack09" / "repro.py").read_text() == PACK.script.read_text()


def test_of_many_checks_that_are_ok_and_of_warnings_alike_the_first_are_shown():
    log = "\n".join(
        [
            *(f"[02:20:0{i}] a.cc:227: Warning: merging to granularity 8" for i in range(3)),
            *(f"trigger   ok       case {i}" for i in range(20)),
            "trigger   FAIL     case 20",
            *(f"forgets 0.{i} a token" for i in range(3)),
            "FIX_VALIDATED",
        ]
    )
    shown = attach._readable(log).splitlines()
    assert shown[:2] == [
        "[02:20:00] a.cc:227: Warning: merging to granularity 8",
        "… 2 more that say the same, see the attached log",
    ]
    assert shown[2:15] == [*(f"trigger   ok       case {i}" for i in range(12)), "… 8 more that are ok, see the attached log"]
    assert shown[15:] == ["trigger   FAIL     case 20", *(f"forgets 0.{i} a token" for i in range(3)), "FIX_VALIDATED"]


@pytest.mark.parametrize("size", [10, 100_000, 1_000_000])
def test_it_fits_a_comment_whatever_the_logs_size(tmp_path, store, size):
    body = ["\x1b[31mline `` ` ``` </details> | x\x1b[0m"] * (size // 40)
    for version in PACK.pinned:
        store(tmp_path, version=version, log=log_of(version).replace("some output", "\n".join(body)))
    text = write(PACK, tmp_path)[0].read_text()
    assert len(text) <= attach.LIMIT
    assert "\x1b" not in text
    if size >= 100_000:
        assert "left out to keep the comment short" in text
    html = MARKDOWN.render(text)
    assert html.count("<details>") == html.count("</details>")


@given(st.text(alphabet=st.sampled_from("`~ab\n<>|"), max_size=200))
def test_a_fence_holds_whatever_is_inside(text):
    tokens = MARKDOWN.parse(attach.fenced(text, "text") + "\nafter\n")
    fences = [t for t in tokens if t.type == "fence"]
    assert len(fences) == 1
    assert fences[0].content.rstrip() == text.rstrip()
    assert tokens[-2].content == "after"


def test_planted_secrets_do_not_get_in(tmp_path, store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("USER", "jdoe")
    monkeypatch.setenv("HOME", "/home/jdoe")
    planted = "hunter2hunter2 /scratch/jdoe/y /home/jdoe/x ghp_" + "a" * 36
    store(tmp_path, log=log_of("0.7.0").replace("some output", planted))
    for path in write(PACK, tmp_path):
        text = path.read_text()
        assert "hunter2" not in text
        assert "jdoe" not in text
        assert "ghp_" not in text


@pytest.mark.parametrize("template", attach.TEMPLATES)
def test_each_upstreams_headings_are_filled(tmp_path, store, template):
    store(tmp_path)
    text = write(PACK, tmp_path, template=template)[0].read_text()
    headings = [heading for heading, _ in attach.TEMPLATES[template]]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        between = text.partition(heading)[2]
        assert (between.partition(following)[0] if following else between).strip()


def test_one_machine_can_be_named(tmp_path, store):
    store(tmp_path)
    strong = log_of("0.7.0", evidence="device:sm_90").replace("triton-interpreter", "device")
    store(tmp_path, machine="gpu", log=strong)
    assert "0.7.0 (device:sm_90, interpreter)" in write(PACK, tmp_path)[0].read_text()
    assert "0.7.0 (interpreter)" in write(PACK, tmp_path, machine="test-machine")[0].read_text()
    with pytest.raises(UserError, match="there are from gpu, test-machine"):
        write(PACK, tmp_path, machine="cray")


def test_stale_receipts_say_so(tmp_path, store):
    store(tmp_path, stale=True)
    assert "(stale)" in write(PACK, tmp_path)[0].read_text()


def test_what_cannot_be_written_is_one_sentence(tmp_path, store):
    with pytest.raises(UserError, match=r"no receipt of pack09.*nox -s pack09"):
        write(PACK, tmp_path)
    store(tmp_path)
    with pytest.raises(UserError, match="no bug template for 'numpy'"):
        write(PACK, tmp_path, template="numpy")


def test_a_readme_without_words_of_its_own_is_not_filed(tmp_path, store):
    folder = tmp_path / PACK.folder.name
    shutil.copytree(PACK.folder, folder)
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace(attach.section(text, "Trigger"), "The smallest call that shows it."))
    store(tmp_path / "r")
    with pytest.raises(UserError, match="no words of its own under Trigger"):
        write(load(folder), tmp_path / "r")


def test_errors_are_spoken_of_only_where_some_were_measured(tmp_path, store):
    store(tmp_path)
    text = write(PACK, tmp_path)[0].read_text()
    assert "| bug error | limit | error with the fix |" in text
    assert "Errors are relative, unless the text gives a unit." in text
    checks = [{"role": c["role"], "name": c["name"], "ok": c["role"] != "trigger"} for c in FACTS["checks"]]
    exact = {**FACTS, "checks": checks}
    store(tmp_path, log=make_log(exact))
    text = write(PACK, tmp_path)[0].read_text()
    assert "error with the fix" not in text
    assert "relative" not in text.partition("## ")[0]


def test_nothing_to_patch_and_not_run_are_told_apart(tmp_path, store):
    store(tmp_path, version="0.8.2", log=log_of("0.8.2"))
    store(tmp_path, version="0.8.2", side="patched", log=skipped("0.8.2"))
    assert "nothing to patch" in write(PACK, tmp_path)[0].read_text()
