"""In environments where something of ours is missing, one sentence says what; the active one's own packages stay visible."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.hostile


def without(module, *arguments, env=None):
    """``python -m common …`` where ``module`` cannot be imported."""
    code = f"""
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Gone())
sys.argv = ["common", *{list(map(str, arguments))!r}]
import runpy
runpy.run_module("common", run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **(env or {})}
    )


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("packaging", ["run", "pack00", "--here"]),
        ("psutil", ["run", "pack00", "--here"]),
        ("pypi_simple", ["verify"]),
        ("rich", ["list"]),
        ("jinja2", ["attach", "pack09"]),
        ("msgspec", ["verify"]),
    ],
)
def test_a_library_that_is_missing_is_one_sentence(module, arguments, tmp_path):
    done = without(module, *arguments, env={"REPRODUCER_CACHE": str(tmp_path)})
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"needs {module.replace('_', '-')}, which is not installed here" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_users_own_packages_are_seen_by_a_run_in_the_active_environment(tmp_path, wheels, plan, run, monkeypatch):
    import site

    base = tmp_path / "userbase"
    own = base / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    own.mkdir(parents=True)
    (own / "only_in_the_user_site.py").write_text("")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setenv("PYTHONUSERBASE", str(base))
    monkeypatch.setattr(site, "USER_BASE", str(base))
    # A Python that is no virtual environment, which would leave the user's packages out.
    from common.install import environment

    monkeypatch.setattr(environment.sys, "executable", os.path.realpath(sys.executable))
    source = "import only_in_the_user_site\n\ndef total(xs):\n    return sum(xs)\n"
    wheel = wheels.make("2.2", {"reproducer_toy/__init__.py": source})
    from common.install.releases import Release

    rows, failures = run(Release(version="2.2", file="", sha256=""), here=True, wheels={"2.2": wheel})
    assert not failures
    assert str(rows[0].verdict) == "ABSENT"
