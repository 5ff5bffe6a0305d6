"""Where a release runs: an interpreter, the folder that holds the release, and what else is installed.

`made` builds it with uv: one base layer (torch, triton, …) per set of pins, and on top of it one small virtual environment
per release that sees the base through a ``.pth`` file. So torch is installed once, and a release costs a fraction of a
second. `here` takes the active environment as it is, for machines that are closed to the outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from common.errors import UserError
from common.files import locked, write_atomically
from common.overlay import distribution

# Two threads that fill sysconfig's table at once see half of it (https://github.com/python/cpython/issues/92452).
sysconfig.get_config_vars()

#: What uv says when it is the network, not the release, that fails.
_NETWORK = re.compile(r"error sending request|failed to fetch|dns error|connection|network|timed out|offline", re.IGNORECASE)


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

    def distributions(self) -> list[dict[str, str]]:
        """Every installed distribution: name, version, and a sha256 over what its RECORD says was installed."""
        found: dict[str, dict[str, str]] = {}
        for folder in self.path:
            for dist in importlib.metadata.distributions(path=[str(folder)]):
                name = canonicalize_name(dist.metadata["Name"] or "")
                if name and name not in found:
                    found[name] = {"name": name, "version": dist.version, "record_sha256": record_sha256(dist)}
        return [found[name] for name in sorted(found)]


def record_sha256(dist: importlib.metadata.Distribution) -> str:
    """sha256 over the sorted ``path,hash`` pairs of a RECORD, less what an installer adds: the same for uv and pip."""
    lines = []
    for line in (dist.read_text("RECORD") or "").splitlines():
        path, digest, _ = [*line.rsplit(",", 2), "", ""][:3]
        if digest and not path.startswith(("..", "/")) and not re.search(r"\.dist-info/(?!METADATA|WHEEL|entry_points)", path):
            lines.append(f"{path},{digest}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def here(package: str, cache_dir: Path, *, wheel: Path | None = None, release_path: Path | None = None) -> Environment:
    """The active environment, with the release from a wheel, from a folder, or as it is installed."""
    active = [Path(p) for p in sys.path if p and Path(p).is_dir()]
    if wheel is not None:
        sha256, version = read_wheel(wheel, package)
        site = cache_dir / "wheels" / f"{wheel.stem}-{sha256[:12]}"
        if not site.is_dir():
            part = site.with_name(f"{site.name}.{os.getpid()}.part")
            if wheel.name.endswith(".whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(part)
            else:
                with tarfile.open(wheel) as archive:
                    archive.extractall(part, filter="data")
            with contextlib.suppress(OSError):  # Another run was faster.
                part.replace(site)
            shutil.rmtree(part, ignore_errors=True)
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
            raise UserError(
                f"{package} is not installed in the active environment: install it, or give it with --wheel FILE or --release-path DIR."
            )
    return Environment(
        python=Path(sys.executable),
        site=site,
        path=(site, *active) if on_path else tuple(active),
        version=dist.version,
        file="",
        sha256="",
        on_path=on_path,
    )


def made(
    package: str,
    version: str,
    sha256: str,
    file: str,
    requires: Sequence[str],
    cache_dir: Path,
    *,
    wheel: Path | None = None,
    build: Mapping[str, str] = MappingProxyType({}),
    beside: Sequence[str] = (),
    python: str | None = None,
    beside_python: str | None = None,
    as_files: bool = False,
) -> Environment:
    """An environment of its own for ``package==version``, made by uv, or the one made earlier.

    With ``sha256`` the index's file must have just that hash; ``wheel`` installs a local file instead. ``build`` is for sdists:
    environment variables for the build, which then takes what it needs from the base layer (no build isolation). With ``python``
    ("3.12") a wheel for that Python is installed, into this one. ``beside`` are installed after it, without their dependencies,
    for ``beside_python`` likewise. ``as_files`` installs an sdist's Python files without building it.
    Raises `InstallError` when the release cannot be installed and `UserError` when the base layer cannot.
    """
    if wheel is not None:
        sha256, version = read_wheel(wheel, package)
        file = wheel.name
    under = base(requires, cache_dir)
    place = cache_dir / "envs" / f"{package}-{version}-{(sha256 or 'nohash')[:12]}-{under.name[-12:]}"
    place = place.with_name(f"{place.name}-{hashlib.sha256(' '.join(beside).encode()).hexdigest()[:6]}") if beside else place
    stamp = place / "reproducer.json"
    with locked(place.with_name(f"{place.name}.lock")):
        if not stamp.is_file():
            _venv(place)
            if as_files and wheel is None:
                wheel = _wheel_of_files(package, version, file, place)
            wanted = f"{package} @ {wheel.resolve().as_uri()}" if wheel else f"{package}=={version}"
            digest = read_wheel(wheel, package)[0] if wheel else sha256
            (_site(place) / "_base.pth").write_text(f"{_site(under)}\n", encoding="utf-8")
            requirement = place / "release.txt"
            requirement.write_text(f"{wanted} --hash=sha256:{digest}\n" if digest else f"{wanted}\n", encoding="utf-8")
            arguments = ["pip", "install", "--python", str(_python(place)), "--no-deps"]
            arguments += ["--no-build-isolation"] if build else []
            own = ["-r", str(requirement), *(["--require-hashes"] if digest else []), *_for_python(python)]
            done = _uv([*arguments, *own], build)
            if done.returncode == 0 and beside:
                done = _uv([*arguments, *beside, *_for_python(beside_python)], build)
            if done.returncode and "No space left" in done.stderr:
                raise UserError(f"No space left on the disk of {cache_dir}: free some and run again.")
            if done.returncode and _NETWORK.search(done.stderr):
                raise UserError(
                    f"{wanted} cannot be fetched: {_why(done)} Is there a network? A wheel at hand can be given with --wheel FILE."
                )
            if done.returncode:
                raise InstallError(_why(done))
            write_atomically(stamp, json.dumps({"package": package, "version": version, "file": file, "sha256": sha256}))
    return Environment(
        python=_python(place),
        site=_site(place),
        path=(_site(place), _site(under)),
        version=version,
        file=file,
        sha256=sha256,
    )


def _wheel_of_files(package: str, version: str, file: str, folder: Path) -> Path:
    from common import releases, sources  # which wait for the network, and are seldom wanted

    return sources.of_sdist(releases.fetch(package, file, folder), package, version, folder)


def _for_python(version: str | None) -> list[str]:
    return ["--python-version", version] if version else []


def has_base(requires: Sequence[str], cache_dir: Path) -> bool:
    return (_base_place(requires, cache_dir) / "reproducer.json").is_file()


def base(requires: Sequence[str], cache_dir: Path) -> Path:
    """The base layer for these pins; made once, which takes minutes where torch has to be fetched."""
    place = _base_place(requires, cache_dir)
    with locked(place.with_name(f"{place.name}.lock")):
        if has_base(requires, cache_dir):
            return place
        _venv(place)
        if requires:
            done = _uv(["pip", "install", "--python", str(_python(place)), *requires])
            if done.returncode:
                raise UserError(
                    f"The base layer ({', '.join(requires)}) cannot be installed: {_why(done)} "
                    "Without a network, use an environment that has these and run 'python -m common run PACK --here'."
                )
        write_atomically(place / "reproducer.json", json.dumps({"requires": list(requires)}))
    return place


def _base_place(requires: Sequence[str], cache_dir: Path) -> Path:
    digest = hashlib.sha256("\n".join([platform.python_version(), platform.machine(), *requires]).encode()).hexdigest()
    return cache_dir / "bases" / f"python{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


def _venv(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    done = _uv(["venv", "--quiet", "--python", sys.executable, str(place)])
    if done.returncode:
        raise UserError(f"uv cannot make an environment in {place.parent}: {_why(done)}")


def _python(place: Path) -> Path:
    return place / "bin" / "python"


def _site(place: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(place), "platbase": str(place)}))


def _uv(arguments: Sequence[str], also: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    import uv

    return subprocess.run([uv.find_uv_bin(), *arguments], env={**_uv_env(), **also}, capture_output=True, text=True)


@cache
def _uv_env() -> Mapping[str, str]:
    """uv's environment: with pip's find-links, which uv does not read, or else the torch build that suits the machine."""
    env = {**os.environ, "UV_NO_PROGRESS": "1"}
    env.pop("VIRTUAL_ENV", None)
    if links := env.get("UV_FIND_LINKS") or _pip_find_links():
        env["UV_FIND_LINKS"] = links
    else:
        env.setdefault("UV_TORCH_BACKEND", "auto" if gpu() else "cpu")
    return env


def _pip_find_links() -> str:
    """What pip is configured to look through before the index, joined as uv wants it; empty without pip."""
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


@cache
def gpu() -> tuple[dict[str, str], ...]:
    """The NVIDIA GPUs that a run may use: name, driver, compute capability, memory. Empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode:
        return ()
    return tuple(
        dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in done.stdout.splitlines() if line.strip()
    )


def read_wheel(wheel: Path, package: str) -> tuple[str, str]:
    """sha256 and version of a wheel file (or an sdist of plain Python), checked to be ``package``'s."""
    is_wheel = not wheel.name.endswith(".tar.gz")
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
    text = re.sub(r"^(?:warning: .*? )?(?:error: )?", "", text)
    return text if len(text) <= 400 else f"{text[:400]}…"
