"""Which lane a pack runs in here, and how. The lanes themselves are the modules in common/lanes; see docs/evidence.md.

A lane's docstring states what it replaces and which evidence level that leaves. ``device`` needs no module.
"""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import UserError
from common.install.machine import gpu
from common.packs.pack import Pack

FOLDER = Path(__file__).parent.parent / "lanes"


def choose(pack: Pack, wanted: str | None = None) -> str:
    """The strongest of the pack's lanes that this machine allows, or the one that was asked for.

    A pack with the ``device`` lane alone gets it everywhere: without a GPU its script says ``UNTESTABLE: no-device``.
    """
    if unknown := sorted({*pack.lanes, *filter(None, (pack.validate_lane,))} - set(known())):
        raise UserError(f"{pack.folder.name}/pack.toml names a lane {unknown[0]!r}; there are {', '.join(known())}.")
    if wanted is not None:
        if wanted not in pack.lanes:
            raise UserError(f"{pack.name} has no lane {wanted!r}; it has {', '.join(pack.lanes)}.")
        if wanted == "device" and not gpu():
            raise UserError("The lane 'device' needs an NVIDIA GPU, and nvidia-smi shows none on this machine.")
        return wanted
    return next((lane for lane in pack.lanes if lane != "device" or gpu()), "device")


def command(python: Path, lane: str, script: Path) -> list[str]:
    """How to start ``script`` in ``lane``."""
    if lane == "device":
        return [str(python), str(script)]
    return [str(python), str(FOLDER / "launch.py"), lane, str(script)]


def files(lane: str) -> list[Path]:
    """The files that make a lane, whose hashes a receipt carries: with those of the lanes that it is built on."""
    if lane == "device":
        return []
    found = [FOLDER / "launch.py", FOLDER / f"{lane.replace('-', '_')}.py"]
    for file in found:
        found += (FOLDER / name for name in re.findall(r'with_name\("(\w+\.py)"\)', file.read_text()))
    return list(dict.fromkeys(found))


def files_of(pack: Pack, lane: str, side: str, variant: str) -> list[Path]:
    """The files of every lane that a run of one side is in: validate.py may have one of its own."""
    other = pack.checked_in(lane) if side == "patched" and pack.deep_check(variant) else lane
    return list(dict.fromkeys([*files(lane), *files(other)]))


def known() -> list[str]:
    modules = (path.stem.replace("_", "-") for path in FOLDER.glob("*.py"))
    return sorted({"device", *modules} - {"--init--", "launch"})
