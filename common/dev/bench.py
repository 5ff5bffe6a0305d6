"""Measure the runner against doing the same by hand, and what stored receipts cost, in one run; write docs/benchmarks.md.

Never asserted by a timed test: the figures are for people, with the machine beside them.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import transforms
from common.files import CACHE, ROOT, write_atomically
from common.install import lanes, machine, releases
from common.packs.pack import Pack, find
from common.run import overlay, runner
from common.run.plan import Plan
from common.store import receipt
from common.store.cell import Cell
from common.store.grade import grade

#: Numbers of receipts at which the stored ones are read; the last takes minutes and gigabytes of disk.
SIZES = (10, 1_000, 10_000, 100_000)
#: Releases of a synthetic upstream, both sides: so that a pack's page is as long as real ones, and the packs grow in number.
RELEASES = 100
UPSTREAMS = 10

#: The same matrix as nox users write it: a session for each release, an environment of its own, everything installed in it.
NOXFILE = """
import os
import nox

@nox.session(venv_backend="virtualenv")
@nox.parametrize("release", {releases})
def matrix(session, release):
    session.install("--quiet", *{requires}, "{package}==" + release)
    for side in ("unpatched", "patched"):
        overlay = os.path.join({overlays!r}, release) if side == "patched" else ""
        session.run(
            "python", *{script}, env={{"PYTHONPATH": overlay, "REPRODUCER_SIDE": side}}, success_codes=[0, 10, 125], silent=True
        )
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Seconds to regrade so many receipts and to build the site from them, and the larger peak of resident memory, in MiB."""

    count: int
    regrade: float
    site: float
    memory: float
    pages: int


def main(*, quick: bool = False) -> None:
    pack = find("pack09")
    known, _ = releases.releases(pack.package, CACHE)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        matrix = [sys.executable, "-m", "common", "regress", "--pack", pack.name, "--confirm", "1", "--results"]
        print("Filling caches: every release once …")
        _timed([*matrix, str(place / "filled")])
        print("The runner's overhead …")
        overhead = _overhead(place)
        print("nox -s pack09, warm …")
        nox = statistics.median(_timed([*_nox(), "-s", "pack09", "--", "--results", str(place / "nox")]) for _ in range(3))
        print(f"All {len(known)} releases, both sides, warm …")
        warm = _timed([*matrix, str(place / "warm")])
        print("The same with every environment made anew (uv's cache is kept) …")
        cold = _timed([*matrix, str(place / "cold")], env={**os.environ, "REPRODUCER_CACHE": str(place / "cache")})
        shutil.rmtree(place / "cache", ignore_errors=True)
        wrong = [r for r in known if (e := pack.expectation(r.version)) and e.outcome == "REPRODUCED"]
        sample = [r.version for r in wrong[:: max(1, len(wrong) // (2 if quick else 5))]][: 2 if quick else 5]
        print(f"nox parametrized, virtualenv and pip, {len(sample)} releases …")
        by_hand = _by_hand(pack, sample, place)
        stored = []
        for count in SIZES[:2] if quick else SIZES:
            print(f"{count:,} synthetic receipts: regrade, site …")
            stored.append(_stored(count, place))
    _write(pack, len(known), len(wrong), overhead, nox, warm, cold, by_hand, len(sample), stored)
    print("Written: docs/benchmarks.md")


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


def _overhead(place: Path) -> tuple[float, float]:
    """Seconds that the runner adds to a run of a script, and seconds that a call of it takes to start (medians of 5).

    The toy's script is used, whose own time hardly varies: the same code runs for every pack.
    """
    toy = find("pack00")
    wheels = releases.built_wheels(toy, CACHE)
    release = releases.Release(version="2.0", file=wheels["2.0"].name, sha256="")  # one run: there is nothing to patch
    plan = Plan(pack=toy, lane="device", results=place / "overhead")
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


def _by_hand(pack: Pack, versions: Sequence[str], place: Path) -> float:
    """Seconds for both sides of some releases by nox with virtualenv and pip. The patched files are given for free."""
    overlays = place / "overlays"
    for version in versions:
        python = next(CACHE.glob(f"envs/{pack.package}-{version}-*/bin/python"))
        asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        overlay.apply_fix(transforms.load_fix(pack.fix), site, overlays / version)
    script = lanes.command(Path("python"), lanes.choose(pack), pack.script)[1:]
    noxfile = place / "noxfile.py"
    noxfile.write_text(
        NOXFILE.format(
            releases=list(versions), requires=list(pack.requires), package=pack.package, overlays=str(overlays), script=script
        ),
        encoding="utf-8",
    )
    return _timed([*_nox()[:-1], "-f", str(noxfile)] if _nox()[-1] == "noxfile.py" else [*_nox(), "-f", str(noxfile)])


def _stored(count: int, place: Path) -> Stored:
    """Each in a process of its own, whose peak of memory is then its own too."""
    folder = place / f"synthetic-{count}"
    packs = synthetic(count, folder)
    code = (
        "import json, resource, sys, time\n"
        "from pathlib import Path\n"
        "from common.store import audit, history, receipt\n"
        "from common.publish import site\n"
        "from common.packs.pack import all_packs\n"
        "results, packs, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]\n"
        "started, pages = time.monotonic(), 0\n"
        "if what == 'regrade':\n"
        "    assert not any(found or why for _, found, why in audit.problems(results, receipt.stored(results), audit.regrade))\n"
        "else:\n"
        "    found = all_packs(packs)\n"
        "    pages = site.build(found, history.load(results, found), results.parent / 'site')\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "print(json.dumps([time.monotonic() - started, peak, pages]))\n"
    )
    measured = {}
    for what in ("regrade", "site"):
        command = [sys.executable, "-c", code, str(folder / "results"), str(packs), what]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"{what} of {count} receipts failed:\n{done.stderr[-2000:]}")
        measured[what] = json.loads(done.stdout)
    shutil.rmtree(folder)
    return Stored(
        count=count,
        regrade=measured["regrade"][0],
        site=measured["site"][0],
        memory=max(peak for _, peak, _ in measured.values()),
        pages=measured["site"][2],
    )


def synthetic(count: int, folder: Path) -> Path:
    """``count`` receipts with their logs, made from a real one: packs by the hundred releases, both sides. Returns the packs' folder."""
    model = find("pack09")
    there = next(
        path for path in receipt.stored(ROOT / "results", "pack09") if path.name == "liger-kernel-0.7.0.unpatched.json"
    )
    document = receipt.read(there)
    log = receipt.read_log(there, document)
    made = 0
    for number in range(100):
        per_pack = min(count - made, max(2 * RELEASES, count // 100))
        if per_pack <= 0:
            break
        name = f"pack{number:02d}"
        package = f"synthetic-{number % UPSTREAMS}"
        copy = folder / "packs" / f"{name}_synthetic"
        shutil.copytree(model.folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
        toml = (copy / "pack.toml").read_text(encoding="utf-8").replace('package = "liger-kernel"', f'package = "{package}"')
        (copy / "pack.toml").write_text(toml, encoding="utf-8")
        stored = folder / "results" / "synthetic-cpu" / name
        stored.mkdir(parents=True)
        for i in range(per_pack):
            cell = Cell(pack=name, dist=package, version=f"1.{i // 2}", side=("unpatched", "patched")[i % 2])
            _store(cell, document, log, stored)
        made += per_pack
    (folder / "results" / "synthetic-cpu" / "machine.json").write_text("{}", encoding="utf-8")
    return folder / "packs"


def _store(cell: Cell, document: receipt.Receipt, log: str, folder: Path) -> None:
    """Written plainly: a benchmark need not survive a power cut."""
    text = log.replace('"0.7.0"', f'"{cell.version}"').replace('"pack09"', f'"{cell.pack}"')
    text = text.replace('"liger-kernel"', f'"{cell.dist}"')
    new = copy.deepcopy(document)
    if cell.side == "patched":  # Nothing to patch: what a side without the bug leaves.
        opening = json.loads(text.splitlines()[0])
        opening["runner"]["side"] = cell.side
        closing = {"runner": {"exit": None, "stopped": "nothing-to-patch", "message": "synthetic"}}
        text = f"{json.dumps(opening)}\n{json.dumps(closing)}\n"
        new.facts.exit, new.facts.stopped = None, "nothing-to-patch"
    name, sha256 = receipt.log_name(cell, text)
    for part, derived in zip((new.predicate, new.facts), receipt.derived(grade(text)), strict=True):
        for field, value in {**derived, **(asdict(cell) if part is new.facts else {})}.items():
            setattr(part, field, value)
    new.facts.log = receipt.Log(name=name, sha256=sha256, cut=0)
    new.facts.environment.distributions = []  # it is of no release
    new.subject = [receipt.Subject(name=name, uri=f"pkg:generic/{cell.dist}@{cell.version}", digest=new.subject[0].digest)]
    (folder / name).write_text(text, encoding="utf-8")
    (folder / f"{cell.stem}.json").write_text(receipt.text(new), encoding="utf-8")


def _write(
    pack: Pack,
    count: int,
    wrong: int,
    overhead: tuple[float, float],
    nox: float,
    warm: float,
    cold: float,
    by_hand: float,
    sampled: int,
    stored: Sequence[Stored],
) -> None:
    here = machine.describe_machine()
    runs = count + wrong
    # By hand a release without the bug costs an installation and two runs too: nothing tells it that one is not needed.
    hand = by_hand / sampled * count
    table = "\n".join(
        f"| {s.count:,} | {s.regrade:.1f} s | {s.site:.1f} s | {s.pages:,} | {1000 * (s.regrade + s.site) / s.count:.1f} ms | {s.memory:.0f} MiB |"
        for s in stored
    )
    text = f"""# Benchmarks

Written by `nox -s bench`, all in one run; nothing here is asserted by a test.

Machine: {here["system"]} {here["architecture"]}, {here["cpus"]} cores, {here["memory_gib"]} GiB, \
{", ".join(g["name"] for g in here["gpus"]) or "no GPU"}; Python {platform.python_version()}; {time.strftime("%Y-%m-%d")}.

## Runs

| what | measured |
|---|---|
| what the runner adds to a run, over bare `python repro.py` (median of 5) | {overhead[0]:.2f} s |
| start of a call, `python -m common list` (median of 5) | {overhead[1]:.2f} s |
| `nox -s {pack.name}`, warm (median of 3) | {nox:.1f} s |
| `regress`, all {count} releases of {pack.package}, {runs} runs, environments there | {warm:.0f} s, {60 * 2 * count / warm:.0f} cells a minute |
| the same, every environment made anew from uv's cache | {cold:.0f} s, {60 * 2 * count / cold:.0f} cells a minute |
| nox parametrized over releases, virtualenv and pip from pip's cache, both sides: {sampled} releases | {by_hand:.0f} s, {60 * 2 * sampled / by_hand:.1f} cells a minute |
| the same for {count} releases, from these | {hand:.0f} s |
| **ratio, warm** | **{hand / warm:.1f} ×** |
| ratio, cold | {hand / cold:.1f} × |

A cell is a release and a side. The patched side is run where the bug is there, in {wrong} of {count} releases; nox, parametrized, has no
way to know, and runs it always. Its patched files are given for free.

## Stored receipts

Synthetic ones, made from a real one, of {UPSTREAMS} upstreams: {2 * RELEASES} for each pack, up to 100 packs, then more for each.

| receipts | `regrade` | `site` | pages | both, for each receipt | peak memory |
|---|---|---|---|---|---|
{table}

"""
    write_atomically(ROOT / "docs" / "benchmarks.md", text)
