"""Times, sizes and shares in words, as short as they say something. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

__all__ = ["bars", "columns", "counted", "per_cent", "seconds", "shown", "size"]


BLOCKS = "▁▂▃▄▅▆▇█"


def seconds(value: float) -> str:
    """Return a time with about three digits: "1.23 s", "45 ms", "3 min 20 s"."""
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes:,} min {rest} s"
    if value >= 0.9995:
        return f"{value:.1f} s" if value >= 9.995 else f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value else "0 s"


def size(value: float) -> str:
    """Return bytes with three digits: "12.3 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB" if value < 999.5 else f"{value:,.0f} TB"


def per_cent(share: float) -> str:
    """Return a share as "97.3 %"."""
    return f"{share:.1%}".replace("%", " %")


def counted(n: int, what: str, several: str | None = None) -> str:
    """Return how many there are of what: "1 batch", "1,000 batches"."""
    return f"{n:,} {what if n == 1 else several or f'{what}s'}"


def columns(values: Sequence[float], n: int) -> list[float]:
    """Return at most `n` values in the place of many: each the mean of neighbours, as many for every one as can be."""
    n = min(n, len(values))
    edges = [len(values) * at // n for at in range(n + 1)] if n else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def bars(values: Sequence[float], n: int) -> str:
    """Return values as a line of bars as high as they are, beside the highest; empty where all are nothing."""
    shown = columns(values, n)
    most = max(shown, default=0.0)
    return "".join(BLOCKS[min(7, int(8 * value / most))] for value in shown) if most else ""


def shown(title: str, sentence: str, rows: Iterable[tuple[str, str]], drawn: str = "") -> str:
    """Return the HTML of a value, with a picture `drawn` over its table; rows that say nothing are left out."""
    from html import escape  # here: most processes show nothing, and its table of entities takes a while

    left = 'style="text-align:left"'
    body = "".join(
        f"<tr><td {left}><b>{escape(name)}</b></td><td {left}>{escape(said)}</td></tr>"
        for name, said in rows
        if said
    )
    below = f"<br>{escape(sentence)}" if sentence else ""
    return f"<div><p><b>{escape(title)}</b>{below}</p>{drawn}<table>{body}</table></div>"
