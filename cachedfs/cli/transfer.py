"""The commands `export` and `import`: write the cached blocks as a few large objects, and load them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from cachedfs.cli.app import Copying, Urls, command, url_argument
from cachedfs.cli.arguments import Place, place_of
from cachedfs.cli.exit_codes import FAILED
from cachedfs.cli.get import shown
from cachedfs.cli.output import Given, print_json, say
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.common.types import Exported, Imported

__all__ = ["export", "import_"]


@command(
    "cachedfs export 'drive://My Drive/images' 'drive://My Drive/images.cache'",
    "cachedfs export gs://my-bucket/a gs://my-bucket/b gs://my-bucket/cache",
    "cachedfs export gs://my-bucket/data /mnt/disk/data.cache",
    kind=Copying,
)
def export(
    given: Given,
    urls: Urls,
    target: Annotated[str, url_argument("TARGET", "The folder that the export is to be.")],
) -> None:
    """Write what is cached of objects and folders as a few large objects, for import.

    Nothing is fetched; use prefetch for that. Run it again after an interrupt,
    or when more is cached: it sends only what is missing. The previous export in
    TARGET is replaced once the new one is complete. All URLs must have the same
    origin.
    """
    places = [place_of(text, given, offline=True) for text in urls]
    fs = place_of(urls[0], given).fs
    if any(place.fs.fsid != fs.fsid for place in places):
        raise typer.BadParameter("they are of several origins: export each of them", param_hint="URL")
    paths = [path for place in places for path in roots_of(place)]
    given.url = target
    try:
        place_of(target, given)  # raises an error for text that is neither a URL nor a local file
    except ValueError as error:
        raise ValueError(f"{error}, ./{target} for a new local folder") from error
    started = time.perf_counter()
    with told(is_quiet=given.as_json) as callback:
        done = fs.export_cache(paths, target, options_for(target, given), callback=callback)
    seconds = time.perf_counter() - started
    if given.as_json:
        print_json({**done._asdict(), "seconds": round(seconds, 3)})
    else:
        say(said_of_export(done, seconds), err=True)


@command(
    "cachedfs import 'drive://My Drive/images.cache'",
    "cachedfs import gs://my-bucket/cache --cache-dir /fast/nvme",
    name="import",
)
def import_(
    given: Given,
    source: Annotated[str, url_argument("SOURCE", "The folder that export wrote.")],
) -> None:
    """Load what export wrote into the cache, in few requests.

    Cached blocks are not fetched again: run it again to continue after an
    interrupt. Each block is checked. Corrupt blocks are reported and skipped,
    blocks without room are counted, and the exit status is then 1.
    """
    from cachedfs.snapshot import Import

    place = place_of(source, given)
    reader = place.fs._reader
    started = time.perf_counter()
    with told(is_quiet=given.as_json) as callback:
        done = reader.source.runtime.run(Import(reader, place.path, identity=None, callback=callback).run())
    seconds = time.perf_counter() - started
    if given.as_json:
        print_json({**done._asdict(), "seconds": round(seconds, 3)})
    else:
        say(said_of_import(done, seconds), err=True)
    if not done.ok:
        raise typer.Exit(FAILED)


def roots_of(place: Place) -> list[str]:
    """Return the paths that a URL names; for a pattern, the cached ones that match. Sends no request."""
    if not place.is_pattern:
        return [place.path]
    source = place.fs._source
    above = place.path.partition("*")[0].rpartition("/")[0]
    cached = source.runtime.cache.paths_below(source.identity, above)
    found = sorted({root for path in cached if (root := place.named(path)) is not None})
    if not found:
        raise CacheError(f"{place.text}: nothing that is cached has such a name: prefetch it first")
    return found


def options_for(text: str, given: Given) -> dict[str, Any]:
    """Return the `-o` options for the filesystem of a URL."""
    return given.ours_and_theirs()[1] if "://" in text else {}


@contextlib.contextmanager
def told(*, is_quiet: bool) -> Iterator[Any]:
    """Yield an fsspec callback that moves a progress bar."""
    from fsspec.callbacks import Callback

    with shown(is_quiet=is_quiet) as show:

        class OfAll(Callback):  # type: ignore[misc]  # fsspec has no types
            def call(self, *args: Any, **kwargs: Any) -> None:
                show(self.value, self.size)

        yield OfAll()


def said_of_export(done: Exported, seconds: float) -> str:
    here = (
        "all of it was there already"
        if not done.sent
        else f"{decimal(done.sent)} sent{rate(done.sent, seconds)}"
    )
    what = f"{number(done.objects, 'object')}, {number(done.blocks, 'block')}, {decimal(done.bytes)}"
    return f"{what} in {number(done.bundles, 'bundle')}; {here}"


def said_of_import(done: Imported, seconds: float) -> str:
    text = f"{number(done.blocks, 'block')}, {decimal(done.bytes)} fetched{rate(done.bytes, seconds)}; {done.here:,} were here"
    if done.left:
        text += f"; {done.left:,} have no room: raise cache_size, lower keep_free, unpin or evict something"
    return text


def rate(size: int, seconds: float) -> str:
    return f" in {seconds:.1f} s, {decimal(int(size / seconds))}/s" if size and seconds else ""


def number(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
