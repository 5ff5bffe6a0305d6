#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = ["nox>=2025.2.9"]
# ///
"""Sessions: one a pack (``nox -s pack09``), regress, watch, pins, site, attach, tests, lint … ``nox -l`` lists them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
#: What the person calls python, which is not the session's.
PYTHON = shutil.which("python3") or shutil.which("python") or ""
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")


def runner(session: nox.Session, *arguments: str, extra: str = "") -> None:
    """Run ``python -m common`` with this session's name in its help texts."""
    session.install("--quiet", "--editable", f".[{extra}]" if extra else ".")
    told = {"PROG": f"nox -s {session.name} --", "CWD": session.invoked_from, "PYTHON": PYTHON}
    try:
        session.run("python", "-m", "common", *arguments, env={f"REPRODUCER_{name}": value for name, value in told.items()})
    except nox.command.CommandFailed as error:
        # nox itself exits with 1 whatever failed; what cron and CI distinguish has to get through: a usage error, a change, a find of --audit.
        code = int(found[0]) if (found := re.search(r"\d+$", str(error))) else 1
        if code in (2, 3, 10):
            session.warn(f"Session {session.name} failed: {error}")
            raise SystemExit(code) from None
        raise


def add_pack_sessions(folder: Path) -> None:
    """``pack09`` runs the pinned releases, ``pack09(0.8.2)`` one of them; a function, because closures bind late."""
    name = folder.name.partition("_")[0]
    try:
        description = nox.project.load_toml(folder / "pack.toml")
        title, package, pinned, kind = (description[key] for key in ("title", "package", "pinned", "kind"))
        variants = description.get("variants", {}).items()
        commits = [n for n, variant in variants if isinstance(variant, dict) and variant.get("pinned")]
    except (ValueError, KeyError, OSError):  # The runner says what is wrong with it; the other sessions go on.
        title, package, pinned, kind, commits = f"{folder.name}/pack.toml is not sound", "unknown", (), "", ()

    @nox.session(name=name, default=False, tags=["pack", package])
    def pack(session: nox.Session) -> None:
        runner(session, "run", name, *session.posargs)

    pack.__doc__ = pack.func.__doc__ = f"{title}."
    for version in pinned if kind != "selftest" else ():
        add_release_session(name, package, version, "--release")
    for commit in commits:
        add_release_session(name, package, commit, "--variant")


def add_release_session(name: str, package: str, which: str, option: str) -> None:
    @nox.session(name=f"{name}({which})", default=False)
    def release(session: nox.Session) -> None:
        runner(session, "run", name, option, which, *session.posargs)

    release.__doc__ = release.func.__doc__ = f"{name} on {package} {which}."


for folder in sorted((ROOT / "packs").glob("pack[0-9][0-9]_*")):
    if re.fullmatch(r"pack\d\d_\w+", folder.name) and (folder / "pack.toml").exists():
        add_pack_sessions(folder)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, the generated tables, and that every receipt's log gives its verdict."""
    session.install("--quiet", "--editable", ".", *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("python", "-m", "common", "tables", "--check")
    session.run("python", "-m", "common", "regrade")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the fast tests, one real run of pack09 among them."""
    run_tests(session, "not headers and not hostile and not network and not browser and not cluster")


@nox.session(default=False)
def hostile(session: nox.Session) -> None:
    """Attack the runner: its environments, its processes, the machine under it."""
    run_tests(session, "hostile")


@nox.session(default=False)
def headers(session: nox.Session) -> None:
    """Install each script's header in an empty folder, and run it there alone."""
    run_tests(session, "headers")


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Break every fix and blunt every trigger: each mutant must be noticed. nox -s mutants [-- pack09]."""
    runner(session, "mutants", *session.posargs)


@nox.session(default=False)
def packs(session: nox.Session) -> None:
    """Run the tests of the packs: they install real releases and break fixes; UPSTREAM_CLONE=DIR names a clone of Liger-Kernel."""
    run_tests(session, "network")


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Look at the site in Chromium."""
    run_tests(session, "browser")


@nox.session(default=False, name="cluster")
def on_a_cluster(session: nox.Session) -> None:
    """Run the tests that start a dask cluster."""
    run_tests(session, "cluster")


def run_tests(session: nox.Session, which: str) -> None:
    session.install("--quiet", "--editable", ".[cluster,site]", *nox.project.dependency_groups(PYPROJECT, "tests"))
    # A worker keeps a file's tests together: they share an installed release.
    given = session.posargs if "-m" in session.posargs else ["-m", which, *session.posargs]
    # Containers often set it, and then each of the hundreds of processes that the tests start compiles all that it imports.
    env = {"PYTHONDONTWRITEBYTECODE": ""}
    # One more than there are cores: many of them wait for processes of theirs.
    session.run(
        "pytest",
        f"--numprocesses={min(4, (os.cpu_count() or 1) + 1)}",
        "--dist=loadfile",
        "--no-loadscope-reorder",
        *given,
        env=env,
    )


@nox.session(default=False)
def attach(session: nox.Session) -> None:
    """Write the text and the files to attach to an upstream issue: nox -s attach -- pack09 [--for liger-kernel]."""
    runner(session, "attach", *session.posargs)


@nox.session(default=False)
def contract(session: nox.Session) -> None:
    """What each fused cross entropy does in each row of the contract of the loss: nox -s contract [-- --row ROW]."""
    runner(session, "contract", *session.posargs)


@nox.session(default=False)
def hunt(session: nox.Session) -> None:
    """Search a release for deviations from a contract, by differential testing: nox -s hunt -- liger-kernel==0.8.5 --minutes 10."""
    runner(session, "hunt", *session.posargs, extra="hunt")


@nox.session(default=False)
def regress(session: nox.Session) -> None:
    """Run every release of every upstream that has no fresh receipt, and report what changed."""
    runner(session, "regress", *session.posargs, extra=cluster(session))


@nox.session(default=False)
def watch(session: nox.Session) -> None:
    """Run the releases that are newer than the receipts; exits with 3 if something changed."""
    runner(session, "watch", *session.posargs, extra=cluster(session))


def cluster(session: nox.Session) -> str:
    return "cluster" if any(word.startswith("--scheduler") for word in session.posargs) else ""


@nox.session(name="upstream-tests", default=False)
def upstream_tests(session: nox.Session) -> None:
    """Run the upstream's own tests without a fix and with it: nox -s upstream-tests -- pack09 --source CLONE."""
    runner(session, "upstream-tests", *session.posargs)


@nox.session(default=False)
def blame(session: nox.Session) -> None:
    """Find the commits that introduced and fixed a bug: nox -s blame -- pack09 --source CLONE."""
    runner(session, "blame", *session.posargs)


@nox.session(default=False)
def review(session: nox.Session) -> None:
    """Run all packs about a package on a pull request and its base: nox -s review -- liger-kernel --source CLONE --base REF."""
    runner(session, "review", *session.posargs)


@nox.session(default=False)
def changes(session: nox.Session) -> None:
    """Report what changed from release to release: nox -s changes -- --since 2026-11-01."""
    runner(session, "changes", *session.posargs)


@nox.session(default=False)
def tables(session: nox.Session) -> None:
    """Rewrite what is generated in git: the tables of README.md, schemas, badges, report blocks."""
    runner(session, "tables", *session.posargs)


@nox.session(default=False)
def pins(session: nox.Session) -> None:
    """Say which release to pin, and write constraints.txt: nox -s pins -- liger-kernel."""
    runner(session, "pins", *session.posargs)


@nox.session(default=False)
def check(session: nox.Session) -> None:
    """Report the known bugs of the installed packages: nox -s check [-- requirements.txt | uv.lock | --python PATH]."""
    runner(session, "check", *session.posargs)


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """Make the static site from the stored receipts."""
    runner(session, "site", *session.posargs, extra="site")


@nox.session(default=False)
def regrade(session: nox.Session) -> None:
    """Recompute every verdict from the stored logs, running nothing."""
    runner(session, "regrade", *session.posargs)


@nox.session(default=False)
def verify(session: nox.Session) -> None:
    """Check stored receipts: schema, hashes of logs and wheels, nothing private."""
    runner(session, "verify", *session.posargs)


@nox.session(name="new-pack", default=False)
def new_pack(session: nox.Session) -> None:
    """Create the skeleton of a pack: nox -s new-pack -- 50 slug [--package NAME]."""
    runner(session, "new-pack", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure the runner against doing the same by hand; writes docs/benchmarks.md."""
    runner(session, "bench", *session.posargs)


if __name__ == "__main__":
    nox.main()
