"""A working tree or a commit of an upstream's clone, made into a wheel of its plain Python files, whose version names it.

``0.8.2+git.g9ac26bb822`` is a commit, ``….dirty.`` and a hash a working tree whose files are not the commit's, ``0.8.2+local.`` and a hash a
folder that is no clone. The same files give the same wheel. Files of a commit are read as git keeps them: no attribute, link or replacement
of the clone's own changes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from common.errors import UserError
from common.files import locked, write_atomically
from common.install import packed
from common.packs.pack import Pack

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: What git's hooks set, so that a git that is started in one works on the repository that the hook is of, wherever it is told to look.
_ELSEWHERE = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CEILING_DIRECTORIES", "GIT_GRAFT_FILE", "GIT_REPLACE_REF_BASE",
)  # fmt: skip
#: Where upstreams keep their version, besides below the package.
_VERSIONS = ("pyproject.toml", "version.txt", "build_tools/VERSION.txt")


class NoPackage(UserError):
    """A commit or a folder holds no file of the package."""


def git(directory: Path, *arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git on the repository at ``directory`` and on no other."""
    kept = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    # git must not wait for a name and a password, which GitHub asks for where there is no such repository.
    env = {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}
    try:
        return subprocess.run(
            # A clone's own configuration may name a program (core.fsmonitor) that git would run.
            ["git", "-c", "log.showSignature=false", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments],
            env=env,
            input=given,
            capture_output=True,
            timeout=600,
        )
    except FileNotFoundError:
        raise UserError("git is not on PATH, and a commit cannot be read without it.") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(arguments, 1, b"", b"no answer in ten minutes")


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    """The first line of git's complaint."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[0].removeprefix("fatal: ") if lines else f"git exited with {done.returncode}"


def folders(pack: Pack) -> tuple[str, ...]:
    """Where the upstream's repository holds the package."""
    return tuple(folder.rstrip("/") for folder in pack.tree) or (f"{pack.prefix}{pack.imports}",)


def clone_at(directory: Path) -> Path:
    """The top of the clone that a folder is in (the folder itself, of a bare one); `UserError` with git's words where there is none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a folder.")
    done = git(directory, "rev-parse", "--show-toplevel")
    if done.returncode and git(directory, "rev-parse", "--is-bare-repository").stdout.strip() != b"true":
        raise UserError(f"{directory} is not a git clone: {said(done)}.")
    return Path(os.fsdecode(done.stdout).rstrip("\n")) if done.returncode == 0 else directory


def has(clone: Path, ref: str) -> bool:
    return git(clone, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").returncode == 0


def log(clone: Path, *words: str) -> list[list[str]]:
    """Hash, day and first line of the commits that ``git log`` gives for ``words``, oldest first."""
    done = git(clone, "log", "-z", "--reverse", "--topo-order", "--format=%H%x09%cs%x09%s", *words)
    if done.returncode:
        raise UserError(f"{clone}: {said(done)}.")
    return [line.split("\t", 2) for line in done.stdout.decode(errors="replace").split("\0") if line]


def wheel(pack: Pack, directory: Path, ref: str | None, cache: Path) -> Path:
    """The wheel of a working tree at ``directory``, changes that are not committed included, or of a commit of that clone."""
    where = pack.repository
    if ref is not None:
        top = clone_at(directory)
        head = git(top, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").stdout.decode().strip()
        if not ref or not head:
            raise UserError(f"{directory} has no commit {ref!r}: give a clone of {where} that has it.")
        found, told = _committed(top, head, _places(pack)), f"git.g{head[:10]}"
    else:
        found, told = _working(pack, directory)
    files = _of_package(pack, found)
    if not files:
        raise NoPackage(
            f"{directory}{f' at {ref}' if ref else ''} holds nothing below {' or '.join(folders(pack))}, where {where} has {pack.package}."
        )
    told += _digest(files)[:10] if told.endswith(".") else ""
    return packed_wheel(pack, files, f"{_version(found, folders(pack)[0])}+{told}", cache)


def committed(pack: Pack, repository: Path, commit: str) -> dict[str, bytes]:
    """The package's files of a commit, by their path below site-packages."""
    return _of_package(pack, _committed(repository, commit, folders(pack)))


def packed_wheel(pack: Pack, files: dict[str, bytes], version: str, cache: Path) -> Path:
    """The wheel of a package's files, kept below what they hold: whatever its version, other files are another wheel."""
    name = pack.package.replace("-", "_")
    path = cache / "sources" / _digest(files)[:16] / f"{name}-{version}-py3-none-any.whl"
    with locked(path.with_suffix(".lock")):
        if not path.is_file():
            write_atomically(path, packed.wheel(files, name, pack.package, version))
    return path


def _of_package(pack: Pack, found: Mapping[str, bytes]) -> dict[str, bytes]:
    below = tuple(f"{folder}/" for folder in folders(pack))
    return {name.removeprefix(pack.prefix): data for name, data in found.items() if name.startswith(below)}


def _digest(files: Mapping[str, bytes]) -> str:
    return hashlib.sha256(b"".join(os.fsencode(n) + b"\0" + data + b"\0" for n, data in sorted(files.items()))).hexdigest()


def _places(pack: Pack) -> list[str]:
    return [*folders(pack), *_VERSIONS]


def _committed(top: Path, head: str, places: Sequence[str]) -> dict[str, bytes]:
    """The files of a commit, as git keeps them."""
    listed = git(top, "ls-tree", "-r", "-z", "--full-tree", head, "--", *places)
    if listed.returncode:
        raise UserError(f"{top}: {head[:10]} cannot be read: {said(listed)}.")
    shas = {}
    for line in os.fsdecode(listed.stdout).split("\0"):
        if line and packed.may_hold(line):
            told, _, name = line.partition("\t")
            mode, _, sha = told.split()
            _refuse(mode, name)
            shas[name] = sha
    return dict(zip(shas, _blobs(top, head, list(shas.values())), strict=True))


def _refuse(mode: str, name: str) -> None:
    what = {"120000": "a symbolic link", "160000": "a submodule"}.get(mode)
    if what:
        raise UserError(
            f"{name} is {what}, and a wheel of plain files cannot hold it: build a wheel, and name it with --wheel."
        )


def _blobs(top: Path, head: str, shas: Sequence[str]) -> Iterable[bytes]:
    done = git(top, "cat-file", "--batch", given="".join(f"{sha}\n" for sha in shas).encode())
    data, at = done.stdout, 0
    for sha in shas:
        end = data.find(b"\n", at)
        words = data[at:end].split()
        if len(words) != 3:
            raise UserError(f"{top}: {head[:10]} cannot be read: {sha[:10]} is missing ({said(done)}).")
        size = int(words[2])
        yield data[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


def _working(pack: Pack, directory: Path) -> tuple[dict[str, bytes], str]:
    """The files of a working tree and a name for them; of a folder that is no clone, a name that a hash is to follow."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a folder.")
    asked = git(directory, "rev-parse", "--show-toplevel")
    if asked.returncode and b"not a git repository" not in asked.stderr:
        raise UserError(f"{directory} is not a git clone: {said(asked)}.")
    top = Path(os.fsdecode(asked.stdout).rstrip("\n")) if asked.returncode == 0 else directory
    if asked.returncode or not any((top / folder).is_dir() for folder in folders(pack)):
        paths = [path for place in _places(pack) for path in [directory / place, *sorted((directory / place).rglob("*"))]]
        return {
            p.relative_to(directory).as_posix(): _read(p) for p in paths if p.is_file() and "__pycache__" not in p.parts
        }, "local."
    listed = git(top, "ls-files", "-z", "-t", "--stage", "--", *_places(pack)).stdout
    others = git(top, "ls-files", "-z", "--others", "--exclude-standard", "--", *_places(pack)).stdout
    found = {}
    for line in os.fsdecode(listed).split("\0"):
        if not line or not packed.may_hold(line):
            continue
        told, _, name = line.partition("\t")
        tag, mode = told.split()[:2]
        _refuse(mode, name)
        if tag == "S" and not (top / name).exists():
            raise UserError(
                f"The working tree at {top} is sparse and lacks {name}: git sparse-checkout disable, or judge a commit."
            )
        if (top / name).exists():
            found[name] = _read(top / name)
    for name in os.fsdecode(others).split("\0"):
        if name and packed.may_hold(name) and (top / name).is_file():
            found[name] = _read(top / name)
    head = git(top, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").stdout.decode().strip()
    if not head:
        return found, "local."
    with suppress(UserError):  # a commit with a link, say, which the working tree has no more
        if _committed(top, head, _places(pack)) == found:
            return found, f"git.g{head[:10]}"
    return found, f"git.g{head[:10]}.dirty."


def _read(path: Path) -> bytes:
    if path.is_symlink():
        _refuse("120000", str(path))
    return path.read_bytes()


def _version(files: Mapping[str, bytes], folder: str) -> str:
    """The version that the upstream's own files give; 0 where they give none."""
    texts = {name: data.decode(errors="replace") for name, data in files.items() if PurePosixPath(name).name in _NAMES}
    with suppress(tomllib.TOMLDecodeError, AttributeError):
        table = tomllib.loads(texts.get("pyproject.toml", ""))
        texts["pyproject.toml"] = str(table.get("project", {}).get("version", ""))
    info = texts.get(f"{folder}/package_info.py", "")
    numbers = [re.search(rf"^{part}\s*=\s*(\d+)", info, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
    before = re.search(r"""^PRE_RELEASE\s*=\s*["'](\w*)""", info, re.MULTILINE)
    init = re.search(r"""^__version__\s*=\s*["']([^"']+)""", texts.get(f"{folder}/__init__.py", ""), re.MULTILINE)
    told = [texts.get(name, "").strip().partition("\n")[0] for name in _VERSIONS]
    told += [init[1] if init else "", ".".join(n[1] for n in numbers if n) + (before[1] if before else "")]
    for each in told:
        with suppress(InvalidVersion):
            return Version(each).public
    return "0"


_NAMES = {*(PurePosixPath(name).name for name in _VERSIONS), "package_info.py", "__init__.py"}


def tag(clone: Path, release: str, otherwise: str) -> str:
    """The clone's tag of a release; without one a `UserError` that says what to do ``otherwise``. A branch of that name may hold something else than was released."""
    short = release.removesuffix(".0")
    for each in (f"v{release}", release, f"core_v{release}", f"core_r{release}", f"v{short}", f"release_v{short}"):
        if has(clone, f"refs/tags/{each}"):
            return f"refs/tags/{each}"
    raise UserError(f"{clone} has no tag of {release}: fetch its tags, or {otherwise}.")
