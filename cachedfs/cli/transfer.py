"""The commands `export` and `import`: carry a cache to another machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, command
from cachedfs.cli.output import moved
from cachedfs.cli.urls import UrlsBeforeTarget, before_target, drive_url, locate, url_argument
from cachedfs.common.text import counted
from cachedfs.errors import CacheError


@command(
    "cachedfs export 'drive://My Drive/images' 'drive://My Drive/images.cache'",
    "cachedfs export gs://my-bucket/a gs://my-bucket/b gs://my-bucket/cache",
    "cachedfs export gs://my-bucket/data /mnt/disk/data.cache",
)
def export(
    common: CommonOptions,
    urls: UrlsBeforeTarget = None,
    *,
    target: Annotated[str, url_argument("TARGET", "The folder or .zip file to write to.")],
) -> None:
    """Write what is cached as a few large files, for import.

    Nothing is fetched; use prefetch for that. Run it again after an interrupt,
    or when more is cached: a folder gets only what it lacks. A TARGET that ends
    with .zip is one file, written anew. All URLs must have the same origin.
    """
    urls = before_target(urls)
    locations = [locate(text, common, offline=True) for text in urls]
    fs = locate(urls[0], common).fs
    if any(location.fs.fsid != fs.fsid for location in locations):
        raise typer.BadParameter("they are of several origins: export each of them", param_hint="URL")
    paths = []
    for location in locations:
        if not (found := location.cached_paths()):
            raise CacheError(f"{location.text}: nothing that is cached has such a name: prefetch it first")
        paths += found
    try:
        locate(target, common)  # raises an error for text that is neither a URL nor a local file
    except ValueError as error:
        raise ValueError(f"{error}, ./{target} for a new local folder") from error
    target = drive_url(target) or target
    target_options = common.split()[1] if "://" in target else {}
    started = time.perf_counter()
    with common.progress() as callback:
        done = fs.export_cache(paths, target, target_options, callback=callback)
    seconds = time.perf_counter() - started
    what = f"{counted(done.objects, 'object')}, {counted(done.blocks, 'block')}, {decimal(done.bytes)}"
    sent = moved(done.sent, "sent", seconds) if done.sent else "all of it was there already"
    text = f"{what} in {counted(done.bundles, 'file')}; {sent}"
    common.show({**done._asdict(), "seconds": round(seconds, 3)}, text)


@command(
    "cachedfs import 'drive://My Drive/images.cache'",
    "cachedfs import gs://my-bucket/cache --cache-dir /fast/nvme",
    name="import",
)
def import_(
    common: CommonOptions,
    source: Annotated[str, url_argument("SOURCE", "The folder or .zip file that export wrote.")],
) -> None:
    """Load what export wrote into the cache, in few requests.

    Cached blocks are not fetched again: run it again to continue after an
    interrupt. Each block is checked. Corrupt blocks are reported and skipped,
    blocks without room are counted, and the exit status is then 1.
    """
    from cachedfs.filesystem.import_ import import_from

    location = locate(source, common)
    started = time.perf_counter()
    with common.progress() as callback:
        done = import_from(location.fs._objects, location.path, None, callback)
    seconds = time.perf_counter() - started
    fetched = moved(done.bytes, "fetched", seconds)
    text = f"{counted(done.blocks, 'block')}, {fetched}; {done.here:,} were here already"
    if done.left:
        text += f"; {done.left:,} have no room: raise cache_size, lower keep_free, unpin or evict something"
    common.show({**done._asdict(), "seconds": round(seconds, 3)}, text)
    common.has_failed = not done.ok
