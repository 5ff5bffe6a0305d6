"""What is installed, or is going to be: names and versions from an environment, a lock file, requirements or ``pip freeze``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from common.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Run by the other Python, which may be an old one and has nothing of ours.
_LIST = """
import json
try:
    from importlib.metadata import distributions
except ImportError:
    from pkg_resources import working_set
    found = [(d.project_name, d.version) for d in working_set]
else:
    found = [(d.metadata["Name"], d.version) for d in distributions()]
print(json.dumps([pair for pair in found if all(pair)]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Distributions by normalized name. ``open`` are those that are asked for without one version, with what is asked.

    ``lines`` says in which file and line, from 1, each is; ``place`` is what was read.
    """

    versions: dict[str, str]
    open: dict[str, str] = field(default_factory=dict)
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    place: str = ""
    total: int = 0


def of_python(python: Path) -> Stack:
    """What a Python finds when it is started: its environment, with what PYTHONPATH adds left out."""
    if python.is_dir():
        inside = [python / "bin" / "python", python / "Scripts" / "python.exe"]
        python = next((file for file in inside if file.is_file()), python)
    if not python.is_file():
        raise UserError(f"{python} is no Python: name an interpreter, or the folder of a virtual environment.")
    try:
        done = subprocess.run([python, "-I", "-c", _LIST], capture_output=True, text=True, timeout=60)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} could not list what it has installed: {error or 'it ended without an answer'}.") from error
    versions: dict[str, str] = {}
    for name, version in found:  # The first on the path is what is imported.
        versions.setdefault(canonicalize_name(name), version)
    return Stack(versions=versions, place=str(python), total=len(versions))


def of_file(path: Path) -> Stack:
    """A lock file (uv.lock, pylock.toml, poetry.lock, pdm.lock), or requirements, constraints or the output of ``pip freeze``."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8.") from error
    if path.suffix in (".lock", ".toml"):
        return _locked(path, text)
    return of_lines(text.splitlines(), path)


def _locked(path: Path, text: str) -> Stack:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    packages = document.get("package", document.get("packages"))
    if not isinstance(packages, list) or not all(isinstance(each, dict) for each in packages):
        known = "uv.lock, pylock.toml, poetry.lock and pdm.lock have"
        raise UserError(f"{path} has no list of packages, as {known}: give requirements, or a lock file.")
    stack = Stack(versions={}, place=str(path), total=len(packages))
    numbers: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("name = "):
            numbers.setdefault(canonicalize_name(line.partition("=")[2].strip().strip("\"'")), number)
    for each in packages:
        name = str(canonicalize_name(str(each.get("name", ""))))
        stack.lines[name] = str(path), numbers.get(name, 1)
        if isinstance(version := each.get("version"), str):
            # A lock for several platforms may hold a package more than once.
            if stack.versions.setdefault(name, version) != version:
                stack.open[name] = f"locked at {stack.versions[name]} and {version}"
        else:
            stack.open[name] = "locked without a version"
    for name in stack.open:
        stack.versions.pop(name, None)
    return stack


def of_lines(lines: Iterable[str], path: Path | None = None) -> Stack:
    """Requirements, with the files that they include. A line that says no version is kept as open, one that is none is an error."""
    stack = Stack(versions={}, place=str(path or "standard input"))
    for number, name, version, asked in _requirements(lines, path, set()):
        stack.lines.setdefault(name, (stack.place, number))
        if version is None:
            stack.open.setdefault(name, asked)
        elif stack.versions.setdefault(name, version) != version:
            stack.open[name] = f"{stack.versions[name]} and {version} are asked for"
    for name in stack.open.keys() & stack.versions.keys():
        if " and " in stack.open[name]:
            del stack.versions[name]
        else:  # a constraint beside a requirement
            del stack.open[name]
    return Stack(
        versions=stack.versions,
        open=stack.open,
        lines=stack.lines,
        place=stack.place,
        total=len({*stack.versions, *stack.open}),
    )


def _requirements(lines: Iterable[str], path: Path | None, seen: set[Path]) -> Iterator[tuple[int, str, str | None, str]]:
    """(line, name, version if there is one, what is asked for) of each requirement."""
    where = path or Path("standard input")
    joined, start = "", 0
    for number, line in enumerate(lines, 1):
        start = start if joined else number
        joined += line.rstrip("\\") if line.endswith("\\") else line
        if line.endswith("\\"):
            continue
        text, joined = joined, ""
        text = text.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        option, _, rest = text.partition(" ")
        if option in ("-r", "--requirement", "-c", "--constraint") and path and rest:
            other = path.parent / rest.strip()
            if other.resolve() not in seen:
                if not other.is_file():
                    raise UserError(f"{where}:{start} asks for {rest.strip()}, which is not there.")
                found = other.read_text(encoding="utf-8-sig").splitlines()
                for _, *each in _requirements(found, other, {*seen, other.resolve()}):
                    yield (start, *each)  # type: ignore[misc]
            continue
        if option.startswith("-"):  # An index, a hash mode, or an editable folder, whose version is not said.
            continue
        try:
            requirement = Requirement(text.partition(" --hash")[0].strip())
        except InvalidRequirement:
            if text.startswith((".", "/", "http:", "https:", "git+", "file:")):
                continue
            raise UserError(f"{where}:{start} is no requirement: {text[:60]!r}.") from None
        pinned = [s.version for s in requirement.specifier if s.operator in ("==", "===") and not s.version.endswith("*")]
        asked = f"@ {requirement.url}" if requirement.url else str(requirement.specifier) or "any version"
        yield start, canonicalize_name(requirement.name), pinned[0] if pinned else None, asked


def merged(stacks: Sequence[Stack]) -> Stack:
    """Several files as one; a name that two of them pin to different versions is open."""
    if len(stacks) == 1:
        return stacks[0]
    both = Stack(versions={}, place=", ".join(stack.place for stack in stacks))
    for each in stacks:
        both.lines.update({name: place for name, place in each.lines.items() if name not in both.lines})
        for name, version in each.versions.items():
            if both.versions.setdefault(name, version) != version:
                both.open[name] = f"{both.versions[name]} and {version} are asked for"
        both.open.update({name: asked for name, asked in each.open.items() if name not in both.open})
    for name in [name for name, asked in both.open.items() if " and " in asked]:
        both.versions.pop(name, None)
    asked = {name: what for name, what in both.open.items() if name not in both.versions}
    return replace(both, open=asked, total=len({*both.versions, *asked}))


def pinned(text: str) -> tuple[str, str]:
    """Name and version of ``NAME==VERSION``, as --upgrade is given."""
    name, _, version = text.partition("==")
    try:
        return canonicalize_name(Requirement(name).name), str(Version(version))
    except (InvalidRequirement, InvalidVersion) as error:
        raise UserError(f"{text!r} is no NAME==VERSION, such as liger-kernel==0.8.2.") from error
