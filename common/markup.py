"""Words that come from a log, a receipt or an upstream, made fit to stand in Markdown: they are data, and stay it."""

from __future__ import annotations

import re

from common.grade import plain


def md(text: str) -> str:
    """``text`` for a line or a table's cell of Markdown; whatever could be markup, a mention or a link stands as code."""
    text = plain(text, None)
    if re.fullmatch(r"[\w .:,;()+=/%–…→-]*", text) and not re.search(
        r"://|\bwww\.|\b__|__\b|\bGH-\d|\b[0-9a-f]{7,40}\b|^\s*(?:[-+=]|\d+[.)])\s", text
    ):
        return text
    return f"`{text.replace('`', chr(39)).replace('|', '¦')}`"
