"""``pins``: which release to pin, what is wrong with the others, and constraints.txt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common.cli import common, report
from common.errors import UserError
from common.files import CACHE, write_atomically
from common.install.releases import releases
from common.packs.pack import find
from common.publish import pins

HELP = "say which release to pin and what is wrong with the others, and write constraints.txt"
DESCRIPTION = """Say which release of each upstream to pin, on what evidence, and what is wrong with the others, from the stored receipts; and
write it as constraints for pip and uv. A release is advised if every pack about it found it right, or without the API that the bug is in.
Exits with 1 if one that was asked for cannot be advised."""


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("upstream", nargs="*", help="e.g. liger-kernel (default: all that there are packs about)")
    parser.add_argument(
        "--pack", action="append", metavar="PACK", help="consider only this pack's bug; may be repeated (default: every pack)"
    )
    parser.add_argument("--json", action="store_true", help="the advice as JSON on standard output")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("constraints.txt"),
        metavar="FILE",
        help="where the constraints go (default: constraints.txt)",
    )
    common.results_option(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    out = report.console(stderr=options.json)
    packs = common.about_upstreams(out)
    known = sorted({pack.package for pack in packs})
    if unknown := [name for name in options.upstream if name not in known]:
        raise UserError(f"No pack is about {unknown[0]!r}; there are packs about {', '.join(known)}.")
    only = {find(name).name for name in options.pack} if options.pack else None
    common.about_these((pack for pack in packs if pack.name in (only or ())), options.upstream)
    if only and (others := sorted(only - {p.name for p in packs})):
        raise UserError(f"{others[0]} is about no upstream: name another pack.")
    target = common.output(options.output, pins.HEADER)
    asked = options.upstream or sorted({pack.package for pack in packs if only is None or pack.name in only})
    stored = common.stored(options, packs, out)
    advices = []
    for package in asked:
        offered = None
        try:
            found, warning = releases(package, CACHE)
            offered = {release.version: release.yanked for release in found}
        except UserError as error:
            warning = f"{error} So a release that was yanked or deleted is not known as such."
        if warning:
            common.warn(warning, out)
        advices.append(pins.advise(package, packs, stored, offered=offered, only=only))
    if options.json:
        print(json.dumps([advice.to_dict() for advice in advices], indent=1, ensure_ascii=False))
    else:
        for line in (line for advice in advices for line in pins.text(advice)):
            out.print(line, markup=False, soft_wrap=True)
    write_atomically(target, pins.constraints(advices))
    out.print(f"written: {report.where(target)}", markup=False)
    refused = bool(options.upstream or only) and any(advice.pin is None for advice in advices)
    return common.SURPRISE if refused else common.OK
