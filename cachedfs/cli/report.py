"""The command `report`: what a run did, as one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachedfs.cli.arguments import CommonOptions, argument, command, option
from cachedfs.cli.output import print_json
from cachedfs.cli.stats import cache_of
from cachedfs.common.event_log import VARIABLE, log_events

if TYPE_CHECKING:
    from cachedfs.cache.index.block_rows import CachedPath
    from cachedfs.report.event_reader import EventRecords


@command(
    "cachedfs report",
    "cachedfs report events -o report.html",
    "cachedfs report events --json",
    common=("as_json", "debug", "cache_dir"),
)
def report(
    common: CommonOptions,
    folder: Annotated[str | None, argument("FOLDER", "Where the event logs are.", envvar=VARIABLE)] = None,
    output: Annotated[
        Path | None, option("FILE", "The page.", "--output", "-o", default="report.html")
    ] = None,
) -> None:
    """Draw what a run asked, read and waited for, as one page.

    The processes of a run write event logs if CACHEDFS_EVENTS names a folder in
    their environment. The cache content shown is the current one of the cache
    that the run used. With --json the numbers are printed, and a page is written
    only if FILE is given.
    """
    from cachedfs.report.event_reader import read
    from cachedfs.report.summary import by_folder, size_of, summary_of

    if not folder:
        raise typer.BadParameter(f"name it, or set {VARIABLE}", param_hint="FOLDER")
    common.url = folder
    log_events(None)  # the report itself must not log events
    records = read(folder)
    summary = summary_of(records)
    held = [(name, size_of(some)) for name, some in by_folder(held_by(records, common))]
    if common.as_json:
        print_json({**summary.as_dict(), "cache": dict(held)})
        if output is None:
            return
    from cachedfs.report.html_page import page

    path = output or Path("report.html")
    path.write_text(page(summary, held), encoding="utf-8")
    common.say(summary.sentence)
    common.say(f"{path} is the report", err=True)


def held_by(records: EventRecords, common: CommonOptions) -> list[CachedPath]:
    """Return what the caches of a run hold now, or what the cache in a typed `--cache-dir` does."""
    config = common.config_of_existing()
    if common.cache_dir is not None or not records.cache_dirs:
        return cache_of(config).held()
    there = [directory for directory in records.cache_dirs if os.path.isdir(directory)]
    return [each for directory in there for each in cache_of(config._replace(cache_dir=(directory,))).held()]
