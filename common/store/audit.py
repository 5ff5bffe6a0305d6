"""Look at what is stored: recompute verdicts from the logs, and check that receipts are what they say they are.

Nothing is run and nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name

from common.errors import UserError
from common.install import releases
from common.install.machine import architectures
from common.scrub import Scrubber, plain
from common.store import receipt
from common.store.grade import FORM, Disagreement, Verdict, grade, split
from common.store.history import shown
from common.store.receipt import Receipt

#: A home folder that Scrubber leaves, for it is also a name inside of containers.
_ROOT = re.compile(r"/root/[^/\s\"']")


def regrade(path: Path) -> Iterator[str]:
    """Where a receipt is not what its log gives today: what was asked for, how it ended, and all that is derived from them."""
    document = receipt.read(path)
    yield from _follows(path, document, receipt.read_log(path, document))


def _follows(path: Path, document: Receipt, log: str) -> Iterator[str]:
    facts = document.facts
    verdict = grade(log)
    try:
        opening, _, closing = split(log)
    except Disagreement as error:
        yield f"its log cannot be read: {error}"
        return
    for name in ("pack", "dist", "version", "side", "variant", "lane"):
        if opening.get(name) != getattr(facts, name):
            yield f"its {name} is {getattr(facts, name)!r}, and its log is of {plain(str(opening.get(name)))!r}"
    patch = {name: value for name, value in (opening.get("patch") or {}).items() if name != "unpatched"}
    recorded = msgspec.to_builtins(facts.patch) if facts.patch else None
    for name, own, value in (
        ("patch", recorded, patch or None),
        ("sandbox", facts.sandbox or None, opening.get("sandbox")),
    ):
        if own != value:
            yield f"its {name} is {plain(repr(own))}, and its log names {plain(repr(value))}"
    checked = [each.name for each in document.predicate.configuration if each.name.rpartition("/")[2] == "validate.py"]
    if checked and (facts.side, verdict.outcome) == ("patched", "ABSENT") and not opening.get("validate"):
        yield "it is FIX_VALIDATED by repro.py alone, and its pack has a validate.py"
    if facts.command and opening.get("arguments") != facts.command[-len(opening["arguments"]) or len(facts.command) :]:
        yield "its command does not end with the arguments that its log names"
    if facts.command[:1] not in ([], ["python"]):
        yield f"its command is {plain(facts.command[0])}, and python was run"
    if opening.get("form") != FORM:
        yield f"its log is of form {plain(repr(opening.get('form')))}, and {FORM} is known"
    yield from _surroundings(document)
    yield from _other_side(path, document, verdict)
    uri = document.subject[0].uri
    named = [f"pkg:{kind}/{facts.dist}@{facts.version}" for kind in ("pypi", "generic")]
    if not uri.startswith("pkg:github/") and uri.partition("?repository_url=")[0] not in named:
        yield f"its subject is {plain(uri)}"
    if closing.get("cut", facts.log.cut) != facts.log.cut:
        yield f"its log is said to be cut by {facts.log.cut} bytes, and the log says {closing['cut']}"
    for name in ("exit", "signal", "stopped", "seconds", "peak_rss"):
        if closing.get(name, getattr(facts, name)) != getattr(facts, name):
            yield f"its {name} is {getattr(facts, name)!r}, and its log ends with {closing[name]!r}"
    for stored, derived in zip((document.predicate, facts), receipt.derived(verdict), strict=True):
        for name, value in derived.items():
            if getattr(stored, name) != value:
                yield f"{name} was {plain(repr(getattr(stored, name)))}, and is {plain(repr(value))} by today's rules"
    gpus = set(architectures(facts.environment.gpus))
    on_gpu = verdict.evidence.startswith("device") and verdict.evidence != "device:cpu"
    if on_gpu and verdict.evidence.partition(":")[2] not in gpus:
        yield f"its evidence is {verdict.evidence}, and its machine has {', '.join(sorted(gpus)) or 'no GPU'}"
    if "gpus" in opening and set(opening["gpus"]) != gpus:
        yield f"its GPUs are {', '.join(sorted(gpus)) or 'none'}, and its log names {', '.join(opening['gpus']) or 'none'}"
    yield from _other_runs(path, document)


def _surroundings(document: Receipt) -> Iterator[str]:
    """Where what a receipt says of its surroundings contradicts itself."""
    facts = document.facts
    try:
        datetime.strptime(facts.started, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        yield f"it was started at {plain(facts.started)}, which is no time"
    if not canonicalize_name(document.subject[0].name).startswith(canonicalize_name(facts.dist)):
        yield f"its subject is the file {plain(document.subject[0].name)}, and not one of {facts.dist}"
    held = {each.name: each.version for each in facts.environment.distributions}
    for name, version in (("torch", facts.environment.torch), ("triton", facts.environment.triton)) if held else ():
        if held.get(name) != version:
            yield f"it ran with {name} {version}, and its environment holds {plain(str(held.get(name)))}"
    own = held.get(canonicalize_name(facts.dist), "")
    # A build says of itself where it is for: 2.13.0+cpu. A release that was not installed is in no environment.
    if facts.stopped != "install" and held and facts.version not in (own, own.partition("+")[0]):
        yield f"it is of {facts.dist} {facts.version}, and its environment holds {plain(own) or 'none'}"


def _other_side(path: Path, document: Receipt, verdict: Verdict) -> Iterator[str]:
    """Whether a side with a fix ran all triggers that the side without it ran, by the same script on the same machine."""
    before = path.with_name(f"{document.cell.release.stem}.json")
    if (document.facts.side, verdict.outcome) != ("patched", "ABSENT") or not before.is_file():
        return
    with suppress(UserError):
        other = receipt.read(before)
        same = [
            (each.facts.lane, {n: d for n, d in each.hashes.items() if n.rpartition("/")[2] == "repro.py"})
            for each in (document, other)
        ]
        ran = grade(receipt.read_log(before, other)).triggers
        if same[0] == same[1] and verdict.triggers < ran:
            yield f"{verdict.triggers} triggers ran, and {ran} on the unpatched side"


def _other_runs(path: Path, document: Receipt) -> Iterator[str]:
    """Of a cell that was run more than once: whether the record is what most of its runs showed."""
    facts = document.facts
    runs = facts.runs or []
    words = []
    for run in runs:
        text = receipt.read_log(path, document, run.log)
        words.append(shown(grade(text), facts.side))
        with suppress(Disagreement):
            if any(split(text)[0].get(name) != getattr(facts, name) for name in ("pack", "dist", "version", "side")):
                yield f"the log {run.log.name} of one of its runs is of another cell"
        if words[-1] != run.word:
            yield f"one of its runs is said to be {run.word!r}, and its log gives {words[-1]!r}"
    own = [word for run, word in zip(runs, words, strict=True) if run.log.sha256 == facts.log.sha256]
    if runs and (not own or words.count(own[0]) < max(map(words.count, words))):
        yield "it is not what most of its runs showed"


class Published:
    """The sha256 of each release's files on the index, asked once for each package; ``warnings`` say where it did not answer."""

    def __init__(self, cache: Path, indexes: Mapping[str, str] | None = None) -> None:
        self.cache = cache
        self.indexes = indexes or {}  # of packages that another index has than the one that uv is configured with
        self.warnings: list[str] = []
        self._known: dict[str, dict[str, tuple[str, ...]]] = {}

    def sha256(self, package: str, version: str) -> tuple[str, ...]:
        if package not in self._known:
            try:
                known, warning = releases.releases(package, self.cache, index=self.indexes.get(package))
            except UserError as error:
                known, warning = [], f"{error} The hashes of {package} are not checked."
            self._known[package] = {release.version: (release.sha256, *release.others) for release in known}
            self.warnings += [warning] if warning else []
        return self._known[package].get(version, ())

    def warn(self, sentence: str) -> None:
        self.warnings += [sentence] if sentence not in self.warnings else []

    def answered(self, package: str) -> bool:
        self.sha256(package, "")
        return bool(self._known[package])


class Known:
    """What a record may rest on besides a file of the index: commits that packs name, as package URLs by pack and variant, and other records.

    ``unchecked`` are packs and variants whose fixes repro.py alone judges.
    """

    def __init__(
        self,
        commits: Mapping[tuple[str, str], str] | None = None,
        results: Path | None = None,
        unchecked: Collection[tuple[str, str]] | None = None,
    ) -> None:
        self.commits, self.results, self.unchecked = commits or {}, results, unchecked
        self._installed: dict[tuple[str, str], dict[str, set[str]]] | None = None

    def installed(self, published: Published) -> Mapping[tuple[str, str], Mapping[str, set[str]]]:
        """What the RECORD of each release says, as records of runs of the index's own files have it, by the file's sha256."""
        if self._installed is None:
            self._installed = {}
            for path in receipt.stored(self.results) if self.results else ():
                with suppress(UserError):
                    document = receipt.read(path)
                    cell = document.cell
                    if document.subject[0].digest.sha256 in published.sha256(cell.dist, cell.version):
                        records = (d for d in document.facts.environment.distributions if d.name == cell.dist)
                        files = self._installed.setdefault((cell.dist, cell.version), {})
                        files.setdefault(document.subject[0].digest.sha256 or "", set()).update(
                            d.record_sha256 for d in records
                        )
        return self._installed

    def records(self, published: Published, document: Receipt) -> Collection[str]:
        """What the RECORD that a receipt's file installed is, by all receipts of the same file."""
        cell = document.cell
        return self.installed(published).get((cell.dist, cell.version), {}).get(document.subject[0].digest.sha256 or "", ())


def verify(path: Path, published: Published, *, reviewed: bool = False, known: Known | None = None) -> Iterator[str]:
    """What is wrong with one receipt: schema, log and all that follows from it, file name, the wheel's hash, anything private.

    ``reviewed`` is of somebody's diff or checkout, and so no record of a release.
    """
    document = receipt.read(path)
    log = receipt.read_log(path, document)
    receipt.check_place(path, document)
    yield from _follows(path, document, log)
    cell, digest, facts = document.cell, document.subject[0].digest.sha256, document.facts
    deep = known and known.unchecked is not None and (cell.pack, cell.variant) not in known.unchecked
    if deep and (cell.side, facts.outcome) == ("patched", "ABSENT") and not split(log)[0].get("validate"):
        yield "it is FIX_VALIDATED without validate.py, which its pack has"
    if facts.log.name != receipt.log_name(cell, log)[0]:
        yield f"its log {plain(facts.log.name)} is not named by its hash"
    if not document.predicate.configuration:
        yield "it names no script that it is of"
    names = [[gpu.get("name", "") for gpu in gpus] for gpus in (facts.environment.gpus, receipt.described(path).gpus)]
    if facts.environment.distributions and names[0] != names[1]:
        yield f"it was made on {', '.join(names[0]) or 'no GPU'}, and lies with the receipts of {', '.join(names[1]) or 'no GPU'}"
    if not reviewed:
        yield from _recorded(document, known or Known(), published)
    elif digest and (wanted := published.sha256(cell.dist, cell.version)) and digest not in wanted:
        yield f"its subject has sha256 {digest[:12]}…, and the index publishes {wanted[0][:12]}… for {cell.dist} {cell.version}"
    scrub = Scrubber()
    for name, text in (("receipt", path.read_text(encoding="utf-8")), ("log", log)):
        if _ROOT.search(text) or scrub(text) != text:
            yield f"its {name} holds something private"


def _recorded(document: Receipt, known: Known, published: Published) -> Iterator[str]:
    """Whether a record is of a file that the index has, or of a commit that its pack names."""
    cell, digest = document.cell, document.subject[0].digest
    uri = known.commits.get((cell.pack, cell.variant), "")
    if uri or "+" in cell.version:
        commit = uri.partition("@")[2]
        if not (commit and re.fullmatch(rf"0\+git\.{commit[:10]}\.tree\.[0-9a-f]{{10}}", cell.version)):
            yield f"{cell.version} is no release and no commit that {cell.pack} names: its place is below review/"
        elif document.subject[0].uri != uri:
            yield f"its subject is {plain(document.subject[0].uri)}, and {cell.pack} names {uri}"
        elif not digest.sha256 and document.facts.environment.distributions:
            yield "it does not say by a sha256 which files of the commit ran"
        return
    wanted = published.sha256(cell.dist, cell.version)
    told, index = document.subject[0].uri.partition("?repository_url=")[::2]
    if index != published.indexes.get(cell.dist, "") and told.startswith("pkg:pypi/"):
        yield f"its subject is of the index {plain(index) or 'that uv is configured with'}, and its pack names another"
    if not wanted:
        if told.startswith("pkg:generic/") and not published.answered(cell.dist):
            published.warn(f"{cell.dist} {cell.version} was run from a wheel at hand, and is compared with no index.")
        if published.answered(cell.dist):
            yield f"the index has no {cell.dist} {cell.version}"
    elif not digest.sha256:
        if digest.record_sha256 not in set().union(*known.installed(published).get((cell.dist, cell.version), {}).values()):
            yield "it was made of an installed release, and no record of the index's own file installed the same"
    elif digest.sha256 not in wanted:
        yield f"its subject has sha256 {digest.sha256[:12]}…, and the index publishes {wanted[0][:12]}… for {cell.dist} {cell.version}"
    # What is built may come out otherwise each time.
    elif document.subject[0].name.endswith(".whl") and len(known.records(published, document)) > 1:
        yield f"of this file of {cell.dist} {cell.version}, records say that it installed different files"


def problems(
    results: Path, paths: Iterable[Path], look: Callable[[Path], Iterable[str]]
) -> Iterator[tuple[Path, list[str], str]]:
    """What ``look`` finds at each receipt, or why it cannot be read.

    And what lies beside the receipts: folders that no machine.json describes, logs that no receipt names.
    """
    named: set[Path] = set()
    for path in paths:
        found: list[str] = []
        why = ""
        try:
            named |= {path.parent / name for name in receipt.log_names(receipt.read(path))}
            found += look(path)
        except UserError as error:
            why = str(error)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            why = f"{path} cannot be read ({type(error).__name__}: {plain(str(error))})"
        yield path, found, why
    for described, sentence in receipt.strays(results).items():
        yield described, [sentence], ""
    for log in receipt.logs(results):
        if log not in named:
            yield log, ["no receipt names this log"], ""
