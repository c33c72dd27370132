"""Formatting of times, sizes, percentages and small charts as short text or HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def seconds(value: float) -> str:
    """Format seconds with about three digits: "1.23 s", "45 ms", "3 min 20 s"."""
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes:,} min {rest} s"
    if value >= 0.9995:
        return f"{value:.1f} s" if value >= 9.995 else f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value else "0 s"


def size(value: float) -> str:
    """Format a number of bytes with three digits, in decimal units: "12.3 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB" if value < 999.5 else f"{value:,.0f} TB"


def per_cent(share: float) -> str:
    """Format a fraction as a percentage: 0.973 is "97.3 %"."""
    return f"{share:.1%}".replace("%", " %")


def counted(n: int, what: str, plural: str | None = None) -> str:
    """Format a count with its noun: "1 batch", "1,000 batches".

    `plural` is the plural form, if it is not `what` plus "s".
    """
    return f"{n:,} {what if n == 1 else plural or f'{what}s'}"


def columns(values: Sequence[float], n: int) -> list[float]:
    """Downsample to at most `n` values, each the mean of about equally many neighbors."""
    n = min(n, len(values))
    edges = [len(values) * at // n for at in range(n + 1)] if n else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def bars(values: Sequence[float], n: int) -> str:
    """Format values as a line of `n` block characters, scaled to the largest value.

    The line is empty if all values are 0.
    """
    shown = columns(values, n)
    most = max(shown, default=0.0)
    return "".join(BLOCKS[min(7, int(8 * value / most))] for value in shown) if most else ""


def shown(title: str, sentence: str, rows: Iterable[tuple[str, str]], picture: str = "") -> str:
    """Format a title, a sentence and a table as HTML, with `picture` (HTML) above the table.

    Rows whose second text is empty are left out.
    """
    from html import escape  # imported here, because it is slow to import and most processes show no HTML

    align = 'style="text-align:left"'
    body = "".join(
        f"<tr><td {align}><b>{escape(name)}</b></td><td {align}>{escape(value)}</td></tr>"
        for name, value in rows
        if value
    )
    below = f"<br>{escape(sentence)}" if sentence else ""
    return f"<div><p><b>{escape(title)}</b>{below}</p>{picture}<table>{body}</table></div>"
