"""Report on a run, from its event log: read the events, summarize them, draw charts, and write one HTML page."""

from __future__ import annotations

from cachedfs.report.event_reader import EventRecords, read
from cachedfs.report.summary import RunSummary, by_folder, summary_of

__all__ = ["EventRecords", "RunSummary", "by_folder", "read", "summary_of"]
