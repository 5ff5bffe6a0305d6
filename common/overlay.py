"""The patched side: a copy of a release's files with a fix applied, to be put first on PYTHONPATH.

The installed release is never changed. The unified diff between the two is an output.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from common.errors import AnchorError, UserError
from common.transforms import Fix, Transform

if TYPE_CHECKING:
    from unidiff import PatchedFile


def distribution(package: str, site: Path) -> importlib.metadata.Distribution:
    """The installed distribution ``package`` in the folder ``site``; `UserError` when it is not there."""
    for found in importlib.metadata.distributions(path=[str(site)]):
        if canonicalize_name(found.metadata["Name"] or "") == canonicalize_name(package):
            return found
    raise UserError(
        f"{site} holds no installed {package} (no {package.replace('-', '_')}-*.dist-info): "
        f"make one with 'pip install --no-deps --target DIR {package}==VERSION'."
    )


def load_fix(path: Path) -> Fix:
    """The ``FIX`` of a pack's ``fix.py``."""
    spec = importlib.util.spec_from_file_location(f"fix_of_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fix: Fix = module.FIX
    return fix


def drop(fix: Fix, name: str) -> Fix:
    """``fix`` without the transform ``name``: the patched side must then turn red."""
    if name not in [t.name for transforms in fix.values() for t in transforms]:
        raise UserError(f"There is no transform {name!r} in this fix.")
    return {file: [t for t in transforms if t.name != name] for file, transforms in fix.items()}


def apply_fix(fix: Fix, site: Path, overlay: Path) -> str:
    """Copy what ``fix`` touches from ``site`` to ``overlay``, transform it, return the unified diff.

    Raises `AnchorError`, naming file and anchor, where the release's source is not what the fix expects.
    """
    with _fresh(overlay):
        _copy(site, overlay, {PurePosixPath(file).parts[0] for file in fix})
        for file, transforms in fix.items():
            _transform(overlay / file, file, transforms)
    return diff(site, overlay)


def apply_patch(patch: Path, package: str, site: Path, overlay: Path) -> str:
    """Like `apply_fix`, with somebody else's diff (``git diff`` or ``diff -u``, any path prefix) in place of a fix.

    Files of the diff that the release does not ship (tests, docs) are passed over; at least one must be shipped.
    """
    import unidiff

    try:
        files = list(unidiff.PatchSet(patch.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{patch} cannot be read: {error.strerror}.") from error
    except (unidiff.UnidiffParseError, UnicodeDecodeError) as error:
        raise UserError(f"{patch} is not a unified diff: {str(error).splitlines()[0]}.") from error
    if not files:
        raise UserError(f"{patch} holds no unified diff: make one with 'git diff' or 'diff -u'.")
    shipped = {PurePosixPath(str(f)).parts[0] for f in distribution(package, site).files or [] if not _is_metadata(str(f))}
    with _fresh(overlay):
        _copy(site, overlay, shipped)
        applied = [
            file
            for file in files
            if (prefix := _prefix(file, overlay, shipped)) is not None and _git_apply(patch, file, prefix, overlay)
        ]
        if not applied:
            raise UserError(f"{patch} changes no file that {package} ships; it names {', '.join(f.path for f in files[:3])}.")
    return diff(site, overlay)


def diff(site: Path, overlay: Path) -> str:
    """Unified diff, with ``a/`` and ``b/`` prefixes, of the overlay's text files against the release's."""
    parts: list[str] = []
    for new in sorted(p for p in overlay.rglob("*") if p.is_file()):
        name = new.relative_to(overlay).as_posix()
        old = site / name
        before, after = old.read_bytes() if old.exists() else b"", new.read_bytes()
        if before == after:
            continue
        lines = difflib.unified_diff(
            before.decode("utf-8", "replace").splitlines(keepends=True),
            after.decode("utf-8", "replace").splitlines(keepends=True),
            f"a/{name}" if old.exists() else "/dev/null",
            f"b/{name}",
        )
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)


def _transform(path: Path, file: str, transforms: Sequence[Transform]) -> None:
    if not path.is_file():
        if transforms and all(transform.optional for transform in transforms):
            return
        raise AnchorError(f"{file}: the release has no such file")
    source = path.read_text(encoding="utf-8")
    for transform in transforms:
        try:
            source = transform(source)
        except AnchorError as error:
            raise AnchorError(f"{file}: {error}") from error
    try:
        compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise AnchorError(f"{file}: the transformed source is not valid Python (line {error.lineno}: {error.msg})") from error
    path.write_text(source, encoding="utf-8")


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


def _prefix(file: PatchedFile, overlay: Path, shipped: set[str]) -> int | None:
    """How many leading folders of a diff's path to strip for it to name a shipped file; None for a file not shipped."""
    is_new = bool(file.is_added_file)
    raw = str(file.target_file if is_new else file.source_file)
    parts = PurePosixPath(raw.split("\t")[0]).parts
    for strip in range(len(parts)):
        rest = parts[strip:]
        if rest[0] in shipped and (is_new or overlay.joinpath(*rest).is_file()):
            return strip
    return None


def _git_apply(patch: Path, file: PatchedFile, strip: int, overlay: Path) -> bool:
    """Let git apply one file's hunks (it allows moved lines, not changed context); `UserError` when it will not."""
    git = shutil.which("git")
    if git is None:
        raise UserError("--patch needs git to apply a diff: install git, or apply the diff yourself and use --release-path.")
    done = subprocess.run(
        [git, "apply", f"-p{strip}", "--whitespace=nowarn", "-"],
        input=str(file),
        text=True,
        cwd=overlay,
        capture_output=True,
        # Inside a checkout git would take the paths as the checkout's own and pass over them without a word.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(overlay.parent), "LC_ALL": "C"},
    )
    if done.returncode:
        why = (
            done.stderr.strip().splitlines()[-1].removeprefix("error: ")
            if done.stderr.strip()
            else f"git apply exited with {done.returncode}"
        )
        raise UserError(
            f"{patch} does not apply to this release: {why}. Take a diff made against it, or choose another --release."
        )
    return True
