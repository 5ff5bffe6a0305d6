"""docs/mutants.md: which broken fixes and blunted triggers each pack has noticed, and with which scripts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.packs.pack import Pack

KINDS = ("dropped", "poisoned", "wrong fix", "blunted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one mutant of a pack."""

    pack: str
    kind: str
    name: str
    killed: bool
    saw: str


def digests(packs: Sequence[Pack]) -> dict[str, str]:
    """Of each pack that has mutants, what stands for all that decides what becomes of them: scripts, fix, pins, settings, mutants.

    But not the report block, which is the same in all scripts, and which tests of its own look at.
    """
    found = {}
    for pack in packs:
        mutants = pack.folder / "mutants.toml"
        if mutants.is_file():
            hashes = {name: sha256 for name, sha256 in pack.hashes("patched").items() if name not in ("report", "transforms")}
            told = [hashes, hashlib.sha256(mutants.read_bytes()).hexdigest()]
            found[pack.name] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return found


def page(
    found: Sequence[Outcome],
    left_out: dict[str, dict[str, str]],
    before: str,
    today: Mapping[str, str],
) -> str:
    """docs/mutants.md. Packs of which ``found`` has nothing keep what ``before``, the page as it was, says of them.

    ``today`` has the digest of each pack that has mutants.
    """
    ran = {outcome.pack for outcome in found}
    kept = [line for line in before.splitlines() if (told := re.match(r"(?:\| |- )(pack\d\d)\b", line)) and told[1] not in ran]
    counts = [outcome for outcome in found if not outcome.name.endswith(": same")]
    rows = [line for line in kept if line.startswith("|")]
    for pack in ran:
        cells = [f"`{today[pack]}`" if pack in today else "–"]
        for kind in KINDS:
            mine = [outcome for outcome in counts if (outcome.pack, outcome.kind) == (pack, kind)]
            cells.append(f"{sum(outcome.killed for outcome in mine)} of {len(mine)} killed" if mine else "–")
        why = "; ".join(f"`{name}`: {reason}" for name, reason in left_out.get(pack, {}).items()) or "–"
        rows.append(f"| {pack} | {' | '.join(cells)} | {why} |")
    old = sorted(name for name, mine in today.items() if not any(row.startswith(f"| {name} | `{mine}` |") for row in rows))
    survivors = [line for line in kept if line.startswith("-")]
    survivors += [f"- {o.pack}, {o.kind}, {o.name}: {o.saw}" for o in found if not o.killed]
    lines = [
        "# Mutants",
        "",
        "Fixes broken and triggers blunted, by `nox -s mutants -- PACK`, which writes a row of this page: each mutant has to turn its side",
        "red. A row is of the scripts, pins and mutants of the day that it was run, which the digest stands for. In front of the poisons of",
        "each output stands a wrapper that changes nothing and has to stay green; it is not counted.",
        "",
        f"| pack | digest | {' | '.join(KINDS)} | left out, and why |",
        f"|---|{'---|' * (len(KINDS) + 2)}",
        *sorted(rows),
        "",
        *(
            [f"Not run as a whole with the scripts and mutants of today; a row above is older: {', '.join(old)}.", ""]
            if old
            else ()
        ),
        "## Survivors",
        "",
        *(sorted(survivors) or ["None."]),
    ]
    return "\n".join(lines) + "\n"
