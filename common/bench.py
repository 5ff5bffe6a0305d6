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

from common import lanes, overlay, receipt, releases, report
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
    _write(pack, len(known), overhead, nox, ours, by_hand)
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
    """Seconds that one call of the runner (two runs, unpatched and patched) adds to the bare script, for the toy and here."""
    found = []
    for name, version in (("pack00", "1.0"), (pack.name, pack.pinned[0])):
        this = find(name)
        lane = lanes.choose(this)
        env = next(CACHE.glob(f"envs/{this.package}-{version}-*/bin/python"))
        command = [*lanes.command(env, lane, this.script)]
        bare = statistics.median(_timed(command) for _ in range(5))
        call = [sys.executable, "-m", "common", "run", name, "--release", version, "--results", str(place / "o")]
        whole = statistics.median(_timed([*call, "--jobs", "1"]) for _ in range(5))
        found.append((whole - 2 * bare) / 2)
    return found[0], found[1]


def _by_hand(pack: Pack, version: str, place: Path) -> float:
    """One release: python -m venv, pip install of everything, the script on both sides; the overlay is given for free."""
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
    script = lanes.command(venv / "bin" / "python", lanes.choose(pack), pack.script)
    _timed(script)
    _timed(script, env={**os.environ, "PYTHONPATH": str(patched), "REPRODUCER_SIDE": "patched"})
    took = time.monotonic() - started
    shutil.rmtree(venv)
    return took


def _write(pack: Pack, count: int, overhead: tuple[float, float], nox: float, ours: float, by_hand: list[float]) -> None:
    machine = receipt.describe_machine()
    hand = statistics.median(by_hand)
    text = f"""# Benchmarks

Written by `nox -s bench`, all in one run; nothing here is asserted by a test.

Machine: {machine["system"]} {machine["architecture"]}, {machine["cpus"]} cores, {machine["memory_gib"]} GiB, \
{", ".join(g["name"] for g in machine["gpus"]) or "no GPU"}; Python {platform.python_version()}; {time.strftime("%Y-%m-%d")}.

| what | measured |
|---|---|
| a run through the runner, over bare `python repro.py` (pack00, median of 5) | {overhead[0]:+.2f} s |
| the same for {pack.name} on {pack.package} {pack.pinned[0]} (median of 5) | {overhead[1]:+.2f} s |
| `nox -s {pack.name}`, warm (median of 3) | {nox:.1f} s |
| all {count} releases of {pack.package}, both sides, warm | {ours:.0f} s, {60 * 2 * count / ours:.0f} cells a minute |
| one release by hand: venv, `pip install` of everything from pip's cache, both sides (median of {len(by_hand)}) | {hand:.1f} s |
| all {count} by hand, from that median | {hand * count:.0f} s |
| **ratio** | **{hand * count / ours:.1f} ×** |

The overhead is that of one whole call of `python -m common run`, start of the interpreter included, halved: a call runs two
sides. By hand the patched files are given for free. Releases that need only one run (the bug is not there) are counted as two
cells on our side and are not in the sample by hand; that favours the ratio, so the by-hand figure is per release, and our
figure is for all {count} as they come.
"""
    write_atomically(ROOT / "docs" / "benchmarks.md", text)
