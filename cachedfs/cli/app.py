"""The typer app with all its commands, in the order of the help and of docs/cli.md: most used first."""

from __future__ import annotations

from cachedfs.cli import (  # noqa: F401 - each adds its commands
    cache,
    doctor,
    get,
    login,
    monitoring,
    mount,
    pack,
    reading,
    sim,
    transfer,
)
from cachedfs.cli.arguments import app

__all__ = ["app"]

_ORDER = [
    "ls",
    "cat",
    "get",
    "prefetch",
    "pack",
    "mount",
    "unmount",
    "stats",
    "pin",
    "unpin",
    "evict",
    "verify",
    "export",
    "import",
    "report",
    "login",
    "logout",
    "accounts",
    "doctor",
    "sim",
    "demo",
]
app.registered_commands.sort(key=lambda command: _ORDER.index(str(command.name)))
