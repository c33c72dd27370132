"""The charts of a report, drawn as SVG.

Charts are accessible: none depends on color alone, and each has a text description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from cachedfs.common.text import per_cent, seconds, size
from cachedfs.report.summary import RunSummary

__all__ = ["BACKGROUND", "COLOURS", "INK", "Chart", "pictures"]

# The colors with enough contrast on white from a palette for color-blind readers (Okabe and Ito, 2008).
COLOURS = {"bytes": "#0072b2", "hits": "#009e73", "waits": "#d55e00", "others": "#6a3d6f", "idle": "#767676"}
INK, BACKGROUND = "#1a1a1a", "#ffffff"
WIDTH, HEIGHT = 442, 240  # as wide as a phone screen, so that text is readable there without scaling
LEFT, RIGHT, TOP, BOTTOM = 52, 434, 30, 198  # edges of the drawn area
BELOW = 18  # height of the bars below the axis
LETTER = 7.4  # average width of a letter; those of Chinese, Japanese and Korean are twice as wide
LONGEST = 24  # letters of a folder that are shown


class Chart(NamedTuple):
    """A chart: title, text description (`words`) for screen readers, and SVG source."""

    title: str
    words: str
    svg: str


class Series(NamedTuple):
    """Values over time: stacked bars ("bar", "hatched"), a line ("line", "dotted"), or bars "below" the axis, of up to 1."""

    label: str
    values: Sequence[float]
    color: str
    style: str = "bar"


class Bar(NamedTuple):
    """A horizontal bar, with a name before and a text behind it."""

    name: str
    value: float
    text: str
    color: str


def pictures(summary: RunSummary, by_folder: Sequence[tuple[str, int]]) -> list[Chart]:
    """Return the charts of a report.

    `by_folder`: pairs of folder and cached bytes; without any, that chart is left out.
    """
    total = summary.elapsed_s or 1.0
    parts = [
        Bar(name, took_s, f"{seconds(took_s)}, {per_cent(took_s / total)}", COLOURS[color])
        for name, took_s, color in _parts_of(summary)
    ]
    words = ", ".join(f"{name} {seconds(took_s)}" for name, took_s, _ in _parts_of(summary))
    found = [_requests(summary), _rates(summary), _blocks(summary)]
    found.append(Chart("Where the time went", words, _bars(parts, "seconds")))
    if by_folder:
        held = [Bar(name, n / 1e6, size(n), COLOURS["hits"]) for name, n in by_folder]
        words = ", ".join(f"{folder} {size(n)}" for folder, n in by_folder)
        found.append(Chart("In the cache now", words, _bars(held, "MB")))
    return found


def _requests(summary: RunSummary) -> Chart:
    bins, waited = summary.bins, seconds(summary.waited.all_s)
    series = [
        Series("receiving", bins.coming, COLOURS["bytes"]),
        Series("no answer yet", bins.asking, COLOURS["bytes"], "hatched"),
        Series("program waits", bins.waited, COLOURS["waits"], "below"),
    ]
    top = max(map(sum, zip(bins.asking, bins.coming, strict=True)), default=0.0)
    requests = f"{summary.n_requests:,} requests, {summary.n_ahead:,} of them read ahead"
    svg = _over_time("requests", "requests", bins.width_s, series, top)
    return Chart("Active requests", f"{requests}; the program waited {waited}", svg)


def _rates(summary: RunSummary) -> Chart:
    counts, bound, width_s = summary.counts, summary.bound_per_s or 0.0, summary.bins.width_s
    fetched, served = (
        [value / 1e6 / (width_s or 1.0) for value in summary.bins.counts[name]]
        for name in ("bytes_fetched", "bytes_served")
    )
    series = [
        Series("fetched", fetched, COLOURS["bytes"]),
        Series("read", served, COLOURS["hits"], "line"),
        Series("speed of the link", [bound / 1e6] * len(fetched) if bound else [], INK, "dotted"),
    ]
    top = max([bound / 1e6, *fetched])
    # Cut off the curve of reads: the cache is so much faster than the network that nothing else would be visible.
    top = min(2 * top or math.inf, max([top, *served]))
    link = f"the link gave up to {size(bound)}/s" if bound else "nothing came over the link"
    words = f"{size(counts['bytes_fetched'])} fetched, {size(counts['bytes_served'])} read; {link}"
    return Chart("Bytes a second", words, _over_time("bytes", "MB/s", width_s, series, top))


def _blocks(summary: RunSummary) -> Chart:
    counts, bins = summary.counts, summary.bins.counts
    series = [
        Series("fetched", bins["misses"], COLOURS["bytes"]),
        Series("hits", bins["hits"], COLOURS["hits"], "hatched"),
        Series("evicted", bins["evictions"], COLOURS["waits"], "dotted"),
    ]
    top = max([*map(sum, zip(bins["misses"], bins["hits"], strict=True)), *bins["evictions"]], default=0.0)
    words = f"{counts['hits']:,} hits, {counts['misses']:,} blocks fetched, {counts['evictions']:,} evicted"
    return Chart("Blocks", words, _over_time("blocks", "blocks", summary.bins.width_s, series, top))


def _parts_of(summary: RunSummary) -> list[tuple[str, float, str]]:
    waited = summary.waited
    return [
        ("not waiting", max(0.0, summary.elapsed_s - waited.all_s), "idle"),
        ("waiting for bytes", waited.for_bytes_s, "bytes"),
        ("waiting for answers", waited.for_answers_s, "waits"),
        ("waiting otherwise", waited.for_others_s, "others"),
    ]


# Drawing


def _over_time(name: str, unit: str, width_s: float, series: Sequence[Series], top: float) -> str:
    """Return a chart of values over time, each for `width_s` seconds; `name` makes its ids unique on the page."""
    top, n = top or 1.0, len(series[0].values)
    zero = BOTTOM - BELOW * any(each.style == "below" for each in series)
    step, scale, base, x = (RIGHT - LEFT) / n, (zero - TOP) / top, [0.0] * n, LEFT + 20.0
    drawn = [_axis(LEFT, width_s * n, "seconds"), _text(4, TOP - 15, unit, "start")]
    drawn += [_text(LEFT - 6, zero - scale * tick + 4, f"{tick:,g}", "end") for tick in _ticks(top)]
    for each in series:
        if not each.values:
            continue
        if each.style in ("line", "dotted"):
            at = (
                f"{LEFT + step * (i + 0.5):.1f} {zero - scale * min(v, top):.1f}"
                for i, v in enumerate(each.values)
            )
            drawn += [_line(each, "L".join(at)), _line(each, f"{x:.0f} {TOP - 19}h14")]
        else:
            fill = f"url(#{name}-hatch)" if each.style == "hatched" else each.color
            drawn += [_hatch(name, each.color)] if each.style == "hatched" else []
            drawn += [_rect(x, TOP - 25, 12, 12, fill, each.color)]
            drawn += [
                _rect(LEFT + step * i, zero, step, BELOW * value, fill, each.color)
                if each.style == "below"
                else _rect(
                    LEFT + step * i, zero - scale * (base[i] + value), step, scale * value, fill, each.color
                )
                for i, value in enumerate(each.values)
                if value > 0
            ]
            base = [low + value for low, value in zip(base, each.values, strict=True)]
        drawn.append(_text(x + 18, TOP - 15, each.label, "start"))
        x += 34 + _width(each.label)
    return _svg([*drawn, f'<path d="M{LEFT} {TOP}V{BOTTOM}M{LEFT} {zero}H{RIGHT}" stroke="{INK}"/>'])


def _bars(rows: Sequence[Bar], unit: str) -> str:
    """Return a chart of horizontal bars."""
    names = [each.name if len(each.name) <= LONGEST else f"…{each.name[1 - LONGEST :]}" for each in rows]
    left, high = 10 + max(map(_width, names)), (BOTTOM - TOP) / len(rows)
    room = 12 + max(_width(each.text) for each in rows)
    most = max(each.value for each in rows) or 1.0
    scale, drawn = (RIGHT - room - left) / most, []
    for at, each in enumerate(rows):
        y, width = TOP + high * (at + 0.2), scale * each.value
        drawn.append(_rect(left, y, width, 0.6 * high, each.color, each.color))
        drawn.append(_text(left - 6, y + 0.3 * high + 4, names[at], "end"))
        drawn.append(_text(left + width + 6, y + 0.3 * high + 4, each.text, "start"))
    end = left + scale * most
    return _svg(
        [
            *drawn,
            _axis(left, most, unit, end),
            f'<path d="M{left} {TOP}V{BOTTOM}H{end}" stroke="{INK}" fill="none"/>',
        ]
    )


def _axis(left: float, most: float, unit: str, right: float = RIGHT) -> str:
    """Return the numbers below a chart that reaches from 0 to `most`, and their unit."""
    scale = (right - left) / (most or 1.0)
    numbers = [_text(left + scale * tick, BOTTOM + 17, f"{tick:,g}") for tick in _ticks(most or 1.0)]
    return "".join([*numbers, _text((left + right) / 2, BOTTOM + 34, unit)])


def _ticks(most: float) -> list[float]:
    """Return up to six round numbers from 0 to `most`."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(power * k for k in (1, 2, 5, 10) if most / (power * k) <= 5)
    return [step * at for at in range(int(most / step) + 1)]


def _svg(drawn: Sequence[str]) -> str:
    style = f"font:13px system-ui,sans-serif;fill:{INK}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}">'
    return f"{head}{''.join(drawn)}</svg>"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _width(text: str) -> float:
    return LETTER * sum(1 + (letter >= "\u2e80") for letter in text)


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'


def _line(each: Series, points: str) -> str:
    dash = ' stroke-dasharray="5 3"' if each.style == "dotted" else ""
    return f'<path d="M{points}" fill="none" stroke="{each.color}" stroke-width="1.5"{dash}/>'


def _hatch(name: str, color: str) -> str:
    size = 'width="5" height="5"'
    return (
        f'<pattern id="{name}-hatch" {size} patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect {size} fill="{BACKGROUND}"/><path d="M0 0V5" stroke="{color}" stroke-width="2"/></pattern>'
    )
