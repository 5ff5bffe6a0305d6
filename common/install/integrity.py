"""Whether the files of a release that are about to run are the ones that it installed: all of them, and no others.

A wheel's RECORD lists every file with its sha256 (https://packaging.python.org/en/latest/specifications/recording-installed-packages/).
It guards against accidents (an edit of an installed file, a cache that was written through a hard link, a half-made copy). A
process with the caller's rights can forge both; see docs/security.md.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from common.errors import UserError

#: What Python would import, or run at its start, without a RECORD that lists it.
_IMPORTABLE = (".py", ".pyc", ".so", ".pth")
#: What we, and uv, put into an environment of our own.
OURS = ("_base.pth", "_virtualenv.py", "_virtualenv.pth")


class Tampered(Exception):
    """Installed files are not what their RECORD says; ``str`` names the first of them."""


def distribution(package: str, site: Path) -> importlib.metadata.Distribution:
    """The one installed distribution ``package`` in the folder ``site``; `UserError` where there is none, or more than one."""
    name = canonicalize_name(package)
    found = [
        dist
        for dist in importlib.metadata.distributions(path=[str(site)])
        if canonicalize_name(dist.metadata["Name"] or "") == name
    ]
    if len(found) > 1:
        versions = " and ".join(sorted(str(dist.version) for dist in found))
        raise UserError(
            f"{site} holds {package} twice, {versions}: delete the metadata that is left over, or install it afresh."
        )
    if not found:
        raise UserError(
            f"{site} holds no installed {package} (no {package.replace('-', '_')}-*.dist-info): "
            f"make one with 'pip install --no-deps --target DIR {package}==VERSION'."
        )
    return found[0]


def verify(
    package: str,
    site: Path,
    path: Sequence[Path],
    *,
    owned: bool,
    first: bool = False,
    archive: Path | None = None,
    ours: Sequence[tuple[Path, str]] = (),
) -> None:
    """Compare each file of ``package`` in ``site`` with its RECORD, or with the ``archive`` that was unpacked there.

    ``path`` are all folders that the run imports from. ``owned`` is for a folder that the runner filled itself, where whatever
    nothing lists is as wrong as a changed file; ``ours`` are the files that it put there, with their hashes. A folder that is ``first``
    on the path hides whatever else has its modules' names, and its sitecustomize runs: nothing there may be unlisted, either. Raises
    `Tampered` for files that differ, are gone or are not listed, and `UserError` where there is nothing to compare with: no RECORD, no hashes, two owners of one file.
    """
    for own, digest in ours:
        if sha256(own) != digest:
            raise Tampered(f"{own.name} is {'not what we wrote' if own.exists() else 'gone'}")
    listed = _of_archive(archive) if archive else _of_record(package, distribution(package, site), site)
    shipped = {file: digest for file, digest in listed.items() if _is_shipped(file)}
    others = _others(package, path)
    mine = {file for file in shipped if file.endswith(".py") and "/" in file}
    for name, _, files in others:
        # Only a package's Python files: two may well share a data file's name, or ship a setup.py.
        if shared := sorted(mine & files):
            raise UserError(
                f"{shared[0]} is installed by {name}, too, so it is unclear whose it is: use an environment without {name}."
            )
    for file, digest in shipped.items():
        if digest and sha256(site / file) != digest:
            raise Tampered(f"{file} is {'not what was installed' if (site / file).is_file() else 'gone'}")
    known = set(listed).union(*(files for _, folder, files in others if folder == site))
    known |= {file.removeprefix("../../") for file in known}  # pip install --target puts below it what is listed as beside lib/
    tops = {PurePosixPath(file).parts[0] for file in shipped}
    if owned or first:
        # Scripts are listed as ../../bin/….
        tops |= {entry.name for entry in site.iterdir()} - {*OURS, *(() if owned else ("bin",))}
    for file in _unlisted(site, tops, known, owned=owned, first=first):
        raise Tampered(f"{file} was not installed")


def _of_record(package: str, dist: importlib.metadata.Distribution, site: Path) -> dict[str, str]:
    if '"editable": true' in (dist.read_text("direct_url.json") or ""):
        raise UserError(f"{package} is an editable install, so no release is there to be judged: install a wheel of it.")
    record = dist.read_text("RECORD")
    if record is None:
        raise UserError(f"{package} in {site} has no RECORD, so what was installed cannot be checked: install it from a wheel.")
    listed = dict(_listed(record))
    shipped = [file for file in listed if _is_shipped(file)]
    if not shipped or any(not listed[file] for file in shipped if not file.endswith(".pyc")):
        raise UserError(f"The RECORD of {package} in {site} lists files without hashes: install it from a wheel that has them.")
    return listed


def _of_archive(archive: Path) -> dict[str, str]:
    """The files of a wheel, or those below an sdist's one folder, with their hashes."""
    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as opened:
            return {info.filename: record_digest(opened.read(info)) for info in opened.infolist() if not info.is_dir()}
    with tarfile.open(archive) as tar:
        members = ((member, tar.extractfile(member)) for member in tar if member.isfile())
        return {member.name.partition("/")[2]: record_digest(file.read()) for member, file in members if file}


def record_sha256(dist: importlib.metadata.Distribution) -> str:
    """sha256 over the sorted ``path,hash`` pairs of a RECORD, less what an installer adds: the same for uv and pip."""
    pairs = sorted(
        f"{file},sha256={digest}" for file, digest in _listed(dist.read_text("RECORD") or "") if digest and _is_shipped(file)
    )
    return hashlib.sha256("\n".join(pairs).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The file's sha256 as a RECORD writes it; empty when it is no file. Symbolic links are not followed: wheels have none."""
    if path.is_symlink() or not path.is_file():
        return ""
    return record_digest(path.read_bytes())


def record_digest(data: bytes) -> str:
    """A sha256 as RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _listed(record: str) -> Iterator[tuple[str, str]]:
    for line in record.splitlines():
        file, digest, _ = [*line.rsplit(",", 2), "", ""][:3]
        algorithm, _, value = digest.partition("=")
        if file:
            yield file.strip('"'), value if algorithm == "sha256" else ""


def _is_shipped(file: str) -> bool:
    """Whether a file came with the wheel: not what an installer adds, nor scripts, which lie outside the folder."""
    return not file.startswith(("..", "/")) and not re.search(r"\.dist-info/(?!METADATA|WHEEL|entry_points)", file)


def _others(package: str, path: Sequence[Path]) -> list[tuple[str, Path, set[str]]]:
    """Every other distribution on the path: its name, its folder and its files."""
    own = canonicalize_name(package)
    found: list[tuple[str, Path, set[str]]] = []
    for folder in path:
        for dist in importlib.metadata.distributions(path=[str(folder)]):
            if (name := canonicalize_name(dist.metadata["Name"] or "")) != own:
                lines = (dist.read_text("RECORD") or "").splitlines()
                found.append((name, folder, {line.rsplit(",", 2)[0].strip('"') for line in lines}))
    return found


def _unlisted(site: Path, tops: Iterable[str], known: set[str], *, owned: bool, first: bool) -> Iterator[str]:
    """Importable files at or below ``tops`` that no RECORD lists.

    Hidden folders are left out: nothing is imported from them, and compilers keep caches there.
    """
    for top in sorted(tops):
        if top.endswith((".dist-info", ".data")):
            continue
        for found in [site / top, *sorted((site / top).rglob("*"))]:
            file = found.relative_to(site)
            name = file.as_posix()
            if owned and found.is_symlink():  # No wheel holds one, and rglob looks behind none.
                yield name
            if found.is_dir() or name in known or not name.endswith(_IMPORTABLE):
                continue
            if any(part.startswith(".") for part in file.parts[:-1]):
                continue
            # What Python compiled from a file lies in __pycache__; byte code beside it has no source.
            if owned or not name.endswith(".pyc") or (first and "__pycache__" not in file.parts):
                yield name
