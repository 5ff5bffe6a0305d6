"""The upstream's own tests of what a fix touches, on a release as it is and with the fix."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

from common import transforms
from common.errors import UserError, writing
from common.install import checkouts
from common.install.releases import Release
from common.packs.pack import UpstreamTests
from common.run import execute, overlay, runner
from common.run.plan import Plan

MAIN = Path(__file__).with_name("pytest_main.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Test -> "passed", "failed" or "skipped", for each side."""

    unpatched: dict[str, str]
    patched: dict[str, str]

    def mended(self) -> list[str]:
        """The tests that pass with the fix alone; one that is not there has not passed."""
        return [name for name, how in self.patched.items() if how == "passed" != self.unpatched.get(name)]

    def broken(self) -> list[str]:
        """The tests that pass as released, and not with the fix."""
        return [name for name, how in self.unpatched.items() if how == "passed" != self.patched.get(name)]


def extract(clone: Path, ref: str, tests: UpstreamTests, folder: Path) -> None:
    """The tests of a commit, with the Python files beside them, and nothing else of the upstream: its package is the release's."""
    tops = sorted({PurePosixPath(file).parts[0] for file in tests.files})
    done = checkouts.git(clone, "archive", ref, "--", *(f":(glob){top}/**/*.py" for top in tops))
    if done.returncode:
        raise UserError(f"The tests at {ref} cannot be read from {clone}: {checkouts.said(done)}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    if missing := [file for file in tests.files if not (folder / file).exists()]:
        raise UserError(f"{clone} has no {missing[0]} at {ref}.")


def compare(plan: Plan, release: Release, tests: UpstreamTests, clone: Path, ref: str, say: Callable[[str], None]) -> Compared:
    """Run them on both sides, on this terminal. The plan's pins hold what they require."""
    runner.fix_of(plan, release)  # one that does not fit is told before minutes of tests
    found = {}
    for side in ("unpatched", "patched"):
        with writing(plan.cache), ExitStack() as held:
            there, place = runner.held(plan, release, held)
            if side == "patched":
                overlay.apply_fix(transforms.load_fix(plan.pack.fix), there.site, place / "overlay")
            folder, report = place / "tests", place / "junit.xml"
            folder.mkdir()
            extract(clone, ref, tests, folder)
            (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # else it takes the settings of a folder above
            say(f"{plan.pack.package} {release.version} {side}, {', '.join(tests.files)} at {ref}")
            words = [
                *tests.files,
                "-q",
                "--tb=no",
                "-rN",
                "--disable-warnings",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
            ]
            done = subprocess.run(
                [*execute.command(plan, there, MAIN), *words],
                env=execute.environ(plan, plan.cell(release, side), there, place),
                cwd=folder,
            )
            if not report.is_file():
                raise UserError(f"pytest ended with {done.returncode} before any test: what it said is above.")
            found[side] = outcomes(report.read_text(encoding="utf-8"))
    return Compared(**found)


def outcomes(report: str) -> dict[str, str]:
    """How each test of a JUnit report ended; what Triton's interpreter cannot run says nothing, and counts as skipped."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        tags = {"skipped" if "InterpreterError" in child.get("message", "") else child.tag for child in case}
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
    return found
