"""The generated table of README.md, between ``<!-- packs -->`` and ``<!-- /packs -->``, and results/README.md.

Lint checks that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from packaging.version import Version

from common.attach import Seen, by_machine, ranges, strongest
from common.files import write_atomically
from common.grade import strength
from common.pack import PACKS, ROOT, Pack, all_packs

#: The stored runs of each pack, by pack and machine: every table is made from one reading of the receipts.
Runs = Mapping[str, Mapping[str, list[Seen]]]


def stored_runs(packs: list[Pack], results: Path) -> Runs:
    return {pack.name: by_machine(pack, results) for pack in packs}


def update(*, check: bool = False, root: Path = ROOT, packs: Path = PACKS) -> list[str]:
    """Bring README.md's tables and results/README.md up to date (or only look); returns the files that were not."""
    found = all_packs(packs)
    results = root / "results"
    runs = stored_runs(found, results)
    readme = re.sub(
        r"(<!-- packs -->\n).*?(<!-- /packs -->)",
        lambda match: f"{match[1]}{pack_table(found, runs)}{match[2]}",
        (root / "README.md").read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    wanted = {root / "README.md": readme, results / "README.md": history(found, runs)}
    old = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old if not check else ():
        write_atomically(path, wanted[path])
    return [path.relative_to(root).as_posix() for path in old]


def history(packs: list[Pack], runs: Runs) -> str:
    """What the stored receipts of each pack show, release by release, on each machine."""
    lines = [
        "# What was seen",
        "",
        "Generated from the receipts beside it by `python -m common tables`. Rows are neighbouring releases that show the same.",
    ]
    for pack in packs:
        seen_on = runs[pack.name]
        if seen_on:
            lines += [
                "",
                f"## [{pack.name}](../packs/{pack.folder.name}/README.md): {pack.title}",
                "",
                turns(pack, seen_on),
            ]
        for machine, seen in sorted(seen_on.items()):
            lines += [
                "",
                f"### {machine}: {strongest(seen)}",
                "",
                "| release | as released | with the fix | bug error | limit | control error |",
            ]
            lines += ["|---|---|---|---|---|---|"]
            for row in ranges(seen):
                stale = " (stale)" if row.stale else ""
                lines.append(
                    f"| {row.name}{stale} | {row.unpatched} | {row.patched} | {row.bug} | {row.limit} | {row.control} |"
                )
    return "\n".join(lines) + "\n"


def turns(pack: Pack, seen_on: Mapping[str, list[Seen]]) -> str:
    """First and last wrong release, and the first right one after it, over all machines."""
    by_outcome: dict[str, set[Version]] = {"REPRODUCED": set(), "ABSENT": set()}
    for seen in chain.from_iterable(seen_on.values()):
        if seen.facts["side"] == "unpatched" and seen.facts["outcome"] in by_outcome:
            by_outcome[seen.facts["outcome"]].add(Version(seen.facts["version"]))
    wrong, right = (sorted(by_outcome[outcome]) for outcome in ("REPRODUCED", "ABSENT"))
    if not wrong:
        return "No release shows the bug."
    after = next((version for version in right if version > wrong[-1]), None)
    fixed = f" (commit {pack.fixed['commit']})" if after and pack.fixed.get("commit") else ""
    return f"First wrong {wrong[0]}, last wrong {wrong[-1]}, {f'first right after it {after}{fixed}' if after else 'none right after it'}."


def pack_table(packs: list[Pack], runs: Runs) -> str:
    """Packs, what they are about and what the stored receipts say of the newest release."""
    lines = ["| pack | upstream | what breaks | wrong in | newest release seen | evidence |", "|---|---|---|---|---|---|"]
    for pack in packs:
        wrong = ", ".join(f"`{e.range}`" for e in pack.expected if e.outcome == "REPRODUCED")
        link = f"[{pack.name}](packs/{pack.folder.name}/README.md)"
        lines.append(
            f"| {link} | {pack.package} | {pack.title} | {wrong or '–'} | {' | '.join(_newest(pack, runs[pack.name]))} |"
        )
    return "\n".join(lines) + "\n"


def _newest(pack: Pack, seen_on: Mapping[str, list[Seen]]) -> tuple[str, str]:
    fresh = [s.facts for s in chain.from_iterable(seen_on.values()) if s.facts["side"] == "unpatched" and not s.stale]
    if not fresh:
        return "no fresh receipt" if pack.kind != "selftest" else "–", "–"
    facts = max(fresh, key=lambda facts: (Version(facts["version"]), strength(facts["evidence"])))
    return f"{facts['version']}: {facts['outcome']}", facts["evidence"]
