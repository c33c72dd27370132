"""What a notebook shows of a value: a title, a sentence and a table, as HTML that looks right on a dark page too. Pure."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["shown"]


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
