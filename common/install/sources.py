"""What is in no release: a commit that a pack's variant names, a pull request, somebody's diff.

The version of a variant's wheel names its commit and tree: ``0+git.da482cf5c8.tree.1f0c5ce6a1``. `checkouts` makes those of a user's clone.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import UserError
from common.files import locked, write_atomically
from common.install import checkouts, packed
from common.packs.pack import Pack


class NoSource(UserError):
    """Neither a clone nor GitHub gave the commit: nothing can be said of it here."""


def wheel(pack: Pack, variant: str, directory: Path | None, cache: Path) -> Path:
    """The wheel of the variant's commit, from a clone at ``directory``, or fetched from GitHub.

    Raises `NoSource`, "UNTESTABLE: source", when neither has the commit.
    """
    commit = pack.variants[variant].source
    assert commit is not None
    repository, why = (directory, _missing(directory, commit)) if directory else _fetched(pack.upstream, commit, cache)
    if why:
        raise NoSource(
            f"UNTESTABLE: source: commit {commit[:10]} of {pack.upstream} is in no release, and {why}. "
            f"With a clone that has it: nox -s {pack.name} -- --variant {variant} --source DIR"
        )
    tree = checkouts.git(repository, "rev-parse", f"{commit}^{{tree}}").stdout.decode().strip()
    return checkouts.packed_wheel(
        pack, checkouts.committed(pack, repository, commit), f"0+git.{commit[:10]}.tree.{tree[:10]}", cache
    )


@contextmanager
def _bare(upstream: str, cache: Path) -> Iterator[Path]:
    """Our repository of what was fetched of an upstream, held alone."""
    place = cache / "sources" / upstream.replace("/", "+")
    place.mkdir(parents=True, exist_ok=True)
    with locked(place.with_suffix(".lock")):
        if not (place / "HEAD").is_file():
            checkouts.git(place, "init", "--quiet", "--bare")
        yield place


def pull_request(upstream: str, number: int, cache: Path) -> tuple[Path, str]:
    """A repository that holds the head of a pull request, and its commit."""
    ref = f"refs/pull/{number}/head"
    with _bare(upstream, cache) as place:
        done = checkouts.git(place, "fetch", "--quiet", "--depth=1", f"https://github.com/{upstream}", f"+{ref}:{ref}")
    if done.returncode:
        raise UserError(
            f"Pull request {number} of {upstream} cannot be fetched ({checkouts.said(done)}). Give its diff with --patch, or a "
            f"clone that has it: --source DIR --commit {ref}."
        )
    return place, checkouts.git(place, "rev-parse", ref).stdout.decode().strip()


#: Bytes of a diff.
_LARGEST = 64 << 20


def of_diff(given: str, cache: Path) -> Path:
    """The file of a diff that is given as a file, as an address (of a pull request or a commit on GitHub, too), or as "-"."""
    if given != "-" and not re.match(r"https?://", given):
        return Path(given)
    if given == "-":
        name, data = "stdin", sys.stdin.buffer.read(_LARGEST + 1)
        if not data:
            raise UserError("--patch - got nothing on standard input: is what should have made the diff right?")
    else:
        import requests  # which takes a moment, and is seldom wanted

        page = re.fullmatch(r"(https://github\.com/[^/]+/[^/]+/(?:pull/\d+|commit/[0-9a-f]+))(?:/\w*)?", given)
        try:
            answer = requests.get(f"{page[1]}.diff" if page else given, timeout=60)
            answer.raise_for_status()
        except requests.RequestException as error:
            raise UserError(
                f"--patch {given} cannot be fetched ({type(error).__name__}): save the diff, and name the file."
            ) from error
        name, data = Path(page[1] if page else given).stem, answer.content
    if len(data) > _LARGEST:
        raise UserError(f"--patch {given} is larger than {_LARGEST >> 20} MiB: name a diff of the package's own files.")
    path = cache / "patches" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{hashlib.sha256(data).hexdigest()[:12]}.diff"
    write_atomically(path, data)
    return path


def _missing(directory: Path, commit: str) -> str:
    if not directory.is_dir():
        return f"{directory} is not a folder"
    return (
        ""
        if checkouts.git(directory, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0
        else f"{directory} does not have it"
    )


def _fetched(upstream: str, commit: str, cache: Path) -> tuple[Path, str]:
    """A repository with that commit alone, and why not."""
    with _bare(upstream, cache) as place:
        if _missing(place, commit):
            done = checkouts.git(place, "fetch", "--quiet", "--depth=1", f"https://github.com/{upstream}", commit)
            if done.returncode:
                return place, f"it cannot be fetched ({checkouts.said(done)})"
    return place, ""


def of_sdist(sdist: Path, package: str, version: str, folder: Path) -> Path:
    """A wheel, in ``folder``, of an sdist's packages as they are: of one that cannot be built, and need not be."""
    files: dict[str, bytes] = {}
    with tarfile.open(sdist) as tar:
        for member in tar:
            opened = tar.extractfile(member) if member.isfile() else None
            if opened and packed.may_hold(member.name):
                files[member.name.partition("/")[2]] = opened.read()
    packages = tuple(path.removesuffix("__init__.py") for path in files if re.fullmatch(r"[^/]+/__init__\.py", path))
    name = package.replace("-", "_")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(packed.wheel({p: data for p, data in files.items() if p.startswith(packages)}, name, package, version))
    return path
