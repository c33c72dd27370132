"""The typer app with all its commands, in the order of the help and of docs/cli.md: most used first."""

from __future__ import annotations

from cachedfs.cli import cache, doctor, get, login, monitoring, pack, reading, sim, transfer
from cachedfs.cli.arguments import app

__all__ = ["app", "cache", "doctor", "get", "login", "monitoring", "pack", "reading", "sim", "transfer"]

ORDER = (
    " ls cat get prefetch pack stats pin unpin evict verify export import report"
    " login logout accounts doctor sim demo "
)
app.registered_commands.sort(key=lambda each: ORDER.index(f" {each.name} "))
