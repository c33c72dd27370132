"""Register all commands with the app by importing their modules."""

from __future__ import annotations

from cachedfs.cli import cache, doctor, get, pack, prefetch, reading, report, simulated, stats, transfer
from cachedfs.cli.app import app
from cachedfs.cli.completion import rejoin

__all__ = [
    "app",
    "cache",
    "doctor",
    "get",
    "pack",
    "prefetch",
    "reading",
    "rejoin",
    "report",
    "simulated",
    "stats",
    "transfer",
]

# Order of the commands in the help and in docs/cli.md, most used first.
ORDER = (
    *("ls", "cat", "get", "prefetch", "pack", "stats", "pin", "unpin", "evict", "verify"),
    *("export", "import", "report", "doctor", "sim", "demo"),
)
app.registered_commands.sort(
    key=lambda each: ORDER.index(each.name or getattr(each.callback, "__name__", ""))
)
