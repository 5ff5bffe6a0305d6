import json
import os
import subprocess
import sys

import hypothesis
import pytest
from helpers import FACTS, ROOT, make_log

from common import lanes, receipt
from common.grade import grade
from common.pack import find
from common.receipt import Cell

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")


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
        document = receipt.statement(
            cell,
            grade(log),
            environment=None,
            subject={"name": "wheel", "uri": f"pkg:pypi/{pack.package}@{version}", "digest": {"sha256": "0" * 64}},
            lane="triton-interpreter",
            hashes=hashes,
            command=["python", "<pack>/repro.py"],
            closing=json.loads(log.splitlines()[-1])["runner"],
            started="2026-11-21T00:00:00Z",
            log_name=name,
            log_sha256=sha256,
            patch=None,
            settings={},
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
