"""Small anchored edits of upstream source: each must find its anchor exactly once, or it is a plain error.

A pack's ``fix.py`` lists them per file, so that no upstream code is stored in this repository and the fix survives
releases that move lines:

    FIX = {"pkg/module.py": (insert_after("guard", r"^    x = load\\(\\)\\n", "    check(x)\\n"),)}
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import AnchorError, UserError


@dataclass(frozen=True, slots=True)
class Transform:
    """A named edit of one file's source."""

    name: str
    edit: Callable[[str], str]
    #: Only some releases need it. A file all of whose edits are optional need not be in a release.
    optional: bool = False
    #: A file of the release without which the edit is left out.
    needs: str = ""

    def __call__(self, source: str) -> str:
        return self.edit(source)


#: Path below site-packages -> the edits of that file, in order.
Fix = Mapping[str, Sequence[Transform]]


def replace(
    name: str, anchor: str, replacement: str | Callable[[re.Match[str]], str], *, optional: bool = False, needs: str = ""
) -> Transform:
    """Replace the one match of the regular expression ``anchor`` (multi-line, ``.`` stops at a line's end).

    ``optional`` is for an edit that only some releases need (an option that older ones lack): no match is then no error,
    two still are. ``needs`` is for one that is wrong where the release lacks a file, which it imports, say.
    """
    try:
        pattern = re.compile(anchor, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"the anchor of {name!r} is no regular expression: {error}") from error

    def edit(source: str) -> str:
        found = len(pattern.findall(source))
        if found == 1:
            return pattern.sub(replacement, source)
        if found == 0 and optional:
            return source
        raise AnchorError(f"transform {name!r}: anchor {anchor!r} was found {found} times, not once")

    return Transform(name, edit, optional, needs)


def insert_after(name: str, anchor: str, code: str, *, optional: bool = False) -> Transform:
    return replace(name, anchor, lambda match: match[0] + code, optional=optional)


def insert_before(name: str, anchor: str, code: str, *, optional: bool = False) -> Transform:
    return replace(name, anchor, lambda match: code + match[0], optional=optional)


def load_fix(path: Path) -> Fix:
    """The ``FIX`` of a pack's ``fix.py``; `UserError` where its author made a mistake."""
    name = f"{path.parent.name}/{path.name}"
    spec = importlib.util.spec_from_file_location(f"fix_of_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        fix: Fix = module.FIX
    except SyntaxError as error:
        raise UserError(f"{name} has a syntax error in line {error.lineno}: {error.msg}.") from error
    except AttributeError as error:
        if error.name != "FIX" or error.obj is not module:
            raise UserError(f"{name} cannot be loaded: {type(error).__name__}: {error}.") from error
        raise UserError(
            f"{name} has no FIX: a dictionary, from a file's path in the package to a tuple of transforms."
        ) from error
    except Exception as error:  # whatever its author's code raises
        raise UserError(f"{name} cannot be loaded: {type(error).__name__}: {error}.") from error
    if not isinstance(fix, dict) or not all(isinstance(t, Transform) for of_file in fix.values() for t in of_file):
        raise UserError(f"{name}: FIX has to be a dictionary, from a file's path in the package to a tuple of transforms.")
    names = [transform.name for of_file in fix.values() for transform in of_file]
    if twice := [each for each in dict.fromkeys(names) if names.count(each) > 1]:
        raise UserError(f"{name} has two transforms called {twice[0]!r}: give each a name of its own.")
    return fix
