"""The report as one self-contained HTML page, with charts as text.

It has no scripts, no external resources and a responsive layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from cachedfs.common.text import bars, counted, per_cent, seconds, size
from cachedfs.report.summary import N_BINS, RunSummary

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: #ffffff; color: #1a1a1a; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0; } section { min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } figcaption { font-size: 0.9rem; }
pre { margin: 0; font-size: 0.8rem; line-height: 1.3; overflow-x: auto; } pre span { color: #0072b2; }
table { border-collapse: collapse; } th { text-align: left; } td { padding: 0.15rem 0.8rem 0.15rem 0; vertical-align: top; overflow-wrap: anywhere; }
td + td { text-align: right; white-space: nowrap; }
"""


def page(summary: RunSummary, by_folder: Sequence[tuple[str, int]]) -> str:
    """Return the report as a complete HTML document. `by_folder`: pairs of folder and cached bytes."""
    parts = [*_charts(summary)]
    if by_folder:
        parts.append(_shares("In the cache now", [(folder, n, size(n)) for folder, n in by_folder]))
    parts += [_numbers(summary), _longest(summary)]
    title = (
        f"cachedfs: {seconds(summary.elapsed_s)} of {counted(summary.n_processes, 'process', 'processes')}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p id="sentence">{escape(summary.sentence)}</p>{_notes(summary)}'
        f'<div class="grid">{"".join(parts)}</div></main></body></html>\n'
    )


# Charts.


def _charts(summary: RunSummary) -> Iterator[str]:
    counts, bins, waited = summary.counts, summary.bins, summary.waited
    asked = f"{summary.n_requests:,} requests, {summary.n_ahead:,} of them read ahead"
    lines = {
        f"receiving: at most {max(bins.coming):.3g}": bins.coming,
        f"no answer yet: at most {max(bins.asking):.3g}": bins.asking,
        f"program waits: at most {per_cent(max(bins.waited))} of the time": bins.waited,
    }
    words = f"{asked}; the program waited {seconds(sum(waited.values()))}"
    yield _over_time("Active requests", lines, words)

    link = f"the link gave up to {size(summary.bound_per_s)}/s" if summary.bound_per_s else ""
    named = {"fetched": bins.counts["bytes_fetched"], "read": bins.counts["bytes_served"]}
    lines = {f"{what}: at most {size(max(n) / (bins.width_s or 1.0))}/s": n for what, n in named.items()}
    words = f"{size(counts['bytes_fetched'])} fetched, {size(counts['bytes_served'])} read"
    yield _over_time("Bytes a second", lines, f"{words}; {link or 'nothing came over the link'}")

    named = {
        "fetched": bins.counts["misses"],
        "hits": bins.counts["hits"],
        "evicted": bins.counts["evictions"],
    }
    lines = {f"{what}: at most {max(n):,.0f} in {seconds(bins.width_s)}": n for what, n in named.items()}
    words = f"{counts['hits']:,} hits, {counts['misses']:,} blocks fetched, {counts['evictions']:,} evicted"
    yield _over_time("Blocks", lines, words)

    parts = {
        "not waiting": max(0.0, summary.elapsed_s - sum(waited.values())),
        "waiting for bytes": waited["for_bytes_s"],
        "waiting for answers": waited["for_answers_s"],
        "waiting otherwise": waited["for_others_s"],
    }
    total = summary.elapsed_s or 1.0
    rows = [
        (name, took_s, f"{seconds(took_s)}, {per_cent(took_s / total)}") for name, took_s in parts.items()
    ]
    yield _shares("Where the time went", rows)


def _over_time(title: str, lines: Mapping[str, Sequence[float]], words: str) -> str:
    """Return a chart of values in the course of the run, each with its text."""
    return _chart(title, [(text, bars(values, N_BINS)) for text, values in lines.items()], words)


def _shares(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Return a chart of one bar for each `(name, value, text)`."""
    most = max(value for _, value, _ in rows) or 1.0
    return _chart(
        title, [(f"{name}: {text}", "█" * round(N_BINS * value / most)) for name, value, text in rows]
    )


def _chart(title: str, lines: Iterable[tuple[str, str]], words: str = "") -> str:
    # A screen reader would spell the bars, one by one.
    drawn = "\n".join(f'{escape(text)}\n<span aria-hidden="true">{bar or "─"}</span>' for text, bar in lines)
    return f"<figure><h2>{title}</h2><pre>{drawn}</pre><figcaption>{escape(words)}</figcaption></figure>"


# Notes and tables.


def _notes(summary: RunSummary) -> str:
    notes = []
    if summary.n_full:
        full = counted(summary.n_full, "process", "processes")
        notes.append(f"{full} reached the size limit of an event file: their numbers end there.")
    if summary.n_cut:
        notes.append(f"{counted(summary.n_cut, 'line')} could not be read.")
    return f"<p>{' '.join(notes)}</p>" if notes else ""


def _numbers(summary: RunSummary) -> str:
    """Return the table of exact numbers, with byte counts also in readable units."""
    numbers = {
        **summary.counts,
        "requests": summary.n_requests,
        "requests_ahead": summary.n_ahead,
        "requests_failed": summary.n_failed,
        "bytes_answered": summary.bytes_answered,
    }
    rows = [
        (name.replace("_", " "), f"{value:,}", size(value) if name.startswith("bytes") else "")
        for name, value in numbers.items()
    ]
    return _table("Numbers", rows)


def _longest(summary: RunSummary) -> str:
    rows = [(path, f"{n:,}", seconds(took_s)) for path, n, took_s in summary.longest]
    return _table("Longest waits", rows, head=("object", "times", "waited")) if rows else ""


def _table(title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<section><h2>{title}</h2><table><tr>{top}</tr>{body}</table></section>"
