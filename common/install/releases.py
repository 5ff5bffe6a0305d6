"""Which releases an upstream package has, and the sha256 of each one's wheel (or sdist).

Asked of the package index that pip and uv are configured with, or of one that a pack names; the answer is kept, so that without
a network the last one stands in, and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, cpython_tags, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from common.errors import InfraError, UserError
from common.files import write_atomically
from common.install.environment import find_links
from common.packs.pack import Pack

if TYPE_CHECKING:
    from pypi_simple import PyPISimple

#: An answer younger than this is not asked for again, in seconds.
FRESH = 3600.0
#: Seconds to connect to the index and to wait for its next byte.
TIMEOUT = (10.0, 60.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One release on the index: its best file for this machine."""

    version: str
    file: str
    sha256: str
    yanked: bool = False
    uploaded: str | None = None
    #: sha256 of the release's other files: wheels for other machines, the sdist.
    others: tuple[str, ...] = ()
    #: A wheel in find-links, which was not compared with an index.
    at_hand: bool = False


class NoAnswer(UserError):
    """The index cannot be reached; one that says something else than a list of files has answered."""


def releases(
    package: str, cache: Path, *, python: str | None = None, index: str | None = None, now: float | None = None
) -> tuple[list[Release], str | None]:
    """All releases of ``package``, oldest first, and a sentence of warning where the answer is an old one.

    Wheels for ``python`` ("3.12") are taken first. ``index`` is asked in place of the index that uv is configured with. `UserError`
    when it does not answer and has never been asked before.
    """
    own = hashlib.sha256(index.encode()).hexdigest()[:8] if index else None
    path = cache / "index" / f"{'-'.join(filter(None, (package, python, own)))}.json"
    now = time.time() if now is None else now
    known = _read(path)
    # A file from the future (a clock that was set back) is not fresh either.
    if known is not None and 0 <= now - path.stat().st_mtime < FRESH:
        return known, None
    try:
        found = _ask(package, python, index)
    except UserError as error:
        if known is None:
            raise
        day = time.strftime("%Y-%m-%d", time.localtime(path.stat().st_mtime))
        return known, f"{error} Going by the list of {day}."
    write_atomically(path, json.dumps([asdict(release) for release in found], indent=1))
    return found, None


def of(pack: Pack, cache: Path) -> tuple[list[Release], str | None]:
    """All releases that a pack can be run on: the index's, or those that the pack builds itself.

    Where an index that the pack names cannot be reached, and never could, the wheels in find-links stand in for it.
    """
    if pack.wheels is None:
        try:
            return releases(pack.package, cache, python=pack.python, index=pack.index)
        except NoAnswer as error:
            if pack.index and (there := _at_hand(pack.package)):
                return there, f"{error} Going by the wheels in find-links, which are compared with no index."
            raise
    built = built_wheels(pack, cache)
    return [Release(version=v, file=built[v].name, sha256="") for v in sorted(built, key=Version)], None


def choose(pack: Pack, wanted: str | None, cache: Path) -> tuple[list[Release], list[str]]:
    """The releases that ``wanted`` names ("pinned", "all", or versions and specifiers joined by commas), and warnings.

    Without a network, and with nothing cached, the pinned releases are still known by name; their hash is not.
    """
    try:
        known, warning = of(pack, cache)
    except UserError as error:
        if wanted not in (None, "pinned"):
            raise
        names = ", ".join(pack.pinned)
        return [Release(version=v, file="", sha256="") for v in pack.pinned], [
            f"{error} Going by the pinned releases ({names})."
        ]
    warnings = [warning] if warning else []
    by_version = {Version(release.version): release for release in known}
    chosen: list[Release] = without_builds(pack, known) if wanted == "all" else []
    for part in () if wanted == "all" else pack.pinned if wanted in (None, "pinned") else _parts(str(wanted)):
        if part[0] in "<>=!~":
            chosen += [r for r in _matching(part, known) if r not in chosen]
            continue
        try:
            release = by_version.get(Version(part))
        except InvalidVersion as error:
            raise UserError(
                f"{part!r} is neither a version nor a specifier: write 0.6.5, '>=0.6,<0.8', pinned or all."
            ) from error
        if release is None:
            near = ", ".join(r.version for r in known[-5:])
            raise UserError(f"{pack.package} has no release {part} on the index; the newest are {near}.")
        if release not in chosen:
            chosen.append(release)
    if yanked := [release.version for release in chosen if release.yanked]:
        warnings.append(f"Yanked from the index by its publisher, and run all the same: {', '.join(yanked)}.")
    return chosen, warnings


def without_builds(pack: Pack, known: Sequence[Release]) -> list[Release]:
    """Less the development builds (``.dev``), of which an upstream may put hundreds on the index; a nightly has nothing else."""
    return [r for r in known if pack.package == pack.nightly or not Version(r.version).is_devrelease]


def _parts(wanted: str) -> Iterable[str]:
    """Split at commas, keeping a specifier set such as ``>=0.6,<0.8`` together."""
    plain = [part.strip() for part in wanted.split(",") if part.strip()]
    if not plain:
        raise UserError("No release was named: write 0.6.5, '>=0.6,<0.8', pinned or all.")
    specifiers = [part for part in plain if part[0] in "<>=!~"]
    return [part for part in plain if part not in specifiers] + ([",".join(specifiers)] if specifiers else [])


def _matching(specifiers: str, known: list[Release]) -> list[Release]:
    try:
        matches = SpecifierSet(specifiers)
    except InvalidSpecifier as error:
        raise UserError(f"{specifiers!r} is not a version specifier (PEP 440).") from error
    found = [release for release in known if matches.contains(Version(release.version), prereleases=True)]
    if not found:
        raise UserError(f"No release matches {specifiers!r}; there are {known[0].version} to {known[-1].version}.")
    return found


def _read(path: Path) -> list[Release] | None:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [Release(**{**release, "others": tuple(release["others"])}) for release in listed] or None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # Nothing there, or not whole: the index is asked again.


def _at_hand(package: str) -> list[Release]:
    """The releases of which a wheel for this machine lies in a folder of find-links; the first that is found of each."""
    found: dict[Version, Release] = {}
    for path in (path for folder in _folders() for path in sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))):
        with suppress(InvalidWheelFilename):
            version = parse_wheel_filename(path.name)[1].public
            if fits(path.name) and Version(version) not in found:
                sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                found[Version(version)] = Release(version=version, file=path.name, sha256=sha256, at_hand=True)
    return [found[version] for version in sorted(found)]


def _folders() -> list[Path]:
    """The folders among find-links, which may be addresses of files, or of pages."""
    links = [link.strip() for link in find_links().split(",")]
    return [Path(unquote(link.removeprefix("file://"))) for link in links if link and not link.startswith(("http:", "https:"))]


def _index(own: str | None) -> PyPISimple:
    from pypi_simple import PyPISimple

    if own:
        return PyPISimple(endpoint=own)
    index = next((os.environ[n] for n in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL") if os.environ.get(n)), None)
    return PyPISimple(endpoint=index) if index else PyPISimple()


def fetch(package: str, filename: str, folder: Path, *, sha256: str, index: str | None = None) -> Path:
    """A release's file from the index, its hash checked; `InfraError` where the index does not hand over just that file.

    One that lies in a folder of find-links, with that hash, is not fetched.
    """
    for place in _folders() if sha256 else ():
        near = place / filename
        if near.is_file() and hashlib.sha256(near.read_bytes()).hexdigest() == sha256:
            return near
    import requests
    from pypi_simple import DigestMismatchError, NoSuchProjectError

    path = folder / filename
    try:
        with _index(index) as client:
            files = client.get_project_page(package, timeout=TIMEOUT).packages
            file = next((f for f in files if f.filename == filename), None)
            if file is None:
                raise InfraError(f"The package index has no file {filename} of {package} any more, or is not what it seems.")
            client.download_package(file, path, timeout=TIMEOUT)
    except (requests.RequestException, NoSuchProjectError, DigestMismatchError, ValueError) as error:
        raise InfraError(f"{filename} cannot be fetched ({type(error).__name__}): is there a network?") from error
    if sha256 and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise InfraError(f"{filename} has another sha256 than the index gave for it when its releases were listed.")
    return path


def _ask(package: str, python: str | None, index: str | None) -> list[Release]:
    import requests
    from pypi_simple import NoSuchProjectError

    try:
        with _index(index) as client:
            page = client.get_project_page(package, timeout=TIMEOUT)
    except NoSuchProjectError as error:
        raise UserError(f"The package index has no project {package!r}.") from error
    except (requests.RequestException, ValueError) as error:
        kind = NoAnswer if isinstance(error, (requests.ConnectionError, requests.Timeout)) else UserError
        raise kind(f"The package index did not answer for {package} ({type(error).__name__}): is there a network?") from error
    found: dict[Version, Release] = {}
    hashes: dict[Version, list[str]] = {}
    # A wheel for this machine wins over an sdist, and that over a wheel for another.
    for file in sorted(page.packages, key=lambda f: _rank(f.filename, f.package_type, python)):
        sha256 = file.digests.get("sha256")
        try:
            version = Version(file.version or "")
            version = Version(version.public) if index else version  # torch's builds for CPUs are 2.13.0+cpu
        except InvalidVersion:
            continue
        if file.package_type not in ("wheel", "sdist") or not sha256:
            continue
        hashes.setdefault(version, []).append(sha256)
        if version in found:
            continue
        uploaded = file.upload_time.isoformat() if file.upload_time else None
        found[version] = Release(
            version=str(version), file=file.filename, sha256=sha256, yanked=bool(file.is_yanked), uploaded=uploaded
        )
    if not found:
        raise UserError(f"The package index answered for {package}, but named no release.")
    return [replace(found[version], others=tuple(hashes[version][1:])) for version in sorted(found)]


def _rank(filename: str, kind: str | None, python: str | None) -> int:
    """How well a file suits this machine: the place of its best tag among those that the interpreter takes, then sdists."""
    tags = _tags(python)
    if kind != "wheel":
        return len(tags)
    try:
        return min((tags.get(tag, len(tags) + 1) for tag in parse_wheel_filename(filename)[3]), default=0)
    except InvalidWheelFilename:
        return len(tags) + 2


@cache
def _tags(python: str | None = None) -> dict[Tag, int]:
    first = cpython_tags([int(part) for part in python.split(".")]) if python else ()
    return {tag: i for i, tag in enumerate(dict.fromkeys([*first, *sys_tags()]))}


def fits(filename: str) -> bool:
    """Whether this interpreter takes a file as it is."""
    return not filename.endswith(".whl") or not parse_wheel_filename(filename)[3].isdisjoint(_tags())


def built_wheels(pack: Pack, cache: Path) -> dict[str, Path]:
    """The wheels that a pack builds itself (the self-test's toy releases), by version."""
    assert pack.wheels is not None
    source = pack.folder / pack.wheels
    folder = cache / "built" / f"{pack.name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{pack.name}-", dir=folder.parent))
        namespace: dict[str, Any] = {"__name__": pack.wheels}
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), namespace)
        namespace["build"](part)
        try:
            part.replace(folder)
        except OSError:  # Another run was faster.
            shutil.rmtree(part, ignore_errors=True)
    return {path.name.split("-")[1]: path for path in sorted(folder.glob("*.whl"))}
