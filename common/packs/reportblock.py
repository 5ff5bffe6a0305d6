"""Blocks: lines that are the same in many scripts, for a script is attached to issues as it is and runs alone.

``report`` records checks and gives the verdict, and stands in every script; ``contract`` holds the rows of the loss's contract, and stands in the
packs that measure an implementation of it. Being the same in each, a block is read once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"
TEXTS = {name: (_FOLDER / f"{name}.py.txt").read_text(encoding="utf-8") for name in ("report", "contract")}
TEXT = TEXTS["report"]
_BLOCKS = {name: re.compile(rf"^# --- {name}/1\b.*?^# --- end of {name}/1 ---\n", re.MULTILINE | re.DOTALL) for name in TEXTS}

#: sha256 of earlier texts of a block whose receipts are as good: today's refuses more, and the grader refuses the same in a log.
EARLIER = {
    "report": (
        "01b13970df614bea070a589b8e5caf8cc6df05cd57cb1c31b7448cec71ca325d",
        "a8b0555ba7653ef60f0e08c9edd4ee3eb497e13d71b7ba6c13155001a4888b8a",
        "2d8eb967a00461f9311c7fc5c8a7cb0557d3e5c09867d541997860ad5d9c609c",
    )
}


def own(script: str) -> str:
    """A script without its blocks."""
    for pattern in _BLOCKS.values():
        script = pattern.sub("", script)
    return script


def blocks(script: str) -> dict[str, str]:
    """The blocks of a script by name; none for one that imports them, or of the form before them."""
    return {name: found[0] for name, pattern in _BLOCKS.items() if (found := pattern.search(script))}


def written(scripts: Iterable[Path]) -> Mapping[Path, str]:
    """The scripts that have blocks, with the blocks of today."""
    texts = {path: path.read_text(encoding="utf-8") for path in scripts}
    return {path: _today(text) for path, text in texts.items() if blocks(text)}


def another(pack_script: str, others: Iterable[str]) -> bool:
    """Whether a pack's repro.py lacks the report block, or one of its scripts has a block that is not today's."""
    return "report" not in blocks(pack_script) or any(_today(text) != text for text in (pack_script, *others))


def _today(text: str) -> str:
    for name, found in blocks(text).items():
        text = text.replace(found, TEXTS[name])
    return text
