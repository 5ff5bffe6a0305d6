"""The skeleton of a new pack: it passes the contract tests, and says plainly that it shows nothing yet."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from common.errors import UserError
from common.files import PACKS, write_atomically
from common.packs import reportblock
from common.packs.pack import load

#: What a title may not hold: it stands in TOML, in Markdown and in Python.
_UNFIT = re.compile(r"""["\\|\x00-\x1f\x7f\ud800-\udfff]|<[A-Za-z/!]""")
_TEMPLATES = Path(__file__).parent / "templates" / "pack"
#: The skeleton's README, whose words nobody should file.
README = _TEMPLATES / "README.md.j2"


def new_pack(number: int, slug: str, package: str, packs: Path = PACKS, *, title: str = "", lane: str = "device") -> list[Path]:
    """Make ``packs/packNN_slug`` with repro.py, fix.py, pack.toml and README.md; returns their paths.

    ``title`` is the first line of the bug report; ``lane`` is "cpu" for a package that needs no GPU.
    """
    if not 1 <= number <= 99:
        raise UserError(f"A pack's number has two digits, 01 to 99, and {number} has not.")
    if not re.fullmatch(r"[a-z0-9]+(?:_[a-z0-9]+)*", slug):
        raise UserError(f"{slug!r} is not a slug: lower-case words joined by underscores, such as mimo_reduce.")
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise UserError(f"{package!r} is not a package's name.")
    if _UNFIT.search(title):
        raise UserError(
            "A title is one line of text without tabs, double quotes, backslashes, | and tags: the first line of the bug report."
        )
    if taken := sorted(packs.glob(f"pack{number:02d}_*")):
        raise UserError(f"Number {number:02d} is taken by {taken[0].name}; numbers are never reused.")
    folder = packs / f"pack{number:02d}_{slug}"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    written = []
    for template in sorted(_TEMPLATES.glob("*.j2")):
        path = folder / template.stem
        text = environment.get_template(template.name).render(
            name=f"pack{number:02d}",
            package=package,
            module=package.replace("-", "_").replace(".", "_"),
            block=reportblock.TEXT,
            title=title,
            lane=lane,
        )
        write_atomically(path, text)
        written.append(path)
    load(folder)
    return written
