"""What is in no release: a commit of the upstream's repository, made into a wheel of its plain Python files.

The wheel's version names commit and tree, ``0+git.da482cf5c8.tree.1f0c5ce6a1``, and the same commit gives the same wheel.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.files import locked
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


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """The files that a wheel may hold."""
    for member in tar:
        opened = tar.extractfile(member) if member.isfile() else None
        if opened and not re.search(r"\.(cpp|cu|cuh|h|md)$", member.name):
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
