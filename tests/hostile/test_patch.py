"""Somebody's diff is applied whole, or what was left out is said, and a part is never validated for the whole."""

import json

import pytest
from helpers import raw

from common.errors import UserError
from common.run.overlay import apply_patch, plain_name

pytestmark = pytest.mark.hostile

BUGGY = "def total(xs):\n    return xs[0] * len(xs)\n"


def modify(path, old="return xs[0] * len(xs)", new="return sum(xs)"):
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,2 @@\n def total(xs):\n-    {old}\n+    {new}\n"
    )


def add(path, text="x = 1", mode="100644"):
    return f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{text}\n"


def delete(path, text="x = 1"):
    return f"diff --git a/{path} b/{path}\ndeleted file mode 100644\n--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{text}\n"


def rename(old, new):
    return f"diff --git a/{old} b/{new}\nsimilarity index 100%\nrename from {old}\nrename to {new}\n"


BINARY = "diff --git a/toy/data.bin b/toy/data.bin\nindex 1..2 100644\nBinary files a/toy/data.bin and b/toy/data.bin differ\n"


@pytest.fixture
def judge(tmp_path):
    """Applies a diff to an installed toy release; returns what came of it and the overlay."""
    site = tmp_path / "site"
    files = {"toy/__init__.py": BUGGY, "toy/old.py": "x = 1\n", "toy/data.bin": "\0", "toy/kernels/a.cu": "x = 1\n"}
    files["topmod.py"] = "x = 1\n"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    info = site / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))

    def call(text, prefix="", name="pr.diff"):
        (tmp_path / name).write_text(text)
        return apply_patch(tmp_path / name, "toy", "1.0", prefix, site, tmp_path / "overlay"), tmp_path / "overlay"

    return call


@pytest.mark.parametrize(
    "path",
    ["benchmarks/vendored/toy/__init__.py", "third_party/src/toy/__init__.py", "docs/toy/__init__.py", "x/y/toy/__init__.py"],
)
def test_only_the_upstreams_own_prefix_is_stripped(judge, path):
    for prefix in ("", "src/"):
        with pytest.raises(UserError, match="changes no file of toy that can be applied"):
            judge(modify(path), prefix)


def test_the_declared_prefix_and_installed_paths_are(judge):
    for prefix, path in (("src/", "src/toy/__init__.py"), ("src/", "toy/__init__.py"), ("", "toy/__init__.py")):
        patched, _ = judge(modify(path), prefix)
        assert patched.applied == (path,)
        assert "+    return sum(xs)" in patched.diff
    with pytest.raises(UserError):
        judge(modify("src/toy/__init__.py"), "")


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (BINARY, "toy/data.bin"),
        (add("setup.py"), "setup.py"),
        (add("csrc/kernel.cu"), "csrc/kernel.cu"),
        (add("toy/csrc/kernel.cpp"), "toy/csrc/kernel.cpp"),
        (modify("csrc/flash.cuh"), "csrc/flash.cuh"),
        (add("toy_helpers.py"), "toy_helpers.py"),
        (add("toy_extra/__init__.py"), "toy_extra/__init__.py"),
        (rename("toy/old.py", "elsewhere/new.py"), "elsewhere/new.py"),
        (rename("setup.py", "docs/setup.py"), "docs/setup.py"),
        (rename("toy/sub/core.py", "toy/newer.py"), "toy/newer.py"),
        (rename("topmod.py", "toy/t.py"), "toy/t.py"),
        (add("toy/k/a.cuh"), "toy/k/a.cuh"),
        (add("toy/fast.pyx"), "toy/fast.pyx"),
        (add("toy/CMakeLists.txt"), "toy/CMakeLists.txt"),
        (delete("topmod.py"), "topmod.py"),
        (add("toy/table.dat"), "toy/table.dat"),
    ],
)
def test_what_cannot_be_applied_and_matters_is_named(judge, more, name):
    patched, _ = judge(modify("toy/__init__.py") + more)
    assert patched.unsupported == (name,)
    assert patched.applied == ("toy/__init__.py",)


@pytest.mark.parametrize("path", ["test/test_toy.py", "docs/a.md", "README.md", ".github/workflows/ci.yml", "examples/a.py"])
def test_what_is_no_part_of_a_release_is_named_and_harmless(judge, path):
    patched, _ = judge(modify("toy/__init__.py") + add(path))
    assert (patched.skipped, patched.unsupported) == ((path,), ())


def test_deletions_renames_and_new_files_are_applied_and_handed_out(judge):
    text = modify("toy/__init__.py") + rename("toy/old.py", "toy/new.py") + add("toy/more.py") + delete("toy/kernels/a.cu")
    patched, overlay = judge(text)
    assert patched.unsupported == ("toy/kernels/a.cu",), "what is compiled changes nothing in a wheel"
    assert not (overlay / "toy" / "old.py").exists()
    assert (overlay / "toy" / "new.py").read_text() == "x = 1\n"
    for line in ("--- a/toy/old.py", "+++ b/toy/new.py", "+++ b/toy/more.py"):
        assert line in patched.diff
    assert patched.diff.count("+++ /dev/null") == 1


def test_a_kernel_source_that_the_release_ships_is_compiled_and_so_cannot_be_judged(judge):
    path = "toy/kernels/a.cu"
    patched, overlay = judge(
        modify("toy/__init__.py") + f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
    )
    assert patched.unsupported == (path,)
    assert (overlay / path).read_text() == "x = 1\n"


@pytest.mark.parametrize("where", ["toy/link.txt", "elsewhere/link.txt"])
def test_a_symbolic_link_is_refused(judge, where, tmp_path):
    (tmp_path / "id_rsa").write_text("PRIVATE KEY")
    link = add(where, text=str(tmp_path / "id_rsa"), mode="120000") + "\\ No newline at end of file\n"
    with pytest.raises(UserError, match="symbolic link"):
        judge(modify("toy/__init__.py") + link)
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("path", ["toy/../../secret.py", "/etc/passwd", "../x.py", "toy/./x.py"])
def test_nothing_is_written_outside(judge, path, tmp_path):
    with pytest.raises(UserError):
        judge(add(path))
    assert not (tmp_path / "secret.py").exists()


def test_a_diff_that_is_there_already_says_so(judge):
    with pytest.raises(UserError, match=r"contained in toy 1\.0 already"):
        judge(modify("toy/__init__.py", old="return sum(xs)", new="return xs[0] * len(xs)"))


def test_an_empty_change_is_no_change(judge):
    with pytest.raises(UserError, match="changes nothing"):
        judge(modify("toy/__init__.py", new="return xs[0] * len(xs)"))


@pytest.mark.parametrize(
    "name",
    ["...diff", "..", ".", "-x.diff", "a b;rm -rf.diff", "x" * 300, "évil\n.diff", "../../etc/passwd", "[x](javascript:y)"],
)
def test_names_of_files_are_plain(name):
    made = plain_name(name)
    assert 0 < len(made) <= 100
    assert "/" not in made
    assert made[0] not in ".-"
    assert made.isascii()


TOY = "reproducer_toy/__init__.py"


def write(tmp_path, text, name="pr.diff"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_part_of_a_diff_is_not_validated_for_the_whole(wheels, index, run, tmp_path):
    release = index.add(wheels["1.0"])
    patch = write(tmp_path, modify(TOY) + add("csrc/kernel.cu"))
    rows, _ = run(release, patch=patch)
    assert str(rows[1].verdict) == "UNTESTABLE: partial-patch (csrc/kernel.cu)"
    facts = raw(rows[1].receipt)["predicate"]["reproducer"]
    assert facts["patch"]["unsupported"] == ["csrc/kernel.cu"]
    assert facts["patch"]["applied"] == [TOY]
    rows, _ = run(release, patch=write(tmp_path, modify(TOY) + add("tests/test_x.py")))
    assert rows[1].verdict.outcome == "ABSENT"


def test_a_diff_that_leaves_a_name_undefined_is_not_validated(wheels, index, run, tmp_path):
    release = index.add(wheels["1.0"])
    more = "     return sum(xs)\n+\n+\n+def mean(xs):\n+    return summed(xs) / len(xs)\n".replace(
        "     return", "+    return", 1
    )
    patch = write(tmp_path, modify(TOY).replace("+    return sum(xs)\n", more).replace("+1,2", "+1,6"))
    rows, _ = run(release, patch=patch)
    assert str(rows[1].verdict) == f"CHANGED: the diff leaves names undefined ({TOY}: summed)"
    assert raw(rows[1].receipt)["predicate"]["reproducer"]["patch"]["undefined"] == [f"{TOY}: summed"]


def test_where_there_is_no_bug_there_is_nothing_to_fix(wheels, index, run, tmp_path):
    release = index.add(wheels["2.0"])
    harmless = (
        f"diff --git a/{TOY} b/{TOY}\n--- a/{TOY}\n+++ b/{TOY}\n@@ -1,2 +1,3 @@\n def total(xs):\n     return sum(xs)\n+\n"
    )
    rows, _ = run(release, patch=write(tmp_path, harmless))
    assert str(rows[1].verdict) == "NOTHING_TO_FIX: the controls still hold"
    assert rows[1].as_expected
    harmful = harmless.replace("     return sum(xs)\n+\n", "-    return sum(xs)\n+    return sum(xs) + 1\n").replace(
        "+1,3", "+1,2"
    )
    rows, _ = run(release, patch=write(tmp_path, harmful))
    assert not rows[1].as_expected
    assert rows[1].verdict.outcome == "CHANGED"


def test_the_receipt_cannot_be_made_to_say_otherwise(wheels, index, run, tmp_path):
    """The opening line holds what was applied: a receipt that drops it is found by regrading."""
    from common.store import audit

    release = index.add(wheels["1.0"])
    rows, _ = run(release, patch=write(tmp_path, modify(TOY) + add("csrc/kernel.cu")))
    path = rows[1].receipt
    assert list(audit.regrade(path)) == []
    document = json.loads(path.read_text())
    document["predicate"]["reproducer"]["outcome"] = "ABSENT"
    path.write_text(json.dumps(document))
    assert any(problem.startswith("outcome was 'ABSENT'") for problem in audit.regrade(path))


def test_a_patch_called_dots_cannot_leave_its_folder(cli, tmp_path):
    """``--patch ...diff`` used to be filed as results/review/.., over the real record."""
    for name in ("...diff", "..diff.diff", "a b.diff"):
        patch = write(tmp_path, modify(TOY), name)
        done = cli("run", "pack00", "--release", "1.0", "--patch", patch)
        assert done.returncode == 0, done.stdout + done.stderr
    written = {path.relative_to(tmp_path / "results").parts[0] for path in (tmp_path / "results").rglob("*.json")}
    assert written == {"review"}


PLAIN = "--- /dev/null\n+++ b/csrc/kernel.cu\n@@ -0,0 +1 @@\n+x\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + modify("toy/__init__.py"),
        modify("toy/__init__.py") + PLAIN,
        modify("toy/__init__.py")
        + "diff --cc toy/old.py\n--- a/toy/old.py\n+++ b/toy/old.py\n@@@ -1,1 -1,1 +1,1 @@@\n- x = 1\n++x = 2\n",
        modify("toy/__init__.py") + modify("toy/old.py").replace("a/toy", "toy").replace("b/toy", "toy"),
    ],
    ids=["a plain part before", "a plain part after", "a combined diff", "no prefix"],
)
def test_no_part_of_a_diff_vanishes(judge, text):
    with pytest.raises(UserError):
        judge(text)


@pytest.mark.parametrize("path", ["src/other/old.py", "src/new.py"])
def test_a_package_or_module_beside_the_releases_own_is_not_put_there(judge, path):
    for part in (add(path), rename("src/toy/old.py", path)):
        patched, overlay = judge(modify("src/toy/__init__.py") + part, "src/")
        assert patched.unsupported == (path,)
        assert not (overlay / path.removeprefix("src/")).exists()


@pytest.mark.parametrize(
    "lost",
    [
        "Only in b/toy: helper.py\n",
        "Files a/toy/x.so and b/toy/x.so differ\n",
        "*** a/toy/old.py\n--- b/toy/old.py\n***************\n*** 1 ****\n! x = 1\n--- 1 ----\n! x = 2\n",
    ],
)
def test_what_a_plain_diff_has_lost_is_refused(judge, lost):
    plain = modify("toy/__init__.py").split("\n", 1)[1]
    assert judge(plain)[0].applied == ("toy/__init__.py",)
    with pytest.raises(UserError, match="no part of it"):
        judge(plain + lost)


def test_a_copy_is_of_what_was_there_before_the_diff(judge):
    """Parts are applied one after the other, and git copies from the tree before all of them."""
    copy = "diff --git a/toy/__init__.py b/toy/core.py\nsimilarity index 100%\ncopy from toy/__init__.py\ncopy to toy/core.py\n"
    assert judge(copy)[0].applied == ("toy/core.py",)
    for text in (modify("toy/__init__.py") + copy, copy + modify("toy/__init__.py")):
        with pytest.raises(UserError, match="--no-renames"):
            judge(text)


def test_a_carriage_return_does_not_end_a_line(judge):
    """Python takes what follows it for a line of its own; git does not."""
    text = modify("toy/__init__.py").replace("sum(xs)", "sum(xs)  # end\rx = 1")
    with pytest.raises(UserError, match="carriage return"):
        judge(text)
    assert judge(modify("toy/__init__.py").replace("\n", "\r\n"))[0].applied == ("toy/__init__.py",)


def test_a_series_of_mails_is_one_diff(judge):
    mail = (
        "From 0123 Mon Sep 17\nSubject: [PATCH 1/1] fix\n\n---\n toy/__init__.py | 2 +-\n\n"
        + modify("toy/__init__.py")
        + "-- \n2.39.5\n\n"
    )
    patched, _ = judge(mail)
    assert patched.applied == ("toy/__init__.py",)


@pytest.mark.parametrize(
    "path",
    [
        "CMakeLists.txt",
        "csrc/a.hxx",
        "csrc/a.inc",
        "a.ptx",
        "csrc/x.CU",
        "src/k.cu.in",
        "lib/a.S",
        "third_party/x.f90",
        "toy.c",
    ],
)
def test_sources_of_compiled_code_matter_whatever_their_names(judge, path):
    assert judge(modify("toy/__init__.py") + add(path))[0].unsupported == (path,)


def test_a_submodule_matters(judge):
    bump = "diff --git a/third_party/cutlass b/third_party/cutlass\nindex 111..222 160000\n--- a/third_party/cutlass\n+++ b/third_party/cutlass\n"
    bump += "@@ -1 +1 @@\n-Subproject commit 111\n+Subproject commit 222\n"
    assert judge(modify("toy/__init__.py") + bump)[0].unsupported == ("third_party/cutlass",)


def test_the_diff_that_is_handed_out_is_the_one_that_ran(judge, tmp_path):
    import subprocess

    empty = "diff --git a/toy/sub/__init__.py b/toy/sub/__init__.py\nnew file mode 100644\nindex 0000000..e69de29\n"
    odd = add("toy/odd.py", text="a = 1 # \x0c page \u2028 line")
    patched, overlay = judge(modify("toy/__init__.py") + empty + odd)
    assert "toy/sub/__init__.py" in patched.diff
    env = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(["git", "apply", "-"], input=patched.diff.encode(), cwd=tmp_path / "site", check=True, env=env)
    for name in ("toy/__init__.py", "toy/sub/__init__.py", "toy/odd.py"):
        assert (tmp_path / "site" / name).read_bytes() == (overlay / name).read_bytes()


def test_a_git_hooks_environment_changes_nothing(judge, monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert judge(modify("toy/__init__.py"))[0].applied == ("toy/__init__.py",)


def test_what_no_check_runs_is_not_validated(wheels, index, run, tmp_path):
    release = index.add(wheels["1.0"])
    body = "+    return sum(xs)\n"
    beside = {
        "a function": "+\n+\n+def mean(xs):\n+    return total(xs) / len(xs)\n",
        "a method": "+\n+\n+class Mean:\n+    def __call__(self, xs):\n+        return total(xs) / len(xs)\n",
    }
    for more, part in zip(beside.values(), ("mean", "Mean.__call__"), strict=True):
        patch = write(tmp_path, modify(TOY).replace(body, body + more).replace("+1,2", f"+1,{2 + more.count('+')}"))
        rows, _ = run(release, patch=patch)
        assert str(rows[1].verdict) == f"UNTESTABLE: not-run ({TOY}: {part})"
        assert raw(rows[1].receipt)["predicate"]["reproducer"]["patch"]["unrun"] == [f"{TOY}: {part}"]
    rows, _ = run(release, patch=write(tmp_path, modify(TOY) + add("reproducer_toy/other.py")))
    assert str(rows[1].verdict) == "UNTESTABLE: not-run (reproducer_toy/other.py)"
    kernel = "+\n+\n+def jit(function):\n+    return function\n+\n+\n+@jit\n+def kernel(xs):\n+    return xs\n"
    called = body.replace("sum(xs)", "sum(part(xs))") + "+\n+\n+def part(xs):\n+    return list(xs)\n" + kernel
    patch = write(tmp_path, modify(TOY).replace(body, called).replace("+1,2", f"+1,{1 + called.count(chr(10))}"))
    rows, _ = run(release, patch=patch)
    assert rows[1].verdict.outcome == "ABSENT"  # a kernel is read by a compiler
