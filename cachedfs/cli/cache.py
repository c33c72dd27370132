"""The commands `evict`, `pin`, `unpin` and `verify`, and access to the cache selected by the options."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from cachedfs.cli.app import Urls, command, either, url_argument
from cachedfs.cli.arguments import Place, at_each, place_of
from cachedfs.cli.exit_codes import FAILED
from cachedfs.cli.get import counting, progress
from cachedfs.cli.output import Given, busy, print_json, say
from cachedfs.config import FSSPEC_KEYWORDS, Config
from cachedfs.errors import CacheError, OriginUnavailable

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache
    from cachedfs.common.types import Verified

__all__ = ["cache_of", "config_of", "evict", "pin", "unpin", "verify"]

AT_ONCE = 1000  # pins per transaction, so that other processes can write in between


def config_of(given: Given) -> Config:
    """Return the cachedfs options for all URLs, from the command line and the fsspec configuration."""
    from fsspec.config import conf

    # Not passed as defaults: misspelled defaults are ignored, but a misspelled option must be an error here.
    configured = {k: v for k, v in conf.get("cachedfs", {}).items() if k not in FSSPEC_KEYWORDS}
    return Config.resolve(configured | given.ours_and_theirs()[0])


def cache_of(config: Config) -> BlockCache:
    from cachedfs.fetch.runtimes import runtime_for

    return runtime_for(config).cache


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
    everything: Annotated[
        bool, typer.Option("--all", metavar="", help="The whole cache, of all origins.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")] = False,
) -> None:
    """Drop what is cached of objects, folders or everything.

    Pinned blocks are dropped too. The origin is neither changed nor contacted.
    """
    either(urls, everything=everything)
    if everything and not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                "there is no terminal to ask for confirmation: add --yes", param_hint="--all"
            )
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
    """Drop cached blocks below a path or pattern; return the bytes freed.

    REQUIRES: the filesystem is offline.
    """
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


@dataclasses.dataclass
class Pinned:
    """Result of `pin` for one URL. Sizes are in bytes.

    `cached` is the size of the pinned blocks already in the cache. `may_pin` is the allowance of the cache,
    None if unknown.
    """

    url: str
    objects: int
    bytes: int
    cached: int
    may_pin: int | None

    def __str__(self) -> str:
        return (
            f"{self.url}: {_objects(self.objects)} of {decimal(self.bytes)} pinned; "
            f"{decimal(self.cached)} of them are here"
            + ("" if self.cached >= self.bytes else ", prefetch fetches the rest")
        )


@command(
    "cachedfs pin gs://my-bucket/train.jsonl",
    "cachedfs pin gs://my-bucket/data 'gs://my-bucket/*.parquet'",
    "cachedfs prefetch gs://my-bucket/data && cachedfs pin gs://my-bucket/data",
)
def pin(given: Given, urls: Urls) -> None:
    """Keep objects in the cache, whatever else comes, until unpin.

    Their blocks are never evicted to make room: neither the cached ones nor
    those fetched later. Nothing is fetched now. For a folder or a pattern, the
    objects that exist now are pinned. Pinned blocks count toward the size limit
    of the cache; blocks that do not fit beside them are not kept.
    """
    done: list[Pinned] = []

    def pin_one(place: Place) -> None:
        with busy(f"listing {place.text}", is_quiet=given.as_json):
            done.append(pinned(place))
        if not given.as_json:
            say(str(done[-1]))

    is_ok = at_each(urls, given, pin_one)
    if given.as_json:
        print_json([dataclasses.asdict(each) for each in done])
    may_pin = min((each.may_pin for each in done if each.may_pin is not None), default=None)
    of_all = size_of_pins(cache_of(config_of(given)))
    if may_pin is not None and of_all > may_pin:
        raise CacheError(
            f"pinned, but all that is pinned is {decimal(of_all)}, more than the {decimal(may_pin)} that the cache may hold: what does "
            "not fit is not kept; raise cache_size, lower keep_free, or unpin some"
        )
    if not is_ok:
        raise typer.Exit(FAILED)


def pinned(place: Place) -> Pinned:
    """Pin the objects matched by a URL or pattern. Raises FileNotFoundError if there are none."""
    fs = place.fs
    sizes = dict(objects_of(place))
    cache, identity, paths = fs._source.runtime.cache, fs._source.identity, list(sizes)
    for at in range(0, len(paths), AT_ONCE):
        cache.pin(identity, *paths[at : at + AT_ONCE])
    cached = sum(stop - start for path in paths for start, stop in fs.cached_extent(path))
    return Pinned(place.text, len(paths), sum(sizes.values()), cached, fs.may_hold())


def size_of_pins(cache: BlockCache) -> int:
    """Return the total size of all pinned objects with a known size, cached or not, in bytes."""
    facts = (cache.metadata.lookup(identity, path) for identity, path in cache.pins())
    return sum(record.info.size or 0 for record in facts if record is not None and record.info is not None)


def objects_of(place: Place) -> list[tuple[str, int]]:
    """Return path and size of all objects matched by a URL or pattern, or below a matched folder."""
    fs = place.fs
    found = place.matches() if place.is_pattern else [fs.info(place.path)]
    objects = [info for info in found if info["type"] == "file"]
    for folder in found:
        if folder["type"] == "directory":
            objects += fs.find(folder["name"], detail=True).values()
    return [(str(info["name"]), int(info["size"] or 0)) for info in objects]


@command(
    "cachedfs unpin gs://my-bucket/train.jsonl",
    "cachedfs unpin gs://my-bucket/data",
    "cachedfs unpin --all",
)
def unpin(
    given: Given,
    urls: Annotated[
        list[str] | None, url_argument("URL", "Objects, and folders with all below them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", metavar="", help="All pins, of all origins.")] = False,
) -> None:
    """Let blocks of objects be evicted again.

    The origin is not contacted: for a folder, everything pinned below it is
    unpinned, even if it no longer exists. Cached blocks stay until they are
    evicted.
    """
    either(urls, everything=everything)
    if everything:
        cache = cache_of(config_of(given))
        done = {
            "all": sum(
                let_go(cache, identity, None) for identity in {identity for identity, _ in cache.pins()}
            )
        }
    else:
        places = {text: place_of(text, given, offline=True) for text in urls or ()}
        done = {
            text: let_go(place.fs._source.runtime.cache, place.fs._source.identity, place)
            for text, place in places.items()
        }
    if given.as_json:
        print_json({"unpinned": sum(done.values()), "of": done})
        return
    for text, n in done.items():
        say(f"{text}: {_objects(n)} unpinned" if n else f"{text}: nothing was pinned")


def let_go(cache: BlockCache, identity: str, place: Place | None) -> int:
    """Remove the pins of an origin that match `place`, or all its pins; return how many were removed."""
    paths = [
        path
        for of, path in cache.pins()
        if of == identity and (place is None or place.named(path) is not None)
    ]
    for at in range(0, len(paths), AT_ONCE):
        cache.unpin(identity, *paths[at : at + AT_ONCE])
    return len(paths)


def _objects(n: int) -> str:
    return f"{n:,} object{'' if n == 1 else 's'}"


@command(
    "cachedfs verify gs://my-bucket/train.jsonl",
    "cachedfs verify gs://my-bucket/data 'drive://My Drive/data'",
    "cachedfs verify --json -o offline=true gs://my-bucket/data",
)
def verify(given: Given, urls: Urls) -> None:
    """Check what is cached of objects and folders, and drop what is wrong.

    Every cached byte is read from the disk and compared with its checksum.
    Completely cached objects are also compared with the checksum of the origin.
    Dropped blocks are fetched again when they are read. The exit status is 1 if
    anything was wrong.
    """
    found: list[tuple[Place, list[Verified]]] = []

    def verify_one(place: Place) -> None:
        with progress(None, is_quiet=given.as_json) as advance:
            found.append((place, verified(place, advance)))

    is_ok = at_each(urls, given, verify_one)
    if given.as_json:
        objects = [(place, each) for place, some in found for each in some]
        print_json([{"url": place.url(each.path), **without_path(each)} for place, each in objects])
    else:
        for place, some in found:
            for each in some:
                if not each.ok:
                    say(f"{place.url(each.path)}: {trouble(each)}")
            say(f"{place.text}: {summary(some)}")
    if not (is_ok and all(each.ok for _, some in found for each in some)):
        raise typer.Exit(FAILED)


def verified(place: Place, advance: Callable[[int], None]) -> list[Verified]:
    """Verify everything matched by a URL or pattern; return one result per object."""
    paths = [str(info["name"]) for info in place.matches()] if place.is_pattern else [place.path]
    return [each for path in paths for each in place.fs.verify(path, callback=counting(advance))]


def without_path(found: Verified) -> dict[str, object]:
    values = found._asdict()
    del values["path"]
    return values


def trouble(found: Verified) -> str:
    n = len(found.bad)
    return f"{n:,} block{'' if n == 1 else 's'} dropped: {found.reason}"


def summary(found: list[Verified]) -> str:
    """Return a summary of all results, in one line."""
    objects, sound = sum(bool(each.blocks or each.bad) for each in found), sum(each.blocks for each in found)
    whole, bad = sum(each.whole is True for each in found), sum(len(each.bad) for each in found)
    if not objects:
        return "nothing is cached"
    parts = [f"{_n(sound, 'block')} of {_n(objects, 'object')} right"]
    if bad:
        parts.append(f"{bad:,} wrong and dropped")
    return ", ".join(parts) + f"; {whole:,} whole and as the origin says"


def _n(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
