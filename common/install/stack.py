"""What is installed, or is going to be: names and versions from an environment, a lock file, requirements or ``pip freeze``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from common.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Run by the other Python, which may be an old one and has nothing of ours.
_LIST = """
import sys
sys.path = [folder for folder in sys.path if folder]
import json
try:
    from importlib.metadata import distributions
except ImportError:
    from pkg_resources import working_set
    found = [(d.project_name, d.version, None) for d in working_set]
else:
    found = [(d.metadata["Name"], d.version, d.read_text("direct_url.json")) for d in distributions()]
print(json.dumps([row for row in found if all(row[:2])]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Distributions by normalized name. ``open`` are those that are asked for without one version, or made of a checkout, with what
    is asked ("" where a line names no distribution, and stands in its place); ``several`` those that are asked for in more than one, as by a lock file for several
    platforms, or by two files.

    ``lines`` says in which file and line, from 1, each is; ``place`` is what was read.
    """

    versions: dict[str, str]
    open: dict[str, str] = field(default_factory=dict)
    several: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    place: str = ""
    total: int = 0


def of_python(python: Path) -> Stack:
    """What a Python finds when it is started: its environment, with what PYTHONPATH and the folder it is started in add left out."""
    if python.is_dir():
        inside = [python / "bin" / "python", python / "Scripts" / "python.exe"]
        python = next((file for file in inside if file.is_file()), python)
    if not python.is_file():
        raise UserError(f"{python} is not a Python interpreter: name one, or the folder of a virtual environment.")
    try:
        done = subprocess.run([python, "-E", "-c", _LIST], capture_output=True, text=True, timeout=60)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{python} gave no list of packages ({type(error).__name__}): name a Python interpreter, or the folder of a virtual environment."
        ) from error
    first: dict[str, tuple[str, str | None]] = {}
    for name, version, origin in found:  # The first on the path is what is imported.
        first.setdefault(canonicalize_name(name), (version, origin))
    # https://packaging.python.org/en/latest/specifications/direct-url/: what says of itself that it is a release, and may hold anything.
    made = {
        name: f"{version}, made of a checkout"
        for name, (version, origin) in first.items()
        if not _released(origin, name, version)
    }
    versions = {name: version for name, (version, _) in first.items() if name not in made}
    return Stack(versions=versions, open=made, place=str(python), total=len(first))


def _released(origin: str | None, name: str, version: str) -> bool:
    """Whether what was installed is a file of a release: from an index, which leaves no direct_url.json, or one of that name and version."""
    try:
        return origin is None or ("archive_info" in (told := json.loads(origin)) and _names(str(told["url"]), name, version))
    except (ValueError, TypeError, KeyError):
        return False


def _names(url: str, name: str, version: str) -> bool:
    """Whether a file has the name that a release's has."""
    found = _file(url)
    return found is not None and canonicalize_name(found[0]) == name and _same(found[1], version)


def of_file(path: Path) -> Stack:
    """A lock file (uv.lock, pylock.toml, poetry.lock, pdm.lock), or requirements, constraints or the output of ``pip freeze``."""
    text = _text(path)
    return _locked(path, text) if path.suffix in (".lock", ".toml") else of_lines(text.splitlines(), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): give a lock file, requirements, or what pip freeze prints."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8.") from error


def _locked(path: Path, text: str) -> Stack:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    packages = document.get("package", document.get("packages"))
    if not isinstance(packages, list) or not all(isinstance(each, dict) for each in packages):
        known = "uv.lock, pylock.toml, poetry.lock and pdm.lock have"
        raise UserError(f"{path} has no list of packages, as {known}: give requirements, or a lock file.")
    numbers: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("name = "):
            numbers.setdefault(canonicalize_name(line.partition("=")[2].strip().strip("\"'")), number)
    found = []
    for each in packages:
        name, version = str(canonicalize_name(str(each.get("name", "")))), each.get("version")
        source = each.get("source")
        named = {
            *each,
            *(source if isinstance(source, dict) else ()),
            source["type"] if isinstance(source, dict) and "type" in source else "",
        }
        elsewhere = bool(named & {"git", "vcs", "path", "directory", "editable", "virtual"})
        url = next(
            (str(held["url"]) for held in (source, each.get("archive"), each) if isinstance(held, dict) and "url" in held), ""
        )
        elsewhere |= "legacy" not in named and bool(url) and not _names(url, name, str(version))
        given = version if isinstance(version, str) and not elsewhere else None
        asked = f"{version}, made of a checkout" if elsewhere else "locked without a version"
        found.append((name, given, asked, (str(path), numbers.get(name, 1))))
    return replace(_gathered(str(path), found), total=len(packages))


def _gathered(place: str, found: Iterable[tuple[str, str | None, str, tuple[str, int]]]) -> Stack:
    """From names, versions where one is said, what is asked for, and file and line."""
    pins: dict[str, list[str]] = {}
    open_: dict[str, str] = {}
    lines: dict[str, tuple[str, int]] = {}
    for name, version, asked, at in found:
        lines.setdefault(name, at)
        if version is None:
            open_[name] = asked if _made(asked) else open_.get(name, asked)
        elif not any(_same(version, known) for known in pins.setdefault(name, [])):
            pins[name].append(version)
    made = {name for name, asked in open_.items() if _made(asked)}
    return Stack(
        versions={name: versions[0] for name, versions in pins.items() if len(versions) == 1 and name not in made},
        # Not a constraint beside a requirement.
        open={name: asked for name, asked in open_.items() if name in made or name not in pins},
        several={name: tuple(versions) for name, versions in pins.items() if len(versions) > 1 and name not in made},
        lines=lines,
        place=place,
        total=len({*pins, *(name for name, asked in open_.items() if asked)}),
    )


def _made(asked: str) -> bool:
    """Whether what is asked for is no file of a release."""
    return asked.endswith("a checkout") or asked.startswith("@ ")


def _same(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def of_lines(lines: Iterable[str], path: Path | None = None) -> Stack:
    """Requirements, with the files that they include. A line that says no version is kept as open, one that is none is an error."""
    place = str(path or "standard input")
    found = _requirements(lines, path, set())
    return _gathered(place, ((name, version, asked, (place, number)) for number, name, version, asked in found))


#: Another file, as pip takes it: -r FILE, -rFILE, --requirement=FILE, and -c, --constraint likewise.
_OTHER = re.compile(r"(?:-[rc]\s*|--(?:requirement|constraint)(?:=|\s+))(.+)")


#: What pip freeze writes above a line ``-e FOLDER``.
_EDITABLE = re.compile(r"# Editable .*\((\S+?)==")


def _logical(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Lines without comments, each with its number, joined where one ends in a backslash: a comment does not go on, as in pip."""
    joined, start, egg = "", 0, ""
    for number, line in enumerate([*lines, ""], 1):
        is_comment = line.lstrip().startswith("#")
        start = start if joined else number
        joined += line[:-1] if line.endswith("\\") and not is_comment else f" {line}"
        if not line.endswith("\\") or is_comment:
            text = re.sub(r"(^|\s+)#.*$", "", joined).strip()
            yield start, f"{text}{egg}" if text.startswith("-e") else text
            joined, egg = "", f"#egg={made[1]}" if (made := _EDITABLE.match(line)) else ""


def _requirements(lines: Iterable[str], path: Path | None, seen: set[Path]) -> Iterator[tuple[int, str, str | None, str]]:
    """(line, name, version if there is one, what is asked for) of each requirement."""
    where = path or Path("standard input")
    for start, text in _logical(lines):
        if not text:
            continue
        if named := _OTHER.fullmatch(text):
            if path is None:
                raise UserError(f"{where}:{start} asks for {named[1].strip()}: give that file itself.")
            other = path.parent / named[1].strip().strip("\"'")
            if other.resolve() not in seen:
                if "\0" in str(other) or not other.is_file():
                    raise UserError(f"{where}:{start} asks for {named[1].strip()}, which is not there.")
                found = _text(other).splitlines()
                for _, *each in _requirements(found, other, {*seen, other.resolve()}):
                    yield (start, *each)  # type: ignore[misc]
            continue
        if egg := re.search(r"[#&]egg=([A-Za-z0-9._-]+)", text):
            yield start, canonicalize_name(egg[1]), None, "a checkout"
            continue
        if re.match(r"-e|--editable", text):
            yield start, text, None, ""
            continue
        if text.startswith("-"):  # An index, or a hash mode.
            continue
        try:
            requirement = Requirement(text.partition(" --")[0].strip())  # what pip is to do with it
        except InvalidRequirement:
            if text.startswith((".", "/", "http:", "https:", "git+", "file:")) or text.partition(" ")[0].endswith(".whl"):
                yield (start, *wheel, "") if (wheel := _file(text)) else (start, text, None, "")
                continue
            raise UserError(f"{where}:{start} is not a requirement: {text[:60]!r}.") from None
        pinned = [s.version for s in requirement.specifier if s.operator in ("==", "===") and not s.version.endswith("*")]
        if (
            requirement.url
            and (file := _file(requirement.url))
            and canonicalize_name(file[0]) == canonicalize_name(requirement.name)
        ):
            yield start, *file, ""
            continue
        asked = f"@ {requirement.url}" if requirement.url else str(requirement.specifier) or "any version"
        for version in pinned or (None,):
            yield start, canonicalize_name(requirement.name), version, asked


def _file(text: str) -> tuple[str, str] | None:
    """Name and version of a wheel or an sdist that is named by its path or address; None for a folder or a repository."""
    place, _, file = text.split()[0].partition("#")[0].rpartition("/")
    if "/archive" in place:  # of a repository's branch or tag, whose name says nothing
        return None
    try:
        name, version, *_ = parse_wheel_filename(file) if file.endswith(".whl") else parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return name, str(version)


def merged(stacks: Sequence[Stack]) -> Stack:
    """Several files as one; a name that two of them pin to different versions has several."""
    if len(stacks) == 1:
        return stacks[0]
    found = (
        (name, version, asked, each.lines[name])
        for each in stacks
        for name, version, asked in [
            *((name, version, "") for name, version in each.versions.items()),
            *((name, version, "") for name, versions in each.several.items() for version in versions),
            *((name, None, asked) for name, asked in each.open.items()),
        ]
    )
    return _gathered(", ".join(stack.place for stack in stacks), found)


def pinned(text: str) -> tuple[str, str]:
    """Name and version of ``NAME==VERSION``, as --upgrade is given."""
    name, _, version = text.partition("==")
    try:
        asked = Requirement(name)
        if asked.url or asked.extras or asked.marker or asked.specifier:
            raise InvalidRequirement(name)
        return canonicalize_name(asked.name), str(Version(version))
    except (InvalidRequirement, InvalidVersion) as error:
        raise UserError(f"{text!r} is not NAME==VERSION, such as liger-kernel==0.8.2.") from error
