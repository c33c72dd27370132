"""Statistics of a cache as text for Prometheus, also over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachedfs.cache.counters import Counted

COUNTERS = {  # of all processes that use the cache
    "hits": ("hits", "Blocks read from the cache"),
    "misses": ("misses", "Blocks that had to be fetched"),
    "requests": ("requests", "Requests to the origins"),
    "bytes_fetched": ("fetched_bytes", "Bytes received from the origins"),
    "bytes_served": ("served_bytes", "Bytes returned to callers"),
    "evictions": ("evictions", "Blocks that were evicted"),
}
GAUGES = {
    "blocks": ("blocks", "Blocks in the cache"),
    "bytes": ("bytes", "Bytes that the cache takes on the disk"),
    "may_hold": ("may_hold_bytes", "Bytes that the cache may take now"),
    "disk_free": ("disk_free_bytes", "Free bytes of the disk"),
    "disk_size": ("disk_size_bytes", "Size of the disk"),
}
DRIVE = {
    "units": ("drive_units_today", "Units of Google's daily quota that the account used today"),
    "bytes": ("drive_received_bytes_today", "Bytes that the account received from Google Drive today"),
}
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@contextlib.contextmanager
def answering(port: int, text: Callable[[], str]) -> Iterator[None]:
    """Answer requests for `/metrics` at a port of 127.0.0.1 with `text()`. Raises OSError."""

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            if self.path != "/metrics" or host not in ("127.0.0.1", "localhost"):  # no page of a browser
                self.send_error(404)
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Log nothing: a scraper asks every few seconds."""

    with ThreadingHTTPServer(("127.0.0.1", port), Metrics) as server:
        threading.Thread(target=server.serve_forever, name="cachedfs-metrics", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def exposition(found: Mapping[str, Any], counts: Counted, quotas: Iterable[Mapping[str, Any]]) -> str:
    """Return the contents, counters and quotas of a cache, in the text format of Prometheus.

    What is not known is left out. Counters start at 0 again when the cache directory is deleted.
    """
    of_cache = {"directory": found["directory"] or ""}
    lines: list[str] = []
    for name, (metric, text) in COUNTERS.items():
        lines += _metric(f"cachedfs_{metric}_total", "counter", text, [(of_cache, getattr(counts, name))])
    for name, (metric, text) in GAUGES.items():
        lines += _metric(f"cachedfs_{metric}", "gauge", text, [(of_cache, found[name])])
    can_store = int(not found["cannot_store"])
    lines += _metric(
        "cachedfs_can_store", "gauge", "1 if blocks can be stored, else 0", [(of_cache, can_store)]
    )
    quotas = [*quotas]
    for name, (metric, text) in DRIVE.items():
        values = [({"account": each["account"]}, each[name]) for each in quotas]
        lines += _metric(f"cachedfs_{metric}", "gauge", text, values)
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str, kind: str, text: str, values: Iterable[tuple[Mapping[str, str], Any]]) -> list[str]:
    """Return the lines of one metric with its values by labels; none without a value."""
    samples = []
    for labels, value in values:
        if value is not None:
            named = ",".join(f'{label}="{given.translate(ESCAPES)}"' for label, given in labels.items())
            samples.append(f"{name}{{{named}}} {value}")
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples] if samples else []
