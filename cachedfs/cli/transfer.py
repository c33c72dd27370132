"""The commands `prefetch`, `export` and `import`: fill the cache, and carry it to another machine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, command
from cachedfs.cli.output import failure, progress, rate, say
from cachedfs.cli.urls import Location, Urls, UrlsBeforeTarget, before_target, drive_url, locate, url_argument
from cachedfs.common.text import counted
from cachedfs.errors import CachedFSError, CacheError

if TYPE_CHECKING:
    from cachedfs.prefetch.handle import Prefetch, Progress

EVERY_S = 0.1  # seconds between two checks of the progress
HELD_S = 1.0  # seconds: if a prefetch waits for a reader longer than this, the cache is full


# prefetch


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
    done = PrefetchCounts()
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
                is_whole = wait(handle, is_quiet=common.as_json)
            except KeyboardInterrupt:
                handle.cancel()
                done.add(first, handle.progress, [])
                if not common.as_json:
                    say(f"{done}; run the same command again to continue", err=True)
                raise
            done.add(first, handle.progress, handle.failed)
            if not is_whole:
                done.add_full(locations, handle.progress)
                break
    common.print_result(dataclasses.asdict(done), str(done), done.failed)


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

    def add(self, location: Location, more: Progress, failed: list[tuple[str, CachedFSError]]) -> None:
        """Add the result of a prefetch. Errors name the URL in the form the user wrote."""
        self.files += more.items - more.errors
        self.fetched += more.bytes_fetched
        self.here += more.bytes_here
        self.requests += more.requests
        self.seconds = round(self.seconds + more.seconds, 3)
        self.errors += more.errors
        self.failed += [failure(location.url(path), error) for path, error in failed]

    def add_full(self, locations: Sequence[Location], at: Progress) -> None:
        """Record that not everything fits in the cache."""
        url = locations[0].text
        # The number and size of objects in a folder are unknown until the prefetch lists it.
        of = "" if at.bytes_total is None else f" of {at.items_total:,}"
        more = f" and {len(locations) - 1:,} more" if len(locations) > 1 else ""
        why = (
            f"{url}{more}: {at.items:,}{of} objects are here, and more would drive out what nobody has read yet: "
            "read them, raise cache_size, or prefetch less"
        )
        self.errors += 1
        self.failed.append(failure(url, CacheError(why)))

    def __str__(self) -> str:
        failed = f"; {self.errors:,} not fetched" if self.errors else ""
        fetched = f"{moved(self.fetched, 'fetched', self.seconds)}; " if self.fetched else ""
        return f"{counted(self.files, 'file')}, {fetched}{decimal(self.here)} were here already{failed}"


def wait(handle: Prefetch, *, is_quiet: bool) -> bool:
    """Show the progress of a prefetch until it ends; return False if it stops because the cache is full."""
    held_since = None
    with progress(is_quiet=is_quiet) as bar:
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


# export and import


@command(
    "cachedfs export 'drive://My Drive/images' 'drive://My Drive/images.cache'",
    "cachedfs export gs://my-bucket/a gs://my-bucket/b gs://my-bucket/cache",
    "cachedfs export gs://my-bucket/data /mnt/disk/data.cache",
)
def export(
    common: CommonOptions,
    urls: UrlsBeforeTarget = None,
    *,
    target: Annotated[str, url_argument("TARGET", "The folder to write the export to.")],
) -> None:
    """Write what is cached as a few large objects, for import.

    Nothing is fetched; use prefetch for that. Run it again after an interrupt,
    or when more is cached: it sends only what is missing. The previous export in
    TARGET is replaced once the new one is complete. All URLs must have the same
    origin.
    """
    urls = before_target(urls)
    locations = [locate(text, common, offline=True) for text in urls]
    fs = locate(urls[0], common).fs
    if any(location.fs.fsid != fs.fsid for location in locations):
        raise typer.BadParameter("they are of several origins: export each of them", param_hint="URL")
    paths = [path for location in locations for path in cached_paths(location)]
    try:
        locate(target, common)  # raises an error for text that is neither a URL nor a local file
    except ValueError as error:
        raise ValueError(f"{error}, ./{target} for a new local folder") from error
    target = drive_url(target) or target
    target_options = common.split()[1] if "://" in target else {}
    started = time.perf_counter()
    with progress(is_quiet=common.as_json) as callback:
        done = fs.export_cache(paths, target, target_options, callback=callback)
    seconds = time.perf_counter() - started
    what = f"{counted(done.objects, 'object')}, {counted(done.blocks, 'block')}, {decimal(done.bytes)}"
    sent = moved(done.sent, "sent", seconds) if done.sent else "all of it was there already"
    text = f"{what} in {counted(done.bundles, 'bundle')}; {sent}"
    common.print_result({**done._asdict(), "seconds": round(seconds, 3)}, text)


@command(
    "cachedfs import 'drive://My Drive/images.cache'",
    "cachedfs import gs://my-bucket/cache --cache-dir /fast/nvme",
    name="import",
)
def import_(
    common: CommonOptions,
    source: Annotated[str, url_argument("SOURCE", "The folder that export wrote.")],
) -> None:
    """Load what export wrote into the cache, in few requests.

    Cached blocks are not fetched again: run it again to continue after an
    interrupt. Each block is checked. Corrupt blocks are reported and skipped,
    blocks without room are counted, and the exit status is then 1.
    """
    from cachedfs.snapshot import Import

    location = locate(source, common)
    reader = location.fs._reader
    started = time.perf_counter()
    with progress(is_quiet=common.as_json) as callback:
        run = Import(reader, location.path, identity=None, callback=callback).run()
        done = reader.objects.engine.run(run)
    seconds = time.perf_counter() - started
    fetched = moved(done.bytes, "fetched", seconds)
    text = f"{counted(done.blocks, 'block')}, {fetched}; {done.here:,} were here already"
    if done.left:
        text += f"; {done.left:,} have no room: raise cache_size, lower keep_free, unpin or evict something"
    common.print_result({**done._asdict(), "seconds": round(seconds, 3)}, text)
    common.has_failed = not done.ok


def cached_paths(location: Location) -> list[str]:
    """Return the paths that a URL names; for a pattern, the cached ones that match. Sends no request."""
    if not location.is_pattern:
        return [location.path]
    above = location.path.partition("*")[0].rpartition("/")[0]
    cached = location.cache.paths_below(location.identity, above)
    found = sorted({root for path in cached if (root := location.named(path)) is not None})
    if not found:
        raise CacheError(f"{location.text}: nothing that is cached has such a name: prefetch it first")
    return found


def moved(size: int, how: str, seconds: float) -> str:
    """Return how much was transferred and how fast, as text."""
    speed = f" in {seconds:.1f} s, {rate(size, seconds)}" if size and seconds else ""
    return f"{decimal(size)} {how}{speed}"
