import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import hypothesis
import pytest
from helpers import FACTS, ROOT, make_log

from common.install import lanes
from common.packs.pack import find
from common.store import receipt
from common.store.cell import Cell
from common.store.grade import grade

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")

# A shell starts what it runs in the background with these ignored, which children inherit; the tests send them.
for name in ("SIGHUP", "SIGINT", "SIGQUIT"):
    if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


#: Half of the time; the run of pack09 is the longest by far.
LONG = [f"test_{name}.py" for name in ("end_to_end", "regress", "cli", "site", "report", "timeline", "attach", "hunt")]


def pytest_collection_modifyitems(items):
    """Long files first, for workers take them in this order, and one that begins late keeps the others waiting."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture
def store():
    """Writes a receipt of pack09 into a results folder, as the runner would."""

    def write(results, *, version="0.7.0", side="unpatched", log=None, machine="test-machine", stale=False):
        pack = find("pack09")
        cell = Cell(pack="pack09", dist=pack.package, version=version, side=side)
        log = log or make_log({**FACTS, "version": version}).replace('"version": "1.0"', f'"version": "{version}"')
        log = log.replace('"dist": "toy"', f'"dist": "{cell.dist}"')
        name, sha256 = receipt.log_name(cell, log)
        hashes = pack.hashes(side, lanes.files("triton-interpreter"), cell.variant)
        if stale:
            hashes["repro.py"] = "0" * 64
        closing = json.loads(log.splitlines()[-1])["runner"]
        document = receipt.made(
            grade(log),
            subject=receipt.Subject(
                name=f"{pack.package}-{version}.tar.gz",
                uri=f"pkg:pypi/{pack.package}@{version}",
                digest=receipt.Digest(sha256="0" * 64),
            ),
            hashes=hashes,
            runner="0",
            **asdict(cell),
            lane="triton-interpreter",
            command=["python", "<pack>/repro.py"],
            **{name: closing[name] for name in ("exit", "signal", "stopped", "seconds", "peak_rss")},
            started="2026-11-21T00:00:00Z",
            log=receipt.Log(name=name, sha256=sha256, cut=closing["cut"]),
            patch=None,
            environment=receipt.Surroundings(
                python="3.11", platform="x", torch=None, triton=None, cuda=None, gpus=[], settings={}, distributions=[]
            ),
        )
        return receipt.write(results, cell, log, document, machine=machine)

    return write


@pytest.fixture
def cli(tmp_path):
    """``python -m common …`` as a person calls it, with a cache and results of its own."""

    def call(*arguments, env=None, cache=None, results=True, **options):

        command = [sys.executable, "-m", "common", *map(str, arguments)]
        if results and arguments and arguments[0] in ("run", "attach"):
            command += ["--results", str(tmp_path / "results")]
        environ = {**os.environ, "REPRODUCER_CACHE": str(cache or tmp_path / "cache"), **(env or {})}
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, **options)

    return call
