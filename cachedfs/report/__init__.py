"""Report on a run: read its event log, summarize it, draw charts, write one HTML page."""
