"""What each command does: reads its options, calls the modules that do the work, and prints what came of it."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version
from rich.console import Console, RenderableType
from rich.text import Text

from common.errors import UserError, writing
from common.files import write_atomically
from common.grade import plain
from common.pack import Pack, all_packs, find
from common.receipt import NO_RECORD

if TYPE_CHECKING:
    from common import history, runner
    from common.pool import Pool
    from common.regress import Report, Work
    from common.releases import Release

#: Exit codes: every verdict as expected; one is not; the call or its surroundings are wrong; something changed (watch).
OK, SURPRISE, USAGE, CHANGED = 0, 1, 2, 3


def complain(sentence: str) -> None:
    from common.report import console

    console(stderr=True).print(Text(plain(sentence, None), "red"), soft_wrap=True)


def run(options: argparse.Namespace, extra: list[str]) -> int:
    from common import environment, history, lanes, overlay, pool, report, runner, sources

    pack = find(options.pack)
    _check(options)
    if options.patch is not None and options.without is not None:
        raise UserError("--without leaves out a part of the pack's own fix; it has no meaning beside --patch.")
    variant, arguments = _arguments(pack, options.variant, extra)
    own = pack.variants.get(variant)
    lane = lanes.choose(pack, options.lane or (own.lane if own else None))
    pack = pack.varied(variant, lane)
    out = report.console()
    if options.record and (pack.kind == "selftest" or options.patch or options.without):
        raise UserError("--record is for a pack's own fix on releases: the self-test, --patch and --without make no record.")
    results = options.results or (runner.RESULTS if options.record else runner.CACHE / "runs")
    review = options.patch is not None or options.without is not None
    if review:  # Verdicts on somebody's diff, or on a fix broken on purpose, are no record of the release.
        named = options.patch.stem if options.patch else f"without-{options.without}"
        results = results / "review" / overlay.plain_name(named)
    jobs = options.jobs or runner.default_jobs(lane)
    given = list(options.wheel or ())
    if own and own.source and not given and not options.here:
        with report.waiting(f"{pack.name}: looking for commit {own.source[:10]} of {pack.upstream}", out):
            given = [sources.wheel(pack, variant, options.source, runner.CACHE)]
    elif options.source:
        named = ", ".join(n for n, v in pack.variants.items() if v.source) or "none"
        raise UserError(f"--source goes with a --variant that is a commit; {pack.name} has: {named}.")
    wheels: dict[str, Path] = {}
    for wheel in given:
        version = environment.read_wheel(wheel, pack.package)[1]
        if version in wheels:
            raise UserError(
                f"--wheel was given two files of {pack.package} {version}: {wheels[version].name} and {wheel.name}."
            )
        wheels[version] = wheel.resolve()
    plan = runner.Plan(
        pack=pack,
        threads=runner.threads_each(jobs),
        lane=lane,
        arguments=arguments,
        variant=variant,
        patch=options.patch,
        drop=options.without,
        here=options.here,
        wheels=wheels,
        release_path=options.release_path,
        sandbox=options.sandbox,
        results=results,
        **({"machine": options.machine} if options.machine else {}),
    )
    chosen, warnings = _releases(plan, options.releases, out)
    tool = bool(set(arguments) & set(pack.tools))
    if tool and options.releases is None:
        chosen = chosen[-1:]  # the newest that the pack pins
    if tool and len(chosen) != 1:
        raise UserError(f"{' '.join(arguments)} is for one release; --releases {options.releases} are {len(chosen)}.")
    plan = replace(plan, several=len(chosen) > 1)
    for warning in warnings:
        out.print(Text(warning, "yellow"))
    out.print(f"{pack.name} · {pack.title}", markup=False, style="bold")
    needed = [] if plan.here or plan.release_path else [pack.at(release.version) for release in chosen]
    for each in {each.requires: each for each in needed}.values():
        _base(each, out)
    if tool:
        return _use(plan, chosen[0], out)
    with pool.threads(jobs) as workers, report.Follow(2 * len(chosen), out) as follow:
        out.print(f"{len(chosen)} release(s) of {pack.package}, both sides, lane {lane}, {workers.where}", markup=False)
        rows, failures = runner.run_all([(plan, release) for release in chosen], workers, done=follow)
    if failures and len(chosen) == 1:
        raise UserError(failures[0].message)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        out.print(Text(f"{note}.", "yellow"), soft_wrap=True)
    for line in dict.fromkeys(line for row in rows for line in report.coverage(row)):
        out.print(Text(line, "yellow"), soft_wrap=True)
    surprising = list(report.surprises(rows))
    parts: list[RenderableType] = [report.proofs(rows)] if options.proofs or len(rows) <= report.PROOFS else []
    parts.append(report.table(rows, f"{pack.name} · {pack.package}" + (f" · {variant}" if variant else "")))
    parts += surprising or ([Text("✓ Every verdict is what the pack expects.", "green")] if not failures else [])
    if results != runner.RESULTS and pack.kind != "selftest" and not review:
        parts += report.compared(rows, history.load(runner.RESULTS, [find(options.pack)]))
    for part in parts:
        out.print(part)
    if options.picture is not None:
        write_atomically(options.picture, report.picture(parts, f"nox -s {pack.name}"))
    for message in dict.fromkeys(failure.message for failure in failures):
        complain(message)
    broken = [row for row in rows if row.verdict.outcome == "INFRA" and not row.as_expected]
    return USAGE if failures or broken else SURPRISE if surprising else OK


def _use(plan: runner.Plan, release: Release, out: Console) -> int:
    """The pack's script as a tool, on one release, from the folder that the user is in."""
    from common import runner

    out.print(f"{plan.pack.package} {release.version}, lane {plan.lane}", markup=False)
    done = runner.use(plan, release, Path(os.environ.get("REPRODUCER_CWD") or Path.cwd()))
    return done if done in (OK, USAGE) else SURPRISE


def _check(options: argparse.Namespace) -> None:
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs} is not a number of at least 1.")
    if getattr(options, "confirm", 1) < 1:
        raise UserError(f"--confirm {options.confirm} is not a number of at least 1.")
    if (since := getattr(options, "since", None)) is not None:
        try:
            Version(since)
        except InvalidVersion as error:
            raise UserError(f"--since {since} is not a version (PEP 440).") from error
    if options.machine is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.machine):
        raise UserError(f"--machine {options.machine} is no name for a folder: letters, digits, '.', '_' and '-' only.")
    if options.machine in NO_RECORD:
        raise UserError(f"--machine {options.machine} is no machine's name: results/{options.machine}/ is for something else.")


def _releases(plan: runner.Plan, wanted: str | None, out: Console) -> tuple[list[Release], list[str]]:
    """The releases to run, and warnings: from wheels, from where one is installed, or from the index."""
    from common import environment, report
    from common.releases import Release, choose

    pack = plan.pack
    if plan.wheels:
        return [Release(version=version, file=wheel.name, sha256="") for version, wheel in plan.wheels.items()], []
    if plan.here or plan.release_path:
        if wanted:
            raise UserError(
                "--here runs the one release that is there: give others with --wheel or --release-path, not with --releases."
            )
        there = environment.here(pack.package, plan.cache, release_path=plan.release_path)
        return [Release(version=there.version, file="", sha256="")], []
    with report.waiting(f"{pack.name}: asking the package index for the releases of {pack.package}", out):
        return choose(pack, wanted, plan.cache)


def _arguments(pack: Pack, variant: str | None, extra: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The script's arguments and a name for them: they are part of what a receipt is about."""
    if variant is not None and extra:
        raise UserError(f"--variant {variant} already names the script's arguments: give either it or {' '.join(extra)}.")
    if variant is not None:
        if variant not in pack.variants:
            known = ", ".join(pack.variants) or "none"
            raise UserError(f"{pack.name} has no variant {variant!r}; it has: {known}.")
        return variant, pack.variants[variant].arguments
    takes = set(re.findall(r"add_argument\(\s*['\"](--[a-z-]+)", pack.script.read_text(encoding="utf-8")))
    for word in extra:
        if word.startswith("--") and word.partition("=")[0] not in takes:
            raise UserError(
                f"{word} is no option of this command ('--help' lists them), nor of {pack.name}'s script ({', '.join(sorted(takes)) or 'none'})."
            )
    if extra and not extra[0].startswith("--"):
        raise UserError(f"{extra[0]!r} is not understood here: '--help' lists the options.")
    if not extra:
        return "", ()
    # Words that differ in what a name cannot show are told apart by the hash.
    told = hashlib.sha256("\0".join(extra).encode()).hexdigest()[:6]
    return f"{re.sub(r'[^a-z0-9]+', '-', ' '.join(extra).lower()).strip('-')[:60]}-{told}", tuple(extra)


def regress(options: argparse.Namespace, extra: list[str]) -> int:
    from common import history, regress, report

    _check(options)
    out = report.console()
    packs = _chosen_packs(options, out)
    with _session(options, packs, out) as (workers, plan_for, results, machine):
        load = partial(history.load, results, packs)
        choose = partial(
            regress.plan, packs, plan_for=plan_for, which=options.releases, since=options.since, again=options.again
        )
        if options.dry_run:
            _told(choose(load()), out, dry=True)
            return OK
        with regress.alone(results, machine) as journal:
            work = choose(load())
            _told(work, out)
            found = _run_cells(work, journal, workers, load, options, out)
    _bring_up_to_date(results, out)
    _print(found, out, results / machine)
    return OK if found.as_expected else SURPRISE


def _deliver(target: str, found: Report) -> None:
    text = f"{json.dumps(found.to_dict(), ensure_ascii=False)}\n"
    if target != "-":
        with writing(Path(target)):
            Path(target).write_text(text, encoding="utf-8")  # It may be a pipe, or /dev/stderr.
    else:
        print(text, end="", flush=True)


def watch(options: argparse.Namespace, extra: list[str]) -> int:
    from common import history, regress, report

    _check(options)
    if options.json != "-":
        try:
            Path(options.json).open("a").close()
        except OSError as error:
            raise UserError(f"--json {options.json} cannot be written ({error.strerror}): name another file.") from error
    out = report.console(stderr=options.json == "-")
    packs = _chosen_packs(options, out)
    if options.nightly:
        packs += [replace(pack, package=pack.nightly) for pack in packs if pack.nightly]
    with _session(options, packs, out) as (workers, plan_for, results, machine):
        load = partial(history.load, results, _packs(out) if options.results is None else packs)
        with regress.alone(results, machine) as journal:
            work = regress.plan(packs, load(), plan_for=plan_for, newer=True, pre=options.pre, pending=regress.pending(journal))
            _told(work, out)
            found = _run_cells(work, journal, workers, load, options, out, deliver=partial(_deliver, options.json))
    _bring_up_to_date(results, out)
    _print(found, out, results / machine)
    if found.changes:
        return CHANGED
    return OK if found.as_expected else SURPRISE


def _packs(out: Console) -> list[Pack]:
    """Every pack; one that is not sound is said, and stops no other."""
    problems: list[str] = []
    found = all_packs(problems=problems)
    for problem in dict.fromkeys(problems):
        out.print(Text(f"Left out: {plain(problem, None)}", "yellow"), soft_wrap=True)
    return found


def _chosen_packs(options: argparse.Namespace, out: Console) -> list[Pack]:
    """Those that were named, else all but the self-test, which says nothing of a release."""
    packs = [find(name) for name in options.pack or ()] or [pack for pack in _packs(out) if pack.kind != "selftest"]
    upstreams = sorted({pack.package for pack in packs})
    if unknown := sorted(set(options.upstream or ()) - set(upstreams)):
        raise UserError(f"No pack is about {unknown[0]!r}; there are packs about {', '.join(upstreams)}.")
    return [pack for pack in packs if not options.upstream or pack.package in options.upstream]


@contextmanager
def _session(
    options: argparse.Namespace, packs: Sequence[Pack], out: Console
) -> Iterator[tuple[Pool, Callable[[Pack, str], runner.Plan], Path, str]]:
    """Workers, what holds for each pack's runs on them, where receipts go and the machine's name."""
    from common import lanes, pool, receipt, runner
    from common.environment import gpu

    results = options.results or runner.RESULTS
    if any(pack.kind == "selftest" for pack in packs) and options.results is None:
        raise UserError("The self-test's receipts are no record of a release: name a folder for them with --results.")
    jobs = options.jobs or runner.default_jobs("device" if gpu() else "")
    there: AbstractContextManager[Pool] = (
        pool.cluster(options.scheduler, options.jobs) if options.scheduler else pool.threads(jobs)
    )
    with there as workers:
        machine = options.machine or str(workers.ask(receipt.machine_name))
        strongest = {pack.name: str(workers.ask(partial(lanes.choose, pack))) for pack in packs}
        out.print(f"{machine}, {workers.where}", markup=False)

        def plan_for(pack: Pack, variant: str) -> runner.Plan:
            own = pack.variants.get(variant)
            lane = (own.lane if own else None) or strongest[pack.name]
            return runner.Plan(
                pack=pack.varied(variant, lane),
                lane=lane,
                arguments=own.arguments if own else (),
                variant=variant,
                results=results.resolve(),
                machine=machine,
                # On a cluster it is not known how many runs share a machine's cores.
                threads=1 if options.scheduler else runner.threads_each(jobs),
            )

        yield workers, plan_for, results.resolve(), machine


def _told(work: Work, out: Console, *, dry: bool = False) -> None:
    """What is to be done, before it is."""
    for warning in work.warnings:
        out.print(Text(warning, "yellow"), soft_wrap=True)
    by_pack: dict[str, list[str]] = {}
    for planned, release in work.tasks:
        named = f"{planned.pack.name} {planned.variant}".rstrip()
        by_pack.setdefault(f"{named} {planned.pack.package} ({planned.lane})", []).append(release.version)
    fresh = len(work.cells) - len(work.tasks)
    out.print(f"{len(work.cells)} releases: {fresh} with fresh receipts, {len(work.tasks)} to run on both sides.", markup=False)
    for name, versions in by_pack.items() if dry else ():
        out.print(f"  {name}: {', '.join(versions)}", markup=False, soft_wrap=True)
    for problem in work.problems if dry else ():
        out.print(Text(f"✗ {problem}", "red"), soft_wrap=True)


def _run_cells(
    work: Work,
    journal: Path,
    workers: Pool,
    load: Callable[[], history.History],
    options: argparse.Namespace,
    out: Console,
    *,
    deliver: Callable[[Report], None] = lambda found: None,
) -> Report:
    from common import regress, report, runner

    for label in runner.killed(runner.CACHE):
        out.print(Text(f"A run that was killed was cleared away: {label}.", "yellow"))
    needed = [planned.pack.at(release.version) for planned, release in work.tasks]
    for pack in {pack.requires: pack for pack in needed}.values():
        _base(pack, out)
    with report.Follow(2 * len(work.tasks), out, quiet=options.only_changes) as follow:
        return regress.run(
            work,
            journal,
            workers,
            load,
            confirm=options.confirm,
            done=follow,
            say=lambda line: out.print(Text(line, "yellow"), soft_wrap=True),
            deliver=deliver,
        )


def _base(pack: Pack, out: Console) -> None:
    """Install what the releases share, once; where that fails, the runs that need it say so."""
    from common import environment, report, runner

    if not environment.has_base(pack.requires, runner.CACHE):
        with report.waiting(f"installing {', '.join(pack.requires) or 'nothing'} once, for every release to share", out):
            environment.base(pack.requires, runner.CACHE)


def _bring_up_to_date(results: Path, out: Console) -> None:
    from common import runner, tables

    if results == runner.RESULTS.resolve():
        for path in tables.update():
            out.print(f"rewritten: {path}", markup=False)


def _print(found: Report, out: Console, folder: Path) -> None:
    """The closing lines, the changes last."""
    from common import report

    for label in found.killed:
        out.print(Text(f"Run again, for an earlier run of it had been killed: {label}.", "yellow"), soft_wrap=True)
    for problem in found.problems:
        out.print(Text(f"✗ {problem}", "red"), soft_wrap=True)
    for line in found.unexpected:
        out.print(Text(f"✗ {line}", "red"), soft_wrap=True)
    wrong = len(found.unexpected) + len(found.problems)
    said = f"{wrong} not as expected" if wrong else "every verdict is what its pack expects" if found.cells else "none to run"
    out.print(
        f"{found.ran} runs, {found.cells} cells: {said}. Receipts in {report.where(folder)}/.", markup=False, soft_wrap=True
    )
    for machine, count in found.stale.items():
        out.print(
            Text(f"stale      {machine}: {count} receipt(s), made by another script or fix than today's", "dim"), soft_wrap=True
        )
    for change in found.changes:
        out.print(Text(f"{change.kind:<10} {change}", "red" if change.kind != "fixed" else "green"), soft_wrap=True)
    if not found.changes:
        out.print("Nothing changed.")


def pins(options: argparse.Namespace, extra: list[str]) -> int:
    from common import history, report, runner
    from common import pins as pinning
    from common.releases import releases

    out = report.console(stderr=options.json)
    packs = [pack for pack in _packs(out) if pack.kind != "selftest"]
    known = sorted({pack.package for pack in packs})
    if unknown := [name for name in options.upstream if name not in known]:
        raise UserError(f"No pack is about {unknown[0]!r}; there are packs about {', '.join(known)}.")
    stored = history.load(options.results or runner.RESULTS, packs)
    for error in stored.unreadable.values():
        out.print(Text(f"Not counted: {plain(str(error), None)}", "yellow"), soft_wrap=True)
    advices = []
    for package in options.upstream or known:
        offered = None
        try:
            found, warning = releases(package, runner.CACHE)
            offered = {release.version: release.yanked for release in found}
        except UserError as error:
            warning = f"{error} So a release that was yanked or deleted is not known as such."
        if warning:
            out.print(Text(warning, "yellow"), soft_wrap=True)
        advices.append(pinning.advise(package, packs, stored, offered=offered))
    if options.json:
        print(json.dumps([advice.to_dict() for advice in advices], indent=1, ensure_ascii=False))
    else:
        for line in (line for advice in advices for line in pinning.text(advice)):
            out.print(line, markup=False, soft_wrap=True)
    write_atomically(options.output, pinning.constraints(advices))
    out.print(f"written: {report.where(options.output)}", markup=False)
    return OK


def site(options: argparse.Namespace, extra: list[str]) -> int:
    from common import history, report, runner
    from common import site as pages

    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("The plots need matplotlib: python -m pip install matplotlib (nox does it by itself).")
    if options.base_url and not re.match(r"https?://", options.base_url):
        raise UserError(
            f"--base-url {options.base_url} is no address: give one such as https://github.com/OWNER/NAME/blob/main."
        )
    out = report.console()
    packs = [pack for pack in _packs(out) if pack.kind != "selftest"]
    stored = history.load(options.results or runner.RESULTS, packs)
    for error in stored.unreadable.values():
        out.print(Text(f"Not counted: {plain(str(error), None)}", "yellow"), soft_wrap=True)
    with report.waiting(f"making pages from {len(stored.runs)} receipts", out):
        count = pages.build(packs, stored, options.output, base_url=options.base_url)
    out.print(f"{count} pages. Open {report.where(options.output / 'index.html')}", markup=False, soft_wrap=True)
    return OK


def listing(options: argparse.Namespace, extra: list[str]) -> int:
    from rich.table import Table

    from common import report

    table = Table(header_style="bold", pad_edge=False)
    for column in ("pack", "upstream", "kind", "pinned", "what"):
        table.add_column(column, overflow="fold")
    for pack in _packs(report.console(stderr=True)):
        table.add_row(*map(Text, (pack.name, pack.package, pack.kind, ", ".join(pack.pinned), pack.title)))
    report.console().print(table)
    return OK


def attach(options: argparse.Namespace, extra: list[str]) -> int:
    from common import attach as attaching
    from common import report, runner

    out = report.console()
    results = options.results or runner.RESULTS
    files = attaching.write(find(options.pack), results, machine=options.machine, template=options.template)
    out.print("Read it, run the pack once more if in doubt, and sign it with your own name. To attach:")
    for path in files:
        out.print(f"  {report.where(path)}", markup=False, soft_wrap=True)
    return OK


def new_pack(options: argparse.Namespace, extra: list[str]) -> int:
    from common import report, scaffold

    for path in scaffold.new_pack(options.number, options.slug, options.package):
        report.console().print(report.where(path), markup=False)
    return OK


def tables(options: argparse.Namespace, extra: list[str]) -> int:
    from common import tables as generated

    stale = generated.update(check=options.check)
    for path in stale:
        print(f"{path}: {'not up to date: run python -m common tables' if options.check else 'rewritten'}")
    return SURPRISE if stale and options.check else OK


def audit(options: argparse.Namespace, extra: list[str]) -> int:
    from common import audit as auditing
    from common import receipt, report, runner

    out = report.console()
    results = options.results or runner.RESULTS
    paths = receipt.stored(results)
    if not paths:
        raise UserError(f"There is no receipt in {results}.")
    published = auditing.Published(runner.CACHE)
    look = auditing.regrade if options.command == "regrade" else lambda path: auditing.verify(path, published)
    wrong = 0
    for path, problems in auditing.problems(results, paths, look):
        wrong += bool(problems)
        for problem in problems:
            out.print(Text(plain(f"✗ {report.where(path)}: {problem}", None), "red"), soft_wrap=True)
    for warning in published.warnings:
        out.print(Text(warning, "yellow"))
    what = "graded differently today" if options.command == "regrade" else "not sound"
    out.print(f"{len(paths)} receipts, {wrong} {what}.", markup=False)
    return SURPRISE if wrong else OK


def bench(options: argparse.Namespace, extra: list[str]) -> int:
    from common import bench as benchmark

    benchmark.main(quick=options.quick)
    return OK
