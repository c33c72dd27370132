"""The report as one self-contained HTML page, with charts as text.

It has no scripts, no external resources and a responsive layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from cachedfs.common.text import bars, counted, per_cent, seconds, size
from cachedfs.report.summary import N_BINS, RunSummary

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: #ffffff; color: #1a1a1a; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0; } section { min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } figcaption { font-size: 0.9rem; }
pre { margin: 0; font-size: 0.8rem; line-height: 1.3; overflow-x: auto; } pre span { color: #0072b2; }
table { border-collapse: collapse; } th, td { text-align: left; padding: 0.15rem 0.8rem 0.15rem 0; vertical-align: top; overflow-wrap: anywhere; }
td.n { text-align: right; white-space: nowrap; } td.n + td { white-space: nowrap; } th { overflow-wrap: normal; }
"""


class Chart(NamedTuple):
    """A chart: its title, a sentence on the whole of it, and its lines, each a text and the bars below it."""

    title: str
    words: str
    lines: list[tuple[str, str]]


def page(summary: RunSummary, by_folder: Sequence[tuple[str, int]]) -> str:
    """Return the report as a complete HTML document. `by_folder`: pairs of folder and cached bytes."""
    charts = [_requests(summary), _rates(summary), _blocks(summary), _times(summary)]
    if by_folder:
        charts.append(_shares("In the cache now", [(folder, n, size(n)) for folder, n in by_folder]))
    title = (
        f"cachedfs: {seconds(summary.elapsed_s)} of {counted(summary.n_processes, 'process', 'processes')}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p id="sentence">{escape(summary.sentence)}</p>{_notes(summary)}'
        f'<div class="grid">{"".join(map(_figure, charts))}{_numbers(summary)}{_longest(summary)}</div></main></body></html>\n'
    )


def _requests(summary: RunSummary) -> Chart:
    bins = summary.bins
    words = f"{summary.n_requests:,} requests, {summary.n_ahead:,} of them read ahead; the program waited {seconds(sum(summary.waited.values()))}"
    lines = [
        (f"receiving: at most {max(bins.coming):.3g}", bars(bins.coming, N_BINS)),
        (f"no answer yet: at most {max(bins.asking):.3g}", bars(bins.asking, N_BINS)),
        (f"program waits: at most {per_cent(max(bins.waited))} of the time", bars(bins.waited, N_BINS)),
    ]
    return Chart("Active requests", words, lines)


def _rates(summary: RunSummary) -> Chart:
    counts, bound = summary.counts, summary.bound_per_s
    lines = []
    for name, what in (("bytes_fetched", "fetched"), ("bytes_served", "read")):
        in_bins = summary.bins.counts[name]
        peak = max(in_bins) / (summary.bins.width_s or 1.0)
        lines.append((f"{what}: at most {size(peak)}/s", bars(in_bins, N_BINS)))
    link = f"the link gave up to {size(bound)}/s" if bound else "nothing came over the link"
    words = f"{size(counts['bytes_fetched'])} fetched, {size(counts['bytes_served'])} read; {link}"
    return Chart("Bytes a second", words, lines)


def _blocks(summary: RunSummary) -> Chart:
    counts, width_s = summary.counts, summary.bins.width_s
    words = f"{counts['hits']:,} hits, {counts['misses']:,} blocks fetched, {counts['evictions']:,} evicted"
    lines = []
    for name, what in (("misses", "fetched"), ("hits", "hits"), ("evictions", "evicted")):
        in_bins = summary.bins.counts[name]
        lines.append((f"{what}: at most {max(in_bins):,.0f} in {seconds(width_s)}", bars(in_bins, N_BINS)))
    return Chart("Blocks", words, lines)


def _times(summary: RunSummary) -> Chart:
    waited, total = summary.waited, summary.elapsed_s or 1.0
    parts = [
        ("not waiting", max(0.0, summary.elapsed_s - sum(waited.values()))),
        ("waiting for bytes", waited["for_bytes_s"]),
        ("waiting for answers", waited["for_answers_s"]),
        ("waiting otherwise", waited["for_others_s"]),
    ]
    rows = [(name, took_s, f"{seconds(took_s)}, {per_cent(took_s / total)}") for name, took_s in parts]
    return _shares("Where the time went", rows)


def _shares(title: str, rows: Sequence[tuple[str, float, str]]) -> Chart:
    """Return a chart of one bar for each `(name, value, text)`."""
    most = max(value for _, value, _ in rows) or 1.0
    lines = [(f"{name}: {text}", "█" * round(N_BINS * value / most)) for name, value, text in rows]
    return Chart(title, "", lines)


def _figure(chart: Chart) -> str:
    # A screen reader would spell the bars, one by one.
    lines = "\n".join(
        f'{escape(text)}\n<span aria-hidden="true">{drawn or "─"}</span>' for text, drawn in chart.lines
    )
    return (
        f"<figure><h2>{escape(chart.title)}</h2><pre>{lines}</pre>"
        f"<figcaption>{escape(chart.words)}</figcaption></figure>"
    )


def _notes(summary: RunSummary) -> str:
    notes = []
    if summary.n_full:
        notes.append(
            f"{counted(summary.n_full, 'process', 'processes')} reached the size limit of an event file: their numbers end there."
        )
    if summary.n_cut:
        notes.append(f"{counted(summary.n_cut, 'line')} could not be read.")
    return f"<p>{escape(' '.join(notes))}</p>" if notes else ""


def _numbers(summary: RunSummary) -> str:
    """Return the table of exact numbers, with byte counts also in readable units."""
    rows: dict[str, int] = {
        **summary.counts,
        "requests": summary.n_requests,
        "requests_ahead": summary.n_ahead,
        "requests_failed": summary.n_failed,
        "bytes_answered": summary.bytes_answered,
    }
    body = "".join(
        f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td class="n" id="n-{name}">{value:,}</td>'
        f"<td>{size(value) if name.startswith('bytes') else ''}</td></tr>"
        for name, value in rows.items()
    )
    return f"<section><h2>Numbers</h2><table>{body}</table></section>"


def _longest(summary: RunSummary) -> str:
    if not summary.longest:
        return ""
    body = "".join(
        f'<tr><td>{escape(path)}</td><td class="n">{n:,}</td><td class="n">{seconds(took_s)}</td></tr>'
        for path, n, took_s in summary.longest
    )
    head = '<tr><th scope="col">object</th><th scope="col">times</th><th scope="col">waited</th></tr>'
    return f"<section><h2>Longest waits</h2><table>{head}{body}</table></section>"
