"""Receipts: what was seen, as an in-toto Statement of the test-result predicate, beside the log it was graded from.

"Recording is not approval": a receipt states what was seen; a pack's ``expected`` states what we hold.
Specification: https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from common.errors import UserError, writing
from common.files import like, locked, write_atomically
from common.install.machine import MACHINE, describe_machine
from common.scrub import plain
from common.store.cell import Cell
from common.store.grade import Verdict

SCHEMA: Literal[2] = 2
STATEMENT: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE: Literal["https://in-toto.io/attestation/test-result/v0.1"] = "https://in-toto.io/attestation/test-result/v0.1"
#: Folders in results/ that are no machine's: what is made to be attached, and runs under review.
NO_RECORD = ("attach", "badges", "review")
#: in-toto's word for each outcome: does the release (or the fix) pass the test that the bug is not there?
_RESULT: Mapping[str, Literal["PASSED", "FAILED"]] = {
    "ABSENT": "PASSED",
    "NOTHING_TO_PATCH": "PASSED",
    "NOTHING_TO_FIX": "PASSED",
    "REPRODUCED": "FAILED",
}


Sha256 = Annotated[str, like("[0-9a-f]{64}")]
Word = Annotated[str, like("[A-Za-z0-9][A-Za-z0-9._+!-]*")]
Time = Annotated[str, like(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")]
Error = Annotated[float, Meta(ge=0, le=1e308)] | None
Count = Annotated[int, Meta(ge=0)]


class _Strict(Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class Digest(_Strict):
    """Of a hashed file; ``record_sha256`` names an installed release whose wheel is not at hand by its RECORD."""

    sha256: Sha256 | UnsetType = UNSET
    record_sha256: Sha256 | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not (self.sha256 or self.record_sha256):
            raise ValueError("a digest needs sha256 or record_sha256")


class FileDigest(_Strict):
    sha256: Sha256


class Subject(_Strict):
    """The file of the release that was run."""

    name: Annotated[str, Meta(min_length=1)]
    uri: Annotated[str, Meta(pattern="^pkg:")]
    digest: Digest


class Configuration(_Strict):
    """A file (or the pins, or the settings) that decides what a run shows."""

    name: str
    digest: FileDigest


class NamedLog(_Strict):
    name: Annotated[str, like(r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.log")]
    sha256: Sha256


class Log(NamedLog):
    """``cut`` counts the bytes in its middle that were not kept."""

    cut: Count


class Run(_Strict):
    """One of several runs of a cell, and what it showed in the words of a script's last line."""

    word: str
    started: Time
    log: NamedLog


class Patch(_Strict):
    """The diff that was run; of somebody else's, also which of its files were applied."""

    name: Annotated[str, like("[A-Za-z0-9][A-Za-z0-9._+!-]*"), Meta(max_length=200)]
    sha256: Sha256
    applied: list[str] | UnsetType = UNSET
    skipped: list[str] | UnsetType = UNSET
    unsupported: list[str] | UnsetType = UNSET
    #: Functions, and other parts of files, that the diff changes and the pack's own fix leaves alone.
    beyond: list[str] | UnsetType = UNSET
    #: What the pack's own fix changes, and the diff leaves as it is released.
    left: list[str] | UnsetType = UNSET
    #: What the diff changes and no check ran.
    unrun: list[str] | UnsetType = UNSET
    #: Names that the diff reads and that are defined nowhere: no verdict certifies it.
    undefined: list[str] | UnsetType = UNSET


class Distribution(_Strict):
    name: str
    version: str
    record_sha256: Sha256


class Surroundings(_Strict):
    """Where it ran; ``settings`` are the environment variables that a run may see and a receipt may name."""

    python: str
    platform: str
    torch: str | None
    triton: str | None
    cuda: str | None
    gpus: list[dict[str, str]]  # name, compute_cap, …
    settings: dict[str, str]
    distributions: list[Distribution]


class Facts(_Strict):
    """Our part of the predicate. Errors are relative to the reference, ``seconds`` wall-clock time, ``peak_rss`` in bytes."""

    schema: Literal[2]
    runner: str
    pack: Annotated[str, like("pack[0-9]{2}")]
    dist: Word
    version: Annotated[str, like("[0-9][A-Za-z0-9._+!-]*")]
    side: Literal["unpatched", "patched"]
    variant: Annotated[str, like("[a-z0-9.-]*")]
    lane: Annotated[str, like("[a-z0-9-]+")]
    outcome: Literal["REPRODUCED", "ABSENT", "CHANGED", "UNTESTABLE", "ERROR", "NOTHING_TO_FIX", "NOTHING_TO_PATCH", "MEASURED"]
    reason: str
    evidence: Annotated[str, like("(none|source|interpreter|codegen|device:(?:sm_[0-9a-z]+|cpu))")]
    bug_error: Error
    limit: Error
    control_error: Error
    proofs: dict[str, str]
    claims: list[Literal["BITWISE_IDENTICAL", "MEMORY_SAVE_VERIFIED", "LEGALITY_PROVED"]]
    metrics: dict[str, Any]
    command: list[str]
    exit: int | None
    signal: str | None
    stopped: str | None
    started: Time
    seconds: Annotated[float, Meta(ge=0)]
    peak_rss: Count
    log: Log
    patch: Patch | None
    environment: Surroundings
    sandbox: bool | UnsetType = UNSET
    runs: Annotated[list[Run], Meta(min_length=2)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if any(not {"name", "compute_cap"} <= set(gpu) for gpu in self.environment.gpus):
            raise ValueError("a GPU needs name and compute_cap")
        if self.outcome in ("REPRODUCED", "ABSENT", "NOTHING_TO_FIX"):
            if not {"trigger", "control", "agreement"} <= set(self.proofs):
                raise ValueError(f"{self.outcome} needs the three proofs: trigger, control, agreement")
            if self.evidence == "none":
                raise ValueError(f"{self.outcome} needs evidence")


class Predicate(_Strict, rename="camel"):
    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: list[Configuration]
    passed_tests: list[str]
    failed_tests: list[str]
    reproducer: Facts


class Receipt(_Strict, rename={"type_": "_type", "predicate_type": "predicateType"}):
    """Receipt of one run: an in-toto Statement of the test-result predicate."""

    type_: Literal["https://in-toto.io/Statement/v1"]
    predicate_type: Literal["https://in-toto.io/attestation/test-result/v0.1"]
    subject: Annotated[list[Subject], Meta(min_length=1, max_length=1)]
    predicate: Predicate

    @property
    def facts(self) -> Facts:
        return self.predicate.reproducer

    @property
    def cell(self) -> Cell:
        return Cell.of(self.facts)

    @property
    def hashes(self) -> dict[str, str]:
        """The sha256 of all that decided the run; where they are not the pack's of today, the receipt is stale."""
        return {entry.name: entry.digest.sha256 for entry in self.predicate.configuration}


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine.json says."""

    schema: Literal[1, 2]
    system: str
    architecture: str
    cpus: int
    memory_gib: int
    gpus: list[dict[str, str]]


#: Made once, when nobody else decodes: two threads that are the first to ask msgspec for a type crash the process (msgspec 0.22.0).
_DECODER = msgspec.json.Decoder(Receipt)


class NewerReceipt(UserError):
    """A receipt of a schema that this runner does not know yet: it is left alone."""


def derived(verdict: Verdict) -> tuple[dict[str, Any], dict[str, Any]]:
    """All of a receipt that follows from the verdict: what stands in the predicate, and what in our part of it."""
    predicate = {
        "result": _RESULT.get(verdict.outcome, "WARNED"),
        "passed_tests": list(verdict.passed),
        "failed_tests": list(verdict.failed),
    }
    return predicate, {
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "evidence": verdict.evidence,
        "bug_error": verdict.bug_error,
        "limit": verdict.limit,
        "control_error": verdict.control_error,
        "proofs": dict(verdict.proofs),
        "claims": list(verdict.claims),
        "metrics": dict(verdict.metrics),
    }


def made(verdict: Verdict, *, subject: Subject, hashes: Mapping[str, str], **facts: Any) -> Receipt:
    """The receipt of one run: ``facts`` are those of `Facts` that do not follow from the verdict, free of private words."""
    predicate, shown = derived(verdict)
    configuration = [Configuration(name=name, digest=FileDigest(sha256=digest)) for name, digest in sorted(hashes.items())]
    reproducer = Facts(schema=SCHEMA, **shown, **facts)
    return Receipt(
        type_=STATEMENT,
        predicate_type=PREDICATE,
        subject=[subject],
        predicate=Predicate(**predicate, configuration=configuration, reproducer=reproducer),
    )


def text(receipt: Receipt) -> str:
    """A receipt as it is stored."""
    return json.dumps(msgspec.to_builtins(receipt), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write(
    results: Path,
    cell: Cell,
    log: str,
    receipt: Receipt,
    *,
    machine: str,
    other_logs: Mapping[str, str] | None = None,
) -> Path:
    """Write log and receipt; after a kill at any moment the old pair or the new one is there, whole.

    The logs go first, under names of their own (their hashes); the receipt, which names them, replaces the old one in one
    step; then the logs that no receipt names any more go.
    """
    document = text(receipt)
    try:
        _DECODER.decode(document)
    except msgspec.MsgspecError as error:
        raise UserError(f"The receipt of {cell} would not be valid: {plain(str(error))}.") from error
    folder = results / machine / cell.pack
    log_name = receipt.facts.log.name
    path = folder / f"{cell.stem}.json"
    # Two writers of one cell would each take the other's log for an old one.
    with prepared(results, machine):
        texts = {**(other_logs or {}), log_name: log}
        new = [name for name in texts if not (folder / name).exists()]
        try:
            for name, content in texts.items():
                write_atomically(folder / name, content)
            write_atomically(path, document)
        except BaseException:
            for name in new:
                with suppress(OSError):
                    (folder / name).unlink()
            raise
        pattern = re.compile(rf"{re.escape(cell.stem)}\.[0-9a-f]{{12}}\.log")
        for old in folder.glob(f"{cell.stem}.*.log"):
            if pattern.fullmatch(old.name) and old.name not in texts:
                with suppress(OSError):
                    old.unlink()
    return path


@contextmanager
def prepared(results: Path, machine: str) -> Iterator[None]:
    """Hold a machine's folder for a writer; `UserError` where it cannot be written."""
    folder = results / machine
    with writing(folder), locked(folder / ".lock"):
        described = folder / "machine.json"
        if not described.exists():
            write_atomically(described, json.dumps(describe_machine(), indent=1) + "\n")
        yield


def majority(runs: Sequence[tuple[Receipt, str, str]]) -> tuple[Receipt, str, dict[str, str]]:
    """Of several runs of one cell, (receipt, log, word) each, the record: one that shows what most of them show.

    Returns its receipt, which names them all, its log, and the other logs by file name.
    """
    words = [word for _, _, word in runs]
    chosen, log, _ = max(runs, key=lambda run: words.count(run[2]))
    listed = [receipt.facts for receipt, _, _ in runs]
    chosen.facts.runs = [
        Run(word=word, started=facts.started, log=NamedLog(name=facts.log.name, sha256=facts.log.sha256))
        for facts, word in zip(listed, words, strict=True)
    ]
    return chosen, log, {facts.log.name: text for facts, (_, text, _) in zip(listed, runs, strict=True)}


def log_name(cell: Cell, log: str) -> tuple[str, str]:
    """File name and sha256 of a log."""
    sha256 = hashlib.sha256(log.encode()).hexdigest()
    return f"{cell.stem}.{sha256[:12]}.log", sha256


def read(path: Path) -> Receipt:
    """A receipt, checked; `UserError` in one sentence when it is not a whole one of ours."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"The receipt {path} cannot be read: {error.strerror}.") from error
    try:
        try:
            return _DECODER.decode(data)
        except msgspec.ValidationError as error:  # What is read again may break off behind what is not valid.
            if (version := _schema(data)) > SCHEMA:
                raise NewerReceipt(
                    f"The receipt {path} has schema {version}; this runner knows {SCHEMA}: update the checkout."
                ) from None
            raise UserError(f"The receipt {path} is not valid: {plain(str(error))}.") from error
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise UserError(
            f"The receipt {path} is not whole JSON ({plain(str(error))}): delete it and run its cell again."
        ) from error


def _schema(data: bytes) -> int:
    raw = msgspec.json.decode(data)
    for key in ("predicate", "reproducer", "schema"):
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw if isinstance(raw, int) else 0


def check_place(path: Path, receipt: Receipt) -> None:
    """`UserError` where a receipt lies under another name than its own: it would speak of another release."""
    cell = receipt.cell
    if path.name != f"{cell.stem}.json" or path.parent.name != cell.pack:
        raise UserError(f"The receipt {path} is of {cell.pack}/{cell.stem}.json: put it there, or delete it.")


def described(path: Path) -> Machine:
    """What the machine.json says that a receipt at ``path`` lies beside; `UserError` where it is not whole."""
    file = path.parent.parent / "machine.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Machine)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(
            f"{file} cannot be read ({plain(str(error))}): it says what the machine of the receipts was."
        ) from error


def read_log(path: Path, receipt: Receipt, named: NamedLog | None = None) -> str:
    """The log that a receipt at ``path`` names (or another of its runs, ``named``), checked against its hash."""
    named = named or receipt.facts.log
    file = path.parent / named.name
    try:
        data: bytes = file.read_bytes()
    except OSError as error:
        raise UserError(f"The log {file} of receipt {path.name} cannot be read: {error.strerror}.") from error
    if hashlib.sha256(data).hexdigest() != named.sha256:
        raise UserError(f"The log {file} is not the one that receipt {path.name} was graded from (its sha256 differs).")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"The log {file} of receipt {path.name} is not UTF-8.") from error


def log_names(receipt: Receipt) -> set[str]:
    """The file names of the logs that belong to a receipt: its own, and those of the other runs of its cell."""
    return {receipt.facts.log.name, *(run.log.name for run in receipt.facts.runs or ())}


def strays(results: Path) -> dict[Path, str]:
    """Folders that hold receipts and no machine.json: copied by hand, or what is left of one. Their receipts count for nothing."""
    folders = {found.parent.parent for found in results.glob("*/pack[0-9][0-9]/*.json")}
    missing = [folder / "machine.json" for folder in sorted(folders) if folder.name not in NO_RECORD]
    return {
        path: f"{path} is missing, so the receipts beside it are not counted: put it back, or run the packs again."
        for path in missing
        if not path.is_file() or not MACHINE.fullmatch(path.parent.name)
    }


def logs(results: Path) -> list[Path]:
    return sorted(log for described in results.glob("*/machine.json") for log in described.parent.glob("pack[0-9][0-9]/*.log"))


def reviews(results: Path) -> list[Path]:
    """The folders of kept reviews, one for each diff, each laid out as ``results`` is. No other command counts their receipts."""
    return sorted(folder for folder in results.glob("review/*") if folder.is_dir())


def stored(results: Path, pack: str = "pack[0-9][0-9]") -> list[Path]:
    """The receipts of a pack, or of all, on every machine, in a stable order."""
    # Only a machine's folder has a machine.json; copies made to be attached, or runs under review, are no record.
    machines = (described.parent for described in results.glob("*/machine.json") if MACHINE.fullmatch(described.parent.name))
    return sorted(path for machine in machines for path in machine.glob(f"{pack}/*.json"))
