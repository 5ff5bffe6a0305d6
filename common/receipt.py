"""Receipts: what was seen, as an in-toto Statement of the test-result predicate, beside the log it was graded from.

"Recording is not approval": a receipt states what was seen; a pack's ``expected`` states what we hold.
Specification: https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common import __version__, schema
from common.environment import Environment, gpu
from common.errors import UserError, writing
from common.files import locked, write_atomically
from common.grade import Verdict

SCHEMA = 2
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
#: A machine's name: its folder in results/, and a word in every table.
MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Folders in results/ that are no machine's: what is made to be attached, and runs under review.
NO_RECORD = ("attach", "badges", "review")
#: in-toto's word for each outcome: does the release (or the fix) pass the test that the bug is not there?
_RESULT: Mapping[str, str] = {
    "ABSENT": "PASSED",
    "NOTHING_TO_PATCH": "PASSED",
    "NOTHING_TO_FIX": "PASSED",
    "REPRODUCED": "FAILED",
}


class NewerReceipt(UserError):
    """A receipt of a schema that this runner does not know yet: it is left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One (pack, release, side), and the variant of the script's arguments."""

    pack: str
    dist: str
    version: str
    side: str
    variant: str = ""

    @property
    def stem(self) -> str:
        variant = f".{self.variant}" if self.variant else ""
        return f"{self.dist}-{self.version}.{self.side}{variant}"

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.pack, self.dist, self.version, self.side, self.variant)))


def derived(verdict: Verdict) -> tuple[dict[str, Any], dict[str, Any]]:
    """All of a receipt that follows from the verdict: what stands in the predicate, and what in our part of it."""
    predicate = {
        "result": _RESULT.get(verdict.outcome, "WARNED"),
        "passedTests": list(verdict.passed),
        "failedTests": list(verdict.failed),
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


def statement(
    cell: Cell,
    verdict: Verdict,
    *,
    environment: Environment | None,
    subject: Mapping[str, Any],
    lane: str,
    hashes: Mapping[str, str],
    command: list[str],
    closing: Mapping[str, Any],
    started: str,
    log_name: str,
    log_sha256: str,
    patch: Mapping[str, Any] | None,
    settings: Mapping[str, str],
    sandbox: bool = False,
) -> dict[str, Any]:
    """The receipt of one run, ready to be written; everything in it is already free of private words."""
    installed = environment.distributions() if environment else []
    predicate, facts = derived(verdict)
    return {
        "_type": STATEMENT,
        "subject": [dict(subject)],
        "predicateType": PREDICATE,
        "predicate": {
            **predicate,
            "configuration": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(hashes.items())],
            "reproducer": {
                "schema": SCHEMA,
                "runner": __version__,
                "pack": cell.pack,
                "dist": cell.dist,
                "version": cell.version,
                "side": cell.side,
                "variant": cell.variant,
                "lane": lane,
                **facts,
                "command": command,
                "exit": closing.get("exit"),
                "signal": closing.get("signal"),
                "stopped": closing.get("stopped"),
                "started": started,
                "seconds": closing.get("seconds", 0.0),
                "peak_rss": closing.get("peak_rss", 0),
                "log": {"name": log_name, "sha256": log_sha256, "cut": closing.get("cut", 0)},
                "patch": {name: value for name, value in patch.items() if name != "unpatched"} if patch else None,
                **({"sandbox": True} if sandbox else {}),
                "environment": {
                    "python": platform.python_version(),
                    "platform": f"{platform.system()} {platform.machine()}",
                    "torch": _version(installed, "torch"),
                    "triton": _version(installed, "triton"),
                    "cuda": _cuda(environment),
                    "gpus": [dict(device) for device in gpu()],
                    "settings": dict(settings),
                    "distributions": installed,
                },
            },
        },
    }


def write(
    results: Path,
    cell: Cell,
    log: str,
    receipt: dict[str, Any],
    *,
    machine: str,
    other_logs: Mapping[str, str] | None = None,
) -> Path:
    """Write log and receipt; after a kill at any moment the old pair or the new one is there, whole.

    The logs go first, under names of their own (their hashes); the receipt, which names them, replaces the old one in one
    step; then the logs that no receipt names any more go.
    """
    schema.validate("receipt", receipt)
    folder = results / machine / cell.pack
    log_name = receipt["predicate"]["reproducer"]["log"]["name"]
    path = folder / f"{cell.stem}.json"
    # Two writers of one cell would each take the other's log for an old one.
    with prepared(results, machine):
        texts = {**(other_logs or {}), log_name: log}
        new = [name for name in texts if not (folder / name).exists()]
        try:
            for name, text in texts.items():
                write_atomically(folder / name, text)
            write_atomically(path, json.dumps(receipt, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")
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


def majority(runs: Sequence[tuple[dict[str, Any], str, str]]) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Of several runs of one cell, (receipt, log, word) each, the record: one that shows what most of them show.

    Returns its receipt, which names them all, its log, and the other logs by file name.
    """
    words = [word for _, _, word in runs]
    chosen, log, _ = max(runs, key=lambda run: words.count(run[2]))
    facts = chosen["predicate"]["reproducer"]
    listed = [document["predicate"]["reproducer"] for document, _, _ in runs]
    facts["runs"] = [
        {"word": word, "started": each["started"], "log": {name: each["log"][name] for name in ("name", "sha256")}}
        for each, word in zip(listed, words, strict=True)
    ]
    return chosen, log, {each["log"]["name"]: text for each, (_, text, _) in zip(listed, runs, strict=True)}


def log_name(cell: Cell, log: str) -> tuple[str, str]:
    """File name and sha256 of a log."""
    sha256 = hashlib.sha256(log.encode()).hexdigest()
    return f"{cell.stem}.{sha256[:12]}.log", sha256


def read(path: Path) -> dict[str, Any]:
    """A receipt, checked against the schema; `UserError` in one sentence when it is not a whole one of ours."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except OSError as error:
        raise UserError(f"The receipt {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"The receipt {path} is not whole JSON ({error}): delete it and run its cell again.") from error
    if "\\ud" in text.lower():
        try:
            json.dumps(raw, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"The receipt {path} holds half a character ({error.reason}): delete it and run its cell again."
            ) from error
    version = _dig(raw, "predicate", "reproducer", "schema")
    if isinstance(version, int) and version > SCHEMA:
        raise NewerReceipt(f"The receipt {path} has schema {version}; this runner knows {SCHEMA}: update the checkout.")
    try:
        schema.validate("receipt", raw)
    except UserError as error:
        raise UserError(f"The receipt {path} is not valid: {error}") from error
    found: dict[str, Any] = raw
    return found


def check_place(path: Path, receipt: Mapping[str, Any]) -> None:
    """`UserError` where a receipt lies under another name than its own: it would speak of another release."""
    facts = receipt["predicate"]["reproducer"]
    cell = Cell(**{name: facts[name] for name in ("pack", "dist", "version", "side", "variant")})
    if path.name != f"{cell.stem}.json" or path.parent.name != cell.pack:
        raise UserError(f"The receipt {path} is of {cell.pack}/{cell.stem}.json: put it there, or delete it.")


def read_log(path: Path, receipt: Mapping[str, Any], named: Mapping[str, Any] | None = None) -> str:
    """The log that a receipt at ``path`` names (or another of its runs, ``named``), checked against its hash."""
    named = named or receipt["predicate"]["reproducer"]["log"]
    file = path.parent / named["name"]
    try:
        data: bytes = file.read_bytes()
    except OSError as error:
        raise UserError(f"The log {file} of receipt {path.name} cannot be read: {error.strerror}.") from error
    if hashlib.sha256(data).hexdigest() != named["sha256"]:
        raise UserError(f"The log {file} is not the one that receipt {path.name} was graded from (its sha256 differs).")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"The log {file} of receipt {path.name} is not UTF-8.") from error


def log_names(receipt: Mapping[str, Any]) -> set[str]:
    """The file names of the logs that belong to a receipt: its own, and those of the other runs of its cell."""
    facts = receipt["predicate"]["reproducer"]
    return {facts["log"]["name"], *(run["log"]["name"] for run in facts.get("runs", ()))}


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


def stored(results: Path, pack: str = "pack[0-9][0-9]") -> list[Path]:
    """The receipts of a pack, or of all, on every machine, in a stable order."""
    # Only a machine's folder has a machine.json; copies made to be attached, or runs under review, are no record.
    machines = (described.parent for described in results.glob("*/machine.json") if MACHINE.fullmatch(described.parent.name))
    return sorted(path for machine in machines for path in machine.glob(f"{pack}/*.json"))


def hashes(receipt: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of each file that decided the run; where they are not the pack's of today, the receipt is stale."""
    return {entry["name"]: entry["digest"]["sha256"] for entry in receipt["predicate"]["configuration"]}


def machine_name() -> str:
    """A name for this machine that says what it is and not which: ``linux-x86_64-cpu``, ``linux-x86_64-nvidia-h200``."""
    names = sorted({device["name"] for device in gpu()})
    kind = re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-") or "cpu"
    count = f"-x{len(gpu())}" if len(gpu()) > 1 else ""
    return f"{platform.system().lower()}-{platform.machine().lower()}-{kind}{count}"


def describe_machine() -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": [dict(device) for device in gpu()],
    }


def _version(installed: list[dict[str, str]], name: str) -> str | None:
    return next((d["version"] for d in installed if d["name"] == name), None)


def _cuda(environment: Environment | None) -> str | None:
    """The CUDA version torch was built for, read and not imported: importing torch takes seconds."""
    for folder in environment.path if environment else ():
        with suppress(OSError):
            text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
            found = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
            return found[1] if found else None
    return None


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
