"""The commands `pin`, `unpin`, `evict` and `verify`: keep, drop and check cached data."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, command, flag
from cachedfs.cli.output import busy, print_json, progress, say
from cachedfs.cli.stats import cache_of
from cachedfs.cli.urls import Location, Urls, at_each, check_quoted, locate, url_argument
from cachedfs.common.text import counted
from cachedfs.errors import CacheError, OriginUnavailable

if TYPE_CHECKING:
    from cachedfs.cache.block_store import BlockStore
    from cachedfs.core.verify import Verified

AT_ONCE = 1000  # pins per transaction, so that other processes can write in between

UrlsOrAll = Annotated[
    list[str] | None, url_argument("URL", "Objects, and folders with all below them.", callback=check_quoted)
]


@command(
    "cachedfs pin gs://my-bucket/train.jsonl",
    "cachedfs pin gs://my-bucket/data 'gs://my-bucket/*.parquet'",
    "cachedfs prefetch gs://my-bucket/data && cachedfs pin gs://my-bucket/data",
)
def pin(common: CommonOptions, urls: Urls) -> None:
    """Keep objects in the cache, whatever else comes, until unpin.

    Their blocks are never evicted to make room: neither the cached ones nor
    those fetched later. Nothing is fetched now. For a folder or a pattern, the
    objects that exist now are pinned. Pinned blocks count toward the size limit
    of the cache; blocks that do not fit beside them are not kept.
    """
    done = at_each(urls, common, lambda location: pinned(location, common))
    if common.as_json:
        print_json(done)
    may_pin = min((each["may_pin"] for each in done if each["may_pin"] is not None), default=None)
    of_all = size_of_pins(cache_of(common.config()))
    if may_pin is not None and of_all > may_pin:
        raise CacheError(
            f"pinned, but all pinned objects are {decimal(of_all)}, more than the {decimal(may_pin)} that the cache may hold: "
            "what does not fit is not cached; raise cache_size, lower keep_free, or unpin some"
        )


def pinned(location: Location, common: CommonOptions) -> dict[str, Any]:
    """Pin the objects matched by a URL or pattern; print and return their number and sizes.

    `cached` is the size of the pinned blocks in the cache. `may_pin` is the allowance of the cache, None if unknown.
    Raises FileNotFoundError if there are no such objects.
    """
    with busy(f"listing {location.text}", is_quiet=common.as_json):
        sizes = sizes_of(location)
        for paths in parts_of(list(sizes)):
            location.cache.pin(location.identity, *paths)
        cached = sum(map(location.cached_bytes, sizes))
    n, size = len(sizes), sum(sizes.values())
    if not common.as_json:
        rest = "" if cached >= size else "; prefetch fetches the rest"
        say(
            f"{location.text}: {counted(n, 'object')} of {decimal(size)} pinned, {decimal(cached)} of them cached{rest}"
        )
    return {
        "url": location.text,
        "objects": n,
        "bytes": size,
        "cached": cached,
        "may_pin": location.fs.may_hold(),
    }


def sizes_of(location: Location) -> dict[str, int]:
    """Return the size of each object matched by a URL or pattern, or below a matched folder."""
    fs = location.fs
    found = location.matches() if location.is_pattern else [fs.info(location.path)]
    objects = [info for info in found if info["type"] == "file"]
    for folder in found:
        if folder["type"] == "directory":
            objects += fs.find(folder["name"], detail=True).values()
    return {str(info["name"]): int(info["size"] or 0) for info in objects}


def size_of_pins(cache: BlockStore) -> int:
    """Return the total size of all pinned objects with a known size, cached or not, in bytes."""
    records = (cache.metadata.lookup(identity, path) for identity, path in cache.pins())
    return sum(record.info.size or 0 for record in records if record is not None and record.info is not None)


def parts_of(paths: list[str]) -> Iterator[list[str]]:
    return (paths[at : at + AT_ONCE] for at in range(0, len(paths), AT_ONCE))


@command(
    "cachedfs unpin gs://my-bucket/train.jsonl",
    "cachedfs unpin gs://my-bucket/data",
    "cachedfs unpin --all",
)
def unpin(
    common: CommonOptions,
    urls: UrlsOrAll = None,
    everything: Annotated[bool, flag("All pins, of all origins.", "--all")] = False,
) -> None:
    """Let blocks of objects be evicted again.

    The origin is not contacted: for a folder, everything pinned below it is
    unpinned, even if it no longer exists. Cached blocks stay until they are
    evicted.
    """
    refuse_both_or_none(urls, everything=everything)
    text = "nothing was pinned", "{} unpinned"
    at_each_or_all(common, urls, "unpinned", unpinned, lambda n: text[n > 0].format(counted(n, "object")))


def unpinned(location: Location | None, common: CommonOptions) -> int:
    """Remove the pins that match `location`, or all pins; return how many were removed."""
    cache = cache_of(common.config()) if location is None else location.cache
    pins: dict[str, list[str]] = {}
    for identity, path in cache.pins():
        if location is None or (identity == location.identity and location.named(path) is not None):
            pins.setdefault(identity, []).append(path)
    for identity, paths in pins.items():
        for part in parts_of(paths):
            cache.unpin(identity, *part)
    return sum(map(len, pins.values()))


@command(
    "cachedfs evict gs://my-bucket/train.jsonl",
    "cachedfs evict gs://my-bucket/data",
    "cachedfs evict --all --yes",
)
def evict(
    common: CommonOptions,
    urls: UrlsOrAll = None,
    everything: Annotated[bool, flag("The whole cache, of all origins.", "--all")] = False,
    yes: Annotated[bool, flag("Do not ask.", "--yes", "-y")] = False,
) -> None:
    """Drop what is cached of objects, folders or everything.

    Pinned blocks are dropped too. The origin is neither changed nor contacted.
    """
    refuse_both_or_none(urls, everything=everything)
    if everything and not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                "there is no terminal to ask for confirmation: add --yes", param_hint="--all"
            )
        typer.confirm("Drop the whole cache?", abort=True, err=True)
    text = "nothing was cached", "{} freed"
    at_each_or_all(common, urls, "freed", evicted, lambda n: text[n > 0].format(decimal(n)))


def evicted(location: Location | None, common: CommonOptions) -> int:
    """Drop cached blocks below a path or pattern, or all; return the bytes freed."""
    if location is None:
        return cache_of(common.config()).evict(None)
    fs, path = location.fs, location.path
    if not location.is_pattern:
        return fs.evict(path if path.strip("/") else None)
    try:
        return sum(fs.evict(name) for name in fs.glob(path))
    except OriginUnavailable:
        logging.getLogger("cachedfs.cli").warning(
            "%s: evict finds names only in cached listings, and this folder has none: name objects or folders instead",
            location.text,
        )
        return 0


def refuse_both_or_none(urls: list[str] | None, *, everything: bool) -> None:
    """Raise BadParameter unless exactly one of URLs and `--all` is given."""
    if everything == bool(urls):
        more, name = (", and not both", "--all") if everything else ("", "URL")
        raise typer.BadParameter(f"give URLs, or --all{more}", param_hint=name)


def at_each_or_all(
    common: CommonOptions,
    urls: list[str] | None,
    name: str,
    do: Callable[[Location | None, CommonOptions], int],
    text: Callable[[int], str],
) -> None:
    """Print the number that `do` returns for each URL, or for everything without URLs; asks no origin.

    With --json, `name` is the sum of all.
    """
    with busy("looking at the cache", is_quiet=common.as_json):
        locations = {url: locate(url, common, offline=True) for url in urls} if urls else {"all": None}
        of = {url: do(location, common) for url, location in locations.items()}
    if common.as_json:
        print_json({name: sum(of.values()), "of": of})
        return
    for url, n in of.items():
        say(f"{url}: {text(n)}")


@command(
    "cachedfs verify gs://my-bucket/train.jsonl",
    "cachedfs verify gs://my-bucket/data 'drive://My Drive/data'",
    "cachedfs verify --json -o offline=true gs://my-bucket/data",
)
def verify(common: CommonOptions, urls: Urls) -> None:
    """Check cached objects and folders, and drop what is wrong.

    Every cached byte is read from the disk and compared with its checksum.
    Completely cached objects are also compared with the checksum of the origin.
    Dropped blocks are fetched again when they are read. The exit status is 1 if
    anything was wrong.
    """

    def verify_one(location: Location) -> list[dict[str, Any]]:
        with progress(is_quiet=common.as_json) as bar:
            results = [each for path in location.paths() for each in location.fs.verify(path, callback=bar)]
        common.has_failed |= not all(each.ok for each in results)
        if not common.as_json:
            for each in results:
                if not each.ok:
                    dropped = counted(len(each.bad), "block")
                    say(f"{location.url(each.path)}: {dropped} dropped: {each.reason}")
            say(f"{location.text}: {summary(results)}")
        values = [each._asdict() for each in results]
        return [{"url": location.url(each.pop("path")), **each} for each in values]

    found = at_each(urls, common, verify_one)
    if common.as_json:
        print_json([each for results in found for each in results])


def summary(results: list[Verified]) -> str:
    """Return a summary of all results, in one line."""
    objects = sum(bool(each.blocks or each.bad) for each in results)
    if not objects:
        return "nothing is cached"
    bad = sum(len(each.bad) for each in results)
    correct = counted(sum(each.blocks for each in results), "block")
    wrong = f", {bad:,} wrong and dropped" if bad else ""
    whole = sum(each.whole is True for each in results)
    return f"{correct} of {counted(objects, 'object')} correct{wrong}; {whole:,} complete and equal to the origin's"
