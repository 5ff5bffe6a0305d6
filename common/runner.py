"""Run cells: environment, overlay, subprocess, log, verdict, receipt. Knows nothing of any pack's subject."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import environment as environments
from common import lanes, overlay, receipt
from common.environment import Environment, InstallError
from common.errors import AnchorError, UserError, writing
from common.files import locked, write_atomically
from common.grade import Verdict, grade
from common.pack import ROOT, Pack
from common.pool import Pool
from common.process import Ended, kill_marked, run
from common.receipt import Cell
from common.releases import Release, built_wheels, fits
from common.scrub import Scrubber, allowed_env, run_env

CACHE = Path(os.environ.get("REPRODUCER_CACHE") or ROOT / ".cache")
RESULTS = ROOT / "results"
#: Of a pack without a fix.py.
NO_FIX = "the fault is in compiled code, which no transform of installed source reaches"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What holds for every cell of one call of the runner."""

    pack: Pack
    lane: str
    arguments: tuple[str, ...] = ()
    variant: str = ""
    patch: Path | None = None
    drop: str | None = None
    here: bool = False
    wheels: Mapping[str, Path] = field(default_factory=dict)
    release_path: Path | None = None
    results: Path = RESULTS
    machine: str = field(default_factory=receipt.machine_name)
    cache: Path = CACHE
    threads: int = 0
    several: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the closing table."""

    cell: Cell
    verdict: Verdict
    expected: str
    why: str
    seconds: float
    receipt: Path
    ran: bool
    environment: Environment | None
    message: str

    @property
    def as_expected(self) -> bool:
        return self.verdict.meets(self.expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A release that could not be run for a reason that says nothing of it: the call, the machine, or a fault of ours."""

    pack: str
    dist: str
    version: str
    message: str


def run_all(
    tasks: Sequence[tuple[Plan, Release]], pool: Pool, *, done: Callable[[Row | Failure], None] = lambda row: None
) -> tuple[list[Row], list[Failure]]:
    """Both sides of each release; ``done`` is told of each row as it is there. A release that fails stops no other.

    On Ctrl-C whatever runs is killed, and what is finished has its receipt.
    """
    ended: dict[int, list[Row] | Failure] = {}
    # Threads tell of each side as it ends; from another process the rows of a release come together.
    given: dict[str, Any] = {"stop": pool.stop, "done": done} if pool.stop else {}
    futures = {pool.executor.submit(run_release, plan, release, **given): i for i, (plan, release) in enumerate(tasks)}
    try:
        for future in as_completed(futures):
            i = futures[future]
            try:
                ended[i] = rows = future.result()
                for row in rows if not given else ():
                    done(row)
            except Exception as error:
                plan, release = tasks[i]
                ended[i] = failure = Failure(
                    pack=plan.pack.name, dist=plan.pack.package, version=release.version, message=_told(error)
                )
                done(failure)
    except BaseException:
        if pool.stop:
            pool.stop.set()
        pool.executor.shutdown(wait=pool.stop is not None, cancel_futures=True)
        raise
    in_order = [ended[i] for i in sorted(ended)]
    return [row for rows in in_order if isinstance(rows, list) for row in rows], [f for f in in_order if isinstance(f, Failure)]


def _told(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" at {Path(place[0].filename).name}:{place[0].lineno}" if place else ""
    return f"{type(error).__name__}: {error}{at} (a fault of the runner, or of the machine)."


def run_release(
    plan: Plan,
    release: Release,
    *,
    stop: threading.Event | None = None,
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Both sides of one release, the unit of work of every pool."""
    sweep(plan.cache)
    unpatched = _side(plan, release, "unpatched", stop=stop)
    done(unpatched)
    patched = _side(plan, release, "patched", unpatched, stop=stop)
    done(patched)
    return [unpatched, patched]


def use(plan: Plan, release: Release, folder: Path) -> int:
    """A pack's script as a tool on one release, from the user's ``folder``, on this terminal; its exit code."""
    cell = Cell(pack=plan.pack.name, dist=plan.pack.package, version=release.version, side="unpatched", variant=plan.variant)
    with writing(plan.cache), _folder(plan.cache, cell) as place:
        return _Attempt(plan, release, cell, place, None, None).on_this_terminal(folder)


def sweep(cache: Path) -> None:
    """Clear away what killed runs left, processes and folders, and note for `killed` which cells they were at."""
    for folder in cache.glob("cells/*/"):
        try:
            with locked(folder.with_suffix(".lock"), wait=False):
                if (folder / "cell").is_file():
                    kill_marked(folder.name)
                    (folder / "cell").replace(folder.with_suffix(".killed"))
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".lock").unlink(missing_ok=True)
        except BlockingIOError:  # It is being run.
            continue


def killed(cache: Path) -> list[str]:
    """The cells whose runs were found killed since this was last asked.

    A worker of a cluster cannot return them: the cluster may compute again, and drop, what a lost worker had returned.
    """
    sweep(cache)
    found = []
    for note in cache.glob("cells/*.killed"):
        found.append(note.read_text(encoding="utf-8"))
        note.unlink(missing_ok=True)
    return sorted(found)


@contextmanager
def _folder(cache: Path, cell: Cell) -> Iterator[Path]:
    """A folder for one run, held for as long as we live: whoever finds it not held knows that its run was killed."""
    # Short, for sockets are made below it, and their paths may have 107 characters.
    place = cache.resolve() / "cells" / uuid.uuid4().hex[:12]
    with locked(place.with_suffix(".lock")):
        try:
            for folder in ("overlay", "home", "tmp"):
                (place / folder).mkdir(parents=True)
            (place / "cell").write_text(cell.label, encoding="utf-8")
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
            place.with_suffix(".lock").unlink(missing_ok=True)


def expected(plan: Plan, version: str, side: str) -> tuple[str, str]:
    """What a side is held to show, and why. The patched side follows from the unpatched one."""
    expectation = plan.pack.expectation(version)
    if expectation is None:
        return "an [expected] range", f"no range in pack.toml holds {version}"
    own = plan.pack.variants.get(plan.variant)
    if own is not None and own.verdict is not None:
        expectation = replace(expectation, verdict=own.verdict, why=f"the variant {plan.variant} shows it")
    if side == "unpatched":
        return expectation.verdict, expectation.why
    if plan.patch is not None:
        return "ABSENT", "a patch under review has to cure the bug and to break nothing"
    if expectation.outcome == "REPRODUCED":
        return ("ABSENT", "the fix cures it") if plan.pack.fix.is_file() else ("NOTHING_TO_PATCH", NO_FIX)
    if expectation.outcome in ("ABSENT", "CHANGED"):
        return "NOTHING_TO_PATCH", expectation.why
    return expectation.verdict, expectation.why


def _side(
    plan: Plan,
    release: Release,
    side: str,
    before: Row | None = None,
    *,
    stop: threading.Event | None,
) -> Row:
    cell = Cell(pack=plan.pack.name, dist=plan.pack.package, version=release.version, side=side, variant=plan.variant)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with writing(plan.cache), _folder(plan.cache, cell) as place:
        attempt = _Attempt(plan, release, cell, place, before.environment if before else None, stop)
        ended, output = attempt.closing(before.verdict if before else None)
    verdict_log = attempt.log(output, ended)
    verdict = grade(verdict_log)
    name, sha256 = receipt.log_name(cell, verdict_log)
    document = receipt.statement(
        cell,
        verdict,
        environment=attempt.environment,
        subject=attempt.subject(),
        lane=plan.lane,
        hashes=plan.pack.at(release.version).hashes(side, lanes.files(plan.lane)),
        command=attempt.command,
        closing=ended,
        started=started,
        log_name=name,
        log_sha256=sha256,
        patch=attempt.patch,
        settings={n: attempt.scrub(v) for n, v in allowed_env(attempt.env).items()},
    )
    path = receipt.write(plan.results, cell, verdict_log, document, machine=plan.machine)
    wanted, why = expected(plan, release.version, side)
    return Row(
        cell=cell,
        verdict=verdict,
        expected=wanted,
        why=why,
        seconds=float(ended.get("seconds", 0.0)),
        receipt=path,
        ran=ended.get("stopped") not in ("nothing-to-patch", "skipped"),
        environment=attempt.environment,
        message=str(ended.get("message", "")),
    )


def installed(pack: Pack, release: Release, cache: Path, wheel: Path | None = None) -> Environment:
    """The environment of one release, or of a wheel in its place, with the pins that go with it."""
    return environments.made(
        pack.package,
        release.version,
        release.sha256,
        release.file,
        pack.at(release.version).requires,
        cache,
        wheel=wheel,
        build=pack.build,
        beside=pack.beside,
        python=None if wheel or fits(release.file) else pack.python,
        as_files=pack.as_files,
        beside_python=None if pack.build else pack.python,  # what is built is built for this Python
    )


class _Attempt:
    """One try at one cell: everything up to the closing line of its log."""

    def __init__(
        self,
        plan: Plan,
        release: Release,
        cell: Cell,
        place: Path,
        environment: Environment | None,
        stop: threading.Event | None,
    ) -> None:
        self.plan = plan
        self.release = release
        self.cell = cell
        self.place = place
        self.stop = stop
        self.environment = environment  # the other side's: a side that is not run is still about the same file
        self.command: list[str] = []
        self.env: dict[str, str] = {}
        self.patch: dict[str, str] | None = None
        self.scrub = self._scrubber()

    def closing(self, before: Verdict | None) -> tuple[dict[str, Any], str]:
        """How the run ended, as the log's closing line has it, and what the script printed."""
        skip = None if before is None or self.plan.patch else _skip(before, self.plan.pack)
        if skip is not None:
            return {"exit": None, **skip}, ""
        try:
            if self.environment is None:
                self.environment = self._environment()
                self.scrub = self._scrubber()
            if self.cell.side == "patched":
                self._overlay()
        except InstallError as error:
            if not self.release.sha256:
                raise UserError(f"{self.cell.dist} {self.cell.version} cannot be installed: {error}") from error
            return {"exit": None, "stopped": "install", "message": self.scrub(str(error))}, ""
        except AnchorError as error:
            return {"exit": None, "stopped": "anchor", "message": self.scrub(str(error))}, ""
        ended = self._run()
        output = self.scrub(ended.output)
        if ended.exit == 2 and (complaint := re.search(r"^repro\.py: error: (.+)$", output, re.MULTILINE)):
            raise UserError(f"{self.plan.pack.folder.name}/repro.py does not take these arguments: {complaint[1]}.")
        return {
            "exit": ended.exit,
            "signal": ended.signal,
            "stopped": ended.stopped,
            "seconds": ended.seconds,
            "peak_rss": ended.peak_rss,
            "cut": ended.cut,
            "stragglers": ended.stragglers,
        }, output

    def subject(self) -> dict[str, Any]:
        """What the receipt is about: the file of the release, by the hash it was installed with."""
        cell, release, environment = self.cell, self.release, self.environment
        file, sha256 = (environment.file, environment.sha256) if environment else (release.file, release.sha256)
        if not sha256 and environment is not None:
            # Without the wheel at hand, what its RECORD says was installed is all there is to name it by.
            digest = {"record_sha256": environments.record_sha256(overlay.distribution(cell.dist, environment.site))}
        else:
            digest = {"sha256": sha256}
        own = self.plan.pack.variants.get(self.plan.variant)
        uri = f"pkg:pypi/{cell.dist}@{cell.version}"
        if own is not None and own.source:
            uri = f"pkg:github/{self.plan.pack.upstream.lower()}@{own.source}"
        return {
            "name": file or f"{cell.dist}-{cell.version}",
            "uri": uri,
            "digest": digest,
        }

    def log(self, output: str, closing: Mapping[str, Any]) -> str:
        plan = self.plan
        opening = {
            "pack": self.cell.pack,
            "dist": self.cell.dist,
            "version": self.cell.version,
            "side": self.cell.side,
            "lane": plan.lane,
            "arguments": list(plan.arguments),
        }
        body = output if not output or output.endswith("\n") else f"{output}\n"
        return f"{json.dumps({'runner': opening})}\n{body}{json.dumps({'runner': dict(closing)})}\n"

    def _environment(self) -> Environment:
        plan, release = self.plan, self.release
        wheel = plan.wheels.get(release.version)
        if plan.here or plan.release_path is not None:
            return environments.here(plan.pack.package, plan.cache, wheel=wheel, release_path=plan.release_path)
        if wheel is None and plan.pack.wheels is not None:
            wheel = built_wheels(plan.pack, plan.cache)[release.version]
        return installed(plan.pack, release, plan.cache, wheel)

    def _overlay(self) -> None:
        assert self.environment is not None
        plan, site = self.plan, self.environment.site
        with writing(self.place / "overlay"):
            if plan.patch is not None:
                try:
                    diff = overlay.apply_patch(plan.patch, plan.pack.package, site, self.place / "overlay")
                except UserError as error:
                    # Among several releases, one that the diff does not fit is a row; alone, it is a mistake in the call.
                    if not plan.several:
                        raise
                    raise AnchorError(str(error)) from error
                name = plan.patch.name
            else:
                fix = overlay.load_fix(plan.pack.fix)
                diff = overlay.apply_fix(overlay.drop(fix, plan.drop) if plan.drop else fix, site, self.place / "overlay")
                name = f"{plan.pack.name}-{self.cell.dist}-{self.cell.version}.diff"
        sha256 = hashlib.sha256(diff.encode()).hexdigest()
        write_atomically(plan.cache / "diffs" / f"{sha256}.diff", diff)
        self.patch = {"name": name, "sha256": sha256}

    def _prepare(self) -> list[str]:
        """What to call; its environment variables are kept."""
        assert self.environment is not None
        plan, patched = self.plan, self.cell.side == "patched"
        command = lanes.command(self.environment.python, plan.lane, plan.pack.script) + list(plan.arguments)
        self.command = [self.scrub(word) for word in command]
        self.command[0] = "python"
        first = ([str(self.place / "overlay")] if patched else []) + (
            [str(self.environment.site)] if self.environment.on_path else []
        )
        self.env = {
            **run_env(os.environ),
            # What the active environment was started with has to stay visible to the script, but behind the release.
            "PYTHONPATH": os.pathsep.join(
                first + ([os.environ["PYTHONPATH"]] if plan.here and os.environ.get("PYTHONPATH") else [])
            ),
            # Runs beside each other share the cores; left alone, each would start a thread for every core.
            **({"OMP_NUM_THREADS": str(plan.threads)} if plan.threads and "OMP_NUM_THREADS" not in os.environ else {}),
            "PYTHONUNBUFFERED": "1",
            "REPRODUCER_SIDE": self.cell.side,
            "REPRODUCER_DIST": self.cell.dist,
            # Compile caches go into the cell's own folder: no run sees another's kernels.
            "HOME": str(self.place / "home"),
            "TMPDIR": str(self.place / "tmp"),
            "TRITON_CACHE_DIR": str(self.place / "home" / "triton"),
            "TILELANG_CACHE_DIR": str(self.place / "home" / "tilelang"),
        }
        return command

    def _run(self) -> Ended:
        command = self._prepare()
        with writing(self.place):
            return run(
                command,
                env=self.env,
                cwd=self.place / "tmp",
                timeout=self.plan.pack.timeout,
                memory=int(self.plan.pack.memory * 2**30),
                stop=self.stop,
                mark=self.place.name,
            )

    def on_this_terminal(self, folder: Path) -> int:
        """Run the unpatched script in the user's own folder, with nothing kept of it; its exit code."""
        try:
            self.environment = self._environment()
        except InstallError as error:
            raise UserError(f"{self.cell.dist} {self.cell.version} cannot be installed: {error}") from error
        return subprocess.run(self._prepare(), env=self.env, cwd=folder).returncode

    def _scrubber(self) -> Scrubber:
        there = self.environment
        folders = [("<release>", there.site)] if there else []
        folders += [
            ("<overlay>", self.place / "overlay"),
            ("<cell>", self.place),
            ("<pack>", self.plan.pack.folder),
            ("<lanes>", lanes.FOLDER),
        ]
        folders += [("<base>", folder) for folder in there.path] + [("<python>", there.python.parent.parent)] if there else []
        folders += [("<cache>", self.plan.cache), ("<checkout>", ROOT)]
        return Scrubber(folders)


def _skip(before: Verdict, pack: Pack) -> dict[str, str] | None:
    """Why the patched side is not run, if it is not: only a bug that was seen can be seen to be cured."""
    if before.outcome == "REPRODUCED":
        return None if pack.fix.is_file() else {"stopped": "nothing-to-patch", "message": NO_FIX}
    if before.outcome in ("ABSENT", "CHANGED"):
        return {"stopped": "nothing-to-patch", "message": f"the unpatched side is {before}"}
    return {"stopped": "skipped", "verdict": before.outcome, "message": before.reason}


def default_jobs(lane: str) -> int:
    """One at a time on a device (timings, memory peaks); else one a core."""
    return 1 if lane == "device" else max(1, os.cpu_count() or 1)


def threads_each(jobs: int) -> int:
    """How many threads a run may start beside ``jobs - 1`` others; 0, as many as it likes, where it is alone."""
    return max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else 0
