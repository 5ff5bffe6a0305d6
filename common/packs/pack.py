"""A pack: one upstream bug, or one claim that is measured. Found by listing ``packs/``, described by its ``pack.toml``."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from common.errors import UserError
from common.files import PACKS, ROOT, like
from common.packs import reportblock

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Kind = Literal[
    "wrong-result",
    "crash",
    "capture",
    "compile",
    "memory",
    "performance",
    "refactor",
    "contract",
    "feature",
    "claim",
    "selftest",
]
#: What a release may be expected to show. ERROR is the harness's fault and INFRA the machine's, so only the self-test may.
OUTCOMES = ("REPRODUCED", "ABSENT", "CHANGED", "UNTESTABLE", "MEASURED", "ERROR", "INFRA")
#: Kinds that are about no fault: how code is written, what two packages take of each other, a feature that is missing, what an
#: article says, and the self-test. No release is wrong for them.
NO_FAULT = ("refactor", "contract", "feature", "claim", "selftest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What the releases of one range show, and why."""

    range: str
    specifier: SpecifierSet
    verdict: str
    why: str
    #: The lane without which the release cannot be judged: in others it is UNTESTABLE: no-device.
    lane: str | None = None

    @property
    def outcome(self) -> str:
        return self.verdict.partition(":")[0]


class Variant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the script that have a name. With them may go a lane, pins in place of the pack's of the same name, and what
    the pinned releases show then, where it is not what they show without; or a commit that is in no release.
    """

    arguments: tuple[str, ...] = ()
    lane: str | None = None
    requires: tuple[str, ...] = ()
    verdict: str | None = None
    #: A commit of the upstream, which is run in place of a release.
    source: Annotated[str, like("[0-9a-f]{40}")] | None = None
    #: Run with the pinned releases: the bug is in no release that they show it by.
    pinned: bool = False
    #: measure.py, where the variant measures and gives no verdict on the bug.
    script: Annotated[str, like(r"[a-z][a-z0-9_]*\.py")] | None = None

    def __post_init__(self) -> None:
        if self.source and not self.verdict:
            raise ValueError("a variant with a source needs a verdict")
        if self.pinned and not self.source:
            raise ValueError("'pinned' is for a variant with a source: a commit that runs with the pinned releases")
        if self.pinned and self.lane:
            raise ValueError("a pinned commit runs in the lane of the pinned releases: it takes no 'lane'")
        if self.script and not self.verdict:
            msgspec.structs.force_setattr(self, "verdict", "MEASURED")


class UpstreamTests(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The upstream's own tests of what the fix touches: files or folders of its repository, and what they import besides."""

    files: Annotated[tuple[str, ...], Meta(min_length=1)]
    requires: tuple[str, ...] = ("pytest",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One ``packs/packNN_slug`` folder, validated."""

    folder: Path
    title: str
    package: str
    #: The package's import name, where it is not its name on the index with underscores (python-dateutil: "dateutil").
    imports: str
    #: Where the bug is tracked, and what the package is built from, which is another repository for few packs.
    upstream: str
    repository: str
    kind: str
    #: To whom, in a line, for `nox -s check`; and what they can do about it on an affected release.
    matters: str
    workaround: str
    lanes: tuple[str, ...]
    requires: tuple[str, ...]
    threads: tuple[str, ...]
    fixed: Mapping[str, str]
    pinned: tuple[str, ...]
    expected: tuple[Expectation, ...]
    variants: Mapping[str, Variant]
    wheels: str | None
    nightly: str | None
    #: The package index that has the releases, where it is not PyPI: PyTorch's, for builds of torch for CPUs.
    index: str | None
    #: Requirements that go with a lane, or with some releases ('>=0.1.6'), each in place of the pack's of the same name.
    pins: Mapping[str, Sequence[str]]
    #: The Python that the upstream asks for, where its plain Python files run on an older one: older than that, this is said to uv.
    python: str | None
    #: Packages that stand beside the release in its environment, without their dependencies, built as ``build`` says.
    beside: tuple[str, ...]
    #: The folder of the upstream's repository that its package lies in ("src/"), for diffs made there.
    prefix: str
    #: The folders of the upstream's repository that its wheels hold, for commits.
    tree: tuple[str, ...]
    #: The release's sdist cannot be built, and need not be: its Python files are put where they would be installed.
    as_files: bool
    #: Options of the script that make it a tool for the user's own code: it then gives no verdict, and gets no receipt.
    tools: Mapping[str, str]
    build: Mapping[str, str]
    #: The deep check of the fix, run on the patched side after repro.py; FIX_VALIDATED needs both.
    validate: str | None
    #: The lane that runs it, with the lane's pins, where that is not the lane that runs repro.py. A GPU runs both.
    validate_lane: str | None
    #: What `nox -s hunt` varies, and what is right.
    hunt: str | None
    upstream_tests: UpstreamTests | None
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
        return (self.folder / self.validate).resolve() if self.validate and self.script_of(variant) == self.script else None

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

    def shown_on(self) -> str:
        """The first pinned release that is expected to have the bug; the first pinned where none is."""
        return next((v for v in self.pinned if (e := self.expectation(v)) and e.outcome == "REPRODUCED"), self.pinned[0])

    def matrix(self) -> list[str]:
        """The variants that pin other packages than the pack itself: regress runs them on the pinned releases."""
        return [name for name, variant in self.variants.items() if variant.requires]

    def pinned_commits(self) -> list[str]:
        """The variants that are commits and run with the pinned releases."""
        return [name for name, variant in self.variants.items() if variant.pinned]

    def varied(self, variant: str, lane: str) -> Pack:
        """This pack with the pins of one of its lanes and one of its variants."""
        own = self.variants.get(variant)
        return self._with([*self.pins.get(lane, ()), *(own.requires if own else ())])

    def checked_in(self, lane: str) -> str:
        """The lane that runs validate.py where repro.py is run in ``lane``."""
        return lane if lane == "device" else self.validate_lane or lane

    def at(self, version: str) -> Pack:
        """This pack with the pins that go with one release of its upstream."""
        keys = [key for key in self.pins if key not in (*self.lanes, self.validate_lane)]
        mine = [key for key in keys if SpecifierSet(key).contains(Version(version), prereleases=True)]
        return self._with([pin for key in mine for pin in self.pins[key]])

    def _with(self, pins: Iterable[str]) -> Pack:
        """This pack with some more requirements, each in place of the one of the same name."""
        more = {Requirement(pin).name: pin for pin in pins}
        if not more:  # As for most receipts, each of which asks.
            return self
        requires = {Requirement(pin).name: pin for pin in self.requires}
        return replace(self, requires=tuple({**requires, **more}.values()))

    def hashes(self, side: str, lane_files: Iterable[Path] = (), variant: str = "") -> dict[str, str]:
        """sha256 of all that decides what a run of ``side`` shows: files, pins and settings. A receipt with others is stale."""
        # A fix that takes edits from another pack's names its folder.
        named = re.findall(r"""["'](pack\d\d)_""", self.fix.read_text(encoding="utf-8")) if self.fix.is_file() else []
        fixes = [self.fix, *(find(name, self.folder.parent).fix for name in dict.fromkeys(named))]
        scripts = [self.script, self.script_of(variant)]
        deep = self.deep_check(variant)
        scripts += [deep] if deep and side == "patched" else []
        for script in scripts:  # With what a script imports from beside it.
            beside = (
                script.parent / f"{name}.py"
                for name in re.findall(r"^(?:from|import) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
            )
            scripts += [path for path in beside if path.is_file() and path not in scripts]
        hashes = {}
        for script in dict.fromkeys(scripts):
            text = script.read_text(encoding="utf-8")
            hashes[_label(self.folder, script)] = hashlib.sha256(reportblock.own(text).encode()).hexdigest()
            hashes |= {n: hashlib.sha256(block.encode()).hexdigest() for n, block in reportblock.blocks(text).items()}
        if side == "patched" and self.fix.is_file():
            hashes["transforms"] = hashlib.sha256((ROOT / "common" / "transforms.py").read_bytes()).hexdigest()
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
            **({"validate_lane": pins} if (pins := self.pins.get(self.validate_lane or "")) else {}),
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


def numbered(name: str) -> str:
    """``pack09`` for ``09``, ``9`` and ``pack9``; another name as it is."""
    number = re.fullmatch(r"(?:pack)?(\d{1,2})", name)
    return f"pack{int(number[1]):02d}" if number else name


def find(name: str, packs: Path = PACKS) -> Pack:
    """The pack called ``pack09``, ``09``, ``9`` or by its whole folder name."""
    folders = _folders(packs)
    short = numbered(name)
    found = [folder for folder in folders if short in (folder.name, folder.name.partition("_")[0])]
    if len(found) > 1:
        names = " and ".join(folder.name for folder in found)
        raise UserError(f"There are two packs of the number {found[0].name[4:6]}, {names}: give one of them another number.")
    if found:
        return load(found[0])
    numbers = [folder.name.partition("_")[0] for folder in folders]
    known = f"those here are {numbers[0]} – {numbers[-1]}" if numbers else "there is none here"
    raise UserError(f"There is no pack {name!r}; {known}, and python -m common list says what each is about.")


def load(folder: Path) -> Pack:
    """The pack in a folder. `UserError` names the key of pack.toml that is wrong, and what is wrong with it."""
    where = f"{folder.name}/pack.toml"
    if not re.fullmatch(r"pack\d\d_[a-z0-9_]+", folder.name):
        raise UserError(f"{folder.name} is not a pack folder's name: it must look like pack09_liger_reduction_none.")
    try:
        raw = tomllib.loads((folder / "pack.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not valid TOML: {str(error)[:200]}.") from error
    # What is short to write for a variant that has arguments alone.
    if isinstance(raw.get("variants"), dict):
        raw["variants"] = {n: {"arguments": v} if isinstance(v, list) else v for n, v in raw["variants"].items()}
    try:
        # One by one, for msgspec does not say which entry of a table is wrong.
        for table, kind in (("expected", _Expected), ("variants", Variant)):
            for key, value in raw[table].items() if isinstance(raw.get(table), dict) else ():
                _converted(f"{table}.{key}", value, kind)
        return _pack(folder, _converted("", raw, _Toml))
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error


def _converted(key: str, value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at ")
        at = at.strip("`").removeprefix("$").lstrip(".").replace("key` in `$.", "a key of ")
        if "unknown field" in what:
            what += f"; known are {', '.join(kind.__struct_fields__)}"  # type: ignore[attr-defined]
        raise ValueError(f"{'.'.join(filter(None, (key, at))) or 'the file'}: {what}") from error


#: One line that stands in Markdown's tables, too: no bar, and no tag.
_Title = Annotated[str, like(r"(?:[^|<\n]|<(?![A-Za-z/!]))+")]
_File = Annotated[str, like(r"[a-z][a-z0-9_]*\.py")]
#: owner/name#number, or an address.
_Thread = Annotated[str, like(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+#\d+|https?://[^\s<>\"'()]+")]
_Positive = Annotated[float, Meta(gt=0, le=1e9)]


class _Expected(Struct, forbid_unknown_fields=True):
    verdict: Annotated[str, like(f"({'|'.join(OUTCOMES)})(: .+)?")]
    why: Annotated[str, Meta(min_length=1)]
    lane: str | None = None

    def __post_init__(self) -> None:
        if self.verdict in ("UNTESTABLE", "CHANGED"):  # Alone, it would hold for a script that is broken, too.
            example = "UNTESTABLE: import" if self.verdict == "UNTESTABLE" else "CHANGED: [64, 17] compiles"
            raise ValueError(f"{self.verdict} must say why, as in '{example}'")


class _Toml(Struct, forbid_unknown_fields=True, kw_only=True):
    """pack.toml as it is written; docs/adding-a-pack.md says what each key is for."""

    title: _Title
    package: str
    imports: Annotated[str, like(r"[A-Za-z_][A-Za-z0-9_]*")] | None = None
    upstream: str
    repository: str | None = None
    kind: Kind
    #: To whom, in a line, for `nox -s check`; and what they can do about it on an affected release.
    matters: str = ""
    workaround: str = ""
    lanes: list[str]
    pinned: list[str]
    expected: dict[str, _Expected]
    requires: list[str] = []
    threads: list[_Thread] = []
    fixed: dict[str, str] = {}
    variants: dict[Annotated[str, like("[a-z0-9.-]+")], Variant] = {}
    wheels: _File | None = None
    nightly: str | None = None
    index: Annotated[str, like(r"https://\S+[^/\s]")] | None = None
    pins: dict[str, list[str]] = {}
    python: Annotated[str, like(r"3\.\d{1,3}")] | None = None
    beside: list[str] = []
    prefix: Annotated[str, like(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*")] = ""
    tree: list[str] = []
    as_files: bool = False
    #: Options that run another script as a tool for a user's own code.
    tools: dict[str, _File] = {}
    build: dict[str, str] = {}
    #: Two packs about one piece of upstream code may share the check: "../pack11_slug/validate.py".
    validate: Annotated[str, like(r"(?:\.\./pack\d\d_[a-z0-9_]+/)?[a-z][a-z0-9_]*\.py")] | None = None
    validate_lane: str | None = None
    #: hunt.py, or another pack's: "../pack32_slug/hunt.py".
    hunt: Annotated[str, like(r"(?:\.\./pack\d\d_[a-z0-9_]+/)?[a-z][a-z0-9_]*\.py")] | None = None
    upstream_tests: UpstreamTests | None = None
    timeout: _Positive = 180.0
    memory: _Positive = 8.0


def _pack(folder: Path, told: _Toml) -> Pack:
    given = {name: getattr(told, name) for name in told.__struct_fields__}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    python = told.python if told.python and sys.version_info < tuple(map(int, told.python.split("."))) else None
    expected = tuple(
        Expectation(
            range=key, specifier=_specifier(f"expected.{key}", key), verdict=value.verdict, why=value.why, lane=value.lane
        )
        for key, value in told.expected.items()
    )
    imports = told.imports or told.package.replace("-", "_").replace(".", "_")
    pack = Pack(
        **{
            **given,
            "folder": folder,
            "expected": expected,
            "python": python,
            "imports": imports,
            "repository": told.repository or told.upstream,
        }
    )
    for key, listed in (
        ("requires", told.requires),
        ("beside", told.beside),
        ("upstream_tests.requires", told.upstream_tests.requires if told.upstream_tests else ()),
        *((f"pins.{k}", v) for k, v in told.pins.items()),
    ):
        _requirements(key, listed)
    for key in told.pins:
        if key not in (*told.lanes, told.validate_lane):
            _specifier(f"pins.{key}", key)
    for name, script in (
        ("validate", told.validate),
        ("hunt", told.hunt),
        *told.tools.items(),
        *((f"variants.{n}", v.script) for n, v in told.variants.items()),
    ):
        if script is not None and not (folder / script).is_file():
            raise ValueError(f"{name} names {script}, and there is no such file in {folder.name}")
    if told.validate_lane is not None and told.validate is None:
        raise ValueError("validate_lane names the lane that runs validate.py, and `validate` is missing")
    for entry in expected:
        if entry.lane not in (None, *told.lanes):
            raise ValueError(f"expected.{entry.range}.lane: {entry.lane} is none of the pack's lanes: {', '.join(told.lanes)}")
    if told.kind != "selftest" and (odd := [e.range for e in expected if e.outcome in ("ERROR", "INFRA")]):
        raise ValueError(f"expected.{odd[0]}: ERROR and INFRA are for the self-test, they say nothing of a release")
    if odd := [
        e.range for e in expected if e.outcome not in (("MEASURED", "UNTESTABLE") if told.kind == "claim" else OUTCOMES)
    ]:
        raise ValueError(f"expected.{odd[0]}: a pack of kind claim measures, and has no verdict on a bug")
    if told.kind != "claim" and (odd := [e.range for e in expected if e.outcome == "MEASURED"]):
        raise ValueError(f"expected.{odd[0]}: MEASURED is for a pack of kind claim")
    if any(v.source for v in told.variants.values()) and not told.tree:
        raise ValueError("a variant with a source needs 'tree', the folders of the repository that make the package")
    for version in told.pinned:
        try:
            Version(version)
        except InvalidVersion as error:
            raise ValueError(f"pinned has {version!r}, which is not a version (PEP 440)") from error
        if pack.expectation(version) is None:
            raise ValueError(f"pinned has {version}, which no [expected] range holds")
    return pack


def _requirements(key: str, listed: Iterable[str]) -> None:
    for requirement in listed:
        try:
            Requirement(requirement)
        except InvalidRequirement as error:
            raise ValueError(f"{key} has an invalid requirement {requirement!r}: {error}") from error


def _specifier(key: str, text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{key} is not a version specifier (PEP 440)") from error
