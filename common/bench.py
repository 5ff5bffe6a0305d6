"""Measure the runner against doing the same by hand, in one run, and write docs/benchmarks.md.

Never asserted by a timed test: the figures are for people, with the machine beside them.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import lanes, overlay, receipt, releases, report, runner
from common.files import write_atomically
from common.pack import ROOT, Pack, find
from common.runner import CACHE


def main(*, quick: bool = False) -> None:
    out = report.console()
    pack = find("pack09")
    known, _ = releases.releases(pack.package, CACHE)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        run = [sys.executable, "-m", "common", "run", pack.name, "--results", str(place / "results")]
        out.print("Filling caches: every release once …")
        _timed([*run, "--releases", "all"])
        out.print("The runner's overhead …")
        overhead = _overhead(pack, place)
        out.print("nox -s pack09, warm …")
        nox = statistics.median(_timed([*_nox(), "-s", "pack09", "--", "--results", str(place / "nox")]) for _ in range(3))
        out.print(f"All {len(known)} releases, both sides, warm …")
        ours = _timed([*run, "--releases", "all"])
        wrong = [r for r in known if (e := pack.expectation(r.version)) and e.outcome == "REPRODUCED"]
        step = max(1, len(wrong) // (2 if quick else 5))
        sample = wrong[::step][: 2 if quick else 5]
        out.print(f"The same by hand with venv and pip, {len(sample)} releases …")
        by_hand = [_by_hand(pack, release.version, place) for release in sample]
    _write(pack, len(known), len(wrong), overhead, nox, ours, by_hand)
    out.print(f"Written: {report.where(ROOT / 'docs' / 'benchmarks.md')}")


def _timed(command: Sequence[str], **options: object) -> float:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)  # type: ignore[call-overload]
    if done.returncode not in (0, 10):
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - started


def _nox() -> list[str]:
    """nox from wherever it is; inside its own session, the interpreter that runs nox is not on the path."""
    import uv

    return [shutil.which("nox") or "nox"] if shutil.which("nox") else [uv.find_uv_bin(), "run", "--script", "noxfile.py"]


def _overhead(pack: Pack, place: Path) -> tuple[float, float]:
    """Seconds that the runner adds to a run of a script, and seconds that a call of it takes to start (medians of 5).

    The toy's script is used, whose own time hardly varies: the same code runs for every pack.
    """
    toy = find("pack00")
    wheels = releases.built_wheels(toy, CACHE)
    release = releases.Release(version="2.0", file=wheels["2.0"].name, sha256="")  # one run: there is nothing to patch
    plan = runner.Plan(pack=toy, lane="device", results=place / "overhead")
    runner.run_release(plan, release)
    script = lanes.command(next(CACHE.glob("envs/reproducer-toy-2.0-*/bin/python")), "device", toy.script)
    bare, through, start = [], [], []
    for _ in range(5):
        bare.append(_timed(script))
        started = time.monotonic()
        runner.run_release(plan, release)
        through.append(time.monotonic() - started)
        start.append(_timed([sys.executable, "-m", "common", "list"]))
    return statistics.median(through) - statistics.median(bare), statistics.median(start)


def _by_hand(pack: Pack, version: str, place: Path) -> tuple[float, float]:
    """Seconds to install one release (python -m venv, pip install of everything), and to run the script on one side.

    The patched files are given for free.
    """
    python = next(CACHE.glob(f"envs/{pack.package}-{version}-*/bin/python"))
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
        ).stdout.strip()
    )
    patched = place / "overlay"
    overlay.apply_fix(overlay.load_fix(pack.fix), site, patched)
    venv = place / "venv"
    started = time.monotonic()
    _timed([sys.executable, "-m", "venv", str(venv)])
    _timed([str(venv / "bin" / "pip"), "install", "--quiet", *pack.requires, f"{pack.package}=={version}"])
    installed = time.monotonic() - started
    script = lanes.command(venv / "bin" / "python", lanes.choose(pack), pack.script)
    started = time.monotonic()
    _timed(script)
    _timed(script, env={**os.environ, "PYTHONPATH": str(patched), "REPRODUCER_SIDE": "patched"})
    ran = (time.monotonic() - started) / 2
    shutil.rmtree(venv)
    return installed, ran


def _write(
    pack: Pack,
    count: int,
    wrong: int,
    overhead: tuple[float, float],
    nox: float,
    ours: float,
    by_hand: list[tuple[float, float]],
) -> None:
    machine = receipt.describe_machine()
    install, ran = (statistics.median(times) for times in zip(*by_hand, strict=True))
    hand = install * count + ran * (count + wrong)
    text = f"""# Benchmarks

Written by `nox -s bench`, all in one run; nothing here is asserted by a test.

Machine: {machine["system"]} {machine["architecture"]}, {machine["cpus"]} cores, {machine["memory_gib"]} GiB, \
{", ".join(g["name"] for g in machine["gpus"]) or "no GPU"}; Python {platform.python_version()}; {time.strftime("%Y-%m-%d")}.

| what | measured |
|---|---|
| what the runner adds to a run, over bare `python repro.py` (median of 5) | {overhead[0]:.2f} s |
| start of a call, `python -m common list` (median of 5) | {overhead[1]:.2f} s |
| `nox -s {pack.name}`, warm (median of 3) | {nox:.1f} s |
| all {count} releases of {pack.package}, both sides, warm | {ours:.0f} s |
| by hand, one release: venv and `pip install` of everything from pip's cache (median of {len(by_hand)}) | {install:.1f} s |
| by hand, one run of the script (median of {len(by_hand)}) | {ran:.1f} s |
| by hand, {count} installs and {count + wrong} runs, from these medians | {hand:.0f} s |
| **ratio** | **{hand / ours:.1f} ×** |

Both ways make {count + wrong} runs: the patched side is run where the bug is there, in {wrong} releases. By hand the patched
files are given for free.
"""
    write_atomically(ROOT / "docs" / "benchmarks.md", text)
