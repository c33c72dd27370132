"""`evict`: dropping what is cached; and the cache that options name."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from cachedfs.cli.given import Given
from cachedfs.cli.output import busy, print_json, say
from cachedfs.cli.places import Place, place_of
from cachedfs.cli.shared import command, either, url_argument
from cachedfs.config import FSSPEC_KEYWORDS, Config
from cachedfs.errors import OriginUnavailable

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache

__all__ = ["cache_of", "config_of", "evict"]


def config_of(given: Given) -> Config:
    """Return the options of cachedfs that hold for all URLs: given, or configured."""
    from fsspec.config import conf

    # Not as defaults, of which a misspelt one is passed over: a filesystem would refuse it, and so do we.
    configured = {k: v for k, v in conf.get("cachedfs", {}).items() if k not in FSSPEC_KEYWORDS}
    return Config.resolve(configured | given.ours_and_theirs()[0])


def cache_of(config: Config) -> BlockCache:
    from cachedfs.fetch.runtimes import engine_for

    return engine_for(config).cache


@command(
    "cachedfs evict gs://my-bucket/train.jsonl",
    "cachedfs evict gs://my-bucket/data",
    "cachedfs evict --all --yes",
)
def evict(
    given: Given,
    urls: Annotated[
        list[str] | None,
        url_argument("URL", "Objects, and folders with all below them."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole cache, of all origins.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop what is cached of objects, folders or everything.

    Pinned or not. Nothing changes at the origin, and it is not asked.
    """
    either(urls, everything=everything)
    if everything and not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here: give --yes too", param_hint="--all")
        typer.confirm("Drop the whole cache?", abort=True, err=True)
    with busy("dropping blocks", is_quiet=given.as_json):
        if everything:
            freed = {"all": cache_of(config_of(given)).evict(None)}
        else:
            freed = {text: evict_below(place_of(text, given, offline=True)) for text in urls or ()}
    if given.as_json:
        print_json({"freed": sum(freed.values()), "of": freed})
        return
    for text, size in freed.items():
        say(f"{text}: {decimal(size) + ' freed' if size else 'nothing was cached'}")


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
