"""What a run is about: the one identity of it, and the key of everything that is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from packaging.version import InvalidVersion, Version

SIDES = ("unpatched", "patched")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One (pack, release, side), and the variant of the script's arguments. ``str`` gives a line that `parse` reads."""

    pack: str
    dist: str
    version: str
    side: str = "unpatched"
    variant: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.pack, self.dist, self.version, self.side, self.variant)))

    @classmethod
    def parse(cls, line: str) -> Cell:
        pack, dist, version, side, variant = [*line.split(" "), ""][:5]
        return cls(pack=pack, dist=dist, version=version, side=side, variant=variant)

    @classmethod
    def of(cls, facts: Any) -> Cell:
        """The cell of a receipt's facts."""
        return cls(pack=facts.pack, dist=facts.dist, version=facts.version, side=facts.side, variant=facts.variant)

    def on(self, side: str) -> Cell:
        return replace(self, side=side)

    @property
    def release(self) -> Cell:
        """The same for both sides."""
        return self.on("unpatched")

    @property
    def stem(self) -> str:
        variant = f".{self.variant}" if self.variant else ""
        return f"{self.dist}-{self.version}.{self.side}{variant}"

    @property
    def order(self) -> tuple[str, str, Version, bool, str]:
        """Pack, package, release, side, variant, the older release first."""
        return self.pack, self.dist, order(self.version), self.side == "patched", self.variant


@lru_cache(maxsize=65_536)
def order(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:  # A receipt that was edited by hand: first, where it is seen.
        return Version("0.dev0")
