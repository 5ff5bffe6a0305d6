"""What is in no release: a commit, a pull request or a working tree of the upstream's repository, made into a wheel of its plain Python files.

The wheel's version names it: ``0+git.da482cf5c8.tree.1f0c5ce6a1`` for a commit that a pack's variant names, ``0.8.2+git.9ac26bb8fe`` for what a user gives, with
``.dirty.`` and a hash where the working tree has changes. The same files give the same wheel.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from packaging.version import InvalidVersion, Version

from common.errors import UserError
from common.files import locked, write_atomically
from common.packs.pack import Pack


class NoSource(UserError):
    """Neither a clone nor GitHub gave the commit: nothing can be said of it here."""


#: Of any file in the wheel: zip knows no earlier time.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def wheel(pack: Pack, variant: str, directory: Path | None, cache: Path) -> Path:
    """The wheel of the variant's commit, from a clone at ``directory``, or fetched from GitHub.

    Raises `NoSource`, "UNTESTABLE: source", when neither has the commit.
    """
    commit = pack.variants[variant].source
    assert commit is not None
    repository, why = (directory, _missing(directory, commit)) if directory else _fetched(pack.upstream, commit, cache)
    if why:
        raise NoSource(
            f"UNTESTABLE: source: commit {commit[:10]} of {pack.upstream} is in no release, and {why}. "
            f"With a clone that has it: nox -s {pack.name} -- --variant {variant} --source DIR"
        )
    tree = _git(repository, "rev-parse", f"{commit}^{{tree}}").stdout.decode().strip()
    name = pack.package.replace("-", "_")
    version = f"0+git.{commit[:10]}.tree.{tree[:10]}"
    path = cache / "sources" / f"{name}-{version}-py3-none-any.whl"
    with locked(path.with_suffix(".lock")):
        if not path.is_file():
            archive = _git(repository, "archive", "--format=tar", commit, "--", *pack.tree)
            if archive.returncode:
                raise UserError(f"{commit[:10]} of {pack.upstream}: {archive.stderr.decode(errors='replace').strip()}")
            partial = path.with_suffix(".partial")
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                files = dict(_files(tar))
            partial.write_bytes(_packed(files, name, pack.package, version))
            partial.replace(path)
    return path


def folders(pack: Pack) -> tuple[str, ...]:
    """Where the upstream's repository holds the package."""
    return pack.tree or (f"{pack.prefix}{pack.imports}",)


def has(clone: Path, ref: str) -> bool:
    return _git(clone, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").returncode == 0


def log(clone: Path, *words: str) -> list[list[str]]:
    """Hash, day and first line of the commits that ``git log`` gives for ``words``, oldest first."""
    done = _git(clone, "log", "--reverse", "--topo-order", "--format=%H%x09%cs%x09%s", *words)
    if done.returncode:
        raise UserError(f"{clone}: {done.stderr.decode(errors='replace').strip()}")
    return [line.split("\t", 2) for line in done.stdout.decode(errors="replace").splitlines()]


def of_checkout(pack: Pack, directory: Path, commit: str | None, cache: Path) -> Path:
    """The wheel of a working tree at ``directory``, changes that are not committed included, or of a ``commit`` of that clone."""
    places = folders(pack)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a folder.")
    head = _git(directory, "rev-parse", "--verify", "--quiet", f"{commit or 'HEAD'}^{{commit}}").stdout.decode().strip()
    if commit:
        if not head:
            raise UserError(f"{directory} has no commit {commit}: give a clone of {pack.upstream} that has it.")
        held = _git(directory, "ls-tree", "-r", "--name-only", "-z", head).stdout.decode().split("\0")
        wanted = [f for f in places if any(name.startswith(f"{f}/") for name in held)]
        wanted += [name for name in _VERSIONS if name in held]
        archive = _git(directory, "archive", "--format=tar", head, "--", *wanted)
        if archive.returncode:
            raise UserError(f"{directory}: {head[:10]} cannot be read: {archive.stderr.decode(errors='replace').strip()}")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            everything = dict(_files(tar))
        told = f"git.{head[:10]}"
    else:
        listed = _git(directory, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--full-name").stdout.decode()
        names = listed.split("\0") if head else [str(f.relative_to(directory)) for f in directory.rglob("*.py")]
        top = Path(_git(directory, "rev-parse", "--show-toplevel").stdout.decode().strip() or directory) if head else directory
        everything = {n: (top / n).read_bytes() for n in names if n and _may_hold(n) and (top / n).is_file()}
        told = f"git.{head[:10]}" if head else "local"
    files = {
        name.removeprefix(pack.prefix): data
        for name, data in everything.items()
        if name.startswith(tuple(f"{folder}/" for folder in places))
    }
    if not files:
        raise UserError(f"{directory} holds nothing below {' or '.join(places)}, where {pack.upstream} has {pack.package}.")
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + data + b"\0" for name, data in sorted(files.items()))).hexdigest()
    if not head:
        told += f".{digest[:10]}"
    elif not commit and _git(directory, "status", "--porcelain", "--", *(f":/{folder}" for folder in places)).stdout:
        told += f".dirty.{digest[:10]}"
    name, version = pack.package.replace("-", "_"), f"{_base(everything, places)}+{told}"
    path = cache / "sources" / digest[:16] / f"{name}-{version}-py3-none-any.whl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_packed(files, name, pack.package, version))
    return path


def pull_request(upstream: str, number: int, cache: Path) -> tuple[Path, str]:
    """A repository that holds the head of a pull request, and its commit."""
    place, ref = cache / "sources" / upstream.replace("/", "+"), f"refs/pull/{number}/head"
    place.mkdir(parents=True, exist_ok=True)
    with locked(place.with_suffix(".lock")):
        if not (place / "HEAD").is_file():
            _git(place, "init", "--quiet", "--bare")
        done = _git(place, "fetch", "--quiet", "--depth=1", f"https://github.com/{upstream}", f"+{ref}:{ref}")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            f"Pull request {number} of {upstream} cannot be fetched ({said[-1] if said else 'git failed'}). Give its diff with --patch, or a "
            f"clone that has it: --source DIR --commit {ref}."
        )
    return place, _git(place, "rev-parse", ref).stdout.decode().strip()


def of_diff(given: str, cache: Path) -> Path:
    """The file of a diff that is given as a file, as an address (of a pull request or a commit on GitHub, too), or as "-"."""
    if given != "-" and not re.match(r"https?://", given):
        return Path(given)
    if given == "-":
        name, data = "stdin", sys.stdin.buffer.read()
    else:
        import requests  # which takes a moment, and is seldom wanted

        page = re.fullmatch(r"(https://github\.com/[^/]+/[^/]+/(?:pull/\d+|commit/[0-9a-f]+))(?:/\w*)?", given)
        try:
            answer = requests.get(f"{page[1]}.diff" if page else given, timeout=60)
            answer.raise_for_status()
        except requests.RequestException as error:
            raise UserError(
                f"--patch {given} cannot be fetched ({type(error).__name__}): save the diff, and name the file."
            ) from error
        name, data = Path(page[1] if page else given).stem, answer.content
    path = cache / "patches" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{hashlib.sha256(data).hexdigest()[:12]}.diff"
    write_atomically(path, data)
    return path


#: Where upstreams keep their version, and how it is written there.
_VERSIONS = {
    "pyproject.toml": r'^version\s*=\s*"([^"]+)"',
    "version.txt": r"^\s*(\d\S*)",
    "build_tools/VERSION.txt": r"^\s*(\d\S*)",
    "__init__.py": r"""^__version__\s*=\s*["']([^"']+)""",
}


def _base(files: dict[str, bytes], folders: tuple[str, ...]) -> str:
    """The version that the upstream's own files give; 0 where they give none."""
    for place, pattern in _VERSIONS.items():
        name = f"{folders[0]}/{place}" if place == "__init__.py" else place
        if found := re.search(pattern, files.get(name, b"").decode(errors="replace"), re.MULTILINE):
            with suppress(InvalidVersion):
                return Version(found[1]).public
    info = files.get(f"{folders[0]}/package_info.py", b"").decode(errors="replace")
    numbers = [re.search(rf"^{part}\s*=\s*(\d+)", info, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(number[1] for number in numbers if number) or "0"


def _missing(directory: Path, commit: str) -> str:
    if not directory.is_dir():
        return f"{directory} is not a folder"
    return "" if _git(directory, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0 else f"{directory} does not have it"


def _fetched(upstream: str, commit: str, cache: Path) -> tuple[Path, str]:
    """A repository with that commit alone, and why not."""
    place = cache / "sources" / upstream.replace("/", "+")
    place.mkdir(parents=True, exist_ok=True)
    with locked(place.with_suffix(".lock")):
        if not (place / "HEAD").is_file():
            _git(place, "init", "--quiet", "--bare")
        if _missing(place, commit):
            done = _git(place, "fetch", "--quiet", "--depth=1", f"https://github.com/{upstream}", commit)
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().splitlines()
                return place, f"it cannot be fetched ({said[-1] if said else 'git failed'})"
    return place, ""


def _git(directory: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        # git must not wait for a name and a password, which GitHub asks for where there is no such repository.
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        return subprocess.run(["git", "-C", str(directory), *arguments], env=env, capture_output=True, timeout=600)
    except FileNotFoundError:
        raise UserError("git is not on PATH, and a commit cannot be read without it.") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(arguments, 1, b"", b"no answer in ten minutes")


def of_sdist(sdist: Path, package: str, version: str, folder: Path) -> Path:
    """A wheel, in ``folder``, of an sdist's packages as they are: of one that cannot be built, and need not be."""
    with tarfile.open(sdist) as tar:
        files = {name.partition("/")[2]: data for name, data in _files(tar)}
    packages = tuple(path.removesuffix("__init__.py") for path in files if re.fullmatch(r"[^/]+/__init__\.py", path))
    name = package.replace("-", "_")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(_packed({p: data for p, data in files.items() if p.startswith(packages)}, name, package, version))
    return path


def _may_hold(name: str) -> bool:
    """Whether a wheel of plain Python may hold it."""
    return not re.search(r"\.(cpp|cu|cuh|h|md)$", name)


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """The files that a wheel may hold."""
    for member in tar:
        opened = tar.extractfile(member) if member.isfile() else None
        if opened and _may_hold(member.name):
            yield member.name, opened.read()


def _packed(files: dict[str, bytes], name: str, package: str, version: str) -> bytes:
    info = f"{name}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: reproducer-packs\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for path, data in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(path, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
