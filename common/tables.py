"""The generated tables of README.md, between ``<!-- NAME -->`` and ``<!-- /NAME -->``; lint checks that they are up to date."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from common import lanes, receipt
from common.files import write_atomically
from common.grade import EVIDENCE
from common.pack import PACKS, ROOT, Pack, all_packs


def update(*, check: bool = False, root: Path = ROOT, packs: Path = PACKS) -> list[str]:
    """Bring the tables up to date (or only look); returns the files that were not."""
    path = root / "README.md"
    text = path.read_text(encoding="utf-8")
    new = re.sub(
        r"(<!-- packs -->\n).*?(<!-- /packs -->)",
        lambda match: f"{match[1]}{pack_table(all_packs(packs), root / 'results')}{match[2]}",
        text,
        flags=re.DOTALL,
    )
    if new == text:
        return []
    if not check:
        write_atomically(path, new)
    return [path.name]


def pack_table(packs: list[Pack], results: Path) -> str:
    """Packs, what they are about and what the stored receipts say of the newest release."""
    lines = ["| pack | upstream | what breaks | wrong in | newest release seen | evidence |", "|---|---|---|---|---|---|"]
    for pack in packs:
        wrong = ", ".join(f"`{e.range}`" for e in pack.expected if e.outcome == "REPRODUCED")
        link = f"[{pack.name}](packs/{pack.folder.name}/README.md)"
        lines.append(f"| {link} | {pack.package} | {pack.title} | {wrong or '–'} | {' | '.join(_newest(pack, results))} |")
    return "\n".join(lines) + "\n"


def _newest(pack: Pack, results: Path) -> tuple[str, str]:
    seen = []
    for path in receipt.stored(results, pack):
        document = receipt.read(path)
        facts = document["predicate"]["reproducer"]
        if (
            facts["side"] == "unpatched"
            and not facts["variant"]
            and not receipt.is_stale(document, pack, lanes.files(facts["lane"]))
        ):
            strength = EVIDENCE.index(facts["evidence"].partition(":")[0])
            seen.append((Version(facts["version"]), strength, facts))
    if not seen:
        return "no fresh receipt" if pack.kind != "selftest" else "–", "–"
    _, _, facts = max(seen, key=lambda entry: entry[:2])
    return f"{facts['version']}: {facts['outcome']}", facts["evidence"]
