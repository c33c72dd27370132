"""`pin` and `unpin`: what is to stay in the cache, whatever else comes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from cachedfs.cli.cache import cache_of, config_of
from cachedfs.cli.given import Given
from cachedfs.cli.output import FAILED, busy, print_json, say
from cachedfs.cli.places import Place, at_each, place_of
from cachedfs.cli.shared import Urls, command, either, url_argument
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache

__all__ = ["pin", "unpin"]

AT_ONCE = 1000  # pins in one transaction, so that others get their turn to write


@dataclasses.dataclass
class Pinned:
    """What `pin` says of one URL; sizes in bytes. `may_pin`: what the cache may hold; None: nobody can tell."""

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

    Their blocks that are here and those to come are not evicted to make room; nothing is fetched. Of a folder or a pattern it
    is the objects that are there now. Pins count in the bound of the cache: what does not fit beside them is not kept.
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
    """Pin what a URL or a pattern names. Raises FileNotFoundError where nothing has the name."""
    fs = place.fs
    sizes = dict(objects_of(place))
    cache, identity, paths = fs._source.engine.cache, fs._source.identity, list(sizes)
    for at in range(0, len(paths), AT_ONCE):
        cache.pin(identity, *paths[at : at + AT_ONCE])
    cached = sum(stop - start for path in paths for start, stop in fs.cached_extent(path))
    return Pinned(place.text, len(paths), sum(sizes.values()), cached, fs.may_hold())


def size_of_pins(cache: BlockCache) -> int:
    """Return the bytes of all objects that are pinned, here or not, as far as their sizes are known."""
    facts = (cache.known.lookup(identity, path) for identity, path in cache.pins())
    return sum(fact.info.size or 0 for fact in facts if fact is not None and fact.info is not None)


def objects_of(place: Place) -> list[tuple[str, int]]:
    """Return path and size of the objects that a URL names, those below a folder and those that match a pattern."""
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
    everything: Annotated[bool, typer.Option("--all", help="All pins, of all origins.")] = False,
) -> None:
    """Let blocks of objects be evicted again.

    The origin is not asked: of a folder it is what is pinned below it, there or not. What is cached stays until it has to go.
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
            text: let_go(place.fs._source.engine.cache, place.fs._source.identity, place)
            for text, place in places.items()
        }
    if given.as_json:
        print_json({"unpinned": sum(done.values()), "of": done})
        return
    for text, n in done.items():
        say(f"{text}: {_objects(n)} unpinned" if n else f"{text}: nothing was pinned")


def let_go(cache: BlockCache, identity: str, place: Place | None) -> int:
    """Forget the pins of an origin at and below a path, or that match a pattern; return how many they were."""
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
