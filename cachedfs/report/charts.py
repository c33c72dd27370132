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


class TimeSeries(NamedTuple):
    """One value for each bin of time.

    `how` is "bar", or a hatch or the style of a line in matplotlib's terms.
    """

    label: str
    values: Sequence[float]
    color: str
    how: str


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
    charts = [_requests(summary), _rates(summary), _blocks(summary), _times(summary)]
    if by_folder:
        words = ", ".join(f"{folder} {size(n)}" for folder, n in by_folder)
        rows = [Bar(_shortened(name), n / 1e6, size(n), "hits") for name, n in by_folder]
        charts.append(Chart("In the cache now", words, _svg("cache", lambda axes: _bars(axes, rows, "MB"))))
    return charts


def _requests(summary: RunSummary) -> Chart:
    bins, n_ahead = summary.bins, summary.n_ahead
    most = max(map(sum, zip(bins.coming, bins.asking, strict=True)), default=0.0) or 1.0
    series = [
        TimeSeries("receiving", bins.coming, "bytes", "bar"),
        TimeSeries("no answer yet", bins.asking, "bytes", "////"),
        # Bars below the axis. A full bar is a bin in which a caller waited all the time.
        TimeSeries("program waits", [-0.12 * most * share for share in bins.waited], "waits", "bar"),
    ]
    words = f"{summary.n_requests:,} requests, {n_ahead:,} of them read ahead; the program waited {seconds(sum(summary.waited.values()))}"
    return _over_time(summary, "requests", "Active requests", words, series, (-0.14 * most, most))


def _rates(summary: RunSummary) -> Chart:
    counts, scale, bound = summary.counts, 1e6 * (summary.bins.width_s or 1.0), summary.bound_per_s or 0.0
    fetched, served = (
        [n / scale for n in summary.bins.counts[name]] for name in ("bytes_fetched", "bytes_served")
    )
    series = [TimeSeries("fetched", fetched, "bytes", "bar"), TimeSeries("read", served, "hits", "-")]
    series += [TimeSeries("speed of the link", [bound / 1e6] * len(served), "idle", "--")] if bound else []
    top = max([bound / 1e6, *fetched])
    # Cut off the curve of reads: the cache is so much faster than the network that nothing else would be visible.
    high = min(2 * top or math.inf, max([top, *served]))
    link = f"the link gave up to {size(bound)}/s" if bound else "nothing came over the link"
    words = f"{size(counts['bytes_fetched'])} fetched, {size(counts['bytes_served'])} read; {link}"
    return _over_time(summary, "MB/s", "Bytes a second", words, series, (0.0, high))


def _blocks(summary: RunSummary) -> Chart:
    counts, of = summary.bins.counts, summary.counts
    series = [
        TimeSeries("fetched", counts["misses"], "bytes", "bar"),
        TimeSeries("hits", counts["hits"], "hits", "...."),
        TimeSeries("evicted", counts["evictions"], "waits", ":"),
    ]
    most = max(
        [*map(sum, zip(counts["misses"], counts["hits"], strict=True)), *counts["evictions"]], default=0.0
    )
    words = f"{of['hits']:,} hits, {of['misses']:,} blocks fetched, {of['evictions']:,} evicted"
    return _over_time(summary, "blocks", "Blocks", words, series, (0.0, most))


def _times(summary: RunSummary) -> Chart:
    waited, total = summary.waited, summary.elapsed_s or 1.0
    parts = [
        ("not waiting", max(0.0, summary.elapsed_s - sum(waited.values())), "idle"),
        ("waiting for bytes", waited["for_bytes_s"], "bytes"),
        ("waiting for answers", waited["for_answers_s"], "waits"),
        ("waiting otherwise", waited["for_others_s"], "others"),
    ]
    rows = [Bar(name, s, f"{seconds(s)}, {per_cent(s / total)}", color) for name, s, color in parts]
    words = ", ".join(f"{name} {seconds(s)}" for name, s, _ in parts)
    return Chart("Where the time went", words, _svg("time", lambda axes: _bars(axes, rows, "seconds")))


def _over_time(
    summary: RunSummary,
    unit: str,
    title: str,
    words: str,
    series: Sequence[TimeSeries],
    limits: tuple[float, float],
) -> Chart:
    """Return a chart over time. A hatched bar stands on the bar before it."""
    width_s = summary.bins.width_s
    at = [width_s * (n + 0.5) for n in range(len(summary.bins.asking))]

    def draw(axes: Axes) -> None:
        for before, each in zip([None, *series], series, strict=False):
            color = COLOURS[each.color]
            if each.how == "bar":
                axes.bar(at, each.values, width_s, label=each.label, color=color)
            elif each.how in ("////", "....") and before is not None:
                look: dict[str, Any] = {
                    "color": BACKGROUND,
                    "edgecolor": color,
                    "hatch": each.how,
                    "linewidth": 0.5,
                }
                axes.bar(at, each.values, width_s, bottom=before.values, label=each.label, **look)
            else:
                axes.plot(at, each.values, color=color, linestyle=each.how, linewidth=1.5, label=each.label)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_ylim(limits[0], 1.35 * limits[1] or 1.0)
        axes.set_xlabel("seconds")
        axes.set_ylabel(unit)
        axes.legend(
            loc="upper center", ncols=3, frameon=False, fontsize=9, handlelength=1.4, columnspacing=1.0
        )

    return Chart(title, words, _svg(unit.partition("/")[0], draw))


def _bars(axes: Axes, rows: Sequence[Bar], unit: str) -> None:
    """Draw horizontal bars, the first one on top, with a name before and a text behind each."""
    shown = rows[::-1]
    values = [each.value for each in shown]
    bars = axes.barh(range(len(shown)), values, height=0.6, color=[COLOURS[each.color] for each in shown])
    axes.set_yticks(range(len(shown)), [each.name for each in shown])
    axes.bar_label(bars, [each.text for each in shown], padding=4)
    axes.set_xlim(0, 1.5 * max(values, default=0.0) or 1.0)
    axes.set_xlabel(unit)


def _svg(name: str, draw: Callable[[Axes], None]) -> str:
    """Return the SVG of a chart drawn by `draw`; `name` makes the ids inside unique among the charts of a page."""
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


def _shortened(folder: str) -> str:
    """Return the end of a long name; "$" is escaped, as matplotlib would render a formula."""
    return (folder if len(folder) <= 24 else f"…{folder[-23:]}").replace("$", r"\$")
