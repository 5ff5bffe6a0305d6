"""``hunt``: search a release for deviations from a contract, by differential testing, and write what is found as packs."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from common.cli import common, report
from common.errors import UserError
from common.files import CACHE
from common.install import checkouts, environment, lanes, releases
from common.install.releases import Release
from common.packs.pack import Pack, load
from common.packs.pack import find as find_pack
from common.publish import found
from common.run import hunt, runner
from common.run import plan as plans
from common.run.plan import Plan

HELP = "search a release for deviations from a contract, by differential testing"
DESCRIPTION = """Try cases of a contract on a release (shapes, dtypes, layouts, options), each against the definition in fp64, in a process that may
die; shrink what is wrong to the least case, leave out what a pack shows already, and write the rest as packs into hunted/. The same seed tries the
same cases. Exit status: 0 nothing new, 1 something new, 2 a mistake."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument(
        "release", metavar="PACKAGE[==VERSION]", help="liger-kernel==0.8.5; the newest that its pack pins without a version"
    )
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which cases, and in which order (default 0)")
    parser.add_argument("--pack", metavar="PACK", help="the pack whose hunt.py says what to vary, where a package has several")
    parser.add_argument(
        "--reference", action="store_true", help="ask the definition in place of the release: nothing may be found"
    )
    parser.add_argument("--lane", metavar="LANE", help="the lane to run in (default: device where there is one)")
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel of the package, or an sdist of plain Python")
    file.add_argument("--checkout", type=Path, metavar="DIR", help="a working tree of the package, as it is now")
    parser.add_argument("--here", action="store_true", help="in the active environment: no nox, no network, nothing installed")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where packs are written (default: hunted/ where you are)")


def call(options: argparse.Namespace, extra: list[str]) -> int:
    out = report.console()
    if not 0 < options.minutes < math.inf:
        raise UserError(f"--minutes {options.minutes:g} is not a duration: give a number greater than 0.")
    folder = common.given(options.output) if options.output else common.called_from() / "hunted"
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--output {folder} cannot be written: name another folder.")
    pack, version = _target(options)
    lane = lanes.choose(pack, options.lane)
    given = {"threads": 2, "results": CACHE / "hunts", "cache": CACHE, "here": options.here} | _file(options, pack, version)
    plan = plans.planned(pack, "", lane, **given)
    release = _release(plan, version, out)
    what = "its definition" if options.reference else f"{pack.package} {release.version}"
    if not options.here:
        common.base(plan.pack.at(release.version), out)
    out.print(f"{what}, by {pack.name}'s hunt.py, seed {options.seed}, {options.minutes:g} min, lane {lane}", markup=False)
    with hunt.pool(plan, release, reference=options.reference) as asked:
        told = hunt.hunt(
            asked,
            seed=options.seed,
            seconds=60 * options.minutes,
            say=lambda line: out.print(line, markup=False, soft_wrap=True),
        )
    new = [find for find in told.finds if find.pack is None and find.sure]
    for line in _covered(told):
        out.print(line, markup=False, soft_wrap=True)
    if any(not find.differs for find in new):
        out.print(
            "The plainest case is wrong, so there is nothing to hold a find against, and no pack is written.", markup=False
        )
    for number, find in enumerate([find for find in new if find.differs] if not options.reference else (), 90):
        place = found.write(find, pack, release.version, options.seed, folder, number, plan.wheels.get(release.version))
        saw = "not run"
        if not told.stopped:
            saw = str(runner.run_unpatched(plans.planned(load(place), "", lane, **given), release).verdict)
        out.print(f"written: {place} ({saw})", markup=False, soft_wrap=True)
    if told.stopped:
        out.print("Stopped by Ctrl-C.", style="yellow")
        return common.INTERRUPTED
    known = [find for find in told.finds if find.pack]
    out.print(
        f"{'✗' if new else '✓'} {len(new)} new, {len(known)} known ({', '.join(str(find.pack) for find in known) or 'none'})",
        style="red" if new else "green",
        markup=False,
    )
    return common.SURPRISE if new else common.OK


def _target(options: argparse.Namespace) -> tuple[Pack, str]:
    """The pack that says what to vary, and which release of its package is asked for."""
    try:
        wanted = Requirement(options.release)
    except InvalidRequirement:
        wanted = None
    if wanted is None or wanted.url or wanted.extras or wanted.marker or [s for s in wanted.specifier if s.operator != "=="]:
        raise UserError(f"{options.release!r} is not a package and one version: write liger-kernel==0.8.5.")
    packs = [pack for pack in common.about_upstreams(report.console(stderr=True)) if pack.hunt]
    about = [pack for pack in packs if canonicalize_name(pack.package) == canonicalize_name(wanted.name)]
    if not about:
        names = ", ".join(sorted({pack.package for pack in packs}))
        raise UserError(f"No pack has a hunt.py for {wanted.name}; there are some for {names}.")
    names = ", ".join(pack.name for pack in about)
    if options.pack:
        about = [pack for pack in about if pack.name == find_pack(options.pack).name]
    if not about:
        raise UserError(f"{options.pack} has no hunt.py for {wanted.name}: give --pack {names}.")
    if len(about) > 1:
        raise UserError(f"Several packs have a hunt.py for {wanted.name}: give --pack {names}.")
    return about[0], str(wanted.specifier).removeprefix("==")


def _file(options: argparse.Namespace, pack: Pack, version: str) -> dict[str, Any]:
    """The plan's fields of a wheel or a checkout that is hunted in place of the index's release."""
    if not (options.wheel or options.checkout):
        return {}
    if version:
        raise UserError(f"{options.release} with a file of its own: write {pack.package} alone, its version is the file's.")
    asked = options.wheel or options.checkout
    wheel = common.given(asked) if options.wheel else checkouts.wheel(pack, common.given(asked), None, CACHE)
    found = environment.read_wheel(wheel, pack.package)[1]
    return {"wheels": {found: wheel.resolve()}, "checkout": options.checkout is not None}


def _release(plan: Plan, version: str, out: Console) -> Release:
    if plan.wheels:
        return next(Release(version=version, file=wheel.name, sha256="") for version, wheel in plan.wheels.items())
    if plan.here:
        there = environment.here(plan.pack.package, plan.cache)
        if version not in ("", there.version):
            raise UserError(f"{plan.pack.package} {there.version} is here, not {version}: give another with --wheel.")
        return Release(version=there.version, file="", sha256="")
    chosen, warnings = releases.choose(plan.pack, version or plan.pack.pinned[-1], plan.cache)
    for warning in warnings:
        common.warn(warning, out)
    if len(chosen) != 1:
        raise UserError(f"A hunt is on one release; {version} are {len(chosen)}.")
    return chosen[0]


def _covered(told: hunt.Report) -> list[str]:
    """What was looked at, so that a hunt that finds nothing says something."""
    ended = ", ".join(f"{count} {name}" for name, count in told.ended.items())
    lines = [f"{sum(told.ended.values())} cases in {told.seconds:.0f} s: {ended}. Judged cases by option:"]
    for name, values in told.space.items():
        row = told.tried.get(name, {})
        lines.append(f"  {name}: {', '.join(f'{json.dumps(v)} {row.get(json.dumps(v), 0)}' for v in values)}")
    if told.lines:
        lines.append(f"  lines of {Path(told.file).name} that ran in every tenth case: {len(told.lines)}")
    return lines
