"""The report as one self-contained HTML page.

It has no scripts, no external resources and a responsive layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cachedfs.common.text import counted, seconds, size
from cachedfs.report.charts import BACKGROUND, INK, Chart
from cachedfs.report.summary import RunSummary

STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0 auto; max-width: 62rem; padding: 1rem; background: {BACKGROUND}; color: {INK}; font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin: 0; }} section {{ min-width: 0; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; }}
figure {{ margin: 0; min-width: 0; }} figcaption {{ font-size: 0.9rem; }}
svg {{ display: block; width: 100%; height: auto; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: 0.15rem 0.8rem 0.15rem 0; vertical-align: top; overflow-wrap: anywhere; }}
td.n {{ text-align: right; white-space: nowrap; }} td.n + td {{ white-space: nowrap; }} th {{ overflow-wrap: normal; }}
"""


def page(summary: RunSummary, pictures: Sequence[Chart]) -> str:
    """Return the report as a complete HTML document."""
    drawn = "".join(_figure(number, picture) for number, picture in enumerate(pictures))
    title = (
        f"cachedfs: {seconds(summary.elapsed_s)} of {counted(summary.n_processes, 'process', 'processes')}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p id="sentence">{escape(summary.sentence)}</p>{_notes(summary)}'
        f'<div class="grid">{drawn}{_numbers(summary)}{_longest(summary)}</div></main></body></html>\n'
    )


def _figure(number: int, picture: Chart) -> str:
    label = f'role="img" aria-labelledby="title-{number} words-{number}"'
    svg = picture.svg.replace("<svg ", f"<svg {label} ", 1)
    return (
        f'<figure><h2 id="title-{number}">{escape(picture.title)}</h2>{svg}'
        f'<figcaption id="words-{number}">{escape(picture.words)}</figcaption></figure>'
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
