"""Under ``--sandbox`` a script reaches no network, reads no file of the person's and writes nothing but its own folder."""

import shutil
import subprocess

import pytest

from common.store import receipt

works = (
    shutil.which("bwrap")
    and not subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True).returncode
)
pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(not works, reason="bubblewrap is not installed, or may make no namespaces here"),
]

TRY = """
import os, pathlib, socket, tempfile

def attempt(name, function):
    try:
        function()
        print(name, "WORKED")
    except OSError as error:
        print(name, "refused")

attempt("network", lambda: socket.create_connection(("127.0.0.1", {port}), timeout=2))
attempt("home", lambda: pathlib.Path({secret!r}).read_text())
attempt("release", lambda: pathlib.Path(__file__).write_text("x = 1"))
attempt("tmp of others", lambda: os.stat({tmp!r}))
attempt("own folder", lambda: pathlib.Path("x").write_text("x"))
print("processes", len([p for p in os.listdir("/proc") if p.isdecimal()]))

def total(xs):
    return sum(xs)
"""


def test_a_script_is_alone(wheels, index, run, plan, tmp_path, monkeypatch):
    secret = tmp_path / "person" / "id_rsa"
    secret.parent.mkdir()
    secret.write_text("PRIVATE")
    monkeypatch.setenv("HOME", str(secret.parent))
    port = int(index.url.rpartition(":")[2].partition("/")[0])
    source = TRY.format(port=port, secret=str(secret), tmp=str(tmp_path / "wheels"))
    release = index.add(wheels.make("2.3", {"reproducer_toy/__init__.py": source}))
    rows, failures = run(release, sandbox=True)
    assert not failures
    document = receipt.read(rows[0].receipt)
    log = receipt.read_log(rows[0].receipt, document)
    assert "WORKED" not in log.replace("own folder WORKED", "")
    assert "own folder WORKED" in log
    assert rows[0].verdict.outcome == "ABSENT"
    assert document.facts.sandbox is True
    rows, _ = run(release)
    assert "home WORKED" in receipt.read_log(rows[0].receipt, receipt.read(rows[0].receipt)), (
        "without it the test shows nothing"
    )


@pytest.mark.parametrize(
    ("version", "said"), [("10.0", "CHANGED: SIGSEGV"), ("0.2", "INFRA: SIGTERM"), ("3.0", "UNTESTABLE: import")]
)
def test_a_run_ends_there_as_it_does_outside(wheels, index, run, version, said):
    rows, _ = run(index.add(wheels[version]), sandbox=True)
    assert str(rows[0].verdict) == said


def test_without_bubblewrap_it_is_one_sentence(wheels, index, run, monkeypatch):
    release = index.add(wheels["1.0"])
    run(release)
    monkeypatch.setattr("common.run.runner.shutil.which", lambda name: None)
    _, failures = run(release, sandbox=True)
    assert "--sandbox needs bubblewrap" in failures[0].message
