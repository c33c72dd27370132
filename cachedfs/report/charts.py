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


def pictures(summary: RunSummary, by_folder: Sequence[tuple[str, int]] | None) -> list[Chart]:
    """Return the charts of a report.

    `by_folder`: pairs of folder and cached bytes. None or empty leaves out that chart. Raises ImportError if matplotlib
    is not installed.
    """
    counts, waited = summary.counts, summary.waited
    fetched, served = size(counts["bytes_fetched"]), size(counts["bytes_served"])
    bound = (
        f"the link gave up to {size(summary.bound_per_s)}/s"
        if summary.bound_per_s
        else "nothing came over the link"
    )
    blocks = f"{counts['hits']:,} hits, {counts['misses']:,} blocks fetched, {counts['evictions']:,} evicted"
    found = [
        Chart(
            "Active requests",
            f"{summary.n_requests:,} requests, {summary.n_ahead:,} of them read ahead; the program waited {seconds(waited.all_s)}",
            _svg("requests", lambda axes: _requests(axes, summary)),
        ),
        Chart(
            "Bytes a second",
            f"{fetched} fetched, {served} read; {bound}",
            _svg("bytes", lambda axes: _rates(axes, summary)),
        ),
        Chart("Blocks", blocks, _svg("blocks", lambda axes: _blocks(axes, summary))),
        Chart(
            "Where the time went",
            _parts_in_words(summary),
            _svg("time", lambda axes: _parts(axes, summary)),
        ),
    ]
    if by_folder:
        words = ", ".join(f"{folder} {size(n)}" for folder, n in by_folder)
        found.append(
            Chart("In the cache now", words, _svg("cache", lambda axes: _cached_by_folder(axes, by_folder)))
        )
    return found


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


def _bin_centers(summary: RunSummary) -> tuple[list[float], float]:
    width_s = summary.bins.width_s
    return [width_s * (at + 0.5) for at in range(len(summary.bins.asking))], width_s


def _requests(axes: Axes, summary: RunSummary) -> None:
    at, width_s = _bin_centers(summary)
    bins = summary.bins
    axes.bar(at, bins.coming, width_s, color=COLOURS["bytes"], label="receiving")
    axes.bar(
        at,
        bins.asking,
        width_s,
        bottom=bins.coming,
        color=BACKGROUND,
        edgecolor=COLOURS["bytes"],
        hatch="////",
        linewidth=0.5,
        label="no answer yet",
    )
    most = max((a + b for a, b in zip(bins.asking, bins.coming, strict=True)), default=0.0) or 1.0
    # Bars below the axis. A full bar is a bin in which a caller waited all the time.
    low = [-0.12 * most * share for share in bins.waited]
    axes.bar(at, low, width_s, color=COLOURS["waits"], label="program waits")
    axes.set_ylim(-0.14 * most, 1.35 * most)
    axes.axhline(0, color=INK, linewidth=0.8)
    _label_time(axes, "requests")


def _rates(axes: Axes, summary: RunSummary) -> None:
    at, width_s = _bin_centers(summary)
    scale = 1e6 * (width_s or 1.0)
    fetched = [value / scale for value in summary.bins.counts["bytes_fetched"]]
    served = [value / scale for value in summary.bins.counts["bytes_served"]]
    axes.bar(at, fetched, width_s, color=COLOURS["bytes"], label="fetched")
    axes.plot(at, served, color=COLOURS["hits"], linewidth=1.5, marker=".", markersize=3, label="read")
    top = max(fetched, default=0.0)
    if summary.bound_per_s:
        top = max(top, summary.bound_per_s / 1e6)
        axes.axhline(
            summary.bound_per_s / 1e6, color=INK, linestyle="--", linewidth=1.2, label="speed of the link"
        )
    # Cut off the curve of reads: the cache is so much faster than the network that nothing else would be visible.
    axes.set_ylim(0, 1.35 * min(2 * top or math.inf, max([top, *served])) or 1.0)
    _label_time(axes, "MB/s")


def _blocks(axes: Axes, summary: RunSummary) -> None:
    at, width_s = _bin_centers(summary)
    counts = summary.bins.counts
    axes.bar(at, counts["misses"], width_s, color=COLOURS["bytes"], label="fetched")
    axes.bar(
        at,
        counts["hits"],
        width_s,
        bottom=counts["misses"],
        color=BACKGROUND,
        edgecolor=COLOURS["hits"],
        hatch="....",
        linewidth=0.5,
        label="hits",
    )
    axes.plot(at, counts["evictions"], color=COLOURS["waits"], linestyle=":", linewidth=1.5, label="evicted")
    top = max((a + b for a, b in zip(counts["misses"], counts["hits"], strict=True)), default=0.0)
    axes.set_ylim(0, 1.35 * max([top, *counts["evictions"]]) or 1.0)
    _label_time(axes, "blocks")


def _label_time(axes: Axes, what: str) -> None:
    axes.set_xlabel("seconds")
    axes.set_ylabel(what)
    axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=9, handlelength=1.4, columnspacing=1.0)


def _parts_of(summary: RunSummary) -> list[tuple[str, float, dict[str, Any]]]:
    waited, plain = summary.waited, {"color": COLOURS["idle"]}
    return [
        ("not waiting", max(0.0, summary.elapsed_s - waited.all_s), plain),
        ("waiting for bytes", waited.for_bytes_s, {"color": COLOURS["bytes"]}),
        ("waiting for answers", waited.for_answers_s, {"color": COLOURS["waits"]}),
        ("waiting otherwise", waited.for_others_s, {"color": COLOURS["others"]}),
    ]


def _parts_in_words(summary: RunSummary) -> str:
    return ", ".join(f"{name} {seconds(took_s)}" for name, took_s, _ in _parts_of(summary))


def _parts(axes: Axes, summary: RunSummary) -> None:
    parts = _parts_of(summary)[::-1]
    bars = axes.barh([name for name, _, _ in parts], [took_s for _, took_s, _ in parts], height=0.6)
    for bar, (_, _, style) in zip(bars, parts, strict=True):
        bar.set(**style)
    total = summary.elapsed_s or 1.0
    axes.bar_label(
        bars, [f"{seconds(took_s)}, {per_cent(took_s / total)}" for _, took_s, _ in parts], padding=4
    )
    axes.set_xlim(0, 1.5 * max((took_s for _, took_s, _ in parts), default=0.0) or 1.0)
    axes.set_xlabel("seconds")


def _cached_by_folder(axes: Axes, by_folder: Sequence[tuple[str, int]]) -> None:
    shown = by_folder[::-1]
    names = [folder if len(folder) <= 24 else f"…{folder[-23:]}" for folder, _ in shown]
    bars = axes.barh(range(len(shown)), [n / 1e6 for _, n in shown], height=0.6, color=COLOURS["hits"])
    # Escape "$" in names, which matplotlib would render as a formula.
    axes.set_yticks(range(len(shown)), [name.replace("$", r"\$") for name in names])
    axes.bar_label(bars, [size(n) for _, n in shown], padding=4)
    axes.set_xlim(0, 1.35 * max(n for _, n in shown) / 1e6 or 1.0)
    axes.set_xlabel("MB")
