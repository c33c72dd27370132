"""The command `stats`: show what the cache holds and saved, once or repeatedly."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachedfs.cli.advice import saved_by
from cachedfs.cli.app import command, option
from cachedfs.cli.cache import cache_of, config_of
from cachedfs.cli.output import NARROW, Given, busy, cell, is_narrow, plain_table, print_json, print_table
from cachedfs.common.text import counted as number_of
from cachedfs.common.text import per_cent
from cachedfs.config import Config
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache
    from cachedfs.cache.index.block_rows import CachedPath
    from cachedfs.common.types import Counted

__all__ = ["contents", "said", "stats"]

FOLDERS = 8  # folders shown; the others are summed up in one line
LEAST_S = 0.1  # seconds: shortest interval of `--watch`


@command(
    "cachedfs stats",
    "cachedfs stats --watch",
    "cachedfs stats --cache-dir /fast/nvme --json",
    "cachedfs stats -o cache_size=200GB",
)
def stats(
    given: Given,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", metavar="", help="Look again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, option(metavar="SECONDS", default=True, help="With --watch: how long between two looks.")
    ] = 1.0,
) -> None:
    """Show what the cache holds, of which folders, what it saved, and how much it may hold.

    Hits, misses and requests are totals of all processes that use this cache
    directory. With --watch they are counted per interval; with --json, or
    without a terminal, each interval is one line.
    """
    config = config_of(given)
    cache = cache_of(config)
    if watch:
        watched(cache, max(LEAST_S, every), as_json=given.as_json)
        return
    with busy("looking at all blocks", is_quiet=given.as_json):
        found, counted, folders = contents(cache, config), cache.counts.total(), folders_of(cache.held())
    if given.as_json:
        print_json(found | counts_of(counted) | {"folders": [dataclasses.asdict(each) for each in folders]})
        return
    print_table(table_of(found, counted))
    if folders:
        typer.echo("")
        print_table(table_of_folders(folders, has_times=not is_narrow(NARROW)))


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
        found |= {name: bound_of(bound, total) for name, bound in bounds.items()}
        found |= {"disk_free": free, "disk_size": total}
    return found | {"pins": [path for _, path in cache.pins()], "cannot_store": cannot_store}


def no_room(cache: BlockCache, config: Config) -> str | None:
    """Return why not even one block could be stored now; None if it could."""
    room = cache.room(config.bounds)
    if room >= config.block_size:
        return None
    return f"only {decimal(room)} are left for blocks beside what is pinned or in use: unpin something, raise cache_size or lower keep_free"


def counts_of(counted: Counted) -> dict[str, Any]:
    """Return the counters of all processes by name, with the values derived from them."""
    saved = {"bytes_saved": counted.bytes_saved, "requests_saved": counted.requests_saved}
    since = datetime.datetime.fromtimestamp(counted.since, datetime.UTC) if counted.since else None
    return counted._asdict() | saved | {"since": since}


def bound_of(bound: int | float | None, total: int) -> int | str:
    """Return a limit in bytes, or "auto"."""
    return "auto" if bound is None else bytes_of(bound, total)


def bytes_of(bound: int | float, total: int) -> int:
    """Return a limit in bytes; a float is a share of the disk size `total`."""
    return int(bound * total) if isinstance(bound, float) else bound


def said(name: str, value: Any) -> str:
    """Return a value of `contents` as text."""
    if name == "pins":
        more = [f"{len(value) - FOLDERS:,} others"] if len(value) > FOLDERS else []
        return ", ".join([*value[:FOLDERS], *more]) or "none"
    if name == "blocks":
        return f"{value:,}"
    if isinstance(value, int):
        return decimal(value)
    return value or ("no: everything can be kept" if name == "cannot_store" else "none")


def said_of_counts(counted: Counted) -> dict[str, str]:
    """Return the counters of all processes as text, by topic."""
    if not counted.since:
        return {"since": "nothing was counted yet"}
    ratio = counted.hit_ratio
    n_blocks = f"{counted.hits:,} of {number_of(counted.hits + counted.misses, 'block')}"
    return {
        "since": minute_of(datetime.datetime.fromtimestamp(counted.since, datetime.UTC)),
        "hits": "no block was read" if ratio is None else f"{n_blocks}, {per_cent(ratio)}",
        "fetched": f"{decimal(counted.bytes_fetched)} in {number_of(counted.requests, 'request')}",
        "saved": saved_by(counted),
        "evicted": number_of(counted.evictions, "block"),
    }


def minute_of(at: datetime.datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M")


def table_of(found: dict[str, Any], counted: Counted) -> Table:
    """Return the values of `contents`, except those shown elsewhere, and the counters, one per row."""
    table = plain_table()
    rows = {name: said(name, value) for name, value in found.items() if name not in counts_of(counted)}
    for name, words in (rows | said_of_counts(counted)).items():
        table.add_row(Text(name.replace("_", " "), style="bold"), cell(words, overflow="fold"))
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
        folders = [name for name in names if is_in(each.path, name)]
        found[max(folders, key=len, default=names[-1])].append(each)
    return [folder_of(name, some) for name, some in found.items()]


def is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def folder_of(name: str, held: list[CachedPath]) -> Folder:
    came = [at for each in held for at in (each.first_s, each.last_s) if at is not None]
    ends = (
        (datetime.datetime.fromtimestamp(at, datetime.UTC) for at in (min(came), max(came)))
        if came
        else (None, None)
    )
    return Folder(name, len(held), sum(each.blocks for each in held), sum(each.size for each in held), *ends)


def table_of_folders(folders: list[Folder], *, has_times: bool = True) -> Table:
    table = plain_table("bytes", "objects", *(("first came", "last") if has_times else ()), "folder")
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[0].justify = table.columns[1].justify = "right"
    table.columns[-1].overflow = "fold"
    for each in folders:
        when = [minute_of(at) if at else "" for at in (each.oldest, each.newest)] if has_times else []
        table.add_row(decimal(each.bytes), f"{each.objects:,}", *when, cell(each.folder))
    return table


# Watching


@dataclasses.dataclass(frozen=True)
class Look:
    """Counters of the `over_s` seconds before `at`, and the cached size at that time."""

    at: datetime.datetime
    over_s: float
    counted: Counted
    blocks: int
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        counts = self.counted._asdict()
        del counts["since"]
        return {
            "at": self.at,
            "over_s": round(self.over_s, 3),
            **counts,
            "blocks": self.blocks,
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        counts, ratio = self.counted, self.counted.hit_ratio
        hits = f"{counts.hits:,} hits, {counts.misses:,} misses" + (
            f" ({per_cent(ratio)})" if ratio is not None else ""
        )
        rates = f"read {self.rate(counts.bytes_served)}, fetched {self.rate(counts.bytes_fetched)} in {number_of(counts.requests, 'request')}"
        evicted = f", {counts.evictions:,} evicted" if counts.evictions else ""
        return f"{self.at.astimezone():%H:%M:%S}  {hits}; {rates}{evicted}; holds {decimal(self.bytes)}"

    def rate(self, size: int) -> str:
        return f"{decimal(int(size / self.over_s))}/s"


def watched(cache: BlockCache, every_s: float, *, as_json: bool) -> None:
    """Print the counters of each interval until Ctrl-C, which is a normal exit here."""
    try:
        if sys.stdout.isatty() and not as_json:
            show_live(cache, every_s)
        for look in looks(cache, every_s):
            told = look.as_dict() if as_json else str(look)
            typer.echo(json.dumps(told, default=datetime.datetime.isoformat) if as_json else told)
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit from None


def looks(cache: BlockCache, every_s: float) -> Iterator[Look]:
    """Yield the counters of each interval of `every_s` seconds."""
    before, then = cache.counts.total(), time.monotonic()
    while True:
        time.sleep(every_s)
        now, counted = time.monotonic(), cache.counts.total()
        at = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        yield Look(at, now - then, counted.since_then(before), *cache.usage())
        before, then = counted, now


def show_live(cache: BlockCache, every_s: float) -> None:
    """Show the totals and the last interval in place on a terminal."""
    from rich.live import Live

    def shown(look: Look | None) -> Group:
        blocks, size = cache.usage()
        found = {"directory": cache.root, "blocks": blocks, "bytes": size}
        last = f"\n{look}" if look else ""
        return Group(table_of(found, cache.counts.total()), Text(f"{last}\nCtrl-C ends"))

    with Live(shown(None), auto_refresh=False) as live:
        for look in looks(cache, every_s):
            live.update(shown(look), refresh=True)
