"""The typer app with all its commands, in the order of the help and of docs/cli.md: most used first."""

from __future__ import annotations

from cachedfs.cli.arguments import app

# Each module adds its commands when it is imported.
# isort: off
from cachedfs.cli import (
    reading,
    get,
    prefetch,
    pack,
    mount,
    stats,
    cache,
    transfer,
    report,
    login,
    doctor,
    sim,
)  # noqa: F401
# isort: on

__all__ = ["app"]
