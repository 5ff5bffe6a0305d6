"""pack.toml is validated with errors that name file and key; every pack keeps the contract."""

import ast
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from common import transforms
from common.errors import UserError
from common.files import PACKS, ROOT
from common.install import lanes
from common.packs import reportblock, scaffold
from common.packs.pack import all_packs, find, load
from common.publish import attach
from common.run.plan import expected, planned

GOOD = """
title = "t"
package = "toy"
upstream = "o/r"
kind = "crash"
lanes = ["device"]
pinned = ["1.0"]
[expected]
"<2" = { verdict = "REPRODUCED", why = "because" }
">=2" = { verdict = "ABSENT", why = "because" }
"""


def write(tmp_path, text, name="pack50_toy"):
    folder = tmp_path / name
    folder.mkdir()
    if text is not None:
        (folder / "pack.toml").write_text(text)
    return folder


def test_a_good_one_is_read(tmp_path):
    pack = load(write(tmp_path, GOOD))
    assert (pack.name, pack.package, pack.timeout) == ("pack50", "toy", 180)
    assert pack.expectation("1.5").outcome == "REPRODUCED"
    assert pack.expectation("2.0rc1") is None  # PEP 440: a candidate of the boundary is in neither range
    assert pack.expectation("3.0.dev1").outcome == "ABSENT"


def test_pins_of_a_lane_stand_in_for_the_packs_and_a_variants_for_both(tmp_path):
    keys = """pinned = ["1.0"]
requires = ["torch==2.0", "numpy"]
pins = { device = ["torch==2.1"] }
variants = { old = { arguments = [], requires = ["torch==1.9"] } }
"""
    pack = load(write(tmp_path, GOOD.replace('pinned = ["1.0"]', keys, 1)))
    assert pack.varied("", "device").requires == ("torch==2.1", "numpy")
    assert pack.varied("old", "device").requires == ("torch==1.9", "numpy")
    assert pack.requires == ("torch==2.0", "numpy")


def test_an_upstream_that_asks_for_a_newer_python_is_told_of_it_where_this_one_is_older(tmp_path, monkeypatch):
    folder = write(tmp_path, GOOD.replace('pinned = ["1.0"]', 'pinned = ["1.0"]\npython = "3.12"', 1))
    for version, said in (((3, 11, 7), "3.12"), ((3, 12, 0), None), ((3, 13, 1), None)):
        monkeypatch.setattr("sys.version_info", version)
        assert load(folder).python == said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "t"', "", "missing required field `title`"),
        ('title = "t"', "title = 'a | b'", "title: Expected `str` matching regex"),
        ('title = "t"', "title = '<b>'", "title: Expected `str` matching regex"),
        ('title = "t"', "title = 3", "title: Expected `str`, got `int`"),
        ('kind = "crash"', 'kind = "cosmic"', "kind: Invalid enum value 'cosmic'"),
        ('why = "because" }', 'why = "because", lane = "gpu" }', "gpu is none of the pack's lanes: device"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nvalidate_lane = "tilelang-cpu"', "`validate` is missing"),
        ('pinned = ["1.0"]', 'pinned = ["one"]', "not a version"),
        ('pinned = ["1.0"]', "pinned = [1.0]", "pinned\\[0\\]: Expected `str`"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\ntimeout = 0', "timeout: Expected `float` > 0"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\ntimeout = true', "timeout: Expected `float`, got `bool`"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nrequires = ["torch=="]', "invalid requirement"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\npinnned = []', "unknown field `pinnned`"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nvariants = { A = [] }', "variants"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\npins = { nowhere = [] }', "pins.nowhere is not a version specifier"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\npython = 3.12', "python: Expected `str"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\npython = "3"', "python: Expected `str` matching"),
        ('"<2" =', '"lower than 2" =', "not a version specifier"),
        ('"<2" = { verdict = "REPRODUCED", why = "because" }', '"<2" = "REPRODUCED"', "expected"),
        ('"<2" = { verdict = "REPRODUCED"', '"<2" = { verdict = "BROKEN"', "expected.*matching"),
        ('"<2" = { verdict = "REPRODUCED"', '"<2" = { verdict = "ERROR"', "for the self-test"),
        ('"<2" = { verdict = "REPRODUCED"', '"<2" = { verdict = "UNTESTABLE"', "must say why"),
        ('"<2" = { verdict = "REPRODUCED"', '"<2" = { verdict = "CHANGED"', "must say why"),
        ('"<2" =', '"<1" =', "which no \\[expected\\] range holds"),
        ('"<2" =', '"<=2" =', None),
        ("title", "title title", "not valid TOML"),
        ('"<2" = { verdict = "REPRODUCED"', '"<2" = { verdict = "REPRODUCED\\n"', r"expected.<2.verdict"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nprefix = "src/\\n"', "prefix"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nvariants = { a = { sorce = "x" } }', "variants.a: .*known are arguments, lane"),
        (
            'pinned = ["1.0"]',
            'pinned = ["1.0"]\nvariants = { a = { pinned = true } }',
            "'pinned' is for a variant with a source",
        ),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nvalidate = "../../x.py"', "validate"),
        ('pinned = ["1.0"]', 'pinned = ["1.0"]\nthreads = ["https://x/\\n"]', "threads"),
    ],
)
def test_a_bad_one_is_refused_by_file_and_key(tmp_path, old, new, said):
    folder = write(tmp_path, GOOD.replace(old, new, 1))
    if said is None:  # ranges that overlap are found when a release falls into both
        with pytest.raises(UserError, match="more than one"):
            load(folder).expectation("2")
        return
    with pytest.raises(UserError, match=said) as caught:
        load(folder)
    assert "pack50_toy/pack.toml" in str(caught.value)


def test_no_file_and_no_pack(tmp_path):
    with pytest.raises(UserError, match=r"pack50_toy/pack\.toml cannot be read"):
        load(write(tmp_path, None))
    with pytest.raises(UserError, match="There is no pack '77'"):
        find("77")
    assert find("9") == find("pack09") == find("pack09_liger_reduction_none")


def test_what_a_lane_alone_can_judge_is_untestable_in_others(tmp_path):
    text = GOOD.replace('lanes = ["device"]', 'lanes = ["device", "te-cpu"]')
    pack = load(write(tmp_path, text.replace('why = "because" }', 'why = "because", lane = "device" }', 1)))
    at = {lane: [expected(planned(pack, "", lane), v, "unpatched")[0] for v in ("1.0", "2.0")] for lane in pack.lanes}
    assert at == {"device": ["REPRODUCED", "ABSENT"], "te-cpu": ["UNTESTABLE: no-device", "ABSENT"]}
    measures = find("pack42")
    at = {lane: expected(planned(measures, "", lane), "0.18.0", "unpatched")[0] for lane in measures.lanes}
    assert at == {"device": "MEASURED", "cpu": "UNTESTABLE: no-device"}


def test_what_applies_a_fix_is_hashed_with_it():
    pack = find("pack09")
    assert "transforms" in pack.hashes("patched")
    assert "transforms" not in pack.hashes("unpatched")


def test_validate_in_a_lane_of_its_own_is_hashed_with_that_lane():
    pack = find("pack07")
    names = {
        side: {path.name for path in lanes.files_of(pack, "tilelang-codegen", side, "")} for side in ("unpatched", "patched")
    }
    assert "tilelang_cpu.py" in names["patched"]
    assert "tilelang_cpu.py" not in names["unpatched"]
    assert lanes.files_of(pack, "device", "patched", "") == [], "a GPU runs both"
    assert pack.checked_in("device") == "device"
    assert "tilelang==0.1.15" in pack.varied("", pack.checked_in("tilelang-codegen")).requires
    assert "tilelang==0.1.8" in pack.varied("", "tilelang-codegen").requires


def test_validate_in_a_lane_without_pins_of_its_own_leaves_the_unpatched_side_alone():
    pack = find("pack09")
    names = {
        side: {path.name for path in lanes.files_of(pack, "triton-interpreter", side, "")} for side in ("unpatched", "patched")
    }
    assert "triton_interpreter_math.py" in names["patched"] - names["unpatched"]
    assert pack.hashes("unpatched") == replace(pack, validate_lane=None).hashes("unpatched")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def check_contract(folder):
    """What every pack keeps, a new one included."""
    pack = load(folder)
    script = pack.script.read_text()
    others = [path.read_text() for path in folder.glob("*.py") if path != pack.script]
    assert not reportblock.another(script, others), "python -m common tables writes the report block"
    metadata = re.search(r"^# /// script\n((?:#.*\n)+)# ///$", script, re.MULTILINE)
    assert metadata, "repro.py runs alone: it needs a PEP 723 header"
    needs = [Requirement(r) for r in re.findall(r'"([^"]+)"', metadata[1].partition("dependencies")[2])]
    assert pack.as_files or pack.package in [r.name for r in needs], "only what can be installed can be asked for"
    pins = {Requirement(r).name: str(Requirement(r).specifier) for r in pack.requires}
    for requirement in needs:
        if requirement.name in {"torch", "triton"} - {pack.package} and requirement.specifier:
            assert str(requirement.specifier) == pins.get(requirement.name), "what the header pins pack.toml pins the same"
    own = {"megatron" if r.name == "megatron-core" else r.name.replace("-", "_") for r in needs} | {"triton", pack.imports}
    assert set(imported(pack.script)) <= own | set(sys.stdlib_module_names), (
        "repro.py imports what its header names, and nothing of ours"
    )
    assert all(lane in lanes.known() for lane in pack.lanes)
    fix = transforms.load_fix(pack.fix) if pack.fix.exists() else {}
    names = [t.name for transforms in fix.values() for t in transforms]
    assert len(names) == len(set(names))
    assert all(names)
    readme = (folder / "README.md").read_text()
    for heading in ("Trigger", "Fix", "Scope claimed", "Scope NOT claimed"):
        assert attach.section(readme, heading), f"README.md needs a section '## {heading}'"
    # A pack without fix.py says which release has the fix, or why there is none.
    reasons = "no transform of installed source reaches", "this pack has no fix, for"
    is_said = pack.kind == "claim" or pack.fixed.get("release")
    assert fix or is_said or any(reason in attach.section(readme, "Fix") for reason in reasons)
    assert readme.splitlines()[2].startswith("**"), "README.md starts with one bold line: the verdict"


@pytest.mark.parametrize("pack", all_packs(), ids=lambda pack: pack.name)
def test_every_pack_keeps_the_contract(pack):
    check_contract(pack.folder)


def test_a_new_pack_keeps_the_contract(tmp_path):
    files = scaffold.new_pack(21, "mimo_reduce", "mamba-ssm", tmp_path)
    assert {path.name for path in files} == {"repro.py", "fix.py", "pack.toml", "README.md"}
    check_contract(tmp_path / "pack21_mimo_reduce")


@pytest.mark.parametrize(
    ("number", "slug", "package", "said"),
    [
        (0, "x", "toy", "two digits"),
        (100, "x", "toy", "two digits"),
        (21, "Bad-Slug", "toy", "not a slug"),
        (21, "../x", "toy", "not a slug"),
        (21, "x", "no such name!", "not a package"),
        (9, "again", "toy", "taken by pack09"),
    ],
)
def test_a_new_pack_refuses(number, slug, package, said):
    with pytest.raises(UserError, match=said):
        scaffold.new_pack(number, slug, package, PACKS)


def test_a_check_that_two_packs_share_is_one_of_both_packs_files():
    pack = find("pack10")
    assert pack.deep_check("") == find("pack11").folder / "validate.py"
    assert set(pack.hashes("patched")) >= {"repro.py", "pack11/validate.py"}
    assert "pack11/validate.py" not in pack.hashes("unpatched")


def test_the_worst_of_several_errors_keeps_a_nan():
    """max(1e-7, nan) is 1e-7 in Python, so that a NaN in a later tensor would be right."""
    scripts = [path for pack in all_packs() for path in pack.folder.glob("*.py") if path.stem in ("repro", "validate")]
    assert [path for path in scripts if re.search(r"\bmax\(.*\bnorm\(\).* for ", path.read_text(encoding="utf-8"))] == []


def test_a_script_finds_an_editable_install():
    """Its files are not beside its metadata, so that to look for them there would make it an old release."""
    found = [path for path in PACKS.glob("*/repro.py") if "locate_file(" in path.read_text(encoding="utf-8")]
    beside = {path.parent.name[4:6] for path in found} - {"25"}  # which looks for nvcc
    docs = (ROOT / "docs" / "checkouts.md").read_text(encoding="utf-8")
    assert beside == set(re.findall(r"\d\d", re.search(r"editable install .* but for those of packs (.*?):", docs)[1]))


def test_a_script_is_one_page():
    lines = {pack.name: reportblock.own(pack.script.read_text()).count("\n") for pack in all_packs()}
    assert {name: count for name, count in lines.items() if count > 100} == {}


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ('check("control", "x", False, error=0.0, limit=1.0)', "CHANGED: TypeError"),  # two answers
        ('check("control", "x", error=0.0)', "CHANGED: TypeError"),  # no limit
        ('check("control", "x", lambda: False)', "CHANGED: TypeError"),
        ('check("control", "x", (each for each in ()))', "CHANGED: TypeError"),
        ('check("control", "x", "False")', "CHANGED: TypeError"),
        ('check("control", "x", 1)', "CHANGED: TypeError"),
        ('check("control", "x", False); finish("MEASURED")', "CHANGED: x"),
        ('check("control", "x", True); finish("MEASURED")', "MEASURED"),
        ('check("control", "x", True); finish()', "CHANGED: nothing was checked"),
        ('check("control", "x", error=math.nan, limit=1.0); check("trigger", "y", True); finish()', "CHANGED: x"),
    ],
)
def test_the_report_block_takes_no_check_that_is_no_answer(tmp_path, lines, word):
    script = tmp_path / "repro.py"
    script.write_text(f"{reportblock.TEXT}\n{lines}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == word
    assert done.returncode == (0 if word == "MEASURED" else 125)
