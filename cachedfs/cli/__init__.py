"""The command line: argv, printing, exit codes. `cachedfs --help` says what there is, docs/cli.md shows it.

What a command needs of the filesystem is imported where it runs: help and shell completion import none. The commands
themselves are imported by `main`, so that Ctrl-C meanwhile ends it as it does later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cachedfs.cli.exit_codes import INTERRUPTED, PIPE_CLOSED

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process's run with SystemExit and its status."""
    try:
        _run(None if arguments is None else list(arguments))
    except KeyboardInterrupt:  # before a command began
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        # Who read the help has seen enough; typer calls that 1.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(PIPE_CLOSED)
        raise
    finally:
        # CPython remembers a Ctrl-C in text that it was executing, as of a dataclass in a module that was being imported,
        # until it executes the next one; with `python -m` it would end by the signal, whatever the status is.
        exec("")


def _run(arguments: list[str] | None) -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us: what is said goes nowhere
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    try:
        from cachedfs.cli.commands import app, rejoin
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        raise SystemExit('The command line needs typer and rich: pip install "cachedfs[cli]"') from error
    rejoin(os.environ)
    app(args=arguments, prog_name="cachedfs")
