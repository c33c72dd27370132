"""The commands `pin`, `unpin`, `evict` and `verify`: keep, evict and check cached data."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, command, flag
from cachedfs.cli.stats import cache_of
from cachedfs.cli.urls import Location, Urls, at_each, check_quoted, locate, url_argument
from cachedfs.common.text import counted
from cachedfs.errors import CacheError

if TYPE_CHECKING:
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
    common.show(done)
    may_pin = min((each["may_pin"] for each in done if each["may_pin"] is not None), default=None)
    cache = cache_of(common.config())
    records = (cache.metadata.lookup(identity, path) for identity, path in cache.pins())
    of_all = sum(
        record.info.size or 0 for record in records if record is not None and record.info is not None
    )
    if may_pin is not None and of_all > may_pin:
        raise CacheError(
            f"pinned, but all pinned objects are {decimal(of_all)}, more than the {decimal(may_pin)} that the cache may hold: "
            "what does not fit is not cached; raise cache_size, lower keep_free, or unpin some"
        )


def pinned(location: Location, common: CommonOptions) -> dict[str, Any]:
    """Pin the objects at and below what a URL names; print and return their number and sizes, in bytes.

    `cached` is what is cached of them. `may_pin` is what the cache may hold, None if unknown.
    """
    with common.progress(f"listing {location.text}"):
        infos = location.entries()
        for folder in [info for info in infos if info["type"] == "directory"]:
            infos += location.fs.find(folder["name"], detail=True).values()
        sizes = {str(info["name"]): int(info["size"] or 0) for info in infos if info["type"] == "file"}
        names = list(sizes)
        for at in range(0, len(names), AT_ONCE):
            location.cache.pin(location.identity, *names[at : at + AT_ONCE])
        cached = sum(map(location.cached_bytes, sizes))
    size = sum(sizes.values())
    what = f"{counted(len(sizes), 'object')} of {decimal(size)} pinned, {decimal(cached)} of them cached"
    common.say(f"{location.text}: {what}{'' if cached >= size else '; prefetch fetches the rest'}")
    found = {"url": location.text, "objects": len(sizes), "bytes": size, "cached": cached}
    return {**found, "may_pin": location.fs.may_hold()}


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
    of = {
        text: unpinned(location, common)
        for text, location in cached_locations(urls, everything, common).items()
    }
    show_each(
        common, "unpinned", of, lambda n: f"{counted(n, 'object')} unpinned" if n else "nothing was pinned"
    )


def unpinned(location: Location | None, common: CommonOptions) -> int:
    """Remove the pins that match `location`, or all pins; return how many were removed."""
    cache = cache_of(common.config()) if location is None else location.cache
    pins: dict[str, list[str]] = {}
    for identity, path in cache.pins():
        if location is None or (identity == location.identity and location.named(path) is not None):
            pins.setdefault(identity, []).append(path)
    for identity, paths in pins.items():
        cache.unpin(identity, *paths)
    return sum(map(len, pins.values()))


@command(
    "cachedfs evict gs://my-bucket/train.jsonl",
    "cachedfs evict gs://my-bucket/data",
    "cachedfs evict --all --yes",
    "cachedfs evict --from-shared",
    "cachedfs evict --old",
)
def evict(
    common: CommonOptions,
    urls: UrlsOrAll = None,
    everything: Annotated[bool, flag("The whole cache, of all origins.", "--all")] = False,
    from_shared: Annotated[bool, flag("What came from shared caches and imports.", "--from-shared")] = False,
    old: Annotated[bool, flag("The caches that earlier releases left, which are not used.", "--old")] = False,
    yes: Annotated[bool, flag("Do not ask.", "--yes", "-y")] = False,
) -> None:
    """Evict what is cached of objects, folders or everything.

    Pinned blocks are evicted too. The origin is neither changed nor contacted.
    """
    if old or from_shared:
        if urls or everything or (old and from_shared):
            hint = "--old" if old else "--from-shared"
            raise typer.BadParameter("it is about all origins: give it alone", param_hint=hint)
        if old:
            remove_old_caches(common)
        else:
            freed = cache_of(common.config_of_existing()).evict(None, from_shared=True)
            nothing = "nothing was copied from a shared cache: one on a local disk is read where it is"
            common.show({"freed": freed}, f"{decimal(freed)} freed" if freed else nothing)
        return
    locations = cached_locations(urls, everything, common)
    if everything and not yes:
        if not sys.stdin.isatty():
            what = "there is no terminal to ask for confirmation: add --yes"
            raise typer.BadParameter(what, param_hint="--all")
        typer.confirm("Evict the whole cache?", abort=True, err=True)
    with common.progress("looking at the cache"):
        of = {text: evicted(location, common) for text, location in locations.items()}
    show_each(common, "freed", of, lambda n: f"{decimal(n)} freed" if n else "nothing was cached")


def evicted(location: Location | None, common: CommonOptions) -> int:
    """Evict cached blocks at and below what a URL names, or all; return the bytes freed."""
    if location is None:
        return cache_of(common.config()).evict(None)
    return sum(location.fs.evict(path if path.strip("/") else None) for path in location.cached_paths())


def remove_old_caches(common: CommonOptions) -> None:
    """Remove the caches of earlier formats beside the one in use; print the bytes freed by each."""
    of = {}
    for folder in cache_of(common.config_of_existing()).old_caches:
        files = (os.path.join(above, name) for above, _, names in os.walk(folder) for name in names)
        of[folder] = sum(os.lstat(file).st_size for file in files)
        shutil.rmtree(folder)
    lines = [f"{folder}: {decimal(n)} freed" for folder, n in of.items()]
    lines = lines or ["no earlier release left a cache"]
    common.show({"freed": sum(of.values()), "of": of}, *lines, err=False)


def cached_locations(
    urls: list[str] | None, everything: bool, common: CommonOptions
) -> dict[str, Location | None]:
    """Return what URLs name, or "all" and None for `--all`; asks no origin. Raises BadParameter for both or none."""
    if everything == bool(urls):
        more, name = (", and not both", "--all") if everything else ("", "URL")
        raise typer.BadParameter(f"give URLs, or --all{more}", param_hint=name)
    common.config_of_existing()
    return {url: locate(url, common, offline=True) for url in urls} if urls else {"all": None}


def show_each(common: CommonOptions, name: str, of: dict[str, int], text: Callable[[int], str]) -> None:
    """Print what was done with each URL; with --json, `name` is the sum of all."""
    common.show(
        {name: sum(of.values()), "of": of}, *(f"{url}: {text(n)}" for url, n in of.items()), err=False
    )


@command(
    "cachedfs verify gs://my-bucket/train.jsonl",
    "cachedfs verify gs://my-bucket/data 'drive://My Drive/data'",
    "cachedfs verify --json -o offline=true gs://my-bucket/data",
)
def verify(common: CommonOptions, urls: Urls) -> None:
    """Check cached objects and folders, and remove what is wrong.

    Every cached byte is read from the disk and compared with its checksum.
    Completely cached objects are also compared with the checksum of the origin.
    Removed blocks are fetched again when they are read. The exit status is 1 if
    anything was wrong.
    """

    def verify_one(location: Location) -> list[dict[str, Any]]:
        with common.progress() as bar:
            results = [each for path in location.paths() for each in location.fs.verify(path, callback=bar)]
        wrong = [each for each in results if not each.ok]
        common.has_failed |= bool(wrong)
        for each in wrong:
            common.say(f"{location.url(each.path)}: {counted(len(each.bad), 'block')} removed: {each.reason}")
        common.say(f"{location.text}: {summary(results)}")
        values = [each._asdict() for each in results]
        return [{"url": location.url(each.pop("path")), **each} for each in values]

    common.show([each for results in at_each(urls, common, verify_one) for each in results])


def summary(results: list[Verified]) -> str:
    objects = sum(bool(each.blocks or each.bad) for each in results)
    if not objects:
        return "nothing is cached"
    bad = sum(len(each.bad) for each in results)
    correct = counted(sum(each.blocks for each in results), "block")
    wrong = f", {bad:,} wrong and removed" if bad else ""
    whole = sum(each.whole is True for each in results)
    return f"{correct} of {counted(objects, 'object')} correct{wrong}; {whole:,} complete and equal to the origin's"
