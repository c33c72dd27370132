"""The command `prefetch`: fetch objects and folders into the cache ahead of reading."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.filesize import decimal

from cachedfs.cli.app import Urls, command
from cachedfs.cli.arguments import Place, place_of
from cachedfs.cli.get import shown
from cachedfs.cli.output import Given, print_summary, say
from cachedfs.common.text import counted
from cachedfs.errors import CachedFSError

if TYPE_CHECKING:
    from cachedfs.prefetch.handle import Prefetch, Progress

__all__ = ["prefetch"]

EVERY_S = 0.1  # seconds between two checks of the progress
HELD_S = 1.0  # seconds: if a plan waits for a reader longer than this, the cache is full


@command(
    "cachedfs prefetch gs://my-bucket/data",
    "cachedfs prefetch 'gs://my-bucket/data/*.parquet' gs://my-bucket/train.jsonl",
    "cachedfs prefetch --json 'drive://My Drive/images'",
)
def prefetch(given: Given, urls: Urls) -> None:
    """Fetch objects and folders into the cache, so that later reads need no request.

    Cached objects are not fetched again: after an interrupt, run it again to
    continue. It stops when the cache is full of blocks of this origin that have
    not been read yet. Objects that cannot be fetched are reported, the rest is
    fetched, and the exit status is 1.
    """
    done = PrefetchCounts()
    # One plan per origin: blocks of a finished plan are not protected from the next plan.
    for places in by_origin([place_of(text, given) for text in urls]):
        given.url = places[0].text
        with places[0].fs.prefetch([item_of(place) for place in places]) as plan:
            try:
                is_whole = watched(plan, is_quiet=given.as_json)
            except KeyboardInterrupt:
                plan.cancel()
                done.add(places[0], plan.progress, [])
                if not given.as_json:
                    say(f"{done}; run the same command again to continue", err=True)
                raise
            done.add(places[0], plan.progress, plan.failed)
            if not is_whole:
                done.full(places, plan.progress)
                break
    print_summary(done, as_json=given.as_json)


def by_origin(places: Sequence[Place]) -> list[list[Place]]:
    """Group the places by origin, in their original order."""
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(place.fs.fsid, []).append(place)
    return list(found.values())


def item_of(place: Place) -> str:
    """Return the path for a prefetch plan. A trailing slash, which `Place.path` lacks, marks a folder."""
    return place.path + ("/" if place.text.endswith("/") else "")


@dataclasses.dataclass
class PrefetchCounts:
    """Result of `prefetch`. `here` counts the bytes that were already cached.

    `failed` has the first errors; `errors` is the total number of errors.
    """

    files: int = 0
    fetched: int = 0
    here: int = 0
    requests: int = 0
    seconds: float = 0.0
    errors: int = 0
    failed: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def add(self, place: Place, told: Progress, failed: list[tuple[str, CachedFSError]]) -> None:
        """Add the result of a plan. Errors name the URL in the form the user wrote."""
        self.files += told.items - told.errors
        self.fetched += told.bytes_fetched
        self.here += told.bytes_here
        self.requests += told.requests
        self.seconds = round(self.seconds + told.seconds, 3)
        self.errors += told.errors
        self.failed += [
            {"url": place.url(path), "type": type(error).__name__, "message": str(error)}
            for path, error in failed
        ]

    def full(self, places: Sequence[Place], told: Progress) -> None:
        """Record that not everything fits in the cache."""
        # The number and size of objects in a folder are unknown until the plan lists it.
        of = "" if told.bytes_total is None else f" of {told.items_total:,}"
        more = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
        why = (
            f"{places[0].text}{more}: {told.items:,}{of} objects are here, and more would drive out what nobody has read yet: "
            "read them, raise cache_size, or prefetch less"
        )
        self.errors += 1
        self.failed.append({"url": places[0].text, "type": "CacheError", "message": why})

    def __str__(self) -> str:
        files = counted(self.files, "file")
        failed = f"; {self.errors:,} not fetched" if self.errors else ""
        here = f"{decimal(self.here)} were here already"
        if not self.fetched:
            return f"{files}, {here}{failed}"
        rate = f", {decimal(int(self.fetched / self.seconds))}/s" if self.seconds else ""
        return f"{files}, {decimal(self.fetched)} fetched in {self.seconds:.1f} s{rate}; {here}{failed}"


def watched(plan: Prefetch, *, is_quiet: bool) -> bool:
    """Show the progress of a plan until it ends; return False if it stops because the cache is full."""
    held_since = None
    with shown(is_quiet=is_quiet) as show:
        while not (told := plan.progress).is_over:
            show(told.bytes_fetched + told.bytes_here, told.bytes_total)
            held_since = (held_since or time.monotonic()) if told.state == "held" else None
            if held_since is not None and time.monotonic() - held_since > HELD_S:
                return False
            with contextlib.suppress(TimeoutError, CachedFSError):
                plan.wait(EVERY_S)
    if told.state == "failed":
        plan.wait()  # raises the error of the plan
    return True
