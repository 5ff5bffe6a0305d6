"""Builds and scripts see no secret, and no secret, name or path of the person's gets into what is stored."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers import ROOT

from common.install import environment
from common.scrub import ALLOWED_ENV, Scrubber, run_env, without_password
from common.store import receipt

pytestmark = pytest.mark.hostile

SECRET = "hunter2-hunter2-hunter2"


def sdist(tmp_path, backend):
    root = tmp_path / "reproducer_toy-1.4"
    (root / "reproducer_toy").mkdir(parents=True)
    (root / "reproducer_toy" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (root / "backend.py").write_text(backend)
    with tarfile.open(tmp_path / "reproducer_toy-1.4.tar.gz", "w:gz") as tar:
        tar.add(root, root.name)
    return tmp_path / "reproducer_toy-1.4.tar.gz"


def test_a_build_sees_what_a_run_sees(index, run, tmp_path, monkeypatch):
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "NCCL_MY_TOKEN",
        "NVTE_PASSWORD",
        "TL_SECRET",
        "UV_PUBLISH_TOKEN",
        "PIP_PASSWORD",
        "MY_SETTING",
    ):
        monkeypatch.setenv(name, SECRET)
    seen = tmp_path / "seen"
    backend = f"import os, sys\n\ndef build_wheel(*_, **__):\n    open({str(seen)!r}, 'w').write(repr(dict(os.environ)))\n    sys.exit(repr(dict(os.environ)))\n"
    rows, _ = run(index.add(sdist(tmp_path, backend)))
    assert str(rows[0].verdict) in ("UNTESTABLE: install", "INFRA: install")
    assert SECRET not in seen.read_text()
    assert f"'HOME': '{Path.home()}'" not in seen.read_text()
    stored = "".join(path.read_text() for row in rows if row.receipt for path in row.receipt.parent.glob("*"))
    assert SECRET not in stored + "".join(row.message for row in rows)


def test_a_build_gets_indexes_without_their_passwords():
    given = {
        "UV_INDEX": f"https://me:{SECRET}@index.example/simple",
        "https_proxy": f"http://me:{SECRET}@proxy:1",
        "HOME": "/x",
    }
    assert environment.build_env(given) == {"UV_INDEX": "https://index.example/simple", "https_proxy": "http://proxy:1"}


@pytest.mark.parametrize("name", ["NCCL_MY_TOKEN", "NVTE_PASSWORD", "TL_SECRET", "NVTE_", "NCCL_DEBUG_X", "nvte_debug"])
def test_names_are_listed_one_by_one(name):
    assert run_env({name: SECRET}) == {}
    assert {"NVTE_DEBUG", "NCCL_DEBUG", "TL_DISABLE_CACHE"} <= ALLOWED_ENV


def test_passwords_are_taken_from_addresses():
    assert without_password("https://me:pw@a.example/x https://token@b.example/y") == "https://a.example/x https://b.example/y"


@pytest.mark.parametrize("word", ["release", "control", "trigger", "error", "sm90", "fp8", "gradient"])
def test_a_name_that_is_a_common_word_breaks_no_log(word):
    scrub = Scrubber([("<release>", Path("/env/site"))], {"HOME": f"/home/{word}", "USER": word, "HOSTNAME": word})
    line = f'{{"role": "{word}", "name": "the {word} of dH", "error": 1e-7}} {word}: {word}s'
    assert scrub(line) == line
    assert scrub(f"{word}@node /home/{word}/x /scratch/{word}/y") == "<user>@node ~/x /scratch/<user>/y"


@pytest.mark.parametrize("folder", ["Größe", "日本", "a b", 'quo"te', "back\\slash", "emoji😀"])
def test_a_path_is_scrubbed_in_every_form_it_is_written_in(folder):
    import json

    path = Path("/data") / folder / "overlay"
    scrub = Scrubber([("<overlay>", path)], {"HOME": "/root"})
    for form in (str(path), json.dumps(str(path))[1:-1], repr(str(path).encode())[2:-1]):
        assert scrub(f"{form}/toy/__init__.py") == "<overlay>/toy/__init__.py"
    assert json.loads(scrub(json.dumps({"file": f"{path}/m.py"}))) == {"file": "<overlay>/m.py"}


def test_a_checkout_of_any_name_works(tmp_path):
    """In a folder such as Größe every run was an ERROR: JSON writes it as Gr\\u00f6\\u00dfe, which was not scrubbed."""
    env = {**os.environ, "REPRODUCER_CACHE": str(tmp_path / "Größe 日本" / "cache")}
    command = [
        sys.executable,
        "-m",
        "common",
        "run",
        "pack00",
        "--release",
        "1.0",
        "--results",
        str(tmp_path / "Größe 日本" / "r"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (tmp_path / "Größe 日本" / "r").rglob("*.json"):
        assert "Gr" not in path.read_text()


LONG = 2**20


@pytest.mark.parametrize(
    "pattern",
    ["-eyJ", "eyJ", "eyJaaaaaaaaa.", "://a:", "://a", "ghp_", "sk-", "bearer ", "token=", "/home/", "@", "/", "AKIA", "x"],
)
def test_a_megabyte_of_anything_is_scrubbed_in_no_time(pattern):
    """64 KB of "-eyJ" took 10.8 s: the time grew with the square of the length. With that, a megabyte takes an hour."""
    text = (pattern * (LONG // len(pattern) + 1))[:LONG]
    code = "import sys; from common.scrub import Scrubber; Scrubber()(sys.stdin.read())"
    subprocess.run([sys.executable, "-c", code], input=text, text=True, cwd=ROOT, check=True, timeout=60)


def test_the_runner_cannot_be_read_by_others_of_the_same_user():
    """As root nothing helps (docs/security.md); for others /proc/PID/environ of the runner is closed."""
    code = "import ctypes; from common.cli import _guard; _guard(); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_a_script_sees_no_secret(wheels, index, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_TOKEN", SECRET)
    source = "import os, sys\nprint(dict(os.environ))\n\ndef total(xs):\n    return sum(xs)\n"
    rows, _ = run(index.add(wheels.make("2.1", {"reproducer_toy/__init__.py": source})))
    assert rows[0].verdict.outcome == "ABSENT"
    assert SECRET not in receipt.read_log(rows[0].receipt, receipt.read(rows[0].receipt))


def test_arguments_are_scrubbed(plan, index, wheels, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    rows, _ = run(index.add(wheels["2.0"]), arguments=("--data", f"{Path.home()}/private/x", SECRET), variant="own")
    text = rows[0].receipt.read_text() + receipt.read_log(rows[0].receipt, receipt.read(rows[0].receipt))
    assert SECRET not in text
    assert f"{Path.home()}/private" not in text
