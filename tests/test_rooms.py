"""A module imports only from its own room and from those before it, so that the data flows one way."""

import ast
import re

import pytest

from common.files import ROOT

#: In the order of the data. What is in no folder comes first; lanes run inside the environment under test and import none of ours.
ROOMS = ["", "packs", "install", "store", "run", "publish", "dev", "cli"]
FIRST = {"errors", "files", "scrub", "transforms", "process", "warden", "__init__"}


def modules():
    for path in sorted((ROOT / "common").rglob("*.py")):
        parts = path.relative_to(ROOT / "common").parts
        yield path, parts[0] if len(parts) > 1 else ""


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import hides its room"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"common(\.\w+)+", node.value):
            yield node.value  # what importlib is given
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "common":
            yield from ([f"{node.module}.{alias.name}" for alias in node.names])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "common"]
            assert "common" not in names, "its rooms would be reached without an import"
            yield from names


def room_of(name):
    parts = name.split(".")[1:]
    return parts[0] if parts and parts[0] in (*ROOMS, "lanes") else ""


@pytest.mark.parametrize(("path", "room"), list(modules()), ids=lambda value: str(getattr(value, "stem", value)))
def test_imports_go_one_way(path, room):
    rooms = {room_of(name) for name in imported(path)}
    if path.name == "__main__.py" and room == "":
        assert rooms == {"cli"}
    elif room == "lanes":
        assert not rooms
    else:
        assert all(ROOMS.index(other) <= ROOMS.index(room) for other in rooms), rooms


def test_every_room_is_known():
    assert {room for _, room in modules()} == {*ROOMS, "lanes"}
    assert {path.stem for path, room in modules() if room == ""} == {*FIRST, "__main__"}
