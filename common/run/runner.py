"""Run cells: environment, overlay, subprocess, log, verdict, receipt. Knows nothing of any pack's subject."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import UNSET
from packaging.requirements import Requirement

from common import __version__, transforms
from common.errors import AnchorError, InfraError, UserError, writing
from common.files import RESULTS, ROOT, locked, write_atomically
from common.install import environment as environments
from common.install import integrity, lanes, machine
from common.install.environment import Environment, InstallError
from common.install.releases import Release, built_wheels, fits
from common.packs.pack import Pack
from common.process import Ended, kill_marked, run
from common.run import execute, overlay
from common.run import pool as pools
from common.run.plan import Failure, Plan, Row, Task, expected, skipped
from common.run.pool import Pool
from common.scrub import Scrubber, allowed_env, plain
from common.store import history, receipt
from common.store.cell import Cell
from common.store.grade import FORM, Verdict, grade


def run_all(
    tasks: Sequence[Task], pool: Pool, *, done: Callable[[Row | Failure], None] = lambda row: None
) -> tuple[list[Row], list[Failure]]:
    """Both sides of each release; ``done`` is told of each row as it is there. A release that fails stops no other.

    On Ctrl-C whatever runs is killed, and what is finished has its receipt.
    """
    ended: dict[int, list[Row] | Failure] = {}
    # Threads tell of each side as it ends; from another process the rows of a release come together.
    given: dict[str, Any] = {"stop": pool.stop, "done": done} if pool.stop else {}
    futures = {pool.executor.submit(run_release, plan, release, **given): i for i, (plan, release) in enumerate(tasks)}
    try:
        for future in pools.ended(futures):
            i = futures[future]
            try:
                ended[i] = rows = future.result()
                for row in rows if not given else ():
                    done(row)
            except Exception as error:
                plan, release = tasks[i]
                ended[i] = failure = Failure(cell=plan.cell(release), message=_sentence(error))
                done(failure)
    except BaseException:
        pool.cancel()
        raise
    in_order = [ended[i] for i in sorted(ended)]
    return [row for rows in in_order if isinstance(rows, list) for row in rows], [f for f in in_order if isinstance(f, Failure)]


def _sentence(error: Exception) -> str:
    if isinstance(error, UserError):
        return plain(str(error), None)
    place = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" at {Path(place[0].filename).name}:{place[0].lineno}" if place else ""
    return f"{type(error).__name__}: {plain(str(error))}{at} (a fault of the runner, or of the machine)."


def run_unpatched(plan: Plan, release: Release, *, stop: threading.Event | None = None) -> Row:
    """One release as it is."""
    sweep(plan.cache)
    return _side(plan, release, "unpatched", stop=stop)


def run_release(
    plan: Plan,
    release: Release,
    *,
    before: Row | None = None,
    stop: threading.Event | None = None,
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Both sides of one release, the unit of work of every pool. With ``before``, its unpatched side, the patched one alone."""
    unpatched = before or run_unpatched(plan, release, stop=stop)
    done(unpatched)
    patched = _side(plan, release, "patched", unpatched, stop=stop)
    done(patched)
    return [unpatched, patched]


def use(plan: Plan, release: Release, script: Path, folder: Path) -> int:
    """A pack's ``script`` as a tool on one release, from the user's ``folder``, on this terminal; its exit code."""
    cell = plan.cell(release, "unpatched")
    with writing(plan.cache), ExitStack() as stack:
        there, place = held(plan, release, stack)
        return subprocess.run(
            execute.command(plan, there, script), env=execute.environ(plan, cell, there, place), cwd=folder
        ).returncode


def held(plan: Plan, release: Release, stack: ExitStack) -> tuple[Environment, Path]:
    """A release's environment and a folder to run in, for as long as ``stack`` is open."""
    place = stack.enter_context(_folder(plan.cache, plan.cell(release, "unpatched")))
    try:
        there, _ = _hold(plan, release, stack, None)
    except InstallError as error:
        raise UserError(f"{plan.pack.package} {release.version} cannot be installed: {error}") from error
    return there, place


def debug(plan: Plan, release: Release, side: str, say: Callable[[str], None]) -> int:
    """One side of a release on this terminal, for a pack's author: `breakpoint` works, its folder is kept, nothing is graded."""
    cell = plan.cell(release, side)
    place = plan.cache.resolve() / "debug" / cell.pack
    shutil.rmtree(place, ignore_errors=True)
    for folder in ("overlay", "home", "tmp"):
        (place / folder).mkdir(parents=True)
    with writing(plan.cache), ExitStack() as held:
        try:
            there, _ = _hold(plan, release, held, None)
            if side == "patched":
                _overlay(plan, cell, there, place, None, _scrubber(plan, place, there))
        except (InstallError, AnchorError) as error:
            raise UserError(f"{cell.dist} {cell.version} {side}: {error}") from error
        command, environ = execute.command(plan, there), execute.environ(plan, cell, there, place)
        say(f"environment: {there.site}")
        say(f"folder:      {place}" + (", with the patched files in overlay/" if side == "patched" else ""))
        for name, value in sorted(environ.items()):
            say(f"  {name}={value}")
        say(f"command:     {shlex.join(command)}")
        return subprocess.run(command, env=environ, cwd=place / "tmp").returncode


def fix_of(plan: Plan, release: Release) -> str:
    """The unified diff of the pack's fix on one release."""
    with writing(plan.cache), tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        try:
            there, _ = _hold(plan, release, held, None)
            return overlay.apply_fix(transforms.load_fix(plan.pack.fix), there.site, Path(folder) / "overlay")
        except (InstallError, AnchorError) as error:
            raise UserError(f"{plan.pack.name} has no diff for {plan.pack.package} {release.version}: {error}") from error


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
        with suppress(FileNotFoundError):  # Another call has said it.
            found.append(note.read_text(encoding="utf-8"))
            note.unlink()
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
            (place / "cell").write_text(str(cell), encoding="utf-8")
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
            place.with_suffix(".lock").unlink(missing_ok=True)


def _side(
    plan: Plan,
    release: Release,
    side: str,
    before: Row | None = None,
    *,
    stop: threading.Event | None,
) -> Row:
    cell = plan.cell(release, side)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with writing(plan.cache), ExitStack() as held:
        place, environment = held.enter_context(_folder(plan.cache, cell)), held.enter_context(ExitStack())
        triggers, own = before.verdict.triggers if before else 0, dict[str, Any]()

        def log() -> str:
            return _log(plan, cell, ran, _scrubber(plan, place, ran.environment), triggers, own)

        try:
            ran = _attempt(plan, release, cell, place, before, environment, stop)
            if plan.patch and before and plan.pack.fix.is_file() and ran.validate and grade(log()).outcome == "ABSENT":
                environment.close()  # It may have to be made anew.
                own = _recorded_checks(plan, cell) or _own_checks(replace(plan, patch=None), release, cell, before, stop)
        except InfraError as error:
            ran = _Ran(closing={"exit": None, "stopped": "infra", "reason": "install", "message": str(error)})
        written = log()
        verdict = grade(written)
        row = _row(plan, release, cell, ran, verdict)
        if verdict.outcome == "INFRA":  # What was stored before stays as it is.
            return row
        document = _receipt(plan, release, cell, ran, verdict, written, started)
    return replace(row, receipt=receipt.write(plan.results, cell, written, document, machine=plan.machine))


def _own_checks(plan: Plan, release: Release, cell: Cell, before: Row, stop: threading.Event | None) -> dict[str, Any]:
    """How many checks of validate.py pass with the pack's own fix, run here and now; 0 where it is not FIX_VALIDATED itself, and what it is."""
    with _folder(plan.cache, cell) as place, ExitStack() as held:
        ran = _attempt(plan, release, cell, place, before, held, stop)
        verdict = grade(_log(plan, cell, ran, _scrubber(plan, place, ran.environment), before.verdict.triggers, {}))
    if verdict.outcome == "INFRA":
        raise InfraError(f"The pack's own fix, which is run beside a diff, ended in {verdict}: run it again.")
    return {"checks": _deep(verdict.passed)} if verdict.outcome == "ABSENT" else {"checks": 0, "own": str(verdict)}


def _deep(passed: Iterable[str]) -> int:
    return sum(name.startswith("validate: ") for name in passed)


def _recorded_checks(plan: Plan, cell: Cell) -> dict[str, Any]:
    """The same as the record of this release, lane and variant on such GPUs has it; empty without a fresh one."""
    stored = (seen for seen in history.load(RESULTS, [plan.pack]).runs if (seen.cell, seen.lane) == (cell, plan.lane))
    found = [seen.document() for seen in stored if seen.outcome == "ABSENT" and not seen.stale]
    mine = sorted(machine.architectures(machine.gpu())), len(machine.gpu())
    alike = [each for each in found if (sorted(machine.architectures(gpus := each.facts.environment.gpus)), len(gpus)) == mine]
    return {"checks": max(_deep(each.predicate.passed_tests) for each in alike)} if alike else {}


def _receipt(plan: Plan, release: Release, cell: Cell, ran: _Ran, verdict: Verdict, log: str, started: str) -> receipt.Receipt:
    name, sha256 = receipt.log_name(cell, log)
    closing, there = ran.closing, ran.environment
    installed = there.distributions() if there else []
    versions = {each["name"]: each["version"] for each in installed}
    return receipt.made(
        verdict,
        subject=_subject(plan, release, cell, there),
        hashes=plan.pack.at(release.version).hashes(
            cell.side, lanes.files_of(plan.pack, plan.lane, cell.side, plan.variant), plan.variant
        ),
        runner=__version__,
        **asdict(cell),
        lane=plan.lane,
        command=ran.command,
        exit=closing.get("exit"),
        signal=closing.get("signal"),
        stopped=closing.get("stopped"),
        started=started,
        seconds=closing.get("seconds", 0.0),
        peak_rss=closing.get("peak_rss", 0),
        log=receipt.Log(name=name, sha256=sha256, cut=closing.get("cut", 0)),
        patch=receipt.Patch(**{key: value for key, value in ran.patch.items() if key != "unpatched"}) if ran.patch else None,
        sandbox=plan.sandbox or UNSET,
        environment=receipt.Surroundings(
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            torch=versions.get("torch"),
            triton=versions.get("triton"),
            cuda=there.cuda() if there else None,
            gpus=[dict(device) for device in machine.gpu()],
            settings=dict(ran.settings),
            distributions=[receipt.Distribution(**each) for each in installed],
        ),
    )


def _row(plan: Plan, release: Release, cell: Cell, ran: _Ran, verdict: Verdict) -> Row:
    wanted, why = expected(plan, release.version, cell.side)
    message = str(ran.closing.get("message", ""))
    if verdict.outcome in ("CHANGED", "UNTESTABLE", "ERROR") and not message:
        message = _last_error(ran.output)
        if verdict.reason == "import" and ran.environment and (lacking := ran.environment.lacking(cell.dist)):
            message += f". It asks for {', '.join(lacking)}: is that missing from `requires` in pack.toml?"
    if verdict.outcome == "INFRA" and not message:
        message = _INFRA.get(verdict.reason, "the run was ended from outside, which says nothing of the release: run it again")
    return Row(
        cell=cell,
        verdict=verdict,
        expected=wanted,
        why=why,
        seconds=sum(float(each.get("seconds", 0.0)) for each in (ran.closing, ran.closing.get("validate", {}))),
        receipt=None,
        ran=ran.closing.get("stopped") not in ("nothing-to-patch", "skipped"),
        environment=ran.environment,
        message=message,
        patch=ran.patch,
        notes=ran.notes,
    )


def _last_error(output: str) -> str:
    """The last line of a traceback that a script printed; empty without one."""
    found = re.findall(r"^((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)$", output, re.MULTILINE)
    return plain(found[-1], 300) if found else ""


#: What to say of a run that says nothing of its release.
_INFRA = {
    "SIGKILL": "the run was killed from outside, perhaps by a system short of memory: run it again",
    "lost": "the process that watches over the run was killed: run it again",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ran:
    """What one try at a cell came to; all that is needed for its log and its receipt, free of private words."""

    closing: Mapping[str, Any]
    output: str = ""
    #: How many of its lines are repro.py's, where validate.py was run after it.
    lines: int | None = None
    validate: bool = False
    environment: Environment | None = None
    command: list[str] = field(default_factory=list)
    settings: Mapping[str, str] = field(default_factory=dict)
    patch: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def _attempt(
    plan: Plan,
    release: Release,
    cell: Cell,
    place: Path,
    before: Row | None,
    held: ExitStack,
    stop: threading.Event | None,
) -> _Ran:
    """Install, overlay, execute: each hands its result to the next, and what cannot go on says how it ended."""
    ended: dict[str, Any] | None = None if before is None else skipped(before.verdict, plan, release.version)
    if before is not None and ended is not None:  # A side that is not run is still about the same file.
        return _Ran(closing={"exit": None, **ended}, environment=before.environment)
    scrub = _scrubber(plan, place, None)
    try:
        there, notes = _hold(plan, release, held, stop)
    except InstallError as error:
        if not release.sha256:
            raise UserError(f"{cell.dist} {cell.version} cannot be installed: {error}") from error
        return _Ran(closing={"exit": None, "stopped": "install", "message": scrub(str(error))})
    scrub = _scrubber(plan, place, there)
    if plan.patch and not plan.several and cell.side == "unpatched":  # One that does not fit is told before anything is run.
        with tempfile.TemporaryDirectory(dir=place) as tried:
            _with_the_diff(plan, cell, there, Path(tried) / "overlay")
    try:
        patch = _overlay(plan, cell, there, place, before, scrub) if cell.side == "patched" else None
    except AnchorError as error:
        at_anchor = {"exit": None, "stopped": "anchor", "message": scrub(str(error))}
        return _Ran(closing=at_anchor, environment=there, notes=notes)
    watch = overlay.watched(there.site, place / "overlay") if plan.patch is not None and patch is not None else {}
    if watch:
        write_atomically(execute.watch(place), json.dumps([sorted(lines) for lines in watch.values()]))
        execute.calls(place).touch()
    command, environ = execute.command(plan, there), execute.environ(plan, cell, there, place)

    def ended_by(plan: Plan, there: Environment, command: list[str]) -> Ended:
        with writing(place):
            return run(
                execute.sandboxed(plan, there, place, command) if plan.sandbox else command,
                env=execute.environ(plan, cell, there, place),
                cwd=place / "tmp",
                timeout=plan.pack.timeout,
                memory=int(plan.pack.memory * 2**30),
                stop=stop,
                mark=place.name,
            )

    ended_as = ended_by(plan, there, command)
    output = scrub(ended_as.output)
    if ended_as.exit and shutil.disk_usage(place).free < 2**20:
        raise InfraError(f"No space was left on the disk of {plan.cache} while the script ran: free some and run again.")
    if ended_as.exit == 2 and (complaint := re.search(r"^repro\.py: error: (.+)$", output, re.MULTILINE)):
        raise UserError(f"{plan.pack.folder.name}/repro.py does not take these arguments: {complaint[1]}.")
    closing: dict[str, Any] = _closing(ended_as, sandbox=plan.sandbox)
    deep = plan.pack.deep_check(plan.variant) if cell.side == "patched" else None
    lines = None
    if deep is not None and closing["exit"] == 0:
        lines = len(output.splitlines())
        checking, its = plan, there
        if (lane := plan.pack.checked_in(plan.lane)) != plan.lane:
            checking = replace(plan, lane=lane, pack=plan.pack.varied("", lane))
            try:
                its, _ = _hold(checking, release, held, stop)
            except InstallError as error:
                raise InfraError(f"The environment of lane {lane} for {deep.name} cannot be installed: {error}") from error
            scrub = _scrubber(plan, place, there, its)
        second = ended_by(checking, its, execute.command(checking, its, deep))
        output = _ended(output) + scrub(second.output)
        closing["validate"] = _closing(second, sandbox=plan.sandbox)
    if plan.patch is not None and patch is not None:
        called = set(execute.calls(place).read_text().splitlines()) if watch else set()
        patch["unrun"] = [scrub(plain(part)) for part, lines in sorted(watch.items()) if not lines & called]
    return _Ran(
        closing=closing,
        lines=lines,
        validate=deep is not None,
        output=output,
        environment=there,
        command=["python", *(scrub(word) for word in command[1:])],
        settings={name: scrub(value) for name, value in allowed_env(environ).items()},
        patch=patch,
        notes=notes,
    )


def _closing(ended: Ended, *, sandbox: bool) -> dict[str, Any]:
    """The log's closing line. bubblewrap ends with 128 + N where what it started died of signal N."""
    code, name = ended.exit, ended.signal
    if sandbox and code is not None and code - 128 in set(signal.Signals):
        name, code = signal.Signals(code - 128).name, None
    return {
        "exit": code,
        "signal": name,
        "stopped": ended.stopped,
        "seconds": ended.seconds,
        "peak_rss": ended.peak_rss,
        "cut": ended.cut,
        "stragglers": ended.stragglers,
    }


def _hold(plan: Plan, release: Release, held: ExitStack, stop: threading.Event | None) -> tuple[Environment, tuple[str, ...]]:
    """The release's environment, its files compared with what was installed and held while it is used; and what to say of it."""
    notes: list[str] = []
    for _attempt_again in range(3):
        there = _environment(plan, release, stop, past_cache=bool(notes))
        with ExitStack() as mine:
            if there.lock is not None:
                mine.enter_context(locked(there.lock, shared=True))
            try:
                if not environments.is_whole(there):
                    continue
                _compare(plan, there)
            except integrity.Tampered as error:
                what = f"{plan.pack.package} {there.version}: {error}"
                if there.lock is None:
                    raise UserError(
                        f"{what}, so it is not that release: install it afresh, or judge a change of it with --patch."
                    ) from error
                notes.append(f"{what}; it was installed afresh, past uv's cache")
            else:
                held.push(mine.pop_all())
                return there, tuple(notes)
        environments.discard(there, partial(_is_tampered, plan, there))
    raise InfraError(f"{'; '.join(notes) or 'The environment was taken away'}, and each time something changed it again.")


def _compare(plan: Plan, there: Environment) -> None:
    if not there.python.exists():
        raise integrity.Tampered("its Python is gone")
    owned = there.lock is not None
    integrity.verify(
        plan.pack.package, there.site, there.path, owned=owned, first=there.on_path, archive=there.archive, ours=there.ours
    )


def _is_tampered(plan: Plan, there: Environment) -> bool:
    try:
        _compare(plan, there)
    except (integrity.Tampered, UserError):
        return True
    return False


def _environment(plan: Plan, release: Release, stop: threading.Event | None, *, past_cache: bool) -> Environment:
    wheel = plan.wheels.get(release.version)
    if plan.here or plan.release_path is not None:
        return environments.here(plan.pack.package, plan.cache, wheel=wheel, release_path=plan.release_path)
    if wheel is None and plan.pack.wheels is not None:
        wheel = built_wheels(plan.pack, plan.cache)[release.version]
    return installed(plan.pack, release, plan.cache, wheel, stop=stop, past_cache=past_cache)


def installed(
    pack: Pack,
    release: Release,
    cache: Path,
    wheel: Path | None = None,
    *,
    stop: threading.Event | None = None,
    past_cache: bool = False,
) -> Environment:
    """The environment of one release, or of a wheel in its place, with the pins that go with it."""
    wanted = environments.Wanted(
        package=pack.package,
        version=release.version,
        file=release.file,
        sha256=release.sha256,
        requires=pack.at(release.version).requires,
        wheel=wheel,
        build=pack.build,
        beside=pack.beside,
        python=None if wheel or fits(release.file) else pack.python,
        beside_python=None if pack.build else pack.python,  # what is built is built for this Python
        as_files=pack.as_files,
        index=pack.index,
        past_cache=past_cache,
    )
    return environments.made(wanted, cache, stop=stop)


def _with_the_diff(plan: Plan, cell: Cell, there: Environment, target: Path) -> overlay.Patched:
    assert plan.patch is not None
    beside = [Requirement(each).name for each in plan.pack.beside]
    return overlay.apply_patch(plan.patch, plan.pack.package, cell.version, plan.pack.prefix, there.site, target, beside)


def _overlay(plan: Plan, cell: Cell, there: Environment, place: Path, before: Row | None, scrub: Scrubber) -> dict[str, Any]:
    """Fill the overlay from the fix or the diff under review; what it was, as the receipt has it."""
    target = place / "overlay"
    more: dict[str, Any] = {}
    with writing(target):
        if plan.patch is not None:
            try:
                patched = _with_the_diff(plan, cell, there, target)
            except UserError as error:
                # Among several releases, one that the diff does not fit is a row; alone, it is a mistake in the call.
                if not plan.several:
                    raise
                raise AnchorError(str(error)) from error
            text, name = patched.diff, overlay.plain_name(scrub(plan.patch.name))
            more = {
                key: [scrub(plain(file)) for file in getattr(patched, key)] for key in ("applied", "skipped", "unsupported")
            }
            parts = _compared(plan, there, place) if plan.pack.fix.is_file() else {}
            parts["undefined"] = overlay.undefined(there.site, target)
            more |= {key: [scrub(plain(part)) for part in sorted(found)] for key, found in parts.items()}
            more["unpatched"] = before.verdict.outcome if before else ""
        else:
            fix = transforms.load_fix(plan.pack.fix)
            text = overlay.apply_fix(overlay.drop(fix, plan.drop) if plan.drop else fix, there.site, target)
            name = f"{plan.pack.name}-{cell.dist}-{cell.version}.diff"
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    write_atomically(plan.cache / "diffs" / f"{sha256}.diff", text)
    return {"name": name, "sha256": sha256, **more}


def _compared(plan: Plan, there: Environment, place: Path) -> dict[str, set[str]]:
    """What somebody's diff, which fills the overlay, changes and the pack's own fix leaves alone; and what is the other way round."""
    own: set[str] = set()
    with suppress(AnchorError), tempfile.TemporaryDirectory(dir=place) as folder:
        overlay.apply_fix(transforms.load_fix(plan.pack.fix), there.site, target := Path(folder) / "overlay")
        own = overlay.changed(there.site, target)
    theirs = overlay.changed(there.site, place / "overlay")
    return {"beyond": theirs - own, "left": own - theirs}


def _subject(plan: Plan, release: Release, cell: Cell, there: Environment | None) -> receipt.Subject:
    """What the receipt is about: the file of the release, by the hash it was installed with."""
    file, sha256 = (there.file, there.sha256) if there else (release.file, release.sha256)
    if not sha256 and there is not None:
        # Without the wheel at hand, its RECORD, which its files were compared with, is all there is to name it by.
        record = integrity.record_sha256(integrity.distribution(cell.dist, there.site))
        digest = receipt.Digest(record_sha256=record)
    else:
        digest = receipt.Digest(sha256=sha256)
    own = plan.pack.variants.get(plan.variant)
    uri = f"pkg:pypi/{cell.dist}@{cell.version}" + (f"?repository_url={plan.pack.index}" if plan.pack.index else "")
    if release.at_hand:
        uri = f"pkg:generic/{cell.dist}@{cell.version}"
    if own is not None and own.source:
        uri = f"pkg:github/{plan.pack.upstream.lower()}@{own.source}"
    if plan.checkout:
        local = cell.version.partition("+")[2].removeprefix("git.g")
        uri = f"pkg:github/{plan.pack.repository.lower()}@{local}"
    return receipt.Subject(name=file or f"{cell.dist}-{cell.version}", uri=uri, digest=digest)


def _log(plan: Plan, cell: Cell, ran: _Ran, scrub: Scrubber, triggers: int, own: Mapping[str, Any]) -> str:
    """The opening line (what was asked for), what the script printed, and the closing line (how it ended).

    ``triggers`` ran unpatched; ``own`` says how many checks of validate.py pass with the pack's own fix, where somebody else's is judged.
    """
    opening = {
        "form": FORM,
        "pack": cell.pack,
        "dist": cell.dist,
        "version": cell.version,
        "side": cell.side,
        "variant": cell.variant,
        "lane": plan.lane,
        "arguments": [scrub(word) for word in plan.arguments],
        "gpus": machine.architectures(machine.gpu()),
        **({"patch": ran.patch} if ran.patch else {}),
        **({"sandbox": True} if plan.sandbox else {}),
        **({"triggers": triggers} if triggers else {}),
        **own,
        **({"validate": True, "lines": ran.lines} if ran.validate else {}),
    }
    return f"{json.dumps({'runner': opening})}\n{_ended(ran.output)}{json.dumps({'runner': dict(ran.closing)})}\n"


def _ended(output: str) -> str:
    """What a script printed, its last line ended."""
    return output if not output or output.endswith("\n") else f"{output}\n"


def _scrubber(plan: Plan, place: Path, *those: Environment | None) -> Scrubber:
    found = [there for there in those if there]
    folders = [("<release>", there.site) for there in found]
    folders += [
        ("<overlay>", place / "overlay"),
        ("<cell>", place),
        ("<pack>", plan.pack.folder),
        ("<lanes>", lanes.FOLDER),
    ]
    for there in found:
        folders += [*(("<base>", folder) for folder in there.path), ("<python>", there.python.parent.parent)]
    folders += [("<cache>", plan.cache), ("<checkout>", ROOT)]
    return Scrubber(folders)
