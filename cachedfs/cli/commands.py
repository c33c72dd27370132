"""All commands: importing the module of a command makes it one."""

from __future__ import annotations

from cachedfs.cli import (
    cache,
    carrying,
    doctor,
    get,
    pack,
    pins,
    prefetch,
    reading,
    report,
    simulated,
    stats,
    verifying,
)
from cachedfs.cli.completion import rejoin
from cachedfs.cli.shared import app

__all__ = [
    "app",
    "cache",
    "carrying",
    "doctor",
    "get",
    "pack",
    "pins",
    "prefetch",
    "reading",
    "rejoin",
    "report",
    "simulated",
    "stats",
    "verifying",
]

# Of the help, and of docs/cli.md: what is read first. That of the imports is of no use to anybody.
ORDER = (
    *("ls", "cat", "get", "prefetch", "pack", "stats", "pin", "unpin", "evict", "verify"),
    *("export", "import", "report", "doctor", "sim", "demo"),
)
app.registered_commands.sort(
    key=lambda each: ORDER.index(each.name or getattr(each.callback, "__name__", ""))
)
