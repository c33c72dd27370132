"""The charts of a report, drawn as SVG by matplotlib. No other module imports matplotlib.

Charts are accessible: none depends on color alone, and each has a text description.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cachedfs.common.text import per_cent, seconds, size
from cachedfs.report.summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BACKGROUND", "COLOURS", "INK", "Chart", "pictures"]

# The colors with enough contrast on white from a palette for color-blind readers (Okabe and Ito, 2008).
COLOURS = {"bytes": "#0072b2", "hits": "#009e73", "waits": "#d55e00", "others": "#6a3d6f", "idle": "#767676"}
INK, BACKGROUND = "#1a1a1a", "#ffffff"
INCHES = 4.6, 2.5  # width of a phone screen, so that text is readable there without scaling
FONT = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "hatch.linewidth": 0.6}


class Chart(NamedTuple):
    """A chart: title, text description (`words`) for screen readers, and SVG source."""

    title: str
    words: str
    svg: str


class Bar(NamedTuple):
    """A horizontal bar, with a name before and a text behind it."""

    name: str
    value: float
    text: str
    color: str


def pictures(summary: RunSummary, by_folder: Sequence[tuple[str, int]] | None) -> list[Chart]:
    """Return the charts of a report.

    `by_folder`: pairs of folder and cached bytes. None or empty leaves out that chart. Raises ImportError if matplotlib
    is not installed.
    """
    counts, waited = summary.counts, summary.waited
    fetched, served, bound = size(counts["bytes_fetched"]), size(counts["bytes_served"]), summary.bound_per_s
    link = f"the link gave up to {size(bound)}/s" if bound else "nothing came over the link"
    requests = f"{summary.n_requests:,} requests, {summary.n_ahead:,} of them read ahead"
    blocks = f"{counts['hits']:,} hits, {counts['misses']:,} blocks fetched, {counts['evictions']:,} evicted"
    total, parts = summary.elapsed_s or 1.0, _parts_of(summary)
    times = [Bar(name, s, f"{seconds(s)}, {per_cent(s / total)}", COLOURS[color]) for name, s, color in parts]
    held = [Bar(_shortened(name), n / 1e6, size(n), COLOURS["hits"]) for name, n in by_folder or ()]
    drawn: list[tuple[str, str, str, Callable[[Axes], None]]] = [
        (
            "requests",
            "Active requests",
            f"{requests}; the program waited {seconds(waited.all_s)}",
            lambda axes: _requests(axes, summary),
        ),
        (
            "bytes",
            "Bytes a second",
            f"{fetched} fetched, {served} read; {link}",
            lambda axes: _rates(axes, summary),
        ),
        ("blocks", "Blocks", blocks, lambda axes: _blocks(axes, summary)),
        (
            "time",
            "Where the time went",
            ", ".join(f"{name} {seconds(took_s)}" for name, took_s, _ in parts),
            lambda axes: _bars(axes, times, "seconds"),
        ),
    ]
    if by_folder:
        words = ", ".join(f"{folder} {size(n)}" for folder, n in by_folder)
        drawn.append(("cache", "In the cache now", words, lambda axes: _bars(axes, held, "MB")))
    return [Chart(title, words, _svg(name, draw)) for name, title, words, draw in drawn]


def _svg(name: str, draw: Callable[[Axes], None]) -> str:
    """Return the SVG of a chart drawn by `draw`.

    `name` makes the ids inside unique among the charts of a page.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('the report is drawn by matplotlib: pip install "cachedfs[report]"') from error
    with matplotlib.rc_context({**FONT, "svg.hashsalt": name}):
        figure = Figure(figsize=INCHES, layout="constrained", facecolor=BACKGROUND)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        with warnings.catch_warnings():
            # Text stays text in the SVG and uses the browser's fonts, so glyphs missing in this font do not matter.
            warnings.filterwarnings("ignore", "Glyph .* missing from")
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg)


def _requests(axes: Axes, summary: RunSummary) -> None:
    bins, at, width_s = summary.bins, *_bin_centers(summary)
    most = (
        _stacked(axes, summary, bins.coming, bins.asking, "bytes", "////", ("receiving", "no answer yet"))
        or 1.0
    )
    # Bars below the axis. A full bar is a bin in which a caller waited all the time.
    low = [-0.12 * most * share for share in bins.waited]
    axes.bar(at, low, width_s, color=COLOURS["waits"], label="program waits")
    axes.axhline(0, color=INK, linewidth=0.8)
    _label(axes, "requests", -0.14 * most, 1.35 * most)


def _rates(axes: Axes, summary: RunSummary) -> None:
    at, width_s = _bin_centers(summary)
    scale = 1e6 * (width_s or 1.0)
    fetched, served = (
        [value / scale for value in summary.bins.counts[name]] for name in ("bytes_fetched", "bytes_served")
    )
    axes.bar(at, fetched, width_s, color=COLOURS["bytes"], label="fetched")
    axes.plot(at, served, color=COLOURS["hits"], linewidth=1.5, marker=".", markersize=3, label="read")
    bound = (summary.bound_per_s or 0.0) / 1e6
    if bound:
        axes.axhline(bound, color=INK, linestyle="--", linewidth=1.2, label="speed of the link")
    top = max([bound, *fetched])
    # Cut off the curve of reads: the cache is so much faster than the network that nothing else would be visible.
    _label(axes, "MB/s", 0, 1.35 * min(2 * top or math.inf, max([top, *served])))


def _blocks(axes: Axes, summary: RunSummary) -> None:
    counts, (at, _) = summary.bins.counts, _bin_centers(summary)
    top = _stacked(axes, summary, counts["misses"], counts["hits"], "hits", "....", ("fetched", "hits"))
    axes.plot(at, counts["evictions"], color=COLOURS["waits"], linestyle=":", linewidth=1.5, label="evicted")
    _label(axes, "blocks", 0, 1.35 * max([top, *counts["evictions"]]))


def _bin_centers(summary: RunSummary) -> tuple[list[float], float]:
    width_s = summary.bins.width_s
    return [width_s * (at + 0.5) for at in range(len(summary.bins.asking))], width_s


def _stacked(
    axes: Axes,
    summary: RunSummary,
    below: list[float],
    above: list[float],
    color: str,
    hatch: str,
    labels: tuple[str, str],
) -> float:
    """Draw a bar for each bin, with a hatched one on top; return the height of the highest."""
    at, width_s = _bin_centers(summary)
    axes.bar(at, below, width_s, color=COLOURS["bytes"], label=labels[0])
    hatched: dict[str, Any] = {
        "color": BACKGROUND,
        "edgecolor": COLOURS[color],
        "hatch": hatch,
        "linewidth": 0.5,
    }
    axes.bar(at, above, width_s, bottom=below, label=labels[1], **hatched)
    return max(map(sum, zip(below, above, strict=True)), default=0.0)


def _label(axes: Axes, what: str, low: float, high: float) -> None:
    axes.set_ylim(low, high or 1.0)
    axes.set_xlabel("seconds")
    axes.set_ylabel(what)
    axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=9, handlelength=1.4, columnspacing=1.0)


def _parts_of(summary: RunSummary) -> list[tuple[str, float, str]]:
    waited = summary.waited
    return [
        ("not waiting", max(0.0, summary.elapsed_s - waited.all_s), "idle"),
        ("waiting for bytes", waited.for_bytes_s, "bytes"),
        ("waiting for answers", waited.for_answers_s, "waits"),
        ("waiting otherwise", waited.for_others_s, "others"),
    ]


def _shortened(folder: str) -> str:
    """Return the end of a long name; "$" is escaped, as matplotlib would render a formula."""
    return (folder if len(folder) <= 24 else f"…{folder[-23:]}").replace("$", r"\$")


def _bars(axes: Axes, rows: Sequence[Bar], unit: str) -> None:
    """Draw horizontal bars, the first one on top, with a name before and a text behind each."""
    shown = rows[::-1]
    values = [each.value for each in shown]
    bars = axes.barh(range(len(shown)), values, height=0.6, color=[each.color for each in shown])
    axes.set_yticks(range(len(shown)), [each.name for each in shown])
    axes.bar_label(bars, [each.text for each in shown], padding=4)
    axes.set_xlim(0, 1.5 * max(values, default=0.0) or 1.0)
    axes.set_xlabel(unit)
