"""The mutants: each pack's mutants.toml is sound, a poison poisons, and a mutant that nobody notices is said."""

import json
import shutil
import subprocess
import sys

import pytest

from common.dev import mutants
from common.errors import UserError
from common.files import ROOT
from common.packs import reportblock
from common.packs.pack import all_packs, find, load
from common.publish import mutants as pages
from common.run import overlay
from common.transforms import Transform, load_fix


@pytest.mark.parametrize("pack", [p for p in all_packs() if p.kind != "selftest"], ids=lambda pack: pack.name)
def test_each_pack_has_mutants_that_can_be_made(pack, tmp_path):
    _, made = mutants.of(pack)
    assert made or not pack.fix.is_file()
    for i, mutant in enumerate(made):
        folder = tmp_path / f"{i}" / pack.folder.name
        shutil.copytree(pack.folder, folder)
        if "_PACK10" in (pack.fix.read_text() if pack.fix.is_file() else ""):
            shutil.copytree(find("pack10").folder, folder.parent / find("pack10").folder.name)
        mutant.make(folder)
        assert mutant.kind == "blunted" or load_fix(folder / "fix.py")


@pytest.mark.parametrize(
    ("place", "formula", "returned"),
    [("", "-value", "[-3, 4]"), ("1", "value * 0", "[3, 0]"), ("", "value", "[3, 4]"), ("0", "value * 1.5", "[4.5, 4]")],
)
def test_a_poison_changes_what_is_returned(tmp_path, place, formula, returned):
    source = "class A:\n    @staticmethod\n    def f():\n        return 3, 4\n\ndef g():\n    return 3\n"
    (tmp_path / "site" / "toy").mkdir(parents=True)
    (tmp_path / "site" / "toy" / "a.py").write_text(source)
    name = "A.f" if place or formula == "value" else "g"
    fix = mutants.poisoned(
        {"toy/a.py": [Transform("none", lambda text: text, optional=True)]}, "toy/a.py", name, place, formula
    )
    overlay.apply_fix(fix, tmp_path / "site", tmp_path / "overlay")
    spaces = {"__name__": "toy_a"}
    import sys
    import types

    module = sys.modules["toy_a"] = types.ModuleType("toy_a")
    spaces = module.__dict__
    exec((tmp_path / "overlay" / "toy" / "a.py").read_text(), spaces)
    found = [*spaces["A"].f()] if name == "A.f" else [spaces["g"](), 4]
    assert json.dumps(found) == returned


def test_a_mutants_file_that_is_not_sound_is_one_sentence(tmp_path):
    folder = tmp_path / find("pack00").folder.name
    shutil.copytree(find("pack00").folder, folder)
    for text, said in (
        ("poisson = 1", "unknown field `poisson`"),
        ("[equivalent]\nnone-such = 'x'", "no transform 'none-such'"),
        ("not toml", "mutants.toml"),
    ):
        (folder / "mutants.toml").write_text(text)
        with pytest.raises(UserError, match=said):
            mutants.of(load(folder))
    (folder / "mutants.toml").write_text('[[wrong]]\nname = "x"\nedits = { "nowhere" = "y" }')
    with pytest.raises(UserError, match="does not hold 'nowhere'"):
        [mutant.make(folder) for mutant in mutants.of(load(folder))[1]]


def test_the_scripts_of_a_wrong_fix_end_at_the_first_check_that_fails(tmp_path):
    script = tmp_path / "repro.py"
    checks = (
        ("signature", "unlike", False),
        ("control", "right", True),
        ("trigger", "wrong", False),
        ("trigger", "later", True),
    )
    for evidence, code, last in (("source", 125, "CHANGED: wrong"), ("none", 0, "trigger   ok       later")):
        told = f'FACTS["evidence"] = "{evidence}"\n'
        script.write_text(reportblock.TEXT + told + "".join(f"check{given}\n" for given in checks))
        mutants._end_at_the_first_failure(tmp_path)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last)


def test_a_mutant_that_is_not_noticed_is_a_survivor(tmp_path, monkeypatch):
    """A wrong fix that is right at what the self-test looks at survives, and the table names it."""
    packs = tmp_path / "packs"
    shutil.copytree(find("pack00").folder, packs / find("pack00").folder.name)
    folder = packs / find("pack00").folder.name
    (folder / "mutants.toml").write_text(
        'release = "1.0"\n[[wrong]]\nname = "right by chance"\nedits = { "sum(xs)" = "2.0 * len(xs)" }\n'
    )
    told = (folder / "pack.toml").read_text().replace('validate = "validate.py"\n', "")  # which would notice it
    (folder / "pack.toml").write_text(told)
    monkeypatch.setattr(mutants, "CACHE", tmp_path / "cache")
    found = mutants.run([load(folder)], jobs=1, done=lambda outcome: None)
    assert [(o.kind, o.killed) for o in found] == [("dropped", True), ("wrong fix", False)]
    only = mutants.run([load(folder)], jobs=1, done=lambda outcome: None, only="by chance")
    assert [(o.name, o.killed) for o in only] == [("right by chance", False)]
    # A call that was stopped: what was noticed is not run again, and a line that was being written is nothing.
    for outcome in found:
        mutants.keep(outcome, "digest")
    with mutants._journal("pack00", "digest").open("ab") as journal:
        journal.write(b'{"pack": "pa')
    before = mutants.kept("pack00", "digest")
    assert before == found[:1] and not mutants.kept("pack00", "another")
    told = []
    assert mutants.run([load(folder)], jobs=1, done=told.append, before=before) == found and told == found[1:]
    mutants.forget("pack00", "digest")
    assert not mutants.kept("pack00", "digest")
    today = {"pack00": "aaaaaaaa", "pack09": "bbbbbbbb", "pack38": "cccccccc"}
    text = pages.page(found, {}, "", today)
    assert "| pack00 | `aaaaaaaa` | 1 of 1 killed | – | 0 of 1 killed | – |" in text
    assert "pack00, wrong fix, right by chance: ABSENT" in text
    # Another pack's line stays, and its own is replaced.
    other = pages.Outcome(pack="pack09", kind="dropped", name="x", killed=False, saw="ABSENT")
    both = pages.page([other], {}, text, today)
    assert text.splitlines()[7] in both and "- pack00, wrong fix, right by chance: ABSENT\n- pack09, dropped, x: ABSENT" in both
    assert pages.page(found, {}, both, today) == both
    # What was never run is named, as is what was run with other scripts.
    assert "Not run as a whole with the scripts and mutants of today; a row above is older: pack38.\n" in both
    changed = pages.page([], {}, both, {**today, "pack09": "dddddddd"})
    assert "Not run as a whole with the scripts and mutants of today; a row above is older: pack09, pack38.\n" in changed
    assert "| pack09 | `bbbbbbbb` |" in changed


def test_the_page_says_which_packs_have_other_scripts_or_mutants_today():
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    assert pages.page([], {}, page, pages.digests(all_packs())) == page


def test_any_change_of_what_decides_changes_the_digest(tmp_path):
    folder = tmp_path / find("pack09").folder.name
    shutil.copytree(find("pack09").folder, folder)
    before = pages.digests([load(folder)])["pack09"]
    assert before == pages.digests([find("pack09")])["pack09"]
    for name in ("repro.py", "fix.py", "validate.py", "mutants.toml"):
        text = (folder / name).read_text()
        (folder / name).write_text(f"{text.rstrip()}  # changed\n")
        assert pages.digests([load(folder)])["pack09"] != before, name
        (folder / name).write_text(text)
    assert pages.digests([load(folder)])["pack09"] == before
