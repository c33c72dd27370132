"""What the events of a run say: `records` reads them, `summary` computes (pure), `drawing` draws, `page` makes one page of it."""

from __future__ import annotations

from cachedfs.report.event_reader import EventRecords, read
from cachedfs.report.summary import RunSummary, by_folder, summary_of

__all__ = ["EventRecords", "RunSummary", "by_folder", "read", "summary_of"]
