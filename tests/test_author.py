"""What the author of a pack asks for: a proposal, the fix's diff, one side on the terminal, and their mistakes told as theirs."""

import dataclasses

import pytest
from packaging.specifiers import SpecifierSet
from test_cli import cache  # noqa: F401
from test_review import row

from common.cli import author, report
from common.errors import AnchorError, UserError
from common.install import lanes
from common.packs import scaffold
from common.packs.pack import load, tomllib
from common.run import overlay
from common.run.runner import _last_error
from common.store.cell import Cell
from common.transforms import load_fix, replace


def seen(version, outcome, message=""):
    return dataclasses.replace(
        row(outcome, message), cell=Cell(pack="pack50", dist="toy", version=version, side="unpatched"), receipt=object()
    )


def test_neighbours_that_show_the_same_are_one_range_each_and_hold_every_release_once():
    rows = [
        seen("0.9", "UNTESTABLE", 'ModuleNotFoundError: No module named "x"'),
        seen("1.0rc1", "REPRODUCED"),
        seen("1.0", "REPRODUCED"),
        seen("1.1rc1", "REPRODUCED"),
        seen("1.1", "ABSENT"),
        seen("2.0", "REPRODUCED"),
        seen("2.1", "ABSENT"),
    ]
    lines = list(author.proposed(rows))
    told = tomllib.loads("\n".join(lines))
    assert told["pinned"] == ["2.0", "2.1"]
    assert [each["verdict"] for each in told["expected"].values()] == [
        "UNTESTABLE: why",
        "REPRODUCED",
        "ABSENT",
        "REPRODUCED",
        "ABSENT",
    ]
    for each in rows:
        assert sum(SpecifierSet(key).contains(each.cell.version, prereleases=True) for key in told["expected"]) == 1
    assert 'No module named "x"' in next(iter(told["expected"].values()))["why"]


def test_that_no_release_can_be_imported_is_no_range_to_believe():
    no = seen("1.0", "UNTESTABLE", "No module named 'six'.")
    no = dataclasses.replace(no, verdict=dataclasses.replace(no.verdict, reason="import"))
    lines = list(author.proposed([no, dataclasses.replace(no, cell=dataclasses.replace(no.cell, version="1.1"))]))
    assert lines[0] == "# No release can be imported (No module named 'six'): does 'requires' lack something?"
    assert tomllib.loads("\n".join(lines))["expected"]


def test_one_outcome_is_one_range_and_none_is_said():
    assert list(author.proposed([seen("1.0", "ABSENT"), seen("2.0", "ABSENT")]))[1].startswith('">=1.0" = ')
    with pytest.raises(UserError, match="nothing can be proposed"):
        author.proposed([]).__next__()


def test_a_proposal_is_printed_and_nothing_is_red(cli, cache):  # noqa: F811
    done = cli("run", "pack00", "--release", "1.0", "--release", "2.0", "--propose", cache=cache)
    assert done.returncode == 0, done.stderr
    assert "[expected]" in done.stdout
    assert "✗" not in done.stdout


def test_the_fix_of_a_release_is_a_diff_on_standard_output_alone(cli, cache):  # noqa: F811
    done = cli("run", "pack00", "--diff", "1.0", cache=cache)
    assert done.returncode == 0
    assert done.stdout.startswith("--- a/")
    assert "pack00" in done.stderr


def test_a_side_on_the_terminal_says_how_it_runs_and_keeps_its_files(cli, cache):  # noqa: F811
    done = cli("run", "pack00", "--release", "1.0", "--debug", "patched", cache=cache)
    assert "FIX_VALIDATED" in done.stdout
    assert "REPRODUCER_SIDE=patched" in done.stdout
    assert done.returncode == 0
    assert list((cache / "debug" / "pack00" / "overlay").rglob("*.py"))
    asked = cli("run", "pack00", "--release", "1.0", "--debug", cache=cache, input="")
    assert asked.returncode == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FIX = {", "has a syntax error in line 1"),
        ("FOX = {}", "has no FIX: a dictionary"),
        ("FIX = [1]", "FIX has to be a dictionary"),
        (
            "from common.transforms import replace\nFIX = {'a.py': (replace('x', '(', ''),)}",
            "anchor of 'x' is no regular expression",
        ),
        (
            "from common.transforms import replace\nFIX = {'a.py': (replace('x', 'a', ''), replace('x', 'b', ''))}",
            "two transforms called 'x'",
        ),
        ("import nowhere", "No module named 'nowhere'"),
    ],
)
def test_a_mistake_in_a_fix_is_named(tmp_path, text, said):
    (tmp_path / "fix.py").write_text(text)
    with pytest.raises(UserError) as told:
        load_fix(tmp_path / "fix.py")
    assert said in str(told.value)


def test_a_transform_that_changes_nothing_is_named(tmp_path):
    (tmp_path / "site/toy").mkdir(parents=True)
    (tmp_path / "site/toy/a.py").write_text("x = 1\n")
    fix = {"toy/a.py": (replace("same", r"x = \d", lambda match: match[0]),)}
    with pytest.raises(AnchorError, match="'same' changes nothing"):
        overlay.apply_fix(fix, tmp_path / "site", tmp_path / "overlay")


def test_a_lane_that_is_none_is_named(tmp_path):
    scaffold.new_pack(50, "x", "python-dateutil", tmp_path, lane="cpu")
    toml = tmp_path / "pack50_x/pack.toml"
    assert lanes.choose(load(toml.parent)) == "cpu"
    toml.write_text(toml.read_text().replace('"cpu"', '"gpu"'))
    with pytest.raises(UserError, match="names a lane 'gpu'; there are cpu, device"):
        lanes.choose(load(toml.parent))


def test_a_package_that_is_imported_by_another_name_says_so(tmp_path):
    scaffold.new_pack(50, "x", "python-dateutil", tmp_path, title="the first line", lane="cpu")
    folder = tmp_path / "pack50_x"
    assert load(folder).imports == "python_dateutil"
    (folder / "pack.toml").write_text(
        (folder / "pack.toml").read_text().replace('# imports = "python_dateutil"', 'imports = "dateutil"')
    )
    assert load(folder).imports == "dateutil"
    assert load(folder).title == "the first line"
    assert "the first line" in (folder / "repro.py").read_text()
    with pytest.raises(UserError, match="title is one line"):
        scaffold.new_pack(51, "x", "toy", tmp_path, title='a "word"')
    for title in ("a | b", "<b>x"):
        with pytest.raises(UserError, match="title is one line"):
            scaffold.new_pack(51, "x", "toy", tmp_path, title=title)


def test_a_diff_that_cannot_be_read_and_a_broken_fix_are_noticed_before_anything_runs(cli, cache, tmp_path):  # noqa: F811
    for arguments in (["--patch", "/nowhere.diff"], ["--without", "nothing"]):
        done = cli("run", "pack00", "--release", "1.0", *arguments, cache=cache)
        assert done.returncode == 2
        assert done.stdout == ""


def test_what_a_script_died_of_and_its_log_are_in_the_line():
    said = str(next(report.surprises([row("CHANGED", "TypeError: must be real number, not str")])))
    assert "saw CHANGED: why (TypeError: must be real number, not str: check() takes a number as its error)" in said
    assert _last_error(
        "Traceback …\n  File \"x\"\ntorch.OutOfMemoryError: no\nModuleNotFoundError: No module named 'six'\n{}\n"
    ) == ("ModuleNotFoundError: No module named 'six'")
    assert _last_error("control ok\n") == ""
