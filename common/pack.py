"""A pack: one upstream bug. Found by listing ``packs/``, described by its ``pack.toml``."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from common import reportblock
from common.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKS = ROOT / "packs"

KINDS = ("wrong-result", "crash", "capture", "compile", "memory", "refactor", "contract", "selftest")
#: What a release may be expected to show. ERROR is the harness's fault and INFRA the machine's, so only the self-test may.
OUTCOMES = ("REPRODUCED", "ABSENT", "CHANGED", "UNTESTABLE", "ERROR", "INFRA")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What the releases of one range show, and why."""

    range: str
    specifier: SpecifierSet
    verdict: str
    why: str

    @property
    def outcome(self) -> str:
        return self.verdict.partition(":")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Arguments of the script that have a name. With them may go a lane, pins in place of the pack's of the same name, and what
    the pinned releases show then, where it is not what they show without; or a commit that is in no release.
    """

    arguments: tuple[str, ...]
    lane: str | None = None
    requires: tuple[str, ...] = ()
    verdict: str | None = None
    #: A commit of the upstream, 40 hex digits, which is run in place of a release.
    source: str | None = None
    #: measure.py, where the variant measures and gives no verdict on the bug.
    script: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One ``packs/packNN_slug`` folder, validated."""

    folder: Path
    title: str
    package: str
    upstream: str
    kind: str
    lanes: tuple[str, ...]
    requires: tuple[str, ...]
    threads: tuple[str, ...]
    fixed: Mapping[str, str]
    pinned: tuple[str, ...]
    expected: tuple[Expectation, ...]
    variants: Mapping[str, Variant]
    wheels: str | None
    nightly: str | None
    companions: tuple[tuple[SpecifierSet, tuple[str, ...]], ...]
    pins: Mapping[str, tuple[str, ...]]
    #: The Python that the upstream asks for, where its plain Python files run on an older one: older than that, this is said to uv.
    python: str | None
    #: Packages that stand beside the release in its environment, without their dependencies, built as ``build`` says.
    beside: tuple[str, ...]
    #: The folder of the upstream's repository that its package lies in ("src/"), for diffs made there.
    prefix: str
    #: The folders of the upstream's repository that its wheels hold, for commits.
    tree: tuple[str, ...]
    #: Packs whose fix.py this one's takes edits from.
    fix_from: tuple[str, ...]
    #: The release's sdist cannot be built, and need not be: its Python files are put where they would be installed.
    as_files: bool
    #: Options of the script that make it a tool for the user's own code: it then gives no verdict, and gets no receipt.
    tools: tuple[str, ...]
    build: Mapping[str, str]
    #: The deep check of the fix, run on the patched side after repro.py; FIX_VALIDATED needs both.
    validate: str | None
    timeout: float
    memory: float

    @property
    def name(self) -> str:
        return self.folder.name.partition("_")[0]

    @property
    def script(self) -> Path:
        return self.folder / "repro.py"

    def script_of(self, variant: str) -> Path:
        """What is run: repro.py, or what a variant names in its place."""
        own = self.variants.get(variant)
        return self.folder / (own.script if own and own.script else self.script.name)

    def deep_check(self, variant: str) -> Path | None:
        """The script that a fix has to pass besides repro.py; none where it is not repro.py that is run."""
        return self.folder / self.validate if self.validate and self.script_of(variant) == self.script else None

    @property
    def fix(self) -> Path:
        return self.folder / "fix.py"

    def expectation(self, version: str) -> Expectation | None:
        """The one range that holds ``version``; None when no range does (a release newer than the pack, say)."""
        found = [e for e in self.expected if e.specifier.contains(Version(version), prereleases=True)]
        if len(found) > 1:
            ranges = ", ".join(e.range for e in found)
            raise UserError(f"{self.folder.name}/pack.toml: release {version} is in more than one [expected] range: {ranges}.")
        return found[0] if found else None

    def matrix(self) -> list[str]:
        """The variants that pin other packages than the pack itself: regress runs them on the pinned releases."""
        return [name for name, variant in self.variants.items() if variant.requires]

    def varied(self, variant: str, lane: str) -> Pack:
        """This pack with the pins of one of its lanes and one of its variants, each in place of those of the same name."""
        own = self.variants.get(variant)
        pins = {Requirement(pin).name: pin for pin in (*self.pins.get(lane, ()), *(own.requires if own else ()))}
        return replace(self, requires=tuple(pins.get(Requirement(pin).name, pin) for pin in self.requires)) if pins else self

    def at(self, version: str) -> Pack:
        """This pack with the pins that go with one release of its upstream, where those are not the same for all."""
        more = [pins for releases, pins in self.companions if releases.contains(Version(version), prereleases=True)]
        return replace(self, requires=(*self.requires, *(pin for pins in more for pin in pins))) if more else self

    def hashes(self, side: str, lane_files: Iterable[Path] = (), variant: str = "") -> dict[str, str]:
        """sha256 of all that decides what a run of ``side`` shows: files, pins and settings. A receipt with others is stale."""
        fixes = [self.fix, *(find(name, self.folder.parent).fix for name in self.fix_from)]
        scripts = [self.script, self.script_of(variant)]
        deep = self.deep_check(variant)
        scripts += [deep] if deep and side == "patched" else []
        hashes = {}
        for script in dict.fromkeys(scripts):
            text = script.read_text(encoding="utf-8")
            hashes[script.name] = hashlib.sha256(reportblock.own(text).encode()).hexdigest()
            if block := reportblock.block(text):
                hashes["report"] = hashlib.sha256(block.encode()).hexdigest()
        files = [*lane_files] + (fixes if side == "patched" else [])
        hashes |= {_label(self.folder, f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.exists()}
        hashes["requires"] = hashlib.sha256("\n".join(self.requires).encode()).hexdigest()
        hashes["settings"] = hashlib.sha256(json.dumps(self._settings(variant), sort_keys=True).encode()).hexdigest()
        return hashes

    def _settings(self, variant: str) -> dict[str, Any]:
        """What else a run's outcome may rest on. Arguments without a name are the variant's name themselves."""
        own = self.variants.get(variant)
        return {
            "arguments": own.arguments if own else (),
            "as_files": self.as_files,
            "beside": self.beside,
            "build": dict(self.build),
            "memory": self.memory,
            "timeout": self.timeout,
            "wheels": hashlib.sha256((self.folder / self.wheels).read_bytes()).hexdigest() if self.wheels else None,
        }


def _label(folder: Path, file: Path) -> str:
    return file.name if file.parent == folder else f"{file.parent.name.partition('_')[0]}/{file.name}"


def all_packs(packs: Path = PACKS, problems: list[str] | None = None) -> list[Pack]:
    """Every pack in a folder. With ``problems``, one that is not sound is said there and left out; else it is a `UserError`."""
    found = []
    for folder in _folders(packs):
        try:
            found.append(find(folder.name.partition("_")[0], packs))
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))
    return found


def _folders(packs: Path) -> list[Path]:
    return sorted(folder for folder in packs.glob("pack[0-9][0-9]_*") if folder.is_dir())


def find(name: str, packs: Path = PACKS) -> Pack:
    """The pack called ``pack09``, ``09``, ``9`` or by its whole folder name."""
    folders = _folders(packs)
    short = f"pack{int(name):02d}" if name.isdecimal() else name
    found = [folder for folder in folders if short in (folder.name, folder.name.partition("_")[0])]
    if len(found) > 1:
        names = " and ".join(folder.name for folder in found)
        raise UserError(f"There are two packs of the number {found[0].name[4:6]}, {names}: give one of them another number.")
    if found:
        return load(found[0])
    known = ", ".join(folder.name.partition("_")[0] for folder in folders) or "none"
    raise UserError(f"There is no pack {name!r}; the packs here are: {known}.")


def load(folder: Path) -> Pack:
    path = folder / "pack.toml"
    where = f"{folder.name}/pack.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not valid TOML: {str(error)[:200]}.") from error
    return _Reader(where, raw).pack(folder)


class _Reader:
    """Typed access to a TOML table, with errors that name file and key."""

    def __init__(self, where: str, raw: dict[str, Any]) -> None:
        self.where = where
        self.raw = raw

    def fail(self, key: str, problem: str) -> UserError:
        return UserError(f"{self.where}: {key!r} {problem}.")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self.raw.get(key, default)
        if value is ...:
            raise self.fail(key, "is missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            name = kind.__name__ if isinstance(kind, type) else "a number"
            raise self.fail(key, f"must be of type {name}, not {type(value).__name__}")
        return value

    def strings(self, key: str, default: Any = ...) -> tuple[str, ...]:
        values = self.get(key, list, default)
        if not all(isinstance(value, str) for value in values):
            raise self.fail(key, "must be a list of strings")
        return tuple(values)

    def addresses(self, key: str) -> tuple[str, ...]:
        for thread in self.strings(key, []):
            if not re.fullmatch(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+#\d+|https?://[^\s<>\"'()]+", thread):
                raise self.fail(key, f"has {thread!r}, which is neither owner/name#number nor an http(s) address")
        return self.strings(key, [])

    def positive(self, key: str, default: float) -> float:
        try:
            value = float(self.get(key, (int, float), default))
        except OverflowError:
            value = math.inf
        if not 0 < value < math.inf:
            raise self.fail(key, "must be a number greater than 0")
        return value

    def pack(self, folder: Path) -> Pack:
        known = set(Pack.__dataclass_fields__) - {"folder"}
        if unknown := sorted(set(self.raw) - known):
            raise self.fail(unknown[0], f"is not a known key; known are: {', '.join(sorted(known))}")
        if not re.fullmatch(r"pack\d\d_[a-z0-9_]+", folder.name):
            raise UserError(f"{folder.name} is not a pack folder's name: it must look like pack09_liger_reduction_none.")
        kind = self.get("kind", str)
        if kind not in KINDS:
            raise self.fail("kind", f"must be one of {', '.join(KINDS)}")
        requires = self.requirements("requires", self.strings("requires", []))
        for version in (pinned := self.strings("pinned")):
            try:
                Version(version)
            except InvalidVersion as error:
                raise self.fail("pinned", f"has {version!r}, which is not a version (PEP 440)") from error
        pack = Pack(
            folder=folder,
            title=self.get("title", str),
            package=self.get("package", str),
            upstream=self.get("upstream", str),
            kind=kind,
            lanes=self.strings("lanes"),
            requires=requires,
            threads=self.addresses("threads"),
            fixed=self.get("fixed", dict, {}),
            pinned=pinned,
            expected=tuple(self.expectations(kind)),
            variants=dict(self.variants(folder)),
            wheels=self.get("wheels", str, None) if "wheels" in self.raw else None,
            nightly=self.get("nightly", str, None) if "nightly" in self.raw else None,
            companions=tuple(self.companions()),
            pins=dict(self.lane_pins()),
            python=self.python(),
            beside=self.requirements("beside", self.strings("beside", [])),
            prefix=self.prefix(),
            tree=self.strings("tree", []),
            fix_from=self.strings("fix_from", []),
            as_files=self.get("as_files", bool, False),
            tools=self.strings("tools", []),
            build=self.get("build", dict, {}),
            validate=self.script(folder, "validate", self.raw.get("validate")),
            timeout=self.positive("timeout", 180),
            memory=self.positive("memory", 8),
        )
        for version in pinned:
            if pack.expectation(version) is None:
                raise self.fail("pinned", f"has {version}, which no [expected] range holds")
        return pack

    def requirements(self, key: str, listed: Iterable[str]) -> tuple[str, ...]:
        for requirement in listed:
            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                raise self.fail(key, f"has an invalid requirement {requirement!r}: {error}") from error
        return tuple(listed)

    def companions(self) -> Iterable[tuple[SpecifierSet, tuple[str, ...]]]:
        for specifier, listed in self.get("companions", dict, {}).items():
            if not isinstance(listed, list) or not all(isinstance(requirement, str) for requirement in listed):
                raise self.fail(f"companions.{specifier}", "must be a list of requirements")
            try:
                yield SpecifierSet(specifier), self.requirements(f"companions.{specifier}", listed)
            except InvalidSpecifier as error:
                raise self.fail(f"companions.{specifier}", "is not a version specifier (PEP 440)") from error

    def python(self) -> str | None:
        if "python" not in self.raw:
            return None
        if not re.fullmatch(r"3\.\d{1,3}", version := self.get("python", str)):
            raise self.fail("python", f"must be a version such as '3.12', not {version!r}")
        return version if sys.version_info < tuple(map(int, version.split("."))) else None

    def script(self, folder: Path, key: str, name: Any) -> str | None:
        if name is None:
            return None
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*\.py", name):
            raise self.fail(key, f"must be a script's name such as 'validate.py', not {name!r}")
        if not (folder / name).is_file():
            raise self.fail(key, f"names {name}, and there is no such file in {folder.name}")
        return name

    def prefix(self) -> str:
        prefix: str = self.get("prefix", str, "")
        if prefix and not re.fullmatch(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)+", prefix):
            raise self.fail("prefix", f"must be a folder such as 'src/', not {prefix!r}")
        return prefix

    def lane_pins(self) -> Iterable[tuple[str, tuple[str, ...]]]:
        for lane, listed in self.get("pins", dict, {}).items():
            if lane not in self.raw["lanes"]:
                raise self.fail("pins", f"has {lane!r}, which is none of the pack's lanes")
            if not isinstance(listed, list) or not all(isinstance(requirement, str) for requirement in listed):
                raise self.fail(f"pins.{lane}", "must be a list of requirements")
            yield lane, self.requirements(f"pins.{lane}", listed)

    def variants(self, folder: Path) -> Iterable[tuple[str, Variant]]:
        for name, given in self.get("variants", dict, {}).items():
            table = given if isinstance(given, dict) else {"arguments": given}
            lists = [table.get("arguments", []), table.get("requires", [])]
            if (
                not re.fullmatch(r"[a-z0-9.-]+", name)
                or set(table) - {"arguments", "lane", "requires", "script", "source", "verdict"}
                or not all(isinstance(words, list) and all(isinstance(w, str) for w in words) for words in lists)
                or not all(isinstance(table.get(key, ""), str) for key in ("lane", "script", "source", "verdict"))
            ):
                raise self.fail(
                    "variants",
                    f"has {name!r}, which must be a lower-case name with a list of arguments, or a table of arguments, lane, requires, script, source and verdict",
                )
            if "source" in table and not (
                re.fullmatch(r"[0-9a-f]{40}", table["source"]) and "verdict" in table and self.raw.get("tree")
            ):
                raise self.fail(
                    "variants", f"has {name!r} with a source: that is 40 hex digits, beside a verdict, and needs 'tree'"
                )
            yield (
                name,
                Variant(
                    arguments=tuple(lists[0]),
                    lane=table.get("lane"),
                    requires=tuple(lists[1]),
                    verdict=table.get("verdict", "MEASURED" if "script" in table else None),
                    script=self.script(folder, "variants", table.get("script")),
                    source=table.get("source"),
                ),
            )

    def expectations(self, kind: str) -> Iterable[Expectation]:
        for specifier, value in self.get("expected", dict).items():
            key = f"expected.{specifier}"
            if (
                not isinstance(value, dict)
                or set(value) != {"verdict", "why"}
                or not all(isinstance(v, str) and v for v in value.values())
            ):
                raise self.fail(key, "must be a table { verdict = ..., why = ... }")
            outcome, _, reason = value["verdict"].partition(": ")
            if outcome not in OUTCOMES or (outcome in ("ERROR", "INFRA") and kind != "selftest"):
                raise self.fail(key, f"has verdict {value['verdict']!r}; it must start with one of {', '.join(OUTCOMES[:4])}")
            if outcome == "UNTESTABLE" and not reason:
                raise self.fail(key, "must say why it is untestable, as in 'UNTESTABLE: import'")
            try:
                yield Expectation(
                    range=specifier, specifier=SpecifierSet(specifier), verdict=value["verdict"], why=value["why"]
                )
            except InvalidSpecifier as error:
                raise self.fail(key, "is not a version specifier (PEP 440)") from error
