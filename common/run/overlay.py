"""The patched side: a copy of a release's files with a fix applied, to be put first on PYTHONPATH.

The installed release is never changed. The unified diff between the two is an output.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import os
import re
import shutil
import subprocess
import symtable
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import AnchorError, UserError
from common.install.integrity import distribution
from common.transforms import Fix, Transform


def drop(fix: Fix, name: str) -> Fix:
    """``fix`` without the transform ``name``: the patched side must then turn red."""
    if name not in [t.name for transforms in fix.values() for t in transforms]:
        names = ", ".join(t.name for transforms in fix.values() for t in transforms)
        raise UserError(f"There is no transform {name!r} in this fix; it has: {names}.")
    return {file: [t for t in transforms if t.name != name] for file, transforms in fix.items()}


def apply_fix(fix: Fix, site: Path, overlay: Path) -> str:
    """Copy what ``fix`` touches from ``site`` to ``overlay``, transform it, return the unified diff.

    Raises `AnchorError`, naming file and anchor, where the release's source is not what the fix expects.
    """
    with _fresh(overlay):
        _copy(site, overlay, {PurePosixPath(file).parts[0] for file in fix})
        for file, transforms in fix.items():
            kept = [t for t in transforms if not t.needs or (overlay / t.needs).is_file()]
            if kept or not transforms:
                _transform(overlay / file, file, kept)
    return diff(site, overlay)


#: Of a decorator that has a compiler read a function.
_KERNEL = re.compile(r"jit|prim_func|macro")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patched:
    """What somebody's diff came to: the diff of the release's files, and which of its files it is made of.

    ``skipped`` are no part of the release (tests, docs); ``unsupported`` are, or would be compiled into it, and could not be
    applied, so that nothing can be said of the whole.
    """

    diff: str
    applied: tuple[str, ...]
    skipped: tuple[str, ...]
    unsupported: tuple[str, ...]


def apply_patch(
    patch: Path, package: str, version: str, prefix: str, site: Path, overlay: Path, beside: Sequence[str] = ()
) -> Patched:
    """Like `apply_fix`, with somebody else's diff (``git diff``, ``git format-patch``, ``diff -u``) in place of a fix.

    ``prefix`` is the folder of the upstream's repository that holds its package ("src/"); paths below it, and paths as they are
    installed, are the release's, or those of the packages ``beside`` it. Raises `UserError` where the diff cannot be judged on this release.
    """
    changes = read_diff(patch)
    shipped = {
        PurePosixPath(str(f)).parts[0]
        for name in (package, *beside)
        for f in distribution(name, site).files or []
        if not _is_metadata(str(f))
    }
    sorted_out: dict[str, list[str]] = {"applied": [], "skipped": [], "unsupported": []}
    with _fresh(overlay):
        _copy(site, overlay, shipped)
        for change in changes:
            kind = _kind(change, prefix, shipped, overlay)
            if kind == "applied":
                places = [_place(name, prefix, shipped) if name else None for name in (change.old, change.new)]
                # What leads outside is git's to refuse, and nobody's to write.
                old, new = (overlay / p if p and ".." not in PurePosixPath(p).parts else overlay for p in places)
                with _line_feeds(old, new):
                    _git_apply(patch, f"{package} {version}", change, prefix, overlay)
            name = change.new or change.old
            if name not in sorted_out[kind]:  # A series of commits may touch a file many times.
                sorted_out[kind].append(name)
        if links := [path.name for path in overlay.rglob("*") if path.is_symlink()]:
            raise UserError(f"{patch} makes a symbolic link of {links[0]}, which no release holds: take it out of the diff.")
        made = diff(site, overlay)
        if not sorted_out["applied"]:
            names = ", ".join(dict.fromkeys(change.new or change.old for change in changes))
            raise UserError(
                f"{patch} changes no file of {package} that can be applied: its Python files are below "
                f"{', '.join(f'{prefix}{top}' for top in sorted(shipped)[:3])}, and it names {names[:300]}."
            )
        if not made:
            raise UserError(f"{patch} changes nothing in {package} {version}: what it does is there already.")
    return Patched(
        diff=made,
        applied=tuple(sorted_out["applied"]),
        skipped=tuple(sorted_out["skipped"]),
        unsupported=tuple(sorted_out["unsupported"]),
    )


def read_diff(patch: Path) -> list[_Change]:
    """What a diff changes; `UserError` where it cannot be read as one."""
    try:
        text = patch.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(
            f"{patch} cannot be read ({error.strerror}): give a file, an address, or - for standard input."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{patch} is not a unified diff: it is not text.") from error
    if "\r" in text:  # Python reads a new line there, git does not.
        raise UserError(f"{patch} has a carriage return within a line: make it with 'git diff'.")
    changes = list(_changes(text))
    _as_git_sees_it(patch, text, changes)
    if not changes:
        raise UserError(f"{patch} holds no unified diff: make one with 'git diff' or 'diff -u'.")
    if links := [change.new or change.old for change in changes if change.link]:
        raise UserError(f"{patch} makes a symbolic link of {links[0]}, which no release holds: take it out of the diff.")
    named = [name for change in changes for name in {change.source or change.old, change.new} if name]
    if moved := [change.source for change in changes if change.source and named.count(change.source) > 1]:
        # git copies what was there before the diff; parts that are applied one after the other would copy what it made.
        raise UserError(f"{patch} copies or renames {moved[0]} and changes it as well: make it with 'git diff --no-renames'.")
    return changes


def plain_name(name: str) -> str:
    """A name for a file or folder made from somebody's: no path, no hidden file, nothing that a shell or Markdown reads."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name)[:100].strip(".-+_") or "patch"


def diff(site: Path, overlay: Path) -> str:
    """Unified diff, with ``a/`` and ``b/`` prefixes, of the overlay's text files against the release's; deletions, too."""
    parts: list[str] = []
    for name in _files(site, overlay):
        old, new = site / name, overlay / name
        before, after = (path.read_bytes() if path.exists() else b"" for path in (old, new))
        if before == after and old.exists() == new.exists():
            continue
        if not before and not after:  # An empty file that is new or gone has no hunk to be seen by.
            parts.append(f"diff --git a/{name} b/{name}\n{'deleted' if old.exists() else 'new'} file mode 100644\n")
            continue
        lines = difflib.unified_diff(
            _lines(before),
            _lines(after),
            f"a/{name}" if old.exists() else "/dev/null",
            f"b/{name}" if new.exists() else "/dev/null",
        )
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)


def _files(site: Path, overlay: Path) -> list[str]:
    """The files of an overlay, and of the release below the folders that are in it."""
    tops = [entry.name for entry in overlay.iterdir()]
    names = {p.relative_to(overlay).as_posix() for p in overlay.rglob("*") if p.is_file()}
    names |= {p.relative_to(site).as_posix() for top in tops for p in (site / top).rglob("*") if p.is_file()}
    return sorted(name for name in names if not name.endswith(".pyc"))


def changed(site: Path, overlay: Path) -> set[str]:
    """What an overlay changes of a release: ``file: Class.function``, ``file: Class`` or ``file`` for what stands in no function."""
    found: set[str] = set()
    for name, old, new in _differing(site, overlay):
        before, after = (_definitions(text, name) for text in (old, new))
        found |= {part for part in {*before, *after} if before.get(part) != after.get(part)} or {name}
    return found


def _differing(site: Path, overlay: Path) -> Iterator[tuple[str, bytes, bytes]]:
    """Each file that is not the same in a release and an overlay: its name and both texts, empty where it is not."""
    for name in _files(site, overlay):
        old, new = (each.read_bytes() if each.exists() else b"" for each in (site / name, overlay / name))
        if old != new:
            yield name, old, new


def watched(site: Path, overlay: Path) -> dict[str, set[str]]:
    """What an overlay changes of a release, as `changed` names it, and where its code begins: ``LINE FILE``, one of which is called.

    Kernels are left out, which a compiler reads and Python does not run.
    """
    found: dict[str, set[str]] = {}
    for part in changed(site, overlay):
        name = part.partition(": ")[0]
        places = _places((overlay / name).read_bytes(), name) if (overlay / name).is_file() else {}
        if part in places:
            found[part] = {f"{line} {overlay / name}" for line in places[part]}
    return found


def _places(text: bytes, name: str) -> dict[str, set[int]]:
    """Each part of a Python file as `changed` names it, and the first lines of its code; decorators are a part of it."""
    if not name.endswith(".py"):
        return {}
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found = {name: {0, 1}}

    def note(nodes: Iterable[ast.AST], within: tuple[str, ...]) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if not any(_KERNEL.search(ast.unparse(each)) for each in node.decorator_list):
                    first = min(each.lineno for each in (node, *node.decorator_list))
                    found.setdefault(f"{name}: {'.'.join((*within, node.name))}", set()).add(first)
                if isinstance(node, ast.ClassDef):
                    note(node.body, (*within, node.name))
            else:
                note(ast.iter_child_nodes(node), within)

    note(module.body, ())
    return found


def undefined(site: Path, overlay: Path) -> set[str]:
    """Names that an overlay reads and defines nowhere, and the release does not read so: ``file: name``.

    Most are left behind in a function that no check of the pack runs. Files with ``from … import *`` are not looked at.
    """
    found: set[str] = set()
    for name, old, new in _differing(site, overlay):
        if name.endswith(".py"):
            found |= {f"{name}: {unknown}" for unknown in _unknown(new) - _unknown(old)}
    return found


def _unknown(text: bytes) -> set[str]:
    try:
        source = text.decode()
        stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(ast.parse(source)))
        tables = [symtable.symtable(source, "<diff>", "exec")]
    except (SyntaxError, ValueError):
        return set()
    known, read = {*dir(builtins), *dir(types.ModuleType("")), "__file__", "__path__", "__builtins__"}, set()
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                read.add(symbol.get_name())
            if (table is tables[0] or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                known.add(symbol.get_name())
    return set() if stars else read - known


def _definitions(text: bytes, name: str) -> dict[str, list[str]]:
    """Each part of a Python file as `changed` names it, and its syntax, in which comments and lines do not count."""
    whole = {name: [text.decode("utf-8", "replace")]}
    if not name.endswith(".py"):
        return whole
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return whole
    found: dict[str, list[str]] = {}

    def note(nodes: Sequence[ast.stmt], within: tuple[str, ...]) -> None:
        for node in nodes:
            parts: list[ast.AST] = [node]
            inside = within
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inside = *within, node.name
            if isinstance(node, ast.ClassDef):
                parts = [*node.bases, *node.keywords, *node.decorator_list]
                note(node.body, inside)
            place = f"{name}: {'.'.join(inside)}" if inside else name
            found.setdefault(place, []).extend(map(ast.dump, parts))

    note(module.body, ())
    return found


def _lines(data: bytes) -> list[str]:
    """Lines as diff and git know them: only a line feed ends one."""
    return re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """One file of a diff: its path before and after ("" where it is not there), and its text for git."""

    old: str
    new: str
    text: str
    #: What it is a copy of, or had for a name.
    source: str = ""
    binary: bool = False
    link: bool = False


def _changes(text: str) -> Iterator[_Change]:
    """The files of a diff as git writes it, or as ``diff -u`` does."""
    if not re.search(r"^diff --git ", text, re.MULTILINE):
        import unidiff

        if found := _LOST.search("\n".join(_outside(text))):
            lost = found[0]
            raise UserError(
                f"The diff has changes that are no part of it ({lost.strip()[:80]}): make it with 'git diff' or 'diff -ruN'."
            )
        try:
            for file in unidiff.PatchSet(text):
                old, new = (re.sub(r"^[ab]/", "", str(name).split("\t")[0]) for name in (file.source_file, file.target_file))
                yield _Change(old="" if old == "/dev/null" else old, new="" if new == "/dev/null" else new, text=str(file))
        except unidiff.UnidiffParseError as error:
            raise UserError(f"The diff is not whole: {str(error).splitlines()[0]}.") from error
        return
    before, *parts = re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)
    for part in (before, *parts):
        if re.search(r"^diff --(?:cc|combined) |^@@@ ", part, re.MULTILINE):
            raise UserError(
                "The diff is a combined one, of a merge: make it with 'git diff BASE HEAD', which compares two trees."
            )
    for part in parts:
        head = re.split(r"^@@ ", part, maxsplit=1, flags=re.MULTILINE)[0]
        same = re.match(r'diff --git "?a/(.*?)"? "?b/(.*?)"?$', head, re.MULTILINE)
        if same is None:
            first = part.splitlines()[0]
            raise UserError(f"The diff has a part whose paths do not begin with a/ and b/ ({first}): make it with 'git diff'.")
        old, new = map(_unquoted, same.groups())
        if renamed := re.search(r"^(?:rename|copy) from (.*)\n(?:rename|copy) to (.*)$", head, re.MULTILINE):
            old, new = map(_unquoted, renamed.groups())
        elif old != new:
            raise UserError(f"The diff names {old} and {new} in one part, which is no renaming: make it with 'git diff'.")
        yield _Change(
            old="" if re.search(r"^new file mode|^copy from", head, re.MULTILINE) else old,
            new="" if re.search(r"^deleted file mode", head, re.MULTILINE) else new,
            text=part,
            source=old if renamed else "",
            binary=bool(re.search(r"^Binary files |^GIT binary patch|mode 160000|^index \S+ 160000$", head, re.MULTILINE))
            or '"' in head.splitlines()[0],
            link=bool(re.search(r"mode 120000$|^index \S+ 120000$", head, re.MULTILINE)),
        )


#: Between the parts of a ``diff -u``: what another tool than git might apply, and what diff says of files that it did not compare.
_LOST = re.compile(
    r"^(?:Only in .*|Files .* differ$|File .* is a .* while file .*|\*\*\* .*|Cannot display.*"
    r"|[ \t]+--- .*\n[ \t]+\+\+\+ .*|\d+(?:,\d+)?[acd]\d+(?:,\d+)?$)",
    re.MULTILINE,
)


def _outside(text: str) -> Iterator[str]:
    """The lines of a diff that are in no hunk."""
    old = new = 0
    for line in text.split("\n"):
        if old > 0 or new > 0:
            old -= line[:1] in ("", " ", "-")
            new -= line[:1] in ("", " ", "+")
        elif hunk := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
        else:
            yield line


def _unquoted(name: str) -> str:
    """A path as git writes it: bytes that are not ASCII as octal numbers, between quotation marks."""
    if "\\" not in name:
        return name.strip('"')
    return (
        name.strip('"')
        .encode("latin-1", "replace")
        .decode("unicode_escape")
        .encode("latin-1", "replace")
        .decode("utf-8", "replace")
    )


def _as_git_sees_it(patch: Path, text: str, changes: Sequence[_Change]) -> None:
    """That git finds the same files in the diff, and so none that it would change and we pass over."""
    if not re.search(r"^diff --git ", text, re.MULTILINE):
        return  # of diff -u, whose parts are made anew for git
    done = _git(Path.cwd(), "--numstat", "-z", text=text)
    if done.returncode:
        raise UserError(f"{patch} is not a unified diff that git can read: {_said(done)}.")
    seen = [line.split("\t", 2)[2] for line in done.stdout.split("\0") if line]
    ours = [change.new or change.old for change in changes]
    if sorted(seen) != sorted(ours):
        other = sorted(set(seen) ^ set(ours)) or sorted(seen)
        raise UserError(f"{patch} names {other[0]} in a way that git reads differently: make it with one 'git diff'.")


#: What a release that is installed does not hold and does not depend on. Anything else that is left out would matter, as what says how it
#: is built and what it needs (setup.py, pyproject.toml, requirements.txt).
_ASIDE = re.compile(
    r"(?:testing|scripts|ci|media|images|assets|\.[^/]+)/.*"
    r"|(?:.*/)?(?:tests?|docs?|examples?|benchmarks?|notebooks?)/.*"
    r"|(?:.*/)?[^/]*\.(?:md|rst|ipynb|png|jpe?g|gif|svg|ya?ml)"
    r"|(?:conftest|noxfile)\.py|uv\.toml|tox\.ini|uv\.lock|Makefile|requirements[-_/](?:dev|tests?|docs?|lint)[^/]*\.txt"
    r"|LICENSE[^/]*|CHANGELOG[^/]*|AUTHORS|NOTICE|CODEOWNERS|VERSION|\.[^/]+"
)
#: What is compiled into a release: a wheel may hold its source as well, and it changes nothing there.
_COMPILED = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".pxd", ".pyx", ".rs", ".cmake", "CMakeLists.txt")


def _kind(change: _Change, prefix: str, shipped: set[str], overlay: Path) -> str:
    """Whether a file of a diff is "applied", "skipped" as no part of the release, or "unsupported"."""
    names = [name for name in (change.old, change.new) if name]
    places = [_place(name, prefix, shipped) for name in names]
    if not any(places):
        return "skipped" if all(map(_ASIDE.fullmatch, names)) and not change.binary else "unsupported"
    before = _place(change.old, prefix, shipped) if change.old else ""
    there = bool(before) and (overlay / str(before)).is_file()
    if change.binary or not all(places) or any(name.endswith(_COMPILED) for name in names):
        return "unsupported"
    if not there and not names[-1].endswith((".py", ".pyi", ".json", ".txt", ".md")):
        return "unsupported"  # Sources of compiled code, mostly.
    if change.new and PurePosixPath(str(places[-1])).parts[0] not in shipped:
        return "unsupported"  # A package of its own beside the release's, which no wheel of it would hold.
    if before and "/" not in before and change.new != change.old:
        return "unsupported"  # A module at the top cannot be hidden by an overlay that lacks it.
    if change.old and not there:
        # A file that is gone, which git will say, or a part of the repository that this release does not hold.
        return "applied" if change.new and (overlay / str(before)).parent.is_dir() else "unsupported"
    return "applied"


def _place(name: str, prefix: str, shipped: set[str]) -> str | None:
    """Where a path of the upstream's repository is installed; None for one that is no part of the package."""
    if prefix and name.startswith(prefix):
        return name[len(prefix) :]
    return name if PurePosixPath(name).parts[0] in shipped else None


def _transform(path: Path, file: str, transforms: Sequence[Transform]) -> None:
    if not path.is_file():
        if transforms and all(transform.optional for transform in transforms):
            return
        raise AnchorError(f"{file}: the release has no such file")
    with _line_feeds(path, path):
        source = path.read_text(encoding="utf-8")
        for transform in transforms:
            try:
                edited = transform(source)
            except AnchorError as error:
                raise AnchorError(f"{file}: {error}") from error
            if edited == source and not transform.optional:
                raise AnchorError(f"{file}: transform {transform.name!r} changes nothing")
            source = edited
        try:
            compile(source, file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise AnchorError(
                f"{file}: the transformed source is not valid Python (line {error.lineno}: {error.msg})"
            ) from error
        path.write_text(source, encoding="utf-8")


@contextmanager
def _line_feeds(old: Path, new: Path) -> Iterator[None]:
    """``old`` with plain line feeds, for git and for anchors; if all its lines ended in CRLF, so do those of ``new`` afterwards."""
    before = old.read_bytes() if old.is_file() else b""
    crlf = 0 < before.count(b"\n") == before.count(b"\r\n")
    if crlf:
        old.write_bytes(before.replace(b"\r\n", b"\n"))
    yield
    if crlf and new.is_file():
        new.write_bytes(re.sub(rb"\r?\n", b"\r\n", new.read_bytes()))


@contextmanager
def _fresh(overlay: Path) -> Iterator[None]:
    """An empty ``overlay``, and none at all when the block fails: a half-made one would run as if it were whole."""
    shutil.rmtree(overlay, ignore_errors=True)
    overlay.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(overlay, ignore_errors=True)
        raise


def _copy(site: Path, overlay: Path, names: set[str]) -> None:
    for name in sorted(names):
        source = site / name
        if source.is_dir():
            shutil.copytree(source, overlay / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        elif source.is_file():
            shutil.copy2(source, overlay / name)


def _is_metadata(path: str) -> bool:
    first = PurePosixPath(path).parts[0]
    return first.endswith((".dist-info", ".data")) or first in ("..", "__pycache__") or first.endswith(".pth")


def _git(folder: Path, *options: str, text: str) -> subprocess.CompletedProcess[str]:
    """``git apply`` of a diff's text to a folder, as if that were in no repository."""
    git = shutil.which("git")
    if git is None:
        raise UserError("--patch needs git to apply a diff: install git, or apply the diff yourself and use --release-path.")
    return subprocess.run(
        [git, "apply", "--whitespace=nowarn", *options, "-"],
        input=text,
        text=True,
        cwd=folder,
        capture_output=True,
        # Inside a checkout git would take the paths as the checkout's own and pass over them without a word.
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
            # Nor is it the user's settings that say how exactly a diff has to fit.
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C",
        },
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    said = [line.removeprefix("error: ") for line in done.stderr.strip().splitlines() if line.startswith("error: ")]
    return "; ".join(said[:2]) or f"git apply exited with {done.returncode}"


def _git_apply(patch: Path, release: str, change: _Change, prefix: str, overlay: Path) -> None:
    """Let git apply one file's hunks (it allows moved lines, not changed context); `UserError` when it will not."""
    name = change.old or change.new
    strip = 1 + (prefix.count("/") if prefix and name.startswith(prefix) else 0)
    text = change.text
    if not text.startswith("diff --git"):  # As diff -u names them: nothing but a path to strip.
        text = re.sub(r"^(---|\+\+\+) (?!/dev/null)(?:[ab]/)?", r"\1 x/", text, count=2, flags=re.MULTILINE)
    done = _git(overlay, f"-p{strip}", text=text)
    if done.returncode:
        if _git(overlay, f"-p{strip}", "--reverse", "--check", text=text).returncode == 0:
            raise UserError(f"{patch} is contained in {release} already: {name} has its change.")
        raise UserError(
            f"{patch} does not apply to {release}: {_said(done)}. Take a diff made against it, or choose another --release."
        )
