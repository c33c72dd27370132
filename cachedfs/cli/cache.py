"""`stats` and `evict`: what the cache holds, and dropping it."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from cachedfs.cli.output import plain_table, print_json, print_table
from cachedfs.cli.places import Place, place_of
from cachedfs.cli.shared import Given, command
from cachedfs.config import FSSPEC_KEYWORDS, Config
from cachedfs.errors import CacheError, OriginUnavailable

if TYPE_CHECKING:
    from cachedfs.cache import BlockCache

__all__ = ["cache_of", "config_of", "contents", "evict", "said", "stats"]


@command(
    "cachedfs stats",
    "cachedfs stats --cache-dir /fast/nvme --json",
    "cachedfs stats -o cache_size=200GB",
)
def stats(given: Given) -> None:
    """Show what the cache holds, and how much it may hold."""
    config = config_of(given)
    found = contents(cache_of(config), config)
    if given.as_json:
        print_json(found)
        return
    table = plain_table()
    for name, value in found.items():
        table.add_row(Text(name.replace("_", " "), style="bold"), Text(said(name, value), overflow="fold"))
    print_table(table)


def config_of(given: Given) -> Config:
    """Return the options of cachedfs that hold for all URLs: given, or configured."""
    from fsspec.config import conf

    # Not as defaults, of which a misspelt one is passed over: a filesystem would refuse it, and so do we.
    configured = {k: v for k, v in conf.get("cachedfs", {}).items() if k not in FSSPEC_KEYWORDS}
    return Config.resolve(configured | given.ours_and_theirs()[0])


def cache_of(config: Config) -> BlockCache:
    from cachedfs.engine import engine_for

    return engine_for(config).cache


def contents(cache: BlockCache, config: Config) -> dict[str, Any]:
    """Return what `stats` shows, sizes in bytes; `may_hold` is None where nothing can be written, `cannot_store` why."""
    blocks, size = cache.usage()
    found: dict[str, Any] = {"directory": cache.root, "blocks": blocks, "bytes": size, "may_hold": None}
    cannot_store = cache.cannot_store
    try:
        found["may_hold"] = cache.allowance(config.bounds)
    except CacheError as error:
        cannot_store = error.message
    if cache.root is not None:
        disk = os.statvfs(cache.root)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        bounds = {"cache_size": config.cache_size, "keep_free": config.keep_free}
        found |= {name: bound_of(bound, total) for name, bound in bounds.items()}
        found |= {"disk_free": free, "disk_size": total}
    return found | {"pins": [path for _, path in cache.pins()], "cannot_store": cannot_store}


def bound_of(bound: int | float | None, total: int) -> int | str:
    """Return a bound in bytes; a float is a share of the disk."""
    if bound is None:
        return "auto"
    return int(bound * total) if isinstance(bound, float) else bound


def said(name: str, value: Any) -> str:
    """Return a value of `contents` in words."""
    if name == "pins":
        return ", ".join(value) or "none"
    if name == "blocks":
        return f"{value:,}"
    if isinstance(value, int):
        return decimal(value)
    return value or ("no: everything can be kept" if name == "cannot_store" else "none")


@command(
    "cachedfs evict gs://my-bucket/train.jsonl",
    "cachedfs evict gs://my-bucket/data",
    "cachedfs evict --all --yes",
)
def evict(
    given: Given,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", show_default=False, help="Objects, and folders with all below them."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole cache, of all origins.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop what is cached of objects, folders or everything.

    Pinned or not. Nothing changes at the origin, and it is not asked.
    """
    if everything == bool(urls):
        raise typer.BadParameter("give URLs, or --all", param_hint="URL")
    if everything and not yes and sys.stdin.isatty():
        typer.confirm("Drop the whole cache?", abort=True, err=True)
    if everything:
        freed = {"all": cache_of(config_of(given)).evict(None)}
    else:
        freed = {text: evict_below(place_of(text, given, offline=True)) for text in urls or ()}
    if given.as_json:
        print_json({"freed": sum(freed.values()), "of": freed})
        return
    for text, size in freed.items():
        typer.echo(f"{text}: {decimal(size) + ' freed' if size else 'nothing was cached'}")


def evict_below(place: Place) -> int:
    """Drop what is cached below a name, or a pattern; return the bytes freed. REQUIRES: a filesystem that is offline."""
    fs, path = place.fs, place.path
    if not place.is_pattern:
        return fs.evict(path if path.strip("/") else None)
    try:
        return sum(fs.evict(name) for name in fs.glob(path))
    except OriginUnavailable:
        logging.getLogger("cachedfs.cli").warning(
            "%s: a pattern matches what was listed, and this was not: name objects or folders", place.text
        )
        return 0
