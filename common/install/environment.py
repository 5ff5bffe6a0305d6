"""Where a release runs: an interpreter, the folder that holds the release, and what else is installed.

`made` builds it with uv: one base layer (torch, triton, …) per set of pins, and on top of it one small virtual environment
per release that sees the base through a ``.pth`` file. So torch is installed once, and a release costs a fraction of a
second. `here` takes the active environment as it is, for machines that are closed to the outside.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from common.errors import InfraError, UserError, writing
from common.files import fill_once, locked, write_atomically
from common.install import integrity
from common.install.integrity import distribution, record_sha256
from common.install.machine import gpu
from common.process import run
from common.scrub import run_env, without_password

# Two threads that fill sysconfig's table at once see half of it (https://github.com/python/cpython/issues/92452).
sysconfig.get_config_vars()

#: Written last into an environment: one without it is not whole.
STAMP = "reproducer.json"
#: Seconds that uv gets for one call: torch over a slow line, or a build.
UV_TIMEOUT = 7200.0
#: How environments are laid out; one made by an older runner is not taken for ours.
LAYOUT = "copies, with byte code and a list of files"
#: Files of bases that are at least so large are kept once.
SHARED_BYTES = 2**18
#: Where uv finds packages: the settings that a build may see, too, for it installs what it needs to build.
UV_SETTINGS = (
    "UV_CONFIG_FILE",
    "UV_DEFAULT_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_HTTP_TIMEOUT",
    "UV_INDEX",
    "UV_INDEX_STRATEGY",
    "UV_INDEX_URL",
    "UV_NATIVE_TLS",
    "UV_OFFLINE",
    "UV_SYSTEM_CERTS",
    "UV_TORCH_BACKEND",
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "CC",
    "CXX",
    "MAX_JOBS",
)
#: What uv says when it is the machine: a build that was killed, a full disk, no more processes or files.
_MACHINE = re.compile(
    r"\(signal: \d+|Disk quota exceeded|Too many open files|Cannot allocate memory|Input/output error"
    r"|(?:os error|Errno) (?:5|12|23|24|28|122)\b"
)
#: Settings that would change which release, or which of its needs, is installed.
_STEERING = (
    "UV_CONSTRAINT",
    "UV_OVERRIDE",
    "UV_EXCLUDE_NEWER",
    "UV_BUILD_CONSTRAINT",
    "UV_PRERELEASE",
    "UV_RESOLUTION",
    "UV_NO_BUILD",
)
#: What uv says when it is the network, not the release, that fails.
_NETWORK = re.compile(
    r"not found in the package registry|error sending request|failed to fetch|dns error|connection|network|timed out|offline",
    re.IGNORECASE,
)


class InstallError(Exception):
    """A release cannot be installed (its own fault, or its dependencies'): the run is UNTESTABLE, not an error of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """``python`` runs it; ``site`` holds the release; ``path`` are the folders, in order, where distributions are found."""

    python: Path
    site: Path
    path: tuple[Path, ...]
    version: str
    file: str
    sha256: str
    on_path: bool = False
    #: Held, shared, by a run that uses it, and alone by whoever fills it; None for an environment that is not ours.
    lock: Path | None = None
    #: What was unpacked to ``site``, where that is how the release got there.
    archive: Path | None = None
    #: What we put there ourselves, and its sha256: what says where packages are found.
    ours: tuple[tuple[Path, str], ...] = ()

    def cuda(self) -> str | None:
        """The CUDA version that torch was built for, read and not imported: importing torch takes seconds."""
        for folder in self.path:
            with contextlib.suppress(OSError):
                text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
                found = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
                return found[1] if found else None
        return None

    def lacking(self, package: str) -> list[str]:
        """What the release says that it needs, and what is not installed beside it."""
        there = {each["name"] for each in self.distributions()}
        found = []
        for line in distribution(package, self.site).requires or ():
            with contextlib.suppress(InvalidRequirement):
                asked = Requirement(line)
                wanted = asked.marker is None or asked.marker.evaluate({"extra": ""})
                found += [f"{asked.name}{asked.specifier}"] if wanted and canonicalize_name(asked.name) not in there else []
        return found

    def distributions(self) -> list[dict[str, str]]:
        """Every installed distribution: name, version, and a sha256 over what its RECORD says was installed."""
        found: dict[str, dict[str, str]] = {}
        for folder in self.path:
            for dist in importlib.metadata.distributions(path=[str(folder)]):
                name = canonicalize_name(dist.metadata["Name"] or "")
                if name and name not in found:
                    found[name] = {"name": name, "version": dist.version, "record_sha256": record_sha256(dist)}
        return [found[name] for name in sorted(found)]


def here(package: str, cache_dir: Path, *, wheel: Path | None = None, release_path: Path | None = None) -> Environment:
    """The active environment, with the release from a wheel, from a folder, or as it is installed."""
    active = [Path(p) for p in sys.path if p and Path(p).is_dir()]
    if wheel is not None:
        sha256, version = read_wheel(wheel, package)
        place = site = cache_dir / "wheels" / f"{wheel.stem}-{sha256[:12]}"
        with writing(place):
            fill_once(place.with_name(f"{place.name}.lock"), place.is_dir, lambda: _unpack(wheel, place))
        if not wheel.name.endswith(".whl"):  # Its one folder holds the package and, in an egg-info, its metadata.
            site = next(folder for folder in site.iterdir() if folder.is_dir())
        return Environment(
            python=Path(sys.executable),
            site=site,
            path=(site, *active),
            version=version,
            file=wheel.name,
            sha256=sha256,
            on_path=True,
            lock=place.with_name(f"{place.name}.lock"),
            archive=wheel,
        )
    if release_path is not None:
        if not release_path.is_dir():
            raise UserError(f"--release-path {release_path} is not a folder.")
        dist, site, on_path = distribution(package, release_path), release_path.resolve(), True
    else:
        for folder in active:
            with contextlib.suppress(UserError):
                dist, site, on_path = distribution(package, folder), folder, False
                break
        else:
            raise UserError(f"{package} is not installed in the active environment: install it, or name a file with --wheel.")
    return Environment(
        python=Path(sys.executable),
        site=site,
        path=(site, *active) if on_path else tuple(active),
        version=dist.version,
        file="",
        sha256="",
        on_path=on_path,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What an environment is to hold: one release of a package, and the pins that go with it.

    With ``sha256`` the index's ``file`` must have just that hash; ``wheel`` installs a local file instead. ``build`` is for
    sdists: environment variables for the build, which then takes what it needs from the base layer (no build isolation). With
    ``python`` ("3.12") a wheel for that Python is installed, into this one. ``beside`` are installed after it, without their
    dependencies, for ``beside_python`` likewise. ``as_files`` installs an sdist's Python files without building it. ``index`` is
    where the file comes from, where that is not the index that uv is configured with.
    ``past_cache`` leaves uv's cache aside, which may hold a changed file of the release.
    """

    package: str
    version: str
    file: str
    sha256: str
    requires: tuple[str, ...] = ()
    wheel: Path | None = None
    build: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    python: str | None = None
    beside_python: str | None = None
    as_files: bool = False
    index: str | None = None
    past_cache: bool = False


def made(wanted: Wanted, cache_dir: Path, *, stop: threading.Event | None = None) -> Environment:
    """An environment of its own for a release, made by uv, or the one made earlier.

    Raises `InstallError` when the release cannot be installed, `InfraError` when nothing can be said of it (no network, a wrong hash,
    a killed uv), and `UserError` when the base layer cannot be made.
    """
    sha256, version, file = wanted.sha256, wanted.version, wanted.file
    if wanted.wheel is not None:
        sha256, version = read_wheel(wanted.wheel, wanted.package)
        file = wanted.wheel.name
    under = base(wanted.requires, cache_dir)
    place = cache_dir / "envs" / f"{wanted.package}-{version}-{(sha256 or 'nohash')[:12]}-{under.name[-12:]}"
    if wanted.beside:
        place = place.with_name(f"{place.name}-{hashlib.sha256(' '.join(wanted.beside).encode()).hexdigest()[:6]}")
    lock = place.with_name(f"{place.name}.lock")
    points, where = _site(place) / "_base.pth", f"{_site(under).resolve()}\n"

    def is_filled() -> bool:
        """One whose base layer lay elsewhere, as in a checkout that was moved, is made anew."""
        return bool(_ours(place)) and points.is_file() and Path(points.read_text(encoding="utf-8").partition("\n")[0]).is_dir()

    def fill() -> None:
        _venv(place)
        points.write_text(where, encoding="utf-8")
        _install(replace(wanted, version=version, file=file, sha256=sha256), place, stop)
        told: dict[str, Any] = {"package": wanted.package, "version": version, "file": file, "sha256": sha256}
        ours = [place / "pyvenv.cfg", *(_site(place) / name for name in integrity.OURS)]
        told["ours"] = {path.relative_to(place).as_posix(): integrity.sha256(path) for path in ours}
        write_atomically(place / STAMP, json.dumps(told))

    fill_once(lock, is_filled, fill)
    return Environment(
        python=_python(place),
        site=_site(place),
        path=(_site(place), _site(under)),
        version=version,
        file=file,
        sha256=sha256,
        lock=lock,
        ours=_ours(place),
    )


def _ours(place: Path) -> tuple[tuple[Path, str], ...]:
    """What we put into an environment, and its sha256, from the stamp; empty for one that is not whole."""
    try:
        told = json.loads((place / STAMP).read_text(encoding="utf-8"))["ours"]
        return tuple((place / name, digest) for name, digest in told.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return ()


def is_whole(there: Environment) -> bool:
    """Whether an environment of ours has not been discarded since it was asked for."""
    if there.lock is None:
        return True
    return there.site.is_dir() if there.archive else bool(there.ours) and (there.lock.with_suffix("") / STAMP).is_file()


def discard(there: Environment, is_bad: Callable[[], bool]) -> None:
    """Forget an environment of ours whose files are not what was installed: `made` and `here` then fill it anew.

    ``is_bad`` is asked once more when nobody else uses it: another run may have filled it afresh by then.
    """
    assert there.lock is not None
    place = there.lock.with_suffix("")
    with locked(there.lock):
        if is_bad():
            (place / STAMP).unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)


def _unpack(wheel: Path, place: Path) -> None:
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if wheel.name.endswith(".whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part)
    else:
        with tarfile.open(wheel) as archive:
            archive.extractall(part, filter="data")
    with contextlib.suppress(OSError):  # Another run was faster.
        part.replace(place)
    shutil.rmtree(part, ignore_errors=True)


def _install(wanted: Wanted, place: Path, stop: threading.Event | None) -> None:
    """Install the release into ``place``.

    That a release cannot be installed is a verdict on it, so it is believed only of the very file that the index names, its
    hash checked, and when a second try fails in the same way. Anything else is the machine's or the network's fault.
    """
    wheel = wanted.wheel
    if wheel is None and wanted.as_files:
        wheel = _wheel_of_files(wanted, place)
    elif wheel is None and wanted.index:
        from common.install import releases  # which waits for the network

        wheel = releases.fetch(wanted.package, wanted.file, place, sha256=wanted.sha256, index=wanted.index)
    tries = [_try(wanted, wheel, place, stop)]
    if tries[0] and wheel is not None:
        tries.append(_try(wanted, wheel, place, stop))
    elif tries[0]:
        if not wanted.sha256:
            raise InfraError(
                f"{wanted.package} {wanted.version} cannot be installed, nor compared with the index's: {_short(tries[0])}"
            )
        from common.install import releases  # which waits for the network

        fetched = releases.fetch(wanted.package, wanted.file, place, sha256=wanted.sha256)
        while tries[-1] and len(tries) < 3 and (len(tries) < 2 or _kind(tries[0]) != _kind(tries[1])):
            tries.append(_try(wanted, fetched, place, stop))
    if not tries[-1]:
        return
    if len(tries) > 1 and _kind(tries[-1]) != _kind(tries[-2]):
        raise InfraError(
            f"{wanted.package} {wanted.version} could not be installed, each time for another reason: {_short(tries[-1])}"
        )
    raise InstallError(_short(tries[-1]))


def _try(wanted: Wanted, wheel: Path | None, place: Path, stop: threading.Event | None) -> str:
    """One try; why it failed, empty where it did not."""
    named = f"{wanted.package} @ {wheel.resolve().as_uri()}" if wheel else f"{wanted.package}=={wanted.version}"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else wanted.sha256
    requirement = place / "release.txt"
    requirement.write_text(f"{named} --hash=sha256:{digest}\n" if digest else f"{named}\n", encoding="utf-8")
    arguments = ["pip", "install", "--python", str(_python(place)), "--no-deps"]
    arguments += ["--no-build-isolation"] if wanted.build else []
    arguments += ["--no-cache"] if wanted.past_cache else []
    own = ["-r", str(requirement), *(["--require-hashes"] if digest else []), *_for_python(wanted.python)]
    done = _uv([*arguments, *own], wanted.build, builds=not (wheel.name if wheel else wanted.file).endswith(".whl"), stop=stop)
    if done.returncode == 0 and wanted.beside:
        more = [*arguments, *wanted.beside, *_for_python(wanted.beside_python)]
        done = _uv(more, wanted.build, builds=bool(wanted.build), stop=stop)
    if done.returncode == 0:
        return ""
    why = _why(done)
    if done.returncode < 0:
        raise InfraError(f"uv was ended by {signal.Signals(-done.returncode).name} while it installed {named}.")
    if "No space left" in done.stderr:
        raise UserError(f"No space left on the disk of {place.parent}: free some and run again.")
    if _MACHINE.search(done.stderr):
        raise InfraError(f"{named} could not be installed for a fault of this machine: {_short(why)}")
    if _NETWORK.search(done.stderr):
        raise InfraError(
            f"{named} cannot be fetched: {_short(why)} Is there a network? A wheel at hand can be given with --wheel FILE."
        )
    return why


def _kind(why: str) -> str:
    """An install error without what differs from try to try: names and addresses of files, hashes, times."""
    return re.sub(r"`[^`]*`|\S*/\S*|[0-9a-f]{6,}|[\d.]+", "#", why)


def _wheel_of_files(wanted: Wanted, folder: Path) -> Path:
    from common.install import releases, sources  # which wait for the network, and are seldom wanted

    sdist = releases.fetch(wanted.package, wanted.file, folder, sha256=wanted.sha256)
    return sources.of_sdist(sdist, wanted.package, wanted.version, folder)


def _for_python(version: str | None) -> list[str]:
    return ["--python-version", version] if version else []


def has_base(requires: Sequence[str], cache_dir: Path) -> bool:
    return _is_base(_base_place(requires, cache_dir))


#: Bases that were compared with their stamps; looking at the files of torch takes a moment.
_COMPARED: set[Path] = set()


def _is_base(place: Path) -> bool:
    """Whether a base layer is whole. One that lost files would make a release look as if it could not be imported."""
    if place not in _COMPARED or not (place / STAMP).is_file():
        _COMPARED.discard(place)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads((place / STAMP).read_text(encoding="utf-8")).get("files") == _files(place):
                _COMPARED.add(place)
    return place in _COMPARED


def _files(place: Path) -> str:
    """A digest of the names and sizes of what is installed in an environment, less byte code."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(_site(place)):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            digest.update(f"{path.relative_to(place)} {path.lstat().st_size}\n".encode())
    return digest.hexdigest()


def base(requires: Sequence[str], cache_dir: Path) -> Path:
    """The base layer for these pins; made once, which takes minutes where torch has to be fetched."""
    place = _base_place(requires, cache_dir)
    with locked(place.with_name(f"{place.name}.lock")):
        if has_base(requires, cache_dir):
            return place
        (place / STAMP).unlink(missing_ok=True)
        _venv(place)
        if requires:
            arguments = ["pip", "install", "--python", str(_python(place)), *requires]
            done = _uv([*arguments, "--no-build"], builds=False)
            if done.returncode > 0:  # Some are sdists, perhaps.
                done = _uv(arguments, builds=True)
            if done.returncode:
                raise UserError(
                    f"The base layer ({', '.join(requires)}) cannot be installed: {_short(_why(done))} "
                    "Without a network, use an environment that has these and run 'python -m common run PACK --here'."
                )
            # Runs write no byte code (what lies in a release's folder has to be what it installed), so it is made here, once;
            # not of the libraries' own tests, a quarter of their files. Some files are for newer Pythons: that is no failure.
            skipped = r"site-packages[\\/].+[\\/]tests[\\/]"
            compiles = [sys.executable, "-m", "compileall", "-qq", "-j0", "-x", skipped, str(_site(place))]
            with subprocess.Popen(compiles, stdout=subprocess.DEVNULL):
                _share(place, cache_dir / "bases" / "shared")
        write_atomically(place / STAMP, json.dumps({"requires": list(requires), "files": _files(place)}))
    return place


def _share(place: Path, shared: Path) -> None:
    """Keep large files once for all bases, as hard links: each has the same torch and Triton, 1.4 GB of them.

    Not with uv's cache, which other projects use, and no source files, which somebody may edit to look into something.
    """
    with writing(shared):
        shared.mkdir(parents=True, exist_ok=True)
    for path in _site(place).rglob("*"):
        # Byte code is being made meanwhile.
        if path.suffix == ".py" or path.parent.name == "__pycache__" or path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size < SHARED_BYTES:
            continue
        first, link = shared / integrity.sha256(path), path.with_name(f"{path.name}.link")
        with contextlib.suppress(OSError):  # A file system without hard links: then each base has its own.
            if first.is_file() and not filecmp.cmp(first, path, shallow=False):
                first.unlink()  # somebody has changed it
            with contextlib.suppress(FileExistsError):
                first.hardlink_to(path)
            link.hardlink_to(first)
            link.replace(path)


def _base_place(requires: Sequence[str], cache_dir: Path) -> Path:
    digest = hashlib.sha256("\n".join([LAYOUT, platform.python_version(), platform.machine(), *requires]).encode()).hexdigest()
    return cache_dir / "bases" / f"python{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


def _venv(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    done = _uv(["venv", "--quiet", "--python", sys.executable, str(place)])
    if done.returncode:
        raise UserError(f"uv cannot make an environment in {place.parent}: {_short(_why(done))}")


def _python(place: Path) -> Path:
    return place / "bin" / "python"


def _site(place: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(place), "platbase": str(place)}))


def _uv(
    arguments: Sequence[str],
    also: Mapping[str, str] = MappingProxyType({}),
    *,
    builds: bool = False,
    stop: threading.Event | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run uv. With ``builds`` it may run a package's own build, which sees no more of our environment than a run does."""
    import uv

    with tempfile.TemporaryDirectory(prefix="reproducer-") as home:
        env = {**build_env(os.environ), **_uv_settings(), "HOME": home} if builds else {**os.environ, **_uv_settings()}
        env.pop("VIRTUAL_ENV", None)
        for name in _STEERING:
            env.pop(name, None)
        # As a run: nothing of a build goes on after it, and Ctrl-C is not taken for a failed install.
        command = [uv.find_uv_bin(), *arguments]
        ended = run(command, env={**env, **also}, cwd=Path(home), timeout=UV_TIMEOUT, memory=2**62, stop=stop)
    if ended.stopped or (ended.exit is None and ended.signal is None):
        raise InfraError(f"uv was stopped ({ended.stopped}) at: uv {' '.join(arguments[:2])}.")
    code = ended.exit if ended.exit is not None else -int(signal.Signals[str(ended.signal)])
    return subprocess.CompletedProcess(arguments, code, "", ended.output)


def build_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environ`` that a package's build may see: what a run may, and where packages come from, less passwords."""
    given = {n: without_password(v) for n, v in environ.items() if n.upper() in UV_SETTINGS}
    return {**run_env(environ), **given}


@cache
def _uv_settings() -> Mapping[str, str]:
    """What we tell uv in any case. It gets pip's find-links, which it does not read, or the torch build that suits the machine."""
    # Copies: uv would make links, and an edit of an installed file would change uv's cache, and so every later environment.
    settings = {"UV_NO_PROGRESS": "1", "UV_LINK_MODE": "copy"}
    # Builds have another HOME.
    above = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    settings["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR") or str(Path(above) / "uv")
    if links := find_links():
        settings["UV_FIND_LINKS"] = links
    elif "UV_TORCH_BACKEND" not in os.environ:
        settings["UV_TORCH_BACKEND"] = "auto" if gpu() else "cpu"
    return settings


@cache
def find_links() -> str:
    """What uv, or else pip, is configured to look through before the index, joined as uv wants it; empty without either."""
    if uvs := os.environ.get("UV_FIND_LINKS"):
        return uvs
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    bases = [str(Path(sys.base_prefix) / "bin" / "python3"), "python3"]
    for python in bases if not links else []:
        with contextlib.suppress(OSError):
            done = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True)
            found = re.findall(r"^(?:global|install|user|site|:env:)\.find-links='(.*)'$", done.stdout, re.MULTILINE)
            links = [link for value in found for link in value.replace("\\n", " ").split()]
            if done.returncode == 0:
                break
    return ",".join(dict.fromkeys(links))


def read_wheel(wheel: Path, package: str) -> tuple[str, str]:
    """sha256 and version of a wheel file (or an sdist of plain Python), checked to be ``package``'s."""
    is_wheel = not wheel.name.endswith(".tar.gz")
    if not wheel.is_file():
        raise UserError(f"--wheel {wheel} cannot be read: it is not there, or is no file.")
    try:
        name, version = parse_wheel_filename(wheel.name)[:2] if is_wheel else parse_sdist_filename(wheel.name)
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise UserError(f"--wheel {wheel} does not have a wheel's file name.") from error
    except OSError as error:
        raise UserError(f"--wheel {wheel} cannot be read: {error.strerror}.") from error
    if name != canonicalize_name(package):
        raise UserError(f"--wheel {wheel.name} is a wheel of {name}, but this pack is about {package}.")
    if not (zipfile.is_zipfile(wheel) if is_wheel else tarfile.is_tarfile(wheel)):
        raise UserError(f"--wheel {wheel} is not a whole {'wheel (not a zip file)' if is_wheel else 'sdist'}: fetch it again.")
    return sha256, str(version)


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """The telling part of what uv said, in one line."""
    text = re.sub(r"\s+", " ", re.sub(r"[×╰─▶│├]+", " ", done.stderr)).strip()
    return text.partition("error: ")[2] or text


def _short(why: str) -> str:
    return why if len(why) <= 400 else f"{why[:400]}…"
