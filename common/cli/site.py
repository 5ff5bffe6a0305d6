"""``site``: the static site, from the stored receipts."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

from common.cli import common, report
from common.errors import UserError

HELP = "make the static site from the stored receipts"
DESCRIPTION = f"{HELP.capitalize()}: it opens from disk, with no server and no network."


def arguments(parser: argparse.ArgumentParser, session: str | None) -> None:
    parser.add_argument("--output", type=Path, default=Path("site"), metavar="DIR", help="where it goes (default: site/)")
    parser.add_argument("--base-url", metavar="URL", help="where this checkout can be browsed: links of READMEs lead there")
    common.results_option(parser)


def call(options: argparse.Namespace, extra: list[str]) -> int:
    from common.publish import site  # which needs what draws plots, and that may be missing

    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("The plots need matplotlib: python -m pip install matplotlib (nox does it by itself).")
    if options.base_url and not re.match(r"https?://", options.base_url):
        raise UserError(
            f"--base-url {options.base_url} is not a URL: give one such as https://github.com/OWNER/NAME/blob/main."
        )
    options.output = common.given(options.output)
    out = report.console()
    packs = common.about_upstreams(out)
    stored = common.stored(options, packs, out)
    with report.waiting(f"making pages from {len(stored.runs)} receipts", out):
        count = site.build(packs, stored, options.output, base_url=options.base_url)
    out.print(f"{count} pages. Open {report.where(options.output / 'index.html')}", markup=False, soft_wrap=True)
    return common.OK
