"""The report block: the lines of a script that record checks and give the verdict. One text, written into every script.

A script is attached to issues as it is and runs alone, so the block stands in each; being the same in each, it is read once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

TEXT = (Path(__file__).parent / "templates" / "report.py.txt").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^# --- report/1\b.*?^# --- end of report/1 ---\n", re.MULTILINE | re.DOTALL)


def own(script: str) -> str:
    """A script without its report block."""
    return _BLOCK.sub("", script)


def block(script: str) -> str:
    """The report block of a script; empty for one that imports it, or of the form before it."""
    found = _BLOCK.search(script)
    return found[0] if found else ""


def written(scripts: Iterable[Path]) -> Mapping[Path, str]:
    """The scripts that have a block, with the block of today."""
    texts = {path: path.read_text(encoding="utf-8") for path in scripts}
    return {path: _BLOCK.sub(lambda _: TEXT, text) for path, text in texts.items() if block(text)}
