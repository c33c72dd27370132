"""Report on a run: read its event log, summarize it, draw charts, write one HTML page."""

from __future__ import annotations

from cachedfs.report.event_reader import EventRecords, read
from cachedfs.report.summary import RunSummary, by_folder, summary_of

__all__ = ["EventRecords", "RunSummary", "by_folder", "read", "summary_of"]
