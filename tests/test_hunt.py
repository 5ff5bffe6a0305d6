"""The hunt on a release that is a few lines: what it finds, what it takes for the same, and what it writes."""

import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from common.cli import main
from common.packs.pack import all_packs, find, load
from common.publish import found
from common.run import hunt

pytest.importorskip("hypothesis")

HUNT = '''
SPACE = {"size": [8, 1, 100], "scale": [1.0, 0.5, -1.0], "mask": [False, True], "dies": [False]}
KNOWN = [{"pack": "pack09", "package": "toy", "how": "off", "options": {"mask": [True]}}]
def eager(**options):
    return True
# --- case ---
def case(function, **options):
    """Whether one case is right."""
    import os
    if function is eager:
        return {"ok": True, "how": "", "error": None}
    if options["scale"] == -1.0:
        return {"ok": None, "how": "no negative scale", "error": None}
    if options["dies"] and options["size"] == 100:
        os.abort()
    if options["mask"]:
        return {"ok": False, "how": "the sum is off", "error": 0.5}
    if options["size"] == 100 and options["scale"] == 0.5:
        return {"ok": False, "how": "raises IndexError: 100", "error": None}
    return {"ok": True, "how": "", "error": None}
'''
REPRO = """
FACTS = {"evidence": "source", "file": __file__, "version": "1.0"}
def release():
    print("what a release prints is no answer")
    return "the release"
"""


@pytest.fixture
def asked(tmp_path):
    """A pool as the command makes it, with this Python in the place of a release's; what hunt.py holds when it is asked for counts."""
    (tmp_path / "hunt.py").write_text(HUNT)
    (tmp_path / "repro.py").write_text(REPRO)
    pools = []

    def start(*more):
        command = [sys.executable, str(hunt.WORKER), str(tmp_path / "hunt.py"), str(tmp_path), *more]
        pools.append(hunt.Pool(lambda: hunt._Worker(command, {"PATH": ""}, tmp_path)))
        return pools[-1]

    yield start
    for pool in pools:
        pool.end()


def test_each_fault_is_found_once_at_its_least(asked, tmp_path):
    (tmp_path / "hunt.py").write_text(HUNT.replace('"dies": [False]', '"dies": [False, True]'))
    told = hunt.hunt(asked(), seed=0, seconds=60, say=lambda line: None)
    assert told.seconds < 30, "it ends when each of the 36 cases was tried"
    finds = {(find.how, tuple(find.differs.items())): find for find in told.finds}
    assert set(finds) == {
        ("the sum is off", (("mask", True),)),
        ("raises IndexError: 100", (("size", 100), ("scale", 0.5))),
        ("dies of SIGABRT", (("size", 100), ("dies", True))),
    }
    assert {find.pack for find in told.finds} == {"pack09", None}
    assert all(find.sure for find in told.finds)
    assert told.ended["not taken"] and told.ended["right"]
    assert told.tried["mask"]["true"] and "-1.0" not in told.tried["scale"]


@pytest.mark.parametrize(
    ("options", "how", "known"),
    [
        ({"softcap": 4.0}, "the loss is off", True),
        ({"softcap": 4.0}, "the gradient of x is off", False),  # the loss is right: another bug
        ({"softcap": 4.0, "layout": "x by columns"}, "the loss is off", False),  # the softcap alone is not enough
        ({"softcap": 0.1}, "the loss is off", False),
        ({"gradient": "0.5", "softcap": 4.0}, "the loss is off", True),  # None: whatever it is
        ({}, "the loss is off", False),
    ],
)
def test_a_find_is_known_only_where_it_is_just_what_the_pack_shows(options, how, known):
    row = {"pack": "pack37", "how": "the loss is off", "options": {"softcap": [4.0, 30.0], "gradient": None}}
    assert hunt._is_known(row, how, options) is known


def test_a_find_explains_no_case_with_other_values(asked, tmp_path):
    """A fault of one layout hides that of another no more, nor one reduction the other."""
    layouts = HUNT.replace('"mask": [False, True]', '"mask": [False, True, "other"]')
    (tmp_path / "hunt.py").write_text(layouts)
    told = hunt.hunt(asked(), seed=0, seconds=60, say=lambda line: None)
    assert {find.differs["mask"] for find in told.finds if "mask" in find.differs} == {True, "other"}


def test_ctrl_c_keeps_what_was_found(asked):
    pool, cases = asked(), []

    class Stopped:
        told = pool.told

        def ask(self, options, *, cover=False):
            cases.append(options)
            if len(cases) > 15:
                raise KeyboardInterrupt
            return pool.ask(options, cover=cover)

    told = hunt.hunt(Stopped(), seed=0, seconds=60, say=lambda line: None)
    assert told.stopped and told.finds


def test_the_same_seed_finds_the_same_in_the_same_order(asked):
    said = [[], []]
    for lines in said:
        hunt.hunt(
            asked(), seed=3, seconds=60, say=lambda line, lines=lines: lines.append(line) if "cases" not in line else None
        )
    assert said[0] == said[1]


def test_the_definition_has_no_fault(asked):
    assert hunt.hunt(asked("--reference"), seed=0, seconds=60, say=lambda line: None).finds == []


def test_where_the_plainest_case_is_wrong_nothing_else_is_looked_for(asked, tmp_path):
    (tmp_path / "hunt.py").write_text(HUNT.replace('if options["mask"]:', "if True:"))
    told = hunt.hunt(asked(), seed=0, seconds=60, say=lambda line: None)
    assert [dict(find.differs) for find in told.finds] == [{}]
    assert told.seconds < 30


def test_a_release_that_cannot_be_loaded_is_said_in_a_sentence(asked, tmp_path):
    from common.errors import UserError

    (tmp_path / "repro.py").write_text("raise ImportError('no libcuda')")
    with pytest.raises(UserError, match="cannot be hunted: ImportError: no libcuda"):
        asked()


@pytest.mark.parametrize("how", ["the loss is off", "dies of SIGSEGV"])
def test_a_find_is_written_as_a_pack_that_loads(tmp_path, how):
    given = hunt.Find(plain={"V": 70, "softcap": None}, differs={"softcap": 4.0}, how=how, error=None, pack=None, sure=True)
    place = found.write(given, find("pack32"), "0.8.3", 7, tmp_path, 90)
    pack = load(place)
    assert (pack.name, pack.package, pack.pinned, pack.expectation("0.8.3").outcome) == (
        "pack90",
        "liger-kernel",
        ("0.8.3",),
        "REPRODUCED",
    )
    text = pack.script.read_text()
    compile(text, str(pack.script), "exec")
    assert "liger-kernel==0.8.3" in text
    assert "'softcap': 4.0" in text
    assert "# --- contract/1" not in text
    assert ("--case" in text) == how.startswith("dies")
    assert "no-api" in text or how.startswith("dies"), "what the release does not take shows nothing"
    for section in ("## Trigger", "## Fix", "## Scope claimed", "## Scope NOT claimed"):
        assert section in (place / "README.md").read_text()


def test_a_find_in_a_wheel_of_ones_own_does_not_accuse_the_release(tmp_path):
    given = hunt.Find(plain={"V": 70}, differs={"V": 2}, how="the loss is off", error=None, pack=None, sure=True)
    (wheel := tmp_path / "liger_kernel-0.8.3-py3-none-any.whl").write_bytes(b"mine")
    place = found.write(given, find("pack32"), "0.8.3", 7, tmp_path, 90, wheel)
    for name in ("repro.py", "README.md"):
        text = " ".join((place / name).read_text().split())
        assert "in liger_kernel-0.8.3-py3-none-any.whl of sha256" in text, name
        assert "which was not compared with the index" in text, name


@pytest.mark.parametrize("name", sorted(pack.name for pack in all_packs() if pack.hunt))
def test_what_is_written_has_all_that_it_uses(name, tmp_path):
    given = hunt.Find(plain={"a": 1}, differs={"a": 2}, how="the out is off", error=None, pack=None, sure=True)
    script = found.write(given, find(name), find(name).pinned[0], 0, tmp_path, 90) / "repro.py"
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F822,F823", script],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["liger kernel"], "is not a package and one version"),
        (["numpy==2.0"], "No pack has a hunt.py for numpy; there are some for"),
        (["megatron-core"], "give --pack pack20, pack36"),
        (["megatron_core"], "give --pack pack20, pack36"),
        (["liger_kernel==0.8.5", "--pack", "pack20"], "give --pack pack32"),
        (["liger-kernel==0.8.5", "--minutes", "0"], "is not a duration"),
        (["liger-kernel==0.8.5", "--minutes", "inf"], "is not a duration"),
    ],
)
def test_mistakes_are_said_in_a_sentence(capsys, words, said):
    assert main(["hunt", *words]) == 2
    assert said in capsys.readouterr().err


def test_each_hunt_says_what_it_varies_with_the_plainest_value_first():
    scripts = {(pack.folder / pack.hunt).resolve() for pack in all_packs() if pack.hunt}
    assert scripts
    for script in scripts:
        text = Path(script).read_text()
        assert text.count("# --- case ---\n") == 1
        # torch is not there: what the lists ask of it.
        space = {"device": "cpu", "HALF": "float16", "plainest": "fp32", "torch": types.SimpleNamespace(float32="fp32")}
        exec(textwrap.dedent(text[text.index("SPACE = ") : text.index("#: Finds")]), space)
        assert all(len(values) > 1 for values in space["SPACE"].values())
