"""The commands `stats` and `report`: what the cache holds and saved, and what a run did."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachedfs.cli.arguments import CommonOptions, argument, command, flag, option
from cachedfs.cli.cache import cache_of
from cachedfs.cli.output import busy, cell, is_narrow, plain_table, print_json, print_table, rate, say
from cachedfs.common.event_log import VARIABLE, log_events
from cachedfs.common.text import counted, per_cent
from cachedfs.config import Config
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache
    from cachedfs.cache.index.block_rows import CachedPath
    from cachedfs.common.types import Counted
    from cachedfs.origins.drive.quota import QuotaStats

__all__ = ["bytes_of", "contents", "report", "stats", "text_of", "text_of_use"]

FOLDERS = 8  # folders shown; the others are summed up in one line
FULL = 0.9  # share of the allowance from which on the cache counts as full
LEAST_S = 0.1  # seconds: shortest interval of `--watch`


@command(
    "cachedfs stats",
    "cachedfs stats --watch",
    "cachedfs stats --cache-dir /fast/nvme --json",
    "cachedfs stats -o cache_size=200GB",
)
def stats(
    common: CommonOptions,
    watch: Annotated[bool, flag("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, option(metavar="SECONDS", default=True, help="With --watch: how long between two looks.")
    ] = 1.0,
) -> None:
    """Show what the cache holds, of which folders, what it saved, and how much it may hold.

    Hits, misses and requests are totals of all processes that use this cache
    directory. With --watch they are counted per interval; with --json, or
    without a terminal, each interval is one line.
    """
    config = common.config()
    cache = cache_of(config)
    if watch:
        print_intervals(cache, max(LEAST_S, every), as_json=common.as_json)
        return
    with busy("looking at all blocks", is_quiet=common.as_json):
        found, counts, folders = contents(cache, config), cache.counts.total(), folders_of(cache.held())
        quotas = quotas_of(cache)
    if common.as_json:
        more = {"quota": [dict_of(*each) for each in quotas.items()]}
        print_json(
            found | as_dict(counts) | more | {"folders": [dataclasses.asdict(each) for each in folders]}
        )
        return
    print_table(table_of(found, counts))
    if quotas:
        typer.echo("")
        print_table(table_of_quotas(quotas))
    if folders:
        typer.echo("")
        print_table(table_of_folders(folders))


# Contents, limits and counters


def contents(cache: BlockCache, config: Config) -> dict[str, Any]:
    """Return the contents and limits of a cache for `stats`. Sizes are in bytes.

    `may_hold` is None if the cache cannot be written; `cannot_store` says why.
    """
    blocks, size = cache.usage()
    found: dict[str, Any] = {"directory": cache.root, "blocks": blocks, "bytes": size, "may_hold": None}
    bounds = {"cache_size": config.cache_size, "keep_free": config.keep_free}
    found |= dict.fromkeys([*bounds, "disk_free", "disk_size"])
    cannot_store = cache.cannot_store
    try:
        found["may_hold"] = cache.allowance(config.bounds)
        cannot_store = cannot_store or no_room(cache, config)
    except CacheError as error:
        cannot_store = error.message
    if cache.root is not None:
        disk = os.statvfs(cache.root)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        found |= {name: "auto" if bound is None else bytes_of(bound, total) for name, bound in bounds.items()}
        found |= {"disk_free": free, "disk_size": total}
    return found | {"pins": [path for _, path in cache.pins()], "cannot_store": cannot_store}


def no_room(cache: BlockCache, config: Config) -> str | None:
    """Return why not even one block could be stored now; None if it could."""
    room = cache.room(config.bounds)
    if room >= config.block_size:
        return None
    return f"only {decimal(room)} are left for blocks beside what is pinned or in use: unpin something, raise cache_size or lower keep_free"


def bytes_of(bound: int | float, total: int) -> int:
    """Return a limit in bytes; a float is a share of the disk size `total`."""
    return int(bound * total) if isinstance(bound, float) else bound


def text_of(name: str, value: Any) -> str:
    """Return a value of `contents` as text."""
    if name == "pins":
        more = [f"{len(value) - FOLDERS:,} others"] if len(value) > FOLDERS else []
        return ", ".join([*value[:FOLDERS], *more]) or "none"
    if name == "blocks":
        return f"{value:,}"
    if isinstance(value, int):
        return decimal(value)
    return value or ("no: everything can be kept" if name == "cannot_store" else "none")


def as_dict(counts: Counted) -> dict[str, Any]:
    """Return the counters of all processes by name, with the values derived from them."""
    saved = {"bytes_saved": counts.bytes_saved, "requests_saved": counts.requests_saved}
    return counts._asdict() | saved | {"since": time_of(counts.since)}


def texts_of(counts: Counted) -> dict[str, str]:
    """Return the counters of all processes as text, by topic."""
    if not counts.since:
        return {"since": "nothing was counted yet"}
    ratio = counts.hit_ratio
    n_blocks = f"{counts.hits:,} of {counted(counts.hits + counts.misses, 'block')}"
    return {
        "since": minute_of(time_of(counts.since)),
        "hits": "no block was read" if ratio is None else f"{n_blocks}, {per_cent(ratio)}",
        "fetched": f"{decimal(counts.bytes_fetched)} in {counted(counts.requests, 'request')}",
        "saved": text_of_savings(counts),
        "evicted": counted(counts.evictions, "block"),
    }


def text_of_savings(counts: Counted) -> str:
    """Return the bytes and requests that the cache saved so far, as text.

    Bytes that were fetched before they were read, as by a prefetch, are saved only when they are read again.
    """
    requests = f"about {counted(counts.requests_saved, 'request')}" if counts.requests_saved else ""
    size = decimal(counts.bytes_saved) if counts.bytes_saved else ""
    return ", ".join(filter(None, [size, requests])) or "nothing yet"


def text_of_use(counts: Counted, held: int, may_hold: int | None) -> tuple[str, str]:
    """Return how well all processes use the cache, and what to change (empty if nothing), both as text.

    `held` is the cached size and `may_hold` the allowance, in bytes.
    """
    ratio = counts.hit_ratio
    if ratio is None:
        return "no block was read yet", ""
    text = (
        f"{per_cent(ratio)} of {counted(counts.hits + counts.misses, 'block')} were hits; "
        f"saved {text_of_savings(counts)}; {counted(counts.evictions, 'block')} evicted"
    )
    is_full = may_hold is not None and held >= FULL * may_hold
    if not is_full or counts.evictions <= counts.misses / 2:
        return text, ""
    return text, "It is full, and blocks go nearly as fast as they come: raise cache_size, or lower keep_free"


def time_of(at_s: float | None) -> datetime.datetime | None:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC) if at_s else None


def minute_of(at: datetime.datetime | None) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M") if at else ""


def table_of(found: dict[str, Any], counts: Counted) -> Table:
    """Return the values of `contents` and the counters, one per row."""
    table = plain_table()
    texts = {name: text_of(name, value) for name, value in found.items()} | texts_of(counts)
    for name, text in texts.items():
        table.add_row(Text(name.replace("_", " "), style="bold"), cell(text, overflow="fold"))
    return table


# The daily quota of Google Drive


def quotas_of(cache: BlockCache) -> dict[str, QuotaStats]:
    """Return what each Drive account used today, by account."""
    from cachedfs.origins.drive.quota import QuotaStats, day_of

    day = day_of(time.time())
    return {
        account_of(name): QuotaStats(day, *used) for name, used in sorted(cache.quota.of_day(day).items())
    }


def account_of(identity: str) -> str:
    """Return the account in an identity (`drive|HOST|ACCOUNT`), with the host unless it is Google's."""
    _, host, account = identity.split("|", 2)
    return account if host == "www.googleapis.com" else f"{account} at {host}"


def dict_of(account: str, used: QuotaStats) -> dict[str, Any]:
    shares = {"units_share": used.units_share, "bytes_share": used.bytes_share}
    return {"account": account, **used._asdict(), **shares}


def table_of_quotas(quotas: dict[str, QuotaStats]) -> Table:
    table = plain_table("units today", "of 400 M", "received", "of 1 TB", "Drive account")
    for column in table.columns[:-1]:
        column.no_wrap, column.justify = True, "right"
    table.columns[-1].overflow = "fold"
    for account, used in quotas.items():
        units, received = per_cent(used.units_share), per_cent(used.bytes_share)
        table.add_row(f"{used.units:,}", units, decimal(used.bytes), received, cell(account))
    return table


# Cached bytes by folder


@dataclasses.dataclass(frozen=True)
class Folder:
    """Cached data below a folder.

    `oldest` and `newest` are when its first and last block were cached, None if unknown.
    """

    folder: str
    objects: int
    blocks: int
    bytes: int
    oldest: datetime.datetime | None
    newest: datetime.datetime | None


def folders_of(held: Iterable[CachedPath]) -> list[Folder]:
    """Return the cached content by folder, largest first; the last entry sums up all others."""
    from cachedfs.report.summary import by_folder

    held = list(held)
    names = [name for name, _ in by_folder(((each.path, each.size) for each in held), FOLDERS)]
    found: dict[str, list[CachedPath]] = {name: [] for name in names}
    for each in held:
        folders = [name for name in names if each.path == name or each.path.startswith(f"{name}/")]
        found[max(folders, key=len, default=names[-1])].append(each)
    return [folder_of(name, some) for name, some in found.items()]


def folder_of(name: str, held: list[CachedPath]) -> Folder:
    came = [at for each in held for at in (each.first_s, each.last_s) if at is not None]
    blocks, size = sum(each.blocks for each in held), sum(each.size for each in held)
    return Folder(
        name, len(held), blocks, size, time_of(min(came, default=None)), time_of(max(came, default=None))
    )


def table_of_folders(folders: list[Folder]) -> Table:
    has_times = not is_narrow()
    table = plain_table("bytes", "objects", *(("first came", "last") if has_times else ()), "folder")
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[0].justify = table.columns[1].justify = "right"
    table.columns[-1].overflow = "fold"
    for each in folders:
        times = [minute_of(at) for at in (each.oldest, each.newest)] if has_times else []
        table.add_row(decimal(each.bytes), f"{each.objects:,}", *times, cell(each.folder))
    return table


# Watching


@dataclasses.dataclass(frozen=True)
class Interval:
    """Counters of the `over_s` seconds before `at`, and the cached size at that time."""

    at: datetime.datetime
    over_s: float
    counts: Counted
    blocks: int
    bytes: int

    def as_json(self) -> str:
        """Return one line of JSON."""
        values = {"at": self.at.isoformat(), "over_s": round(self.over_s, 3), **self.counts._asdict()}
        del values["since"]
        return json.dumps(values | {"blocks": self.blocks, "bytes": self.bytes})

    def __str__(self) -> str:
        counts, ratio = self.counts, self.counts.hit_ratio
        hits = f"{counts.hits:,} hits, {counts.misses:,} misses"
        hits += f" ({per_cent(ratio)})" if ratio is not None else ""
        read, fetched = rate(counts.bytes_served, self.over_s), rate(counts.bytes_fetched, self.over_s)
        evicted = f", {counts.evictions:,} evicted" if counts.evictions else ""
        return (
            f"{self.at.astimezone():%H:%M:%S}  {hits}; read {read}, fetched {fetched} in "
            f"{counted(counts.requests, 'request')}{evicted}; holds {decimal(self.bytes)}"
        )


def print_intervals(cache: BlockCache, every_s: float, *, as_json: bool) -> None:
    """Print the counters of each interval until Ctrl-C, which is a normal exit here."""
    try:
        if sys.stdout.isatty() and not as_json:
            show_live(cache, every_s)
        for interval in intervals(cache, every_s):
            typer.echo(interval.as_json() if as_json else str(interval))
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit from None


def intervals(cache: BlockCache, every_s: float) -> Iterator[Interval]:
    """Yield the counters of each interval of `every_s` seconds."""
    before, then = cache.counts.total(), time.monotonic()
    while True:
        time.sleep(every_s)
        now, counts = time.monotonic(), cache.counts.total()
        at = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        yield Interval(at, now - then, counts.since_then(before), *cache.usage())
        before, then = counts, now


def show_live(cache: BlockCache, every_s: float) -> None:
    """Show the totals and the last interval in place on a terminal."""
    from rich.live import Live

    def picture(last: str) -> Group:
        blocks, size = cache.usage()
        found = {"directory": cache.root, "blocks": blocks, "bytes": size}
        return Group(table_of(found, cache.counts.total()), Text(f"{last}\nCtrl-C ends"))

    with Live(picture(""), auto_refresh=False) as live:
        for interval in intervals(cache, every_s):
            live.update(picture(f"\n{interval}"), refresh=True)


# report


@command(
    "cachedfs report",
    "cachedfs report events -o report.html",
    "cachedfs report events --json",
    common=("as_json", "debug", "cache_dir"),
)
def report(
    common: CommonOptions,
    folder: Annotated[
        str | None, argument("FOLDER", "Where the events are; else CACHEDFS_EVENTS says it.")
    ] = None,
    output: Annotated[
        Path | None, option("--output", "-o", metavar="FILE", help="The page; else report.html.")
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
    common.url = folder
    log_events(None)  # the report itself must not log events
    summary = summary_of(read(folder))
    held = by_folder((each.path, each.size) for each in cache_of(common.config()).held())
    if common.as_json:
        print_json({**summary.as_dict(), "cache": dict(held)})
    if output is None and common.as_json:
        return
    from cachedfs.report.charts import pictures
    from cachedfs.report.html_page import page

    path = output or Path("report.html")
    path.write_text(page(summary, pictures(summary, held)), encoding="utf-8")
    if not common.as_json:
        say(summary.sentence)
        say(f"{path} is the report", err=True)
