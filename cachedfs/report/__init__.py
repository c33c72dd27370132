"""What the events of a run say: `records` reads them, `summary` computes (pure), `drawing` draws, `page` makes one page of it."""

from __future__ import annotations

from cachedfs.report.event_reader import Records, read
from cachedfs.report.summary import Summary, by_folder, summary_of

__all__ = ["Records", "Summary", "by_folder", "read", "summary_of"]
