"""The command line: argv, printing, exit codes. `cachedfs --help` says what there is, docs/cli.md shows it.

What a command needs of the filesystem is imported where it runs: help and shell completion import none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ImportError as error:  # an exit, not an error: the script imports this module before it calls anything
    raise SystemExit('The command line needs typer and rich: pip install "cachedfs[cli]"') from error

# In the order of the help: importing the module of a command makes it one.
from cachedfs.cli import reading  # noqa: I001
from cachedfs.cli import (
    get,
    prefetch,
    pack,
    stats,
    pins,
    cache,
    verifying,
    carrying,
    report,
    simulated,
    doctor,
)
from cachedfs.cli.completion import rejoin
from cachedfs.cli.output import INTERRUPTED
from cachedfs.cli.shared import app

__all__ = [
    "app",
    "cache",
    "carrying",
    "doctor",
    "get",
    "main",
    "pack",
    "pins",
    "prefetch",
    "reading",
    "report",
    "simulated",
    "stats",
    "verifying",
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process's run with SystemExit and its status."""
    rejoin(os.environ)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="cachedfs")
    except KeyboardInterrupt:  # before a command began
        sys.exit(INTERRUPTED)
