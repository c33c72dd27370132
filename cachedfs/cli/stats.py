"""The command `stats`: what the cache holds and saved."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from cachedfs.cli.arguments import CommonOptions, command, flag, option
from cachedfs.cli.output import is_narrow, minute_of, print_json, print_table, rate, say, table_of
from cachedfs.cli.prometheus import exposition
from cachedfs.common.text import bars, counted, per_cent
from cachedfs.config import Config
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from rich.table import Table

    from cachedfs.cache.block_store import BlockStore
    from cachedfs.cache.counters import Counted
    from cachedfs.cache.index.block_rows import CachedPath

FOLDERS = 8  # folders shown; the others are summed up in one line
FULL = 0.9  # share of the allowance from which on the cache counts as full
IF_ANY = ("cannot_store", "shared_cache", "old_caches")  # rows that are left out if they are empty
LEAST_S = 0.1  # seconds: shortest interval of `--watch`
CHARTED = 40  # latest intervals in the charts of `--watch`


def cache_of(config: Config) -> BlockStore:
    from cachedfs.core.engines import engine_for

    return engine_for(config).cache


@command(
    "cachedfs stats",
    "cachedfs stats --watch",
    "cachedfs stats --cache-dir /fast/nvme --json",
    "cachedfs stats -o cache_size=200GB",
    "cachedfs stats --prometheus",
)
def stats(
    common: CommonOptions,
    watch: Annotated[bool, flag("Look again and again, until Ctrl-C.", "--watch", "-w")] = False,
    every: Annotated[
        float, option("SECONDS", "With --watch: how long between two looks.", default=True)
    ] = 1.0,
    prometheus: Annotated[bool, flag("Print the totals as text for Prometheus.", "--prometheus")] = False,
) -> None:
    """Show what the cache holds and what it saved.

    Hits, misses and requests are totals of all processes that use this cache
    directory. With --watch they are counted per interval; with --json, or
    without a terminal, each interval is one line.
    """
    config = common.config_of_existing()
    cache = cache_of(config)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is a normal exit here
            print_intervals(cache, max(LEAST_S, every), as_json=common.as_json)
        return
    if prometheus:
        typer.echo(metrics_of(config), nl=False)
        return
    with common.progress("looking at all blocks"):
        found, counts, folders = contents(cache, config), cache.counts.total(), folders_of(cache.held())
        quotas = quotas_of(cache)
    if common.as_json:
        saved = {"bytes_saved": counts.bytes_saved, "requests_saved": counts.requests_saved}
        counted_ = counts._asdict() | saved | {"since": time_of(counts.since)}
        print_json(found | counted_ | {"quota": quotas, "folders": folders})
        return
    print_table(totals_of(found, counts))
    if quotas:
        rows = []
        for each in quotas:
            units, received = per_cent(each["units_share"]), per_cent(each["bytes_share"])
            rows.append((f"{each['units']:,}", units, decimal(each["bytes"]), received, each["account"]))
        typer.echo("")
        print_table(table_of(("units today", "of 400 M", "received", "of 1 TB", "Drive account"), rows))
    if folders:
        times = {} if is_narrow() else {"first came": "oldest", "last": "newest"}
        rows = []
        for each in folders:
            came = (minute_of(each[at]) for at in times.values())
            rows.append((decimal(each["bytes"]), f"{each['objects']:,}", *came, each["folder"]))
        typer.echo("")
        print_table(table_of(("bytes", "objects", *times, "folder"), rows, left=times))


def metrics_of(config: Config) -> str:
    """Return the totals and limits of a cache as text for Prometheus."""
    cache = cache_of(config)
    return exposition(contents(cache, config), cache.counts.total(), quotas_of(cache))


def contents(cache: BlockStore, config: Config) -> dict[str, Any]:
    """Return the contents and limits of a cache for `stats`. Sizes are in bytes.

    `may_hold` is None if the cache cannot be written; `cannot_store` says why.
    """
    blocks, size = cache.usage()
    may_hold, cannot_store = None, cache.cannot_store
    try:
        may_hold = cache.allowance(config.bounds)
        if not cannot_store and may_hold is not None and may_hold < config.block_size:
            cannot_store = (
                f"the cache may hold {decimal(may_hold)} now, less than one block ({decimal(config.block_size)}): "
                "raise cache_size, lower keep_free, or free space on the disk"
            )
        elif not cannot_store and (room := cache.room(config.bounds)) < config.block_size:
            cannot_store = (
                f"only {decimal(room)} are left for blocks beside what is pinned or in use: "
                "unpin something, raise cache_size or lower keep_free"
            )
    except CacheError as error:
        cannot_store = error.message
    limits: dict[str, Any] = dict.fromkeys(("cache_size", "keep_free", "disk_free", "disk_size"))
    if cache.root is not None:
        disk = os.statvfs(cache.root)
        total = disk.f_blocks * disk.f_frsize
        for name in ("cache_size", "keep_free"):
            bound = getattr(config, name)
            share = int(bound * total) if isinstance(bound, float) else bound
            limits[name] = "auto" if bound is None else share
        limits |= {"disk_free": disk.f_bavail * disk.f_frsize, "disk_size": total}
    found = {"directory": cache.root, "blocks": blocks, "bytes": size, "may_hold": may_hold, **limits}
    found |= {"pins": [path for _, path in cache.pins()], "old_caches": [*cache.old_caches]}
    return found | {"shared_cache": shared_state(config), "cannot_store": cannot_store}


def shared_state(config: Config) -> str | None:
    """Return the folder of the shared cache, and why it is not used if so; None without one."""
    if (shared := config.shared) is None:
        return None
    from cachedfs.shared.shared_cache import place_at

    try:
        place_at(shared).check()
    except OSError as error:
        return f"{shared.folder} is not used: {error}"
    return shared.folder


def totals_of(found: dict[str, Any], counts: Counted) -> Table:
    """Return the values of `contents` and the counters, one per row."""
    texts = {name: text_of(name, value) for name, value in found.items() if value or name not in IF_ANY}
    texts |= texts_of(counts)
    return table_of((), [(Text(name.replace("_", " "), style="bold"), text) for name, text in texts.items()])


def text_of(name: str, value: Any) -> str:
    """Return a value of `contents` as text."""
    if name == "pins":
        more = [f"{len(value) - FOLDERS:,} others"] if len(value) > FOLDERS else []
        return ", ".join([*value[:FOLDERS], *more]) or "none"
    if name == "old_caches":
        return f"{', '.join(value)}; `cachedfs evict --old` removes what earlier releases left"
    if isinstance(value, int):
        return f"{value:,}" if name == "blocks" else decimal(value)
    return value or "none"


def texts_of(counts: Counted) -> dict[str, str]:
    """Return the counters of all processes as text, by topic."""
    if not counts.since:
        return {"since": "nothing was counted yet"}
    n_blocks = f"{counts.hits:,} of {counted(counts.hits + counts.misses, 'block')}"
    saved = [decimal(counts.bytes_saved)] if counts.bytes_saved else []
    saved += [f"about {counted(counts.requests_saved, 'request')}"] if counts.requests_saved else []
    return {
        "since": minute_of(time_of(counts.since)),
        "hits": "no block was read"
        if counts.hit_ratio is None
        else f"{n_blocks}, {per_cent(counts.hit_ratio)}",
        "fetched": f"{decimal(counts.bytes_fetched)} in {counted(counts.requests, 'request')}",
        **({"from others": decimal(counts.bytes_shared)} if counts.bytes_shared else {}),
        "saved": ", ".join(saved) or "nothing yet",
        "evicted": counted(counts.evictions, "block"),
    }


def is_too_small(counts: Counted, held: int, may_hold: int | None) -> bool:
    """Return whether a cache that holds `held` bytes is full, and evicts blocks nearly as fast as they arrive."""
    is_full = may_hold is not None and held >= FULL * may_hold
    return is_full and counts.evictions > counts.misses / 2


def time_of(at_s: float | None) -> datetime.datetime | None:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC) if at_s else None


def quotas_of(cache: BlockStore) -> list[dict[str, Any]]:
    """Return what each Drive account used of Google's daily quota today.

    Identities are `drive|HOST|ACCOUNT`; the host is shown unless it is Google's.
    """
    from cachedfs.origins.drive.quota import QuotaStats, day_of

    day, found = day_of(time.time()), []
    for identity, used in sorted(cache.quota.of_day(day).items()):
        _, host, account = identity.split("|", 2)
        stats, where = QuotaStats(day, *used), "" if host == "www.googleapis.com" else f" at {host}"
        shares = {"units_share": stats.units_share, "bytes_share": stats.bytes_share}
        found.append({"account": f"{account}{where}", **stats._asdict(), **shares})
    return found


def folders_of(held: Iterable[CachedPath]) -> list[dict[str, Any]]:
    """Return the cached content by folder, largest first; the last entry sums up all others.

    `oldest` and `newest` are when the first and the last block of a folder were cached, None if unknown.
    """
    from cachedfs.report.summary import by_folder

    found = []
    for name, some in by_folder(held):
        came = [at for each in some for at in (each.first_s, each.last_s) if at is not None]
        times = {"oldest": time_of(min(came, default=None)), "newest": time_of(max(came, default=None))}
        sums = {"blocks": sum(each.blocks for each in some), "bytes": sum(each.size for each in some)}
        found.append({"folder": name, "objects": len(some), **sums, **times})
    return found


def print_intervals(cache: BlockStore, every_s: float, *, as_json: bool) -> None:
    """Print the counters of each interval until Ctrl-C: lines, or in place on a terminal, below the totals."""
    from rich.console import Group
    from rich.live import Live

    is_live = sys.stdout.isatty() and not as_json
    before, then = cache.counts.total(), time.monotonic()
    rates = deque[tuple[float, float]](maxlen=CHARTED)
    with Live(auto_refresh=False) if is_live else contextlib.nullcontext() as live:
        while True:
            time.sleep(every_s)
            now, total, (blocks, size) = time.monotonic(), cache.counts.total(), cache.usage()
            at, counts = datetime.datetime.now(datetime.UTC).replace(microsecond=0), total.since_then(before)
            line = f"{at.astimezone():%H:%M:%S}  {line_of(counts, now - then)}; holds {decimal(size)}"
            if as_json:
                values = {"at": at, "over_s": round(now - then, 3), **counts._asdict()}
                del values["since"]
                print_json(values | {"blocks": blocks, "bytes": size}, indent=None)
            elif live is not None:
                found = {"directory": cache.root, "blocks": blocks, "bytes": size}
                rates.append((counts.bytes_served / (now - then), counts.bytes_fetched / (now - then)))
                below = Text(f"{line}\nCtrl-C ends")
                live.update(Group(totals_of(found, total), "", charts_of(rates), "", below), refresh=True)
            else:
                say(line)
            sys.stdout.flush()
            before, then = total, now


def charts_of(rates: Iterable[tuple[float, float]]) -> Table:
    """Return charts of the bytes per second read and fetched in each interval, the latest on the right."""
    named = zip(("read", "fetched"), zip(*rates, strict=True), strict=True)
    rows = [
        (Text(name, style="bold"), f"{bars(each, len(each)):>{CHARTED}}", f"at most {rate(max(each), 1)}")
        for name, each in named
    ]
    return table_of((), rows)


def line_of(counts: Counted, over_s: float) -> str:
    """Return the counters of `over_s` seconds as one line."""
    share = "" if counts.hit_ratio is None else f" ({per_cent(counts.hit_ratio)})"
    read, fetched = rate(counts.bytes_served, over_s), rate(counts.bytes_fetched, over_s)
    requests = counted(counts.requests, "request")
    evicted = f", {counts.evictions:,} evicted" if counts.evictions else ""
    return f"{counts.hits:,} hits, {counts.misses:,} misses{share}; read {read}, fetched {fetched} in {requests}{evicted}"
