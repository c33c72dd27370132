"""The command `prefetch`: fill the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, command
from cachedfs.cli.output import moved
from cachedfs.cli.urls import Location, Urls, locate
from cachedfs.common.text import counted
from cachedfs.errors import CachedFSError, CacheError

if TYPE_CHECKING:
    from cachedfs.prefetch.handle import Prefetch
    from cachedfs.prefetch.progress import Progress

EVERY_S = 0.1  # seconds between two checks of the progress
HELD_S = 1.0  # seconds: if a prefetch waits for a reader longer than this, the cache is full


@command(
    "cachedfs prefetch gs://my-bucket/data",
    "cachedfs prefetch 'gs://my-bucket/data/*.parquet' gs://my-bucket/train.jsonl",
    "cachedfs prefetch --json 'drive://My Drive/images'",
)
def prefetch(common: CommonOptions, urls: Urls) -> None:
    """Fetch objects and folders into the cache.

    Later reads then need no request for data. Cached objects are not fetched
    again: after an interrupt, run it again to continue. It stops when the cache
    is full of blocks of this origin that have not been read yet. Objects that
    cannot be fetched are reported, the rest is fetched, and the exit status is 1.
    """
    done, errors = PrefetchCounts(), list[tuple[str, Exception]]()
    # One prefetch per origin: blocks of a finished one are not protected from the next one.
    by_origin: dict[str, list[Location]] = {}
    for text in urls:
        location = locate(text, common)
        by_origin.setdefault(location.fs.fsid, []).append(location)
    for locations in by_origin.values():
        first = locations[0]
        common.url = first.text
        # A trailing slash, which `Location.path` lacks, marks a folder.
        items = [each.path + ("/" if each.text.endswith("/") else "") for each in locations]
        with first.fs.prefetch(items) as handle:
            try:
                is_whole = wait(handle, common)
            except KeyboardInterrupt:
                handle.cancel()
                done.add(handle.progress)
                common.say(f"{done}; run the same command again to continue", err=True)
                raise
            done.add(handle.progress)
            errors += [(first.url(path), error) for path, error in handle.failed]
            if not is_whole:
                done.errors += 1
                errors.append((first.text, full(locations, handle.progress)))
                break
        if not wait_until_shared(first, common):
            done.errors += 1
            rest = "not all is in the shared cache, which takes nothing now; `cachedfs export` adds the rest"
            errors.append((first.text, CacheError(f"{first.text}: {rest}")))
    common.show_with_errors(dataclasses.asdict(done), str(done), errors)


@dataclasses.dataclass
class PrefetchCounts:
    """Result of `prefetch`; `here` counts the bytes that were already cached, `errors` all errors."""

    files: int = 0
    fetched: int = 0
    here: int = 0
    requests: int = 0
    seconds: float = 0.0
    errors: int = 0

    def add(self, more: Progress) -> None:
        self.files += more.items - more.errors
        self.fetched += more.bytes_fetched
        self.here += more.bytes_here
        self.requests += more.requests
        self.seconds = round(self.seconds + more.seconds, 3)
        self.errors += more.errors

    def __str__(self) -> str:
        failed = f"; {self.errors:,} not fetched" if self.errors else ""
        fetched = f"{moved(self.fetched, 'fetched', self.seconds)}; " if self.fetched else ""
        return f"{counted(self.files, 'file')}, {fetched}{decimal(self.here)} were here already{failed}"


def full(locations: Sequence[Location], at: Progress) -> CacheError:
    """Return the error that not everything fits in the cache."""
    # The number and size of objects in a folder are unknown until the prefetch lists it.
    of = "" if at.bytes_total is None else f" of {at.items_total:,}"
    more = f" and {len(locations) - 1:,} more" if len(locations) > 1 else ""
    return CacheError(
        f"{locations[0].text}{more}: {at.items:,}{of} objects are here, and more would drive out what nobody has read yet: "
        "read them, raise cache_size, or prefetch less"
    )


def wait_until_shared(location: Location, common: CommonOptions) -> bool:
    """Wait until what was fetched is in the shared cache, if there is one; return False if that takes nothing."""
    engine = location.fs._objects.engine
    if engine.shared is None:
        return True
    with common.progress("writing to the shared cache"):
        engine.drain()
        return engine.shared.finish()


def wait(handle: Prefetch, common: CommonOptions) -> bool:
    """Show the progress of a prefetch until it ends; return False if it stops because the cache is full."""
    held_since = None
    with common.progress() as bar:
        while not (now := handle.progress).is_over:
            bar.set_size(now.bytes_total)
            bar.absolute_update(now.bytes_fetched + now.bytes_here)
            bar.files(now.items, now.items_total)
            held_since = (held_since or time.monotonic()) if now.state == "held" else None
            if held_since is not None and time.monotonic() - held_since > HELD_S:
                return False
            with contextlib.suppress(TimeoutError, CachedFSError):
                handle.wait(EVERY_S)
    if now.state == "failed":
        handle.wait()  # raises its error
    return True
