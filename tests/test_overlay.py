"""Transforms find their anchor once or say so; a diff applies back; somebody else's diff is judged on the same copy."""

import subprocess
import textwrap

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import AnchorError, UserError
from common.install.integrity import distribution
from common.run.overlay import apply_fix, apply_patch, changed, diff, drop, undefined
from common.transforms import insert_after, insert_before, replace

SOURCE = "def total(xs):\n    return xs[0] * len(xs)\n"
FIX = {"toy/__init__.py": (replace("sum", r"xs\[0\] \* len\(xs\)", "sum(xs)"),)}
GIT_DIFF = """diff --git a/src/toy/__init__.py b/src/toy/__init__.py
--- a/src/toy/__init__.py
+++ b/src/toy/__init__.py
@@ -1,2 +1,2 @@
 def total(xs):
-    return xs[0] * len(xs)
+    return sum(xs)
diff --git a/test/test_toy.py b/test/test_toy.py
--- a/test/test_toy.py
+++ b/test/test_toy.py
@@ -1 +1 @@
-assert True
+assert toy.total([1, 2]) == 3
"""


@pytest.fixture
def site(tmp_path):
    """site-packages with one distribution, toy 1.0."""
    site = tmp_path / "site"
    (site / "toy" / "__pycache__").mkdir(parents=True)
    (site / "toy" / "__init__.py").write_text(SOURCE)
    (site / "toy" / "data.txt").write_text("no newline at the end")
    (site / "toy" / "__pycache__" / "x.pyc").write_bytes(b"\0")
    info = site / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "toy/__init__.py,,\ntoy/data.txt,,\ntoy-1.0.dist-info/METADATA,,\ntoy-1.0.dist-info/RECORD,,\n"
    )
    return site


def test_the_release_is_not_changed_and_the_overlay_is(site, tmp_path):
    text = apply_fix(FIX, site, tmp_path / "overlay")
    assert (site / "toy" / "__init__.py").read_text() == SOURCE
    assert "sum(xs)" in (tmp_path / "overlay" / "toy" / "__init__.py").read_text()
    assert not list((tmp_path / "overlay").rglob("*.pyc"))
    assert text.splitlines()[:2] == ["--- a/toy/__init__.py", "+++ b/toy/__init__.py"]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_line_ends_of_a_release_stay_what_they_are(site, tmp_path, ends):
    """cut-cross-entropy's files have CRLF; a diff may have been saved with either."""
    module = site / "toy" / "__init__.py"
    module.write_bytes(SOURCE.replace("\n", "\r\n").encode())
    patch = tmp_path / "pr.diff"
    patch.write_bytes(GIT_DIFF.replace("\n", ends).encode())
    judged = apply_patch(patch, "toy", "1.0", "src/", site, tmp_path / "judged").diff
    assert judged == apply_fix(FIX, site, tmp_path / "fixed")
    assert len(judged.splitlines()) == 6, "the line that changed, and not every line"
    assert (tmp_path / "fixed" / "toy" / "__init__.py").read_bytes() == module.read_bytes().replace(
        b"xs[0] * len(xs)", b"sum(xs)"
    )
    applied = subprocess.run(["git", "apply", "--check", "-"], input=judged.encode(), cwd=site, capture_output=True)
    assert applied.returncode == 0, applied.stderr


def test_a_diff_applies_to_the_release(site, tmp_path):
    text = apply_fix(FIX, site, tmp_path / "overlay")
    subprocess.run(
        ["git", "apply", "-"],
        input=text,
        text=True,
        cwd=site,
        check=True,
        env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path)},
    )
    assert (site / "toy" / "__init__.py").read_text() == (tmp_path / "overlay" / "toy" / "__init__.py").read_text()


@given(old=st.lists(st.sampled_from("abc\n"), max_size=30), new=st.lists(st.sampled_from("abc\n"), min_size=1, max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_any_diff_applies_back(tmp_path_factory, old, new):
    place = tmp_path_factory.mktemp("diff")
    for folder, text in (("site", old), ("overlay", new)):
        (place / folder).mkdir()
        (place / folder / "m.py").write_text("".join(text))
    text = diff(place / "site", place / "overlay")
    if not text:
        assert old == new
        return
    env = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(place)}
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=text, text=True, cwd=place / "site", check=True, env=env)
    assert (place / "site" / "m.py").read_text() == "".join(new)


def test_a_file_of_optional_edits_need_not_be_in_a_release(site, tmp_path):
    fix = {"toy/__init__.py": (replace("maybe", "nowhere", "", optional=True),)}
    fix["toy/other.py"] = (replace("other", "nowhere", "", optional=True),)
    assert apply_fix(fix, site, tmp_path / "overlay") == ""
    fix["toy/other.py"] += (replace("needed", "nowhere", ""),)
    with pytest.raises(AnchorError, match=r"toy/other\.py: the release has no such file"):
        apply_fix(fix, site, tmp_path / "overlay")


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ({"toy/__init__.py": (replace("gone", "nowhere", ""),)}, "'gone'.*'nowhere' was found 0 times"),
        ({"toy/__init__.py": (replace("twice", "xs", "ys"),)}, "'twice'.*found 3 times"),
        ({"toy/__init__.py": (replace("maybe", "xs", "ys", optional=True),)}, "found 3 times"),
        ({"toy/other.py": ()}, "toy/other.py: the release has no such file"),
        ({"toy/__init__.py": (replace("broken", r"return", "retrun !"),)}, "not valid Python"),
    ],
)
def test_an_anchor_that_is_not_right_is_a_plain_error_and_leaves_no_overlay(site, tmp_path, fix, said):
    with pytest.raises(AnchorError, match=said):
        apply_fix(fix, site, tmp_path / "overlay")
    assert not (tmp_path / "overlay").exists()


def test_an_edit_that_needs_a_file_is_left_out_where_the_release_lacks_it(site, tmp_path):
    for file, length in (("toy/__init__.py", 1), ("toy/gone.py", 0)):
        fix = {"toy/__init__.py": (replace("sum", r"xs\[0\] \* len\(xs\)", "sum(xs)", needs=file),)}
        assert bool(apply_fix(fix, site, tmp_path / "overlay")) == length


def test_edits():
    assert replace("none", "zzz", "y", optional=True)(SOURCE) == SOURCE
    assert insert_after("a", r"^def .*\n", "    #\n")("def f():\n    pass\n") == "def f():\n    #\n    pass\n"
    assert insert_before("b", r"^def .*\n", "#\n")("def f():\n    pass\n") == "#\ndef f():\n    pass\n"


@given(st.text(), st.text(min_size=1), st.text())
def test_inserted_text_is_taken_literally(before, code, after):
    """No character of the inserted code is special, not even a backslash or a group's name."""
    assert (
        insert_after("x", "MARK", code)(f"{before.replace('MARK', '')}MARK{after.replace('MARK', '')}").count("MARK" + code)
        >= 1
    )


def test_drop(site, tmp_path):
    assert [t.name for t in drop(FIX, "sum")["toy/__init__.py"]] == []
    with pytest.raises(UserError, match="no transform 'plus'"):
        drop(FIX, "plus")


def test_a_pull_requests_diff_is_applied_to_what_the_release_ships(site, tmp_path):
    patch = tmp_path / "pr.diff"
    patch.write_text(GIT_DIFF)
    patched = apply_patch(patch, "toy", "1.0", "src/", site, tmp_path / "overlay")
    assert "+    return sum(xs)" in patched.diff
    assert "test_toy" not in patched.diff
    assert (patched.applied, patched.skipped, patched.unsupported) == (("src/toy/__init__.py",), ("test/test_toy.py",), ())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GIT_DIFF.replace("return xs[0]", "return ys[0]"), "does not apply to toy 1.0: .*__init__.py:1.*--release"),
        (GIT_DIFF.replace("src/toy/__init__.py", "src/toy/unknown.py"), "toy/unknown.py: No such file"),
        ("hello\n", "holds no unified diff"),
        ("", "holds no unified diff"),
        (GIT_DIFF.replace("@@ -1,2 +1,2 @@", "@@ -1,9 +1,9 @@"), "is not a unified diff|does not apply"),
        (b"\xff\xfe\x00", "is not a unified diff"),
    ],
)
def test_a_diff_that_does_not_apply_is_one_sentence(site, tmp_path, content, said):
    patch = tmp_path / "pr.diff"
    patch.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said) as caught:
        apply_patch(patch, "toy", "1.0", "src/", site, tmp_path / "overlay")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "overlay").exists()


HUNK = GIT_DIFF.split("diff --git")[1].split("\n", 1)[1]


@pytest.mark.parametrize(
    "content",
    [
        f"diff --git a/docs/x.md b/docs/x.md\n{HUNK}",
        HUNK.replace("--- a", "---  a").replace("+++ b", "+++  b") + "diff --git" + GIT_DIFF.split("diff --git")[2],
        f"diff --git a/docs/x.md b/src/toy/__init__.py b/docs/x.md b/src/toy/__init__.py\n{HUNK}",
    ],
    ids=["another name in the header", "a plain part before", "a header that can be read in two ways"],
)
def test_what_git_would_change_and_we_pass_over_is_refused(site, tmp_path, content):
    patch = tmp_path / "pr.diff"
    patch.write_text(content + GIT_DIFF.replace("xs[0] * len(xs)", "other"))
    with pytest.raises(UserError, match="git"):
        apply_patch(patch, "toy", "1.0", "src/", site, tmp_path / "overlay")


PLAIN = "--- a/toy/__init__.py\n+++ b/toy/__init__.py\n@@ -1,2 +1,2 @@\n def total(xs):\n-    return xs[0] * len(xs)\n+    return sum(xs)\n"


@pytest.mark.parametrize(
    "part",
    [
        textwrap.indent(PLAIN.replace("toy/__init__", "toy/other"), "  "),
        "2c2\n< old\n---\n> new\n",
        "File a/toy/x is a directory while file b/toy/x is a regular file\n",
        "Only in b/toy: x.py\n",
    ],
    ids=["indented", "a normal diff", "a folder", "only in one"],
)
def test_what_another_tool_would_apply_is_refused(site, tmp_path, part):
    (tmp_path / "a.diff").write_text(PLAIN + part)
    with pytest.raises(UserError, match="changes that are no part of it"):
        apply_patch(tmp_path / "a.diff", "toy", "1.0", "src/", site, tmp_path / "overlay")


@pytest.mark.parametrize(
    "prose", ["    @@ -1,2 +1,2 @@ is quoted\n", " --- was wrong\n", "12d5 in main\n", "File toy is a package; see there\n"]
)
def test_words_before_a_diff_are_words(site, tmp_path, prose):
    (tmp_path / "a.diff").write_text(prose + PLAIN)
    assert "sum(xs)" in apply_patch(tmp_path / "a.diff", "toy", "1.0", "src/", site, tmp_path / "overlay").diff


def test_a_line_of_a_hunk_may_look_like_another_part(site, tmp_path):
    (tmp_path / "a.diff").write_text(
        PLAIN.replace("+    return sum(xs)", '+    return sum(xs)\n+    "--- a"').replace("+1,2", "+1,3")
    )
    assert '"--- a"' in apply_patch(tmp_path / "a.diff", "toy", "1.0", "src/", site, tmp_path / "overlay").diff


def test_the_users_settings_do_not_decide_what_applies(site, tmp_path, monkeypatch):
    (tmp_path / ".gitconfig").write_text("[apply]\n\tignoreWhitespace = change\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.diff").write_text(PLAIN.replace("-    return xs", "-      return xs"))
    with pytest.raises(UserError, match="does not apply"):
        apply_patch(tmp_path / "a.diff", "toy", "1.0", "src/", site, tmp_path / "overlay")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("setup.py", "unsupported"),
        ("pyproject.toml", "unsupported"),
        ("requirements.txt", "unsupported"),
        ("requirements-dev.txt", "skipped"),
        ("csrc/scripts/gen.py", "unsupported"),
        ("scripts/gen.py", "skipped"),
        ("python/test/unit/test_x.py", "skipped"),
        ("src/toy/kernel.cu", "unsupported"),
        ("docs/größe.md", "skipped"),
    ],
)
def test_parts_that_matter_are_not_passed_over(site, tmp_path, name, kind):
    """How a release is built and what it needs; and sources that are compiled into it, which a wheel may hold as well."""
    (site / "toy" / "kernel.cu").write_text("old\n")
    with (site / "toy-1.0.dist-info" / "RECORD").open("a") as record:
        record.write("toy/kernel.cu,,\n")
    quoted = f'"a/{name}"' if name.isascii() else '"a/docs/gr\\303\\266\\303\\237e.md"'
    names = [quoted.replace('"', "") if name.isascii() else quoted]
    names += [names[0].replace("a/docs" if not name.isascii() else "a/", "b/docs" if not name.isascii() else "b/", 1)]
    part = f"diff --git {names[0]} {names[1]}\n--- {names[0]}\n+++ {names[1]}\n@@ -1 +1 @@\n-old\n+new\n"
    (tmp_path / "pr.diff").write_text(part + GIT_DIFF)
    patched = apply_patch(tmp_path / "pr.diff", "toy", "1.0", "src/", site, tmp_path / "overlay")
    assert name in getattr(patched, kind) or not name.isascii()
    assert "sum(xs)" in patched.diff


def test_a_diff_cannot_reach_outside(site, tmp_path):
    patch = tmp_path / "pr.diff"
    patch.write_text("--- a/toy/../../secret\n+++ b/toy/../../secret\n@@ -0,0 +1 @@\n+x\n")
    with pytest.raises(UserError):
        apply_patch(patch, "toy", "1.0", "src/", site, tmp_path / "overlay")
    assert not (tmp_path / "secret").exists()


def test_no_such_distribution(site):
    assert distribution("Toy", site).version == "1.0"
    with pytest.raises(UserError, match="holds no installed other"):
        distribution("other", site)


def test_what_is_changed_is_named_by_function(tmp_path):
    before = """
import os

LIMIT = 1


def first():
    return 1


class Layer(Base):
    size = 2

    def forward(self):
        return 1

    def backward(self):
        return 2
"""
    after = before.replace("import os", "import os  # a comment\nimport sys").replace("Layer(Base)", "Layer(Other)")
    after = after.replace("        return 2", "        return 3\n\n    def __deepcopy__(self, memo):\n        return self")
    for folder, text in (("site", before), ("overlay", after)):
        (tmp_path / folder / "toy").mkdir(parents=True)
        (tmp_path / folder / "toy" / "a.py").write_text(text)
        (tmp_path / folder / "toy" / "same.py").write_text("x = 1\n")
        (tmp_path / folder / "toy" / "table.json").write_text(f'"{folder}"')
    found = changed(tmp_path / "site", tmp_path / "overlay")
    assert found == {
        "toy/a.py",
        "toy/a.py: Layer",
        "toy/a.py: Layer.backward",
        "toy/a.py: Layer.__deepcopy__",
        "toy/table.json",
    }
    (tmp_path / "overlay" / "toy" / "a.py").write_text("def broken(:\n")
    (tmp_path / "overlay" / "toy" / "table.json").unlink()
    (tmp_path / "overlay" / "toy" / "new.py").write_text("def more():\n    pass\n")
    (tmp_path / "overlay" / "toy" / "same.py").write_text("x = 1  # a comment\n")
    found = changed(tmp_path / "site", tmp_path / "overlay")
    assert {"toy/a.py", "toy/a.py: Layer.forward", "toy/new.py: more", "toy/same.py", "toy/table.json"} <= found


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ("def first():\n    return size()\n", {"toy/a.py: size"}),  # it stood in the file, and went
        ("def first():\n    return [math.pi for _ in range(2)]\n", {"toy/a.py: math"}),
        ("class A:\n    def f(self):\n        return __class__, __name__, __file__, len(other)\n", {"toy/a.py: other"}),
        ("import math\n\ndef first(size=math.pi):\n    return lambda: size\n", set()),
        ("def first():\n    global made\n    made = 1\n\ndef second():\n    return made\n", set()),
        ("def first():\n    return released()\n", set()),  # the release does so, too
        ("from math import *\n\ndef first():\n    return pi\n", set()),
        ("if True:\n    late = 1\n\ndef first():\n    return late\n", set()),
        ("def broken(:\n", set()),
    ],
)
def test_names_that_a_diff_leaves_undefined_are_found(tmp_path, after, found):
    before = "def size():\n    return 1\n\ndef first():\n    return size() + released()\n"
    for folder, text in (("site", before), ("overlay", after)):
        (tmp_path / folder / "toy").mkdir(parents=True)
        (tmp_path / folder / "toy" / "a.py").write_text(text)
        (tmp_path / folder / "toy" / "same.py").write_text("x = unknown\n")
    assert undefined(tmp_path / "site", tmp_path / "overlay") == found
