"""Errors over releases, and peak memory over lengths, as SVGs that follow the reader's light or dark scheme."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.store.history import Seen, best, releases

#: Colours that stand for CSS variables until the SVG is written; light and dark values of each.
COLOURS = {
    "#010203": ("--fg", "#1f2328", "#e6edf3"),
    "#040506": ("--line", "#d0d7de", "#3d444d"),
    "#0a0001": ("--bad", "#a40e26", "#ffa198"),
    "#000a01": ("--good", "#116329", "#7ee787"),
    "#00010a": ("--control", "#0550ae", "#79b8ff"),
    "#0a0a01": ("--limit", "#6f4400", "#f2cc60"),
}
FG, LINE, BAD, GOOD, CONTROL, LIMIT = COLOURS


def errors(runs: Sequence[Seen], title: str) -> str | None:
    """An SVG of the relative errors of one pack on one machine, release by release on a log scale; None where fewer than two have
    figures.

    An error of zero is drawn at the lower edge, one that is not finite at the upper edge: a log scale has no place for them.
    """
    by_release = releases(runs)
    sides = {
        side: [(s.verdict if (s := best(both.get(side, ()))) else None) for both in by_release.values()]
        for side in ("unpatched", "patched")
    }
    first, second = sides["unpatched"], sides["patched"]
    told = [v is not None and v.limit is not None for v in first]
    values = [
        value
        for verdict in (*first, *second)
        if verdict is not None
        for value in (verdict.bug_error, verdict.limit, verdict.control_error)
        if value
    ]
    if not values or sum(told) < 2:
        return None
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    low, high = min(values) / 5, max(values) * 5
    names = list(by_release)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reproducer", "font.family": "sans-serif", "font.size": 9}):
        # Margins in inches, not matplotlib's own layout, which draws everything twice to find them.
        width, height = max(8.0, min(18.0, 0.28 * len(names) + 2)), 3.8
        below = 0.15 + 0.075 * max(map(len, names))
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.8 / width, below / height, 1 - 0.9 / width, 1 - (below + 0.6) / height))
        series = (
            ("as released", BAD, "x", [v.bug_error if v else None for v in first], told),
            (
                "with the fix",
                GOOD,
                "o",
                [v.bug_error if v else None for v in second],
                [v is not None and v.limit is not None for v in second],
            ),
            (
                "control",
                CONTROL,
                "s",
                [v.control_error if v else None for v in first],
                [v is not None and v.control_error is not None for v in first],
            ),
        )
        for label, colour, marker, errors_of, there in series:
            points = [
                (i, high if error is None else max(error, low))
                for i, (error, t) in enumerate(zip(errors_of, there, strict=True))
                if t
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker,
                    color=colour,
                    label=label,
                    markersize=9 if marker == "o" else 5,
                    fillstyle="none" if marker != "x" else None,
                )
        limits = [v.limit if v and v.limit else float("nan") for v in first]
        axes.step(range(len(names)), limits, where="mid", color=LIMIT, label="limit", linewidth=1.5)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(low / 2, high * 2)
        axes.set_xlim(-0.7, len(names) - 0.3)
        step = max(1, len(names) // 60)
        axes.set_xticks(range(0, len(names), step), names[::step], rotation=90)
        axes.set_ylabel("relative error", color=FG)
        return _finished(figure, axes, title)


#: What metrics are drawn over releases: the last word of their names, and what stands at the axis.
UNITS = {"GiB": "GiB", "mib": "MiB", "seconds": "seconds", "bytes": "bytes"}


def metrics(runs: Sequence[Seen], title: str) -> Iterator[tuple[str, str]]:
    """Unit and SVG of what the default runs of one machine measured, release by release; nothing where fewer than two have figures.

    Metrics are ``{"forward peak GiB": 4.1}`` or ``{"kernel": {"seconds": 17.9}}``; a full marker is the release, an empty one the release with the fix.
    """
    by_release = releases(runs)
    series: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for i, sides in enumerate(by_release.values()):
        for side, those in sides.items():
            if seen := best(those):
                for unit, name, value in _measured(seen.document().facts.metrics):
                    series.setdefault(unit, {}).setdefault((name, side), {})[i] = value
    for unit, drawn in series.items():
        names = sorted({name for name, _ in drawn})
        if len({i for points in drawn.values() for i in points}) < 2 or len(names) > 4:
            continue
        yield unit, _over_releases(list(by_release), drawn, names, unit, title)


def _measured(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    flat = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
    flat |= {
        f"{name} {key}": v
        for name, row in metrics.items()
        if isinstance(row, dict) and name != "validate"
        for key, v in row.items()
    }
    for name, value in flat.items():
        unit = UNITS.get(re.split(r"[ _]", name)[-1])
        if unit and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield unit, re.sub(r"[ _]?(?:GiB|mib|seconds|bytes)$", "", name), float(value)


def _over_releases(
    releases_: Sequence[str],
    drawn: Mapping[tuple[str, str], Mapping[int, float]],
    names: Sequence[str],
    unit: str,
    title: str,
) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reproducer", "font.family": "sans-serif", "font.size": 9}):
        width, height = max(8.0, min(18.0, 0.28 * len(releases_) + 2)), 3.8
        below = 0.15 + 0.075 * max(map(len, releases_))
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.8 / width, below / height, 1 - 0.9 / width, 1 - (below + 0.6) / height))
        for name, colour, marker in zip(names, (BAD, CONTROL, GOOD, LIMIT), "osD^", strict=False):
            for side, fill in (("unpatched", colour), ("patched", "none")):
                if points := drawn.get((name, side)):
                    label = name.replace("$", r"\$") + (", with the fix" if side == "patched" else "")
                    axes.plot(list(points), list(points.values()), marker, color=colour, markerfacecolor=fill, label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xticks(range(len(releases_)), releases_, rotation=90)
        axes.set_ylabel(unit, color=FG)
        return _finished(figure, axes, title)


def curves(runs: Iterable[Seen], title: str) -> Iterator[tuple[str, str]]:
    """Name and SVG of what measuring runs found over lengths S, a figure each for memory and for each setting of an error.

    Metrics are ``{"S=1024, GiB": {"fused": 0.02, "unfused": 0.5}, …}``, with null for out of memory, drawn as a gap, or
    ``{"576/512 topk 256 S 8192 flat released": {"dkv": 2.3e-3, "least dkv": 1.7e-3}, …}``.
    """
    drawn: dict[str, dict[int, dict[str, float | None]]] = {}
    for seen in runs:
        if seen.outcome == "MEASURED":
            for figure, length, row in _lengths(seen):
                drawn.setdefault(figure, {}).setdefault(length, {}).update(row)
    for figure, rows in drawn.items():
        if len(rows) > 1 and all(v is None or isinstance(v, int | float) for row in rows.values() for v in row.values()):
            unit = "peak memory, GiB" if figure == "memory" else "relative error of dKV"
            yield figure, _over_lengths(rows, unit, title if figure == "memory" else f"{title}, {figure}")


def _lengths(seen: Seen) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Figure, length and a row of what was measured there by each way."""
    for name, row in seen.document().facts.metrics.items():
        if not isinstance(row, dict):
            continue
        if found := re.fullmatch(r"S=(\d+), GiB", name):
            if seen.side == "patched":
                yield "memory", int(found[1]), row
        elif (found := re.fullmatch(r"(.+) S (\d+) (flat|peaked) (.+)", name)) and "dkv" in row:
            yield (
                f"{found[1]}, {found[3]} scores",
                int(found[2]),
                {found[4]: row["dkv"], "the least possible": row.get("least dkv")},
            )


def _over_lengths(rows: Mapping[int, Mapping[str, float | None]], unit: str, title: str) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    lengths = sorted(rows)
    ways = sorted({way for row in rows.values() for way in row})
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reproducer", "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(8.0, 3.8))
        axes = figure.add_axes((0.1, 0.15, 0.88, 0.68))
        for way, colour, marker in zip(ways, (GOOD, BAD, CONTROL, LIMIT), "osx^", strict=False):
            values = [rows[length].get(way) for length in lengths]
            axes.plot(lengths, [v or float("nan") for v in values], f"{marker}-", color=colour, label=way.replace("$", r"\$"))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        if "memory" in unit:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("S", color=FG)
        axes.set_ylabel(unit, color=FG)
        return _finished(figure, axes, title)


def _finished(figure: Any, axes: Any, title: str) -> str:
    axes.set_title(title.replace("$", r"\$"), color=FG, loc="left", fontsize=10)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.tick_params(colors=FG, which="both")
    for spine in axes.spines.values():
        spine.set_color(LINE)
    figure.legend(loc="upper right", ncols=4, frameon=False, labelcolor=FG)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _themed(buffer.getvalue())


def _themed(svg: str) -> str:
    for colour, (name, _, _) in COLOURS.items():
        svg = svg.replace(colour, f"var({name})")
    light, dark = ("".join(f"{c[0]}:{c[i]};" for c in COLOURS.values()) for i in (1, 2))
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    svg = re.sub(r"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", rf"\1{style}", svg, count=1)
