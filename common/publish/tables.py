"""The generated files in git: the tables of README.md and docs/contract.md between their marks, results/README.md, results/timeline.json,
which packs' mutants are of today in docs/mutants.md, docs/schemas/, the badges and the blocks of each script. Lint checks that they are up to date.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec

from common.files import PACKS, ROOT, write_atomically
from common.packs import reportblock
from common.packs.pack import Pack, all_packs
from common.publish import contract, mutants, pins, timeline
from common.store import history, receipt
from common.store.cell import order
from common.store.grade import strength
from common.store.history import History, strongest


def update(*, check: bool = False, root: Path = ROOT, packs: Path = PACKS) -> list[str]:
    """Bring the generated files up to date (or only look); returns those that were not."""
    found = all_packs(packs)
    results = root / "results"
    stored = history.load(results, found)
    between = {
        "README.md": ("packs", pack_table(found, stored)),
        "docs/contract.md": ("contract", contract.markdown(contract.columns(found, stored), root)),
    }
    wanted = {
        **{root / name: _filled(root / name, mark, text) for name, (mark, text) in between.items() if (root / name).is_file()},
        **of_results(results, found, stored),
    }
    page = root / "docs" / "mutants.md"
    if page.is_file():
        wanted[page] = mutants.page([], {}, page.read_text(encoding="utf-8"), mutants.digests(found))
    for name, kind in (("receipt", receipt.Receipt), ("timeline", timeline.Timeline)):
        wanted[root / "docs" / "schemas" / f"{name}.json"] = json.dumps(msgspec.json.schema(kind), indent=2) + "\n"
    wanted |= reportblock.written(sorted([*packs.glob("*/*.py"), *(root / "docs" / "example").glob("*/*.py")]))
    old = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old if not check else ():
        write_atomically(path, wanted[path])
    return [os.path.relpath(path, root) for path in old]


def of_results(results: Path, packs: list[Pack], stored: History) -> dict[Path, str]:
    """What lies in a results folder besides receipts, and is made of them alone."""
    advised = [pins.advise(package, packs, stored) for package in sorted({pack.package for pack in packs})]
    return {
        results / "README.md": timeline.markdown(packs, stored),
        results / "timeline.json": json.dumps(
            msgspec.to_builtins(timeline.document(packs, stored)), indent=1, ensure_ascii=False
        )
        + "\n",
        **{results / "badges" / f"{each.package}.svg": pins.badge(each) for each in advised if each.releases},
    }


def _filled(path: Path, mark: str, table: str) -> str:
    """A page with what stands between ``<!-- mark -->`` and ``<!-- /mark -->`` made anew."""
    text = path.read_text(encoding="utf-8")
    return re.sub(
        rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda match: f"{match[1]}{table}{match[2]}", text, flags=re.DOTALL
    )


def pack_table(packs: list[Pack], stored: History) -> str:
    """Packs, their bugs, the affected ranges, the newest release that was run, and the evidence for the affected releases."""
    lines = [
        "| pack | upstream | what breaks | affected | newest release run | evidence for the affected releases |",
        "|---|---|---|---|---|---|",
    ]
    for pack in packs:
        commits = [name for name, variant in pack.variants.items() if variant.source and variant.verdict == "REPRODUCED"]
        affected = ", ".join([*(f"`{found}`" for found in affected_ranges(pack)), *(f"commit {name}" for name in commits)])
        link = f"[{pack.name}](packs/{pack.folder.name}/README.md)"
        at_commits = [s for s in stored.of_commits(pack) if s.side == "unpatched" and s.outcome == "REPRODUCED"]
        seen = [timeline.evidence_of(stored.of(pack.name, pack.package))]
        seen += [f"commits {strongest(at_commits)}"] if at_commits else []
        cells = (link, pack.package, pack.title, affected or "–", _newest(pack, stored), ", ".join(filter(None, seen)) or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def affected_ranges(pack: Pack) -> list[str]:
    """The ranges of affected releases; two that touch, and differ in their reasons alone, are one."""
    ranges: list[str] = []
    for expected in pack.expected:
        lower, _, upper = expected.range.partition(",")
        if expected.outcome != "REPRODUCED":
            continue
        if ranges and lower.startswith(">=") and ranges[-1].endswith(f"<{lower[2:]}"):
            start = ranges.pop().removesuffix(f"<{lower[2:]}").removesuffix(",")
            ranges.append(",".join(filter(None, (start, upper))) or ">=0")
        else:
            ranges.append(expected.range)
    return ranges


def _newest(pack: Pack, stored: History) -> str:
    runs = stored.of(pack.name, pack.package)
    fresh = [seen for seen in runs if seen.side == "unpatched" and not seen.stale]
    if not fresh:
        return "no fresh receipt" if pack.kind != "selftest" else "–"
    newest = max(order(seen.version) for seen in fresh)
    seen = max((s for s in fresh if order(s.version) == newest), key=lambda s: strength(s.evidence))
    return f"{seen.version}: {seen.outcome}"
