"""Entry point of the `cachedfs` command line.

Each command imports the filesystem when it runs, so help and shell completion stay fast. `main` imports the
command modules itself, so that Ctrl-C during the import exits the same way as Ctrl-C later.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: always raises SystemExit with the exit status.

    `arguments` replaces `sys.argv[1:]`. The status after a signal is the one that shells report.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process: discard the output
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    try:
        from cachedfs.cli.app import app
        from cachedfs.cli.urls import rejoin

        rejoin(os.environ)
        app(args=None if arguments is None else list(arguments), prog_name="cachedfs")
    except KeyboardInterrupt:  # Ctrl-C before a command started
        sys.exit(128 + signal.SIGINT)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        raise SystemExit('The command line needs typer and rich: pip install "cachedfs[cli]"') from error
