"""Look at what is stored: recompute verdicts from the logs, and check that receipts are what they say they are.

Nothing is run and nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common import receipt, releases
from common.errors import UserError
from common.grade import grade
from common.scrub import Scrubber

#: What no stored file may hold, whoever looks: home folders, credentials, addresses with a password.
PRIVATE = re.compile(
    r"/(?:home|Users|root)/[^/\s\"']|\b(?:ghp_|github_pat_|hf_|glpat-|pypi-)[A-Za-z0-9_\-]{16,}|://[^/\s:@\"]+:[^/\s@\"]+@"
)


def regrade(path: Path) -> Iterator[str]:
    """What the log of a receipt gives today, where that is not what the receipt says."""
    document = receipt.read(path)
    facts = document["predicate"]["reproducer"]
    verdict = grade(receipt.read_log(path, document))
    for name in ("outcome", "reason", "evidence", "bug_error", "limit", "control_error"):
        if facts[name] != getattr(verdict, name):
            yield f"{name} was {facts[name]!r}, and is {getattr(verdict, name)!r} by today's rules"


class Published:
    """The sha256 of each release's files on the index, asked once for each package; ``warnings`` say where it did not answer."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.warnings: list[str] = []
        self._known: dict[str, dict[str, tuple[str, ...]]] = {}

    def sha256(self, package: str, version: str) -> tuple[str, ...]:
        if package not in self._known:
            try:
                known, warning = releases.releases(package, self.cache)
            except UserError as error:
                known, warning = [], f"{error} The hashes of {package} are not checked."
            self._known[package] = {release.version: (release.sha256, *release.others) for release in known}
            self.warnings += [warning] if warning else []
        return self._known[package].get(version, ())


def verify(path: Path, published: Published) -> Iterator[str]:
    """What is wrong with one receipt: schema, log, file name, the hash of the wheel, anything private."""
    document = receipt.read(path)
    facts = document["predicate"]["reproducer"]
    log = receipt.read_log(path, document)
    cell = receipt.Cell(**{name: facts[name] for name in ("pack", "dist", "version", "side", "variant")})
    if path.name != f"{cell.stem}.json" or path.parent.name != cell.pack:
        yield f"it says that it is {cell.pack}/{cell.stem}.json"
    digest, wanted = document["subject"][0]["digest"].get("sha256"), published.sha256(cell.dist, cell.version)
    if digest and wanted and digest not in wanted:
        yield f"its subject has sha256 {digest[:12]}…, and the index publishes {wanted[0][:12]}… for {cell.dist} {cell.version}"
    scrub = Scrubber()
    for name, text in (("receipt", path.read_text(encoding="utf-8")), ("log", log)):
        if PRIVATE.search(text) or scrub(text) != text:
            yield f"its {name} holds something private"


def problems(paths: Iterable[Path], look: Callable[[Path], Iterable[str]]) -> Iterator[tuple[Path, list[str]]]:
    """What ``look`` finds at each receipt; one that cannot be read is a problem like any other."""
    for path in paths:
        try:
            yield path, list(look(path))
        except UserError as error:
            yield path, [str(error)]
