"""Render an epoch report as HTML for notebooks, with an SVG chart of the time of each batch.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachedfs.common.text import columns, seconds, shown
from cachedfs.datasets.loading.metrics import BatchTiming

__all__ = ["page", "picture"]

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 200, 64, 26, 24  # pixels: the chart, and the margins around its bars
MOST = 180  # maximum number of bars; with more batches, a bar is the mean of several
# From the color-blind-safe palette of Okabe and Ito (2008).
COMPUTE, WAIT = "#56b4e9", "#d55e00"
LINE = 'stroke="currentColor" stroke-width="1.5"'  # style of the line for loading


def page(
    title: str, sentence: str, facts: Sequence[tuple[str, str]], stalls: Sequence[BatchTiming], n_threads: int
) -> str:
    """Return a report as self-contained HTML, readable on light and dark pages."""
    rows = [(name, said) for name, said in facts if name != "by time"]  # the chart shows it
    return shown(title, sentence, rows, picture(stalls, n_threads))


def picture(stalls: Sequence[BatchTiming], n_threads: int) -> str:
    """Return an SVG chart of the batches.

    Bars show computing and waiting time, a line the loading time per thread.
    """
    if not stalls:
        return ""
    compute = columns([timing.compute_s for timing in stalls], MOST)
    wait = columns([timing.wait_s for timing in stalls], MOST)
    load = columns([timing.load_s / n_threads for timing in stalls], MOST)
    most = max(*(c + w for c, w in zip(compute, wait, strict=True)), *load) or 1.0
    high, each = HEIGHT - TOP - BOTTOM, (WIDTH - LEFT) / len(compute)

    def bar(at: int, low: float, value: float, colour: str) -> str:
        y = HEIGHT - BOTTOM - high * (low + value) / most
        gap = min(1.0, each / 4)
        place = f'x="{LEFT + each * at:.2f}" y="{y:.2f}" width="{each - gap:.2f}" height="{high * value / most:.2f}"'
        return f'<rect {place} fill="{colour}"/>'

    bars = [bar(at, 0.0, value, COMPUTE) for at, value in enumerate(compute)]
    bars += [bar(at, compute[at], value, WAIT) for at, value in enumerate(wait) if value > 0]
    points = " ".join(
        f"{LEFT + each * (at + 0.5):.2f},{HEIGHT - BOTTOM - high * value / most:.2f}"
        for at, value in enumerate(load)
    )
    line = f'<polyline points="{points}" fill="none" {LINE}/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="seconds a batch: computing, waiting and loading" '
        'style="max-width:100%;font:12px sans-serif;fill:currentColor">'
        f"{_axes(most, len(stalls))}{''.join(bars)}{line if len(load) > 1 else ''}{_legend(n_threads)}</svg>"
    )


def _axes(most_s: float, n: int) -> str:
    base, top = HEIGHT - BOTTOM, TOP
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="currentColor" stroke-opacity="0.3"/>'
        for y in (base, (base + top) / 2, top)
    )
    texts = "".join(
        f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{seconds(value)}</text>'
        for y, value in ((base, 0.0), ((base + top) / 2, most_s / 2), (top, most_s))
    )
    below = f'<text x="{LEFT}" y="{HEIGHT - 8}">the last {n:,} batches, in their order</text>'
    return lines + texts + below


def _legend(n_threads: int) -> str:
    threads = f"loading / {n_threads} threads" if n_threads > 1 else "loading"
    marks = {
        "computing": f'<rect y="4" width="12" height="12" fill="{COMPUTE}"/>',
        "waiting": f'<rect y="4" width="12" height="12" fill="{WAIT}"/>',
        threads: f'<line x2="12" y1="10" y2="10" {LINE}/>',
    }
    return "".join(
        f'<g transform="translate({LEFT + 110 * at})">{mark}<text x="17" y="14">{said}</text></g>'
        for at, (said, mark) in enumerate(marks.items())
    )
