"""From a stored log to a verdict: a pure function, so that every verdict can be recomputed without running anything.

A log is the runner's opening line (JSON: what was asked for), what the script printed, and the runner's closing line (JSON:
how it ended). A verdict needs three proofs, and a log that disagrees with itself is an ERROR, never a pass:

1. the trigger ran: checks were made, on code of the version asked for, imported from where it should come from;
2. a control passed in the same run;
3. exit code, JSON line and sentinel agree.

What the machine did to the run (a signal from outside, a supervisor that was killed) is INFRA: it says nothing of the release.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.scrub import plain

#: Of the logs that are written today.
FORM = 2
#: The factor between bug error, limit and control error under which a numeric verdict is refused.
MARGIN = 10.0
EXIT = {"REPRODUCED": 10, "ABSENT": 0, "CHANGED": 125, "UNTESTABLE": 125, "MEASURED": 0}
ROLES = ("trigger", "control", "signature")
#: Before the checks that failed beside a measurement.
NOT_RIGHT = "it measured something that is not right: "
#: What a script may claim beyond its verdict.
BITWISE = "BITWISE_IDENTICAL"
CLAIMS = (BITWISE, "MEMORY_SAVE_VERIFIED", "LEGALITY_PROVED")
#: Weakest first; "device" is followed by ":sm_90" and the like.
EVIDENCE = ("none", "source", "interpreter", "codegen", "device")


def strength(evidence: str) -> int:
    """Place of an evidence level in `EVIDENCE`, whatever the device's name."""
    return EVIDENCE.index(evidence.partition(":")[0])


#: Signals by which a program's own fault ends it. Any other came from outside: a person, a scheduler, a system short of memory.
CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")

#: The levels of what a lane runs; a lane by another name leaves none.
LANES = {
    "device": ("source", "codegen", "device"),
    "cpu": ("source", "device"),
    "fake-cuda|megatron-cpu|te-cpu": ("source",),
    "tilelang-cpu|triton-interpreter(-[a-z0-9]+)?": ("source", "interpreter"),
    "(tilelang|triton)-codegen": ("source", "codegen"),
}

_SENTINEL = re.compile(r"^(BUG_REPRODUCED|BUG_ABSENT|FIX_VALIDATED|MEASURED|(?:CHANGED|UNTESTABLE)(?:: .+)?)$")
#: The runner's own word for why the script was not run, or was ended.
_STOPS = {"timeout": "timeout", "memory": "oom", "install": "install", "anchor": "anchor", "source": "source"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one run showed.

    ``bug_error`` is the largest trigger error, ``limit`` and ``control_error`` those beside it: relative to the reference,
    None where the pack does not measure an error. ``proofs`` says for each of the three proofs what it rests on; ``triggers`` how many ran.
    """

    outcome: str
    reason: str = ""
    evidence: str = "none"
    bug_error: float | None = None
    limit: float | None = None
    control_error: float | None = None
    proofs: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    triggers: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome

    @property
    def is_by_exact_checks(self) -> bool:
        """Whether the bug was seen by checks that measure no error, while each measured one is within its limit."""
        if self.outcome != "REPRODUCED" or self.bug_error is None or self.limit is None:
            return False
        return self.bug_error <= self.limit

    def meets(self, expected: str) -> bool:
        """Whether this is what is expected: "UNTESTABLE: import" asks for that reason, "CHANGED" for any."""
        outcome, _, reason = expected.partition(": ")
        return self.outcome == outcome and (not reason or self.reason == reason or self.reason.startswith(f"{reason} "))


class Disagreement(Exception):
    """The log contradicts itself or lacks a proof."""


def grade(log: str) -> Verdict:
    """The verdict of a whole log. Never raises: what cannot be read is an ERROR with the reason."""
    try:
        opening, body, closing = split(log)
        return _grade(opening, body, closing)
    except Disagreement as error:
        return Verdict(outcome="ERROR", reason=plain(str(error), None))
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        return Verdict(outcome="ERROR", reason=f"the log cannot be read ({type(error).__name__})")


def split(log: str) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The runner's opening line, the script's lines, the runner's closing line."""
    lines = log.splitlines()
    opening, closing = (_object(lines[i]).get("runner") if len(lines) > 1 else None for i in (0, -1))
    if not isinstance(opening, dict) or not isinstance(closing, dict) or "exit" not in closing or "version" not in opening:
        raise Disagreement("the log lacks the runner's opening or closing line")
    return opening, lines[1:-1], closing


def _grade(opening: dict[str, Any], body: list[str], closing: dict[str, Any]) -> Verdict:
    """The verdict of repro.py and, where it is a fix that looks right, of validate.py, which is run after it."""
    if not opening.get("validate"):
        return _of_script(opening, body, closing)
    second = closing.get("validate")
    verdict = _of_script(opening, body[: opening.get("lines")], closing)
    if verdict.outcome not in ("ABSENT", "NOTHING_TO_FIX"):
        return verdict
    if not isinstance(second, dict) or type(opening.get("lines")) is not int or opening["lines"] < 0:
        raise Disagreement("FIX_VALIDATED without validate.py, which the pack has")
    # A lane of its own may run it, which computes what the first one compiles.
    deep = _of_script({**opening, "patch": None, "triggers": 0, "also": "interpreter"}, body[opening["lines"] :], second)
    if deep.outcome == "ABSENT":
        count, own = len(deep.passed), opening.get("checks")
        if own == 0:
            return Verdict(
                outcome="UNTESTABLE", reason=plain(f"not-compared (the pack's own fix is {opening.get('own')} here)")
            )
        if own and count < own:  # A diff that renames what a check looks for would be spared the check.
            return Verdict(outcome="CHANGED", reason=f"validate: {count} checks ran, and {own} do with the pack's own fix")
        ran = f"{count} checks of validate.py passed"
        found = {**verdict.metrics, **({"validate": dict(deep.metrics)} if deep.metrics else {})}
        passed = (*verdict.passed, *(f"validate: {name}" for name in deep.passed))
        # The one that is nearer to its limit.
        worst = max(verdict, deep, key=lambda each: (each.bug_error or 0.0) / each.limit if each.limit else -1.0)
        return replace(
            verdict,
            evidence=min(verdict.evidence, deep.evidence, key=strength),
            proofs={**verdict.proofs, "validation": ran},
            metrics=found,
            passed=passed,
            bug_error=worst.bug_error,
            limit=worst.limit,
            control_error=verdict.control_error if worst.control_error is None else worst.control_error,
            claims=deep.claims or verdict.claims,
        )
    if deep.outcome == "REPRODUCED":
        return replace(deep, outcome="CHANGED", reason=plain(f"validate: {deep.failed[0]}"), proofs={}, claims=())
    return replace(deep, reason=plain(f"validate: {deep.reason}"))


def _of_script(opening: dict[str, Any], body: list[str], closing: dict[str, Any]) -> Verdict:
    stopped, exit_code = closing.get("stopped"), closing.get("exit")
    if stopped == "nothing-to-patch":
        return Verdict(outcome="NOTHING_TO_PATCH", reason=str(closing.get("message", "")))
    if stopped == "skipped" and closing.get("verdict") in ("UNTESTABLE", "ERROR", "INFRA"):
        return Verdict(outcome=str(closing.get("verdict")), reason=str(closing.get("message", "")))
    if stopped in ("lost", "infra", "exec"):
        return Verdict(outcome="INFRA", reason=str(closing.get("reason") or stopped))
    if stopped in _STOPS:
        return Verdict(outcome="UNTESTABLE", reason=_STOPS[stopped])
    if stopped is not None:
        raise Disagreement(f"the run was stopped for an unknown reason ({stopped})")
    sentinels = [line for line in body if _SENTINEL.match(line)]
    if closing.get("signal"):
        if closing["signal"] not in CRASHES:
            return Verdict(outcome="INFRA", reason=str(closing["signal"]))
        if sentinels:
            raise Disagreement(f"the script printed {sentinels[-1]!r} and then died of {closing['signal']}")
        return Verdict(outcome="CHANGED", reason=str(closing["signal"]))
    if not sentinels:
        return _without_sentinel(body, exit_code)
    if len(sentinels) > 1:
        raise Disagreement(f"the log holds {len(sentinels)} sentinels: {', '.join(sentinels)}")
    return _proved(opening, body, exit_code, sentinels[0])


def _without_sentinel(body: Sequence[str], exit_code: object) -> Verdict:
    last = next((line.strip() for line in reversed(body) if line.strip()), "")
    if exit_code == 1 and re.match(r"(?:ModuleNotFoundError|ImportError)\b", last):
        return Verdict(outcome="UNTESTABLE", reason="import")
    if exit_code == 1 and re.match(r"(?:MemoryError|torch\.(?:cuda\.)?OutOfMemoryError)\b", last):
        return Verdict(outcome="UNTESTABLE", reason="oom")
    if re.search(r"^OSError: \[Errno (?:5|12|23|24|28|122)\]", last):  # A disk or a process table that is full: the machine's.
        return Verdict(outcome="INFRA", reason=plain(last.partition(" ")[2][:40]))
    raise Disagreement(f"the script exited with {exit_code} and printed no sentinel; its last line: {last[:200] or '(none)'}")


def _proved(opening: dict[str, Any], body: list[str], exit_code: object, sentinel: str) -> Verdict:
    word, _, reason = sentinel.partition(": ")
    reason = plain(reason)
    outcome = {"BUG_REPRODUCED": "REPRODUCED", "BUG_ABSENT": "ABSENT", "FIX_VALIDATED": "ABSENT"}.get(word, word)
    if type(exit_code) is not int or exit_code != EXIT[outcome]:
        raise Disagreement(f"the script printed {sentinel!r}, which means exit {EXIT[outcome]}, and exited with {exit_code}")
    if (word == "FIX_VALIDATED") != (outcome == "ABSENT" and opening.get("side") == "patched"):
        raise Disagreement(f"{sentinel!r} is not for the {opening.get('side')} side")
    if outcome == "UNTESTABLE":
        if not reason:
            raise Disagreement("UNTESTABLE came without a reason")
        said = [facts.get("verdict") for line in body if (facts := _object(line)).get("report") == 1]
        if any(verdict != outcome for verdict in said):
            raise Disagreement(f"the sentinel says {sentinel!r} and the JSON line says {said[0]!r}")
        return Verdict(outcome=outcome, reason=reason)
    facts = _facts(body, sentinel)
    if facts.get("verdict") != outcome:
        raise Disagreement(f"the sentinel says {sentinel!r} and the JSON line says {facts.get('verdict')!r}")
    evidence = facts.get("evidence")
    if outcome == "CHANGED" and evidence == "none" and facts.get("checks") == []:
        return Verdict(outcome=outcome, reason=reason)  # It died before it could say where it runs.
    if not isinstance(evidence, str) or not re.fullmatch(r"source|interpreter|codegen|device:(?:sm_[0-9a-z]+|cpu)", evidence):
        raise Disagreement(f"the JSON line has an unknown evidence level {evidence!r}")
    on_cpu, lane = evidence == "device:cpu", str(opening.get("lane"))
    known = next((levels for name, levels in LANES.items() if re.fullmatch(name, lane)), ())
    if evidence.partition(":")[0] not in (*known, opening.get("also")) or (
        known and evidence.startswith("device") and on_cpu != (lane == "cpu")
    ):
        raise Disagreement(f"evidence {evidence!r} cannot come from the lane {lane!r}")
    if evidence.startswith("device") and not on_cpu and "gpus" in opening and evidence.partition(":")[2] not in opening["gpus"]:
        raise Disagreement(f"evidence {evidence!r} without such a GPU: the machine has {', '.join(opening['gpus']) or 'none'}")
    origin = _origin(opening, facts)
    if outcome == "CHANGED":
        return Verdict(outcome=outcome, reason=reason, evidence=evidence, proofs={"trigger": origin}, metrics=_metrics(facts))
    if outcome == "MEASURED":
        return _measured(evidence, origin, facts)
    verdict = _weighed(outcome, evidence, origin, facts, sentinel)
    if verdict.outcome == "ABSENT" and verdict.triggers < opening.get("triggers", 0):
        raise Disagreement(f"{verdict.triggers} triggers ran, and {opening['triggers']} on the unpatched side")
    return _of_patch(opening, verdict) if "unpatched" in (opening.get("patch") or {}) else verdict


def _of_patch(opening: dict[str, Any], verdict: Verdict) -> Verdict:
    """What a good run says of somebody else's diff: nothing where a part of it was not applied, or where there was no bug."""
    if verdict.outcome != "ABSENT":
        return verdict
    if left := opening["patch"].get("unsupported"):
        return replace(verdict, outcome="UNTESTABLE", reason=plain(f"partial-patch ({', '.join(map(str, left))})"), claims=())
    if unknown := opening["patch"].get("undefined"):
        said = plain(f"the diff leaves names undefined ({', '.join(map(str, unknown))})")
        return replace(verdict, outcome="CHANGED", reason=said, claims=())
    before = plain(str(opening["patch"].get("unpatched")))
    if before == "ABSENT":
        return replace(verdict, outcome="NOTHING_TO_FIX", reason="the controls still hold", claims=())
    if before != "REPRODUCED":
        return replace(verdict, outcome="UNTESTABLE", reason=f"unpatched ({before})", claims=())
    if missed := opening["patch"].get("unrun"):
        return replace(verdict, outcome="UNTESTABLE", reason=plain(f"not-run ({', '.join(map(str, missed))})"), claims=())
    if not opening.get("validate"):  # repro.py asks whether the bug is there: of a diff that is too little to certify it.
        return replace(verdict, outcome="UNTESTABLE", reason="not-validated (the pack has no validate.py)", claims=())
    return verdict


def _facts(body: Sequence[str], sentinel: str) -> dict[str, Any]:
    found = [facts for line in body if (facts := _object(line)).get("report") == 1]
    if len(found) != 1:
        raise Disagreement(f"the log holds {len(found)} JSON lines beside the sentinel {sentinel!r}, not one")
    return found[0]


def _origin(opening: dict[str, Any], facts: dict[str, Any]) -> str:
    """Proof 1, first half: the code that ran is the release's (or the overlay's), in the version asked for."""
    file, version = plain(str(facts.get("file", ""))), plain(str(facts.get("version")))
    if version != opening["version"]:
        raise Disagreement(f"release {opening['version']} was asked for, and {version} ran")
    root = "<overlay>/" if opening.get("side") == "patched" else "<release>/"
    if not file.startswith(root) or ".." in file.split("/"):
        raise Disagreement(f"the code that ran was imported from {file!r}, not from {root}")
    return f"{opening.get('dist')} {version} from {file}"


def _measured(evidence: str, origin: str, facts: dict[str, Any]) -> Verdict:
    """What measure.py found: numbers, and no word on whether the bug is there."""
    checks = _checks(facts)
    metrics = _metrics(facts)
    if failed := [c.name for c in checks if not c.ok]:
        raise Disagreement(f"{NOT_RIGHT}{', '.join(failed)}")
    if not _has_number(metrics):
        raise Disagreement("MEASURED without a number")
    passed = tuple(c.name for c in checks)
    return Verdict(outcome="MEASURED", evidence=evidence, proofs={"trigger": origin}, passed=passed, metrics=metrics)


@dataclass(frozen=True, slots=True)
class _Check:
    """``ok``: a correct release behaves so; of a signature: the bug behaves so where it is there."""

    name: str
    role: str
    error: float | None
    limit: float | None
    ok: bool


def _checks(facts: dict[str, Any]) -> list[_Check]:
    """The checks of the JSON line. An error that is missing or not finite is infinite, and so has failed."""
    listed = facts.get("checks")
    if not isinstance(listed, list):
        raise Disagreement("the JSON line has no list of checks")
    found = []
    for raw in listed:
        try:
            found.append(_check(raw))
        except (KeyError, TypeError, ValueError) as error:
            why = f" ({error})" if type(error) is ValueError and error.args else ""
            raise Disagreement(f"the JSON line has a check that cannot be read{why}: {plain(json.dumps(raw))[:120]}") from error
    return found


def _check(raw: Any) -> _Check:
    if raw["ok"] is not True and raw["ok"] is not False:
        raise ValueError("its ok is neither true nor false")
    if raw["role"] not in ROLES:
        raise ValueError(f"its role is none of {', '.join(ROLES)}")
    if not plain(str(raw["name"])).strip():
        raise ValueError("it has no name")
    check = _numeric(raw) if "limit" in raw else _Check(plain(str(raw["name"])), raw["role"], None, None, raw["ok"])
    if check.ok is not raw["ok"]:
        raise ValueError("its ok is not what its error and limit say")
    return check


def _numeric(raw: Any) -> _Check:
    limit, given = _number(raw["limit"]), raw.get("error")
    error = math.inf if given is None else _number(given)
    # A check with an endless limit could not fail.
    if not (0 < limit < math.inf and error >= 0):
        raise ValueError("its limit is 0 or endless, or its error below 0")
    return _Check(plain(str(raw["name"])), str(raw["role"]), error, limit, error <= limit)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return math.inf if math.isnan(value) else float(value)


def _weighed(outcome: str, evidence: str, origin: str, facts: dict[str, Any], sentinel: str) -> Verdict:
    """The three proofs of a REPRODUCED or ABSENT, recomputed from the checks."""
    checks = _checks(facts)
    by_role = {role: [c for c in checks if c.role == role] for role in ROLES}
    triggers, controls = by_role["trigger"], by_role["control"]
    if not triggers:
        raise Disagreement(f"{sentinel} without a check that triggers the bug: nothing ran")
    if not controls:
        raise Disagreement(f"{sentinel} without a control")
    if failed := [c.name for c in controls if not c.ok]:
        raise Disagreement(f"{sentinel}, but the control failed: {', '.join(failed)}")
    numeric = [c for c in triggers if c.limit is not None]
    # The one that is the farthest over its own limit, or the nearest to it.
    worst = max(numeric, key=_ratio, default=None)
    near = worst is not None and not worst.ok and _ratio(worst) < MARGIN
    bug, limit = (worst.error, worst.limit) if worst else (None, None)
    if near and any(not c.ok for c in triggers if c.limit is None):
        bug, near = None, False  # A statement that failed shows the bug, however near its limit a number beside it is.
    control = max((c.error or 0.0 for c in controls if c.limit is not None), default=None)
    seen = any(not c.ok for c in triggers)
    if seen != (outcome == "REPRODUCED"):
        raise Disagreement(f"the checks {'show' if seen else 'do not show'} the bug, and the sentinel is {sentinel}")
    finite = None if bug is None or bug == float("inf") else bug
    verdict = Verdict(
        outcome=outcome,
        evidence=evidence,
        bug_error=finite,
        limit=limit,
        control_error=control,
        proofs={
            "trigger": f"{len(triggers)} trigger check(s) ran on {origin}",
            "control": "passed: " + "; ".join(c.name for c in controls),
            "agreement": f"exit {EXIT[outcome]}, JSON {outcome} and {sentinel} agree",
        },
        claims=_claims(facts, checks, evidence) if outcome == "ABSENT" else (),
        passed=tuple(c.name for c in checks if c.ok),
        failed=tuple(c.name for c in checks if not c.ok),
        triggers=len(triggers),
        metrics=_metrics(facts),
    )
    if outcome == "REPRODUCED":
        if unlike := [c.name for c in by_role["signature"] if not c.ok]:
            raise Disagreement(f"wrong results, but not with the declared signature: {', '.join(unlike)}")
        if near:
            return _without_margin(verdict)
    if limit is not None and control is not None and not limit >= MARGIN * control:
        return _without_margin(verdict)
    return verdict


def _ratio(check: _Check) -> float:
    return (check.error or 0.0) / (check.limit or 1.0)


def _claims(facts: dict[str, Any], checks: Sequence[_Check], evidence: str) -> tuple[str, ...]:
    """What is claimed beyond the verdict: each claim names the checks that it rests on by words of their names."""
    claims = facts.get("claims") or {}
    if not isinstance(claims, dict):
        raise Disagreement("a claim has to name the checks that it rests on")
    for claim, words in claims.items():
        rests = [c for c in checks if str(words) in c.name] if words else []
        if claim not in CLAIMS or not rests or not all(c.ok for c in rests):
            raise Disagreement(f"the claim {plain(str(claim))} rests on no check, or on one that failed")
        if claim == BITWISE and any(c.limit is not None for c in rests):
            raise Disagreement(f"the claim {claim} rests on a check with a limit")
    # Lanes without a GPU compute some dtypes in another one, so that they show nothing of bits.
    return tuple(c for c in CLAIMS if c in claims and (c != BITWISE or evidence.startswith("device")))


def _without_margin(verdict: Verdict) -> Verdict:
    return Verdict(
        outcome="UNTESTABLE",
        reason="margin",
        evidence=verdict.evidence,
        bug_error=verdict.bug_error,
        limit=verdict.limit,
        control_error=verdict.control_error,
        metrics=verdict.metrics,
    )


def _has_number(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_number, inner)) or (isinstance(value, int | float) and not isinstance(value, bool))


def _metrics(facts: dict[str, Any]) -> dict[str, Any]:
    metrics = facts.get("metrics")
    return {plain(str(name)): _finite(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}


def _finite(value: Any) -> Any:
    """``value`` with None for every number that is not finite, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {plain(str(name)): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return plain(value, None) if isinstance(value, str) else value


def _object(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        value = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
