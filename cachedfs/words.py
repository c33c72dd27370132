"""Times, sizes and shares in words, as short as they say something. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["bars", "columns", "counted", "per_cent", "seconds", "size"]

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
