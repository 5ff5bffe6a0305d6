"""``run``: a pack on releases of its upstream, unpatched and patched, compared with what is recorded."""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType

from common import transforms
from common.cli import author, common, report
from common.errors import UserError
from common.files import CACHE, RESULTS, write_atomically
from common.install import checkouts, environment, lanes, releases, sources
from common.install.releases import Release
from common.packs.pack import Pack, find
from common.run import overlay, pool, runner
from common.run import plan as plans
from common.run.plan import Plan, Row
from common.store import history

HELP = "run a pack on releases of its upstream, unpatched and patched"
DESCRIPTION = f"""{HELP.capitalize()}, and compare with what is recorded. Arguments of the pack's own script (--shape, --dtype, …)
may follow and are handed to it."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    # A nox session names the pack itself.
    parser.add_argument("pack", help=argparse.SUPPRESS if session else "pack09, 09 or 9")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--releases",
        "--release",
        action="append",
        metavar="WHICH",
        help="pinned (the default), all, or versions and specifiers: 0.6.5 or '>=0.6,<0.8'; may be repeated",
    )
    which.add_argument(
        "--wheel",
        type=Path,
        action="append",
        metavar="FILE",
        help="a wheel of the upstream package, or an sdist of plain Python; may be repeated",
    )
    which.add_argument(
        "--release-path",
        type=Path,
        metavar="DIR",
        help="a folder that holds the installed release (pip install --target DIR)",
    )
    which.add_argument(
        "--checkout",
        type=Path,
        metavar="DIR",
        help="your clone of the upstream as it is now, changes that are not committed included: does it have the bug?",
    )
    which.add_argument("--commit", metavar="REF", help="a commit, branch or tag of the clone that --source names")
    which.add_argument("--pr", type=int, metavar="N", help="a pull request of the upstream, fetched from GitHub")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a clone of the upstream, for what is a commit of it")
    parser.add_argument("--here", action="store_true", help="in the active environment: no nox, no network, nothing installed")
    parser.add_argument(
        "--patch",
        metavar="DIFF",
        help="judge this diff (a pull request under review) instead of the pack's fix: a file, an address, or - for standard input",
    )
    parser.add_argument(
        "--without", metavar="TRANSFORM", help="leave out one transform of the fix: the patched side must then fail"
    )
    parser.add_argument(
        "--sandbox",
        action="store_true",
        help="run each script under bubblewrap: no network, your files out of sight, nothing to write (docs/security.md)",
    )
    parser.add_argument("--lane", help="this lane instead of the strongest that the machine allows")
    parser.add_argument("--variant", help="arguments that the pack has a name for (see its pack.toml)")
    common.pool_options(parser)
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the receipts in results/, as regress does (in results/review/DIFF/ with --patch)",
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where receipts go (default: .cache/runs/, or results/ with --record)"
    )
    parser.add_argument("--propose", action="store_true", help="print the [expected] block of pack.toml that these runs give")
    parser.add_argument(
        "--diff", nargs="?", const="", metavar="RELEASE", help="run nothing: print what the pack's fix changes in a release"
    )
    parser.add_argument(
        "--debug",
        nargs="?",
        const="unpatched",
        choices=("unpatched", "patched"),
        help="run repro.py alone on one release and side, on this terminal, and say how; nothing is graded",
    )
    parser.add_argument("--proofs", action="store_true", help="print the three proofs of every verdict, however many")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="also save what is printed as a picture")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    pack = find(options.pack)
    common.check(options)
    common.judges(pack)
    _read(options)
    # A diff is all that stands on stdout, so that it can be sent to a file.
    out = report.console(stderr=options.diff is not None)
    plan, review = _planned(pack, options, extra, out)
    chosen, warnings = _releases(plan, options.releases, out)
    tool = next((pack.tools[word] for word in plan.arguments if word in pack.tools), None)
    if tool and options.releases is None:
        chosen = chosen[-1:]  # the newest that the pack pins
    if tool and len(chosen) != 1:
        raise UserError(
            f"{' '.join(plan.arguments)} is for one release; --releases {' '.join(options.releases)} are {len(chosen)}."
        )
    plan = replace(plan, several=len(chosen) > 1)
    own = pack.variants.get(plan.variant)
    if options.record and not review and not (own and own.source):
        _of_the_index(plan)
    for warning in warnings:
        common.warn(warning, out)
    out.print(f"{pack.name} · {pack.title}", markup=False, style="bold")
    needed = [] if plan.here or plan.release_path else [plan.pack.at(release.version) for release in chosen]
    for each in {each.requires: each for each in needed}.values():
        common.base(each, out)
    if tool:
        return _use(plan, chosen[0], pack.folder / tool, out)
    if options.diff is not None or options.debug:
        return _shown(plan, chosen, options, out)
    return _judged(plan, chosen, options, review, out)


def _read(options: argparse.Namespace) -> None:
    """Paths as the caller means them; and what one option says of another."""
    for name in ("checkout", "source", "release_path", "results"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, common.given(path))
    common.folder(options.results, "--results")
    mode, more = ("debug", ("diff",)) if options.debug else ("diff", ("patch", "without"))
    for other in (*more, "propose", "picture", "record", "proofs") if options.debug or options.diff is not None else ():
        if getattr(options, other) not in (None, False):
            raise UserError(f"--{mode} grades nothing; it has no meaning beside --{other}.")
    options.picture = options.picture and common.output(options.picture, "<svg")
    options.wheel = [common.given(wheel) for wheel in options.wheel or ()]
    # What goes to results/ by that name is recorded as what --record puts there.
    options.record = options.record or (options.results is not None and options.results.resolve().is_relative_to(RESULTS))
    if options.diff:
        options.releases = [*(options.releases or ()), options.diff]


def _planned(pack: Pack, options: argparse.Namespace, extra: Sequence[str], out: Console) -> tuple[Plan, bool]:
    """How the pack is run, and whether that is a review: of a diff or a checkout, which are no record of a release."""
    variant, given = _arguments(pack, options.variant, extra)
    own = pack.variants.get(variant)
    lane = lanes.choose(pack, options.lane or (own.lane if own else None))
    if options.record and (pack.kind == "selftest" or options.without):
        raise UserError("--record is for fixes on releases: the self-test and --without make no record.")
    checkout = _checkout(pack, variant, options, out)
    _fix(pack, options)
    if options.record:
        common.formatted([pack], out)
    results = options.results or (RESULTS if options.record else CACHE / "runs")
    of = ""
    if options.patch is not None or options.without is not None:
        of = options.patch.stem if options.patch else f"without-{options.without}"
    if checkout:
        of = checkout.name.split("-")[1]
    plan = plans.planned(
        pack,
        variant,
        lane,
        threads=plans.threads_each(options.jobs or plans.default_jobs(lane)),
        patch=options.patch,
        drop=options.without,
        here=options.here,
        wheels={environment.read_wheel(checkout, pack.package)[1]: checkout}
        if checkout
        else _wheels(pack, variant, options, out),
        checkout=checkout is not None,
        release_path=options.release_path,
        sandbox=options.sandbox,
        results=results / "review" / overlay.plain_name(of) if of else results,
        **({"machine": options.machine} if options.machine else {}),
        **({} if own else {"arguments": given}),
    )
    return plan, bool(of)


def _shown(plan: Plan, chosen: Sequence[Release], options: argparse.Namespace, out: Console) -> int:
    """What the fix changes in a release (--diff), or one script on this terminal (--debug): nothing is graded."""
    release = author.one(
        plan.pack, chosen, "--diff" if options.debug is None else "--debug", named=options.releases is not None
    )
    if options.debug:
        return runner.debug(plan, release, options.debug, lambda line: out.print(line, markup=False, soft_wrap=True))
    author.diff(plan, release, report.console())
    return common.OK


def _judged(plan: Plan, chosen: Sequence[Release], options: argparse.Namespace, review: bool, out: Console) -> int:
    """Run both sides of some releases, and tell what came of them."""
    wanted = [(plan, release) for release in chosen]
    missing: list[str] = []
    if options.releases in (None, ["pinned"]) and not (
        plan.checkout or plan.arguments or plan.variant or plan.wheels or plan.release_path or plan.patch
    ):
        wanted, missing = _with_commits(plan, wanted, options.source, out)
    for sentence in missing:
        common.warn(sentence, out)
    jobs = options.jobs or plans.default_jobs(plan.lane)
    with pool.threads(jobs) as workers, report.Follow(2 * len(wanted), out) as follow:
        commits = f" and {more} commit(s)" if (more := len(wanted) - len(chosen)) else ""
        what = (
            f"{plan.pack.package} {chosen[0].version}"
            if plan.checkout
            else f"{len(chosen)} release(s){commits} of {plan.pack.package}, both sides"
        )
        out.print(f"{what}, lane {plan.lane}, {workers.where}", markup=False)
        rows, failures = runner.run_all(wanted, workers, done=follow)
    if failures and len(wanted) == 1:
        raise UserError(failures[0].message)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        common.warn(f"{note}.", out)
    for line in dict.fromkeys(line for row in rows for line in report.coverage(row)):
        common.warn(line, out)
    surprising = [] if options.propose else list(report.surprises(rows))
    parts = _parts(plan, rows, options, surprising)
    if not (plan.checkout or options.propose or failures or surprising):
        parts.append(report.ending(rows, len(missing)))
    if plan.results.resolve() != RESULTS and plan.pack.kind != "selftest" and not (review or options.propose):
        parts += report.compared(rows, history.load(RESULTS, [plan.pack]), keep=not _is_as_installed(plan))
    for part in parts if rows else ():
        out.print(part)
    if options.propose:
        out.print("", *author.proposed(rows), sep="\n", markup=False, soft_wrap=True)
    if options.picture is not None:
        write_atomically(options.picture, report.picture(parts, f"nox -s {plan.pack.name}"))
    for message in dict.fromkeys(failure.message for failure in failures):
        common.complain(message)
    broken = [row for row in rows if row.verdict.outcome == "INFRA" and not row.as_expected]
    return common.USAGE if failures or broken else common.SURPRISE if surprising else common.OK


def _parts(
    plan: Plan, rows: Sequence[Row], options: argparse.Namespace, surprising: Sequence[RenderableType]
) -> list[RenderableType]:
    """What is said of the runs: proofs, the table, claims, and what was not expected."""
    pack, parts = plan.pack, list[RenderableType]()
    if options.proofs or len(rows) <= report.PROOFS:
        parts.append(report.proofs(rows, whole=options.proofs))
    title = f"{pack.name} · {pack.package}" + (f" · {plan.variant}" if plan.variant else "")
    parts.append(report.table(rows, title, judged=not options.propose))
    parts += report.claims(rows)
    parts += report.marks(rows)
    if plan.checkout and rows and rows[0].verdict.outcome != "MEASURED":
        parts.append(report.of_checkout(rows[0], pack.deep_check(plan.variant) is not None))
    return parts if plan.checkout else [*parts, *surprising]


def _fix(pack: Pack, options: argparse.Namespace) -> None:
    """Look at what is to be applied before anything is run: mistakes in it are told at once."""
    if options.patch is not None and options.without is not None:
        raise UserError("--without leaves out a part of the pack's own fix; it has no meaning beside --patch.")
    if options.patch is not None:
        options.patch = common.given(sources.of_diff(options.patch, CACHE))
        overlay.read_diff(options.patch)
        return
    fix = transforms.load_fix(pack.fix) if pack.fix.is_file() else {}
    if options.without is not None:
        overlay.drop(fix, options.without)


def _with_commits(
    plan: Plan, wanted: list[tuple[Plan, Release]], source: Path | None, out: Console
) -> tuple[list[tuple[Plan, Release]], list[str]]:
    """What is wanted and the pack's pinned commits, and a sentence for each commit that cannot be had here."""
    found, missing = list(wanted), []
    for name in plan.pack.pinned_commits():
        own = plan.pack.variants[name]
        try:
            with report.waiting(f"{plan.pack.name}: looking for commit {name} of {plan.pack.upstream}", out):
                wheel = sources.wheel(plan.pack, name, source, CACHE)
        except sources.NoSource as error:
            missing.append(str(error))
            continue
        version = environment.read_wheel(wheel, plan.pack.package)[1]
        release = Release(version=version, file=wheel.name, sha256="")
        varied = plan.pack.varied(name, plan.lane)  # with the pins that it may have of its own
        wheels = {version: wheel.resolve()}
        found.append((replace(plan, pack=varied, variant=name, arguments=own.arguments, wheels=wheels), release))
    return found, missing


def _is_as_installed(plan: Plan) -> bool:
    """Whether what is run was found installed, and not made from a file of the release."""
    return plan.release_path is not None or (plan.here and not plan.wheels)


def _of_the_index(plan: Plan) -> None:
    """What is recorded of a release rests on the files that the index has of it, and on no others that bear its version."""
    if _is_as_installed(plan):
        raise UserError("--record keeps what was seen of a release's own file: name it with --wheel, or leave --record out.")
    if not plan.wheels:
        return
    try:
        listed = releases.releases(plan.pack.package, plan.cache, python=plan.pack.python, index=plan.pack.index)[0]
    except ModuleNotFoundError as error:
        raise UserError(
            f"--record asks the index for the hashes of its files, for which {error.name} is not installed here: "
            "leave --record out and say with --results where receipts go."
        ) from error
    known = {r.version: (r.sha256, *r.others) for r in listed}
    for version, wheel in plan.wheels.items():
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in known.get(version, ()):
            raise UserError(
                f"{wheel.name} is not the file that the index has of {plan.pack.package} {version}, so it is no record of that "
                "release: leave --record out, or judge your clone with --checkout."
            )


def _checkout(pack: Pack, variant: str, options: argparse.Namespace, out: Console) -> Path | None:
    """The wheel of a working tree, a commit or a pull request, where one is asked for."""
    asked = [name for name in ("checkout", "commit", "pr") if getattr(options, name) is not None]
    if not asked:
        return None
    own = pack.variants.get(variant)
    for other in ("patch", "without", "here", "propose", "debug", "diff"):
        if getattr(options, other):
            raise UserError(f"--{asked[0]} runs what it names as it is; it has no meaning beside --{other}.")
    if options.pr is not None and options.pr < 1:
        raise UserError(f"--pr {options.pr} is not the number of a pull request.")
    if own and own.source:
        raise UserError(f"The variant {variant} is a commit itself; --{asked[0]} names another.")
    if pack.as_files or pack.kind == "selftest":
        raise UserError(f"{pack.name} runs files of its own making, not a checkout of {pack.repository}.")
    if options.commit is not None and options.source is None:
        raise UserError(
            f"--commit {options.commit} is a commit of which clone of {pack.repository}? Name it with --source DIR."
        )
    if options.pr is not None and options.source is None:
        with report.waiting(f"{pack.name}: fetching pull request {options.pr} of {pack.repository}", out):
            source, commit = sources.pull_request(pack.repository, options.pr, CACHE)
        return checkouts.wheel(pack, source, commit, CACHE)
    ref = f"refs/pull/{options.pr}/head" if options.pr is not None else options.commit
    return checkouts.wheel(pack, options.checkout or options.source, ref, CACHE)


def _wheels(pack: Pack, variant: str, options: argparse.Namespace, out: Console) -> dict[str, Path]:
    """The files that are given in place of the index's, by version."""
    own = pack.variants.get(variant)
    given = list(options.wheel)
    if own and own.source and (given or options.release_path or (options.here and options.source is None)):
        raise UserError(
            f"The variant {variant} is commit {own.source[:10]} and nothing else: --source DIR names a clone that has it."
        )
    if own and own.source:
        with report.waiting(f"{pack.name}: looking for commit {own.source[:10]} of {pack.upstream}", out):
            given = [sources.wheel(pack, variant, options.source, CACHE)]
    elif options.source and (variant or not pack.pinned_commits()):
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
    return wheels


def _use(plan: Plan, release: Release, script: Path, out: Console) -> int:
    """The pack's script as a tool, on one release, from the folder that the user is in."""
    out.print(f"{plan.pack.package} {release.version}, lane {plan.lane}", markup=False)
    done = runner.use(plan, release, script, common.called_from())
    return (
        done if done in (common.OK, common.USAGE, 10) else common.SURPRISE
    )  # 10 is what a tool found, as it is a bug of a script


def _releases(plan: Plan, wanted: Sequence[str] | None, out: Console) -> tuple[list[Release], list[str]]:
    """The releases to run, and warnings: from wheels, from where one is installed, or from the index."""
    pack = plan.pack
    if plan.wheels and wanted:
        raise UserError(
            "--releases is about releases of the index, and a file, a commit or a checkout is given: leave one out."
        )
    if plan.wheels:
        return [Release(version=version, file=wheel.name, sha256="") for version, wheel in plan.wheels.items()], []
    if plan.here or plan.release_path:
        if wanted:
            raise UserError(
                "--here runs the one release that is there: give others with --wheel or --release-path, not with --releases."
            )
        return [common.there(plan)], []
    with report.waiting(f"{pack.name}: asking the package index for the releases of {pack.package}", out):
        found = [releases.choose(pack, each, plan.cache) for each in wanted or (None,)]
    chosen = {release.version: release for those, _ in found for release in those}
    return list(chosen.values()), list(dict.fromkeys(warning for _, told in found for warning in told))


def _arguments(pack: Pack, variant: str | None, extra: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The script's arguments and a name for them: they are part of what a receipt is about."""
    if variant is not None and extra:
        raise UserError(f"--variant {variant} already names the script's arguments: give either it or {' '.join(extra)}.")
    if variant is not None:
        if variant not in pack.variants:
            known = ", ".join(pack.variants) or "none"
            raise UserError(f"{pack.name} has no variant {variant!r}; it has: {known}.")
        return variant, pack.variants[variant].arguments
    tools = [pack.folder / script for option, script in pack.tools.items() if option in extra]
    text = "".join(script.read_text(encoding="utf-8") for script in (pack.script, *tools))
    takes = set(pack.tools) | set(re.findall(r"add_argument\(\s*['\"](--[a-z-]+)", text))
    for word in extra:
        if word.startswith("--") and word.partition("=")[0] not in takes:
            raise UserError(
                f"{word} is not an option of this command ('--help' lists them), nor of {pack.name}'s script ({', '.join(sorted(takes)) or 'none'})."
            )
    if extra and not extra[0].startswith("--"):
        raise UserError(f"{extra[0]!r} is not understood here: '--help' lists the options.")
    if not extra:
        return "", ()
    # Words that differ in what a name cannot show are told apart by the hash.
    told = hashlib.sha256("\0".join(extra).encode()).hexdigest()[:6]
    return f"{re.sub(r'[^a-z0-9]+', '-', ' '.join(extra).lower()).strip('-')[:60]}-{told}", tuple(extra)
