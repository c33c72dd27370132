"""The command `report`: summarize a run as an HTML page, from the event logs of its processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachedfs.cli.app import argument, command, option
from cachedfs.cli.cache import cache_of, config_of
from cachedfs.cli.output import Given, print_json, say
from cachedfs.common.event_log import VARIABLE, log_events

if TYPE_CHECKING:
    from cachedfs.report import RunSummary

__all__ = ["report"]


@command(
    "cachedfs report",
    "cachedfs report events -o report.html",
    "cachedfs report events --json",
    takes=("as_json", "debug", "cache_dir"),
)
def report(
    given: Given,
    folder: Annotated[
        str | None,
        argument("FOLDER", "Where the events are; else CACHEDFS_EVENTS says it."),
    ] = None,
    output: Annotated[
        Path | None,
        option("--output", "-o", metavar="FILE", help="The page; else report.html."),
    ] = None,
) -> None:
    """Draw what a run asked, read and waited for, as one page.

    The processes of a run write event logs if CACHEDFS_EVENTS names a folder in
    their environment. The cache content shown is the current one. With --json
    the numbers are printed, and a page is written only if FILE is given.
    """
    from cachedfs.report import by_folder, read, summary_of

    folder = folder or os.environ.get(VARIABLE)
    if not folder:
        raise typer.BadParameter(f"name it, or set {VARIABLE}", param_hint="FOLDER")
    given.url = folder
    log_events(None)  # the report itself must not log events
    summary = summary_of(read(folder))
    held = by_folder((each.path, each.size) for each in cache_of(config_of(given)).held())
    if given.as_json:
        print_json({**summary.as_dict(), "cache": dict(held)})
    if output is not None or not given.as_json:
        _write(summary, held, output or Path("report.html"), is_quiet=given.as_json)


def _write(summary: RunSummary, held: list[tuple[str, int]], path: Path, *, is_quiet: bool) -> None:
    from cachedfs.report.charts import pictures
    from cachedfs.report.html_page import page

    path.write_text(page(summary, pictures(summary, held)), encoding="utf-8")
    if not is_quiet:
        say(summary.sentence)
        say(f"{path} is the report", err=True)
