"""The commands `ls` and `cat`: list folders, and write the bytes of objects to stdout."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from cachedfs.cli.arguments import CommonOptions, command, flag, option
from cachedfs.cli.output import is_narrow, minute_of, print_table, progress, table_of
from cachedfs.cli.urls import Location, Urls, at_each
from cachedfs.common.types import modified_of

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedFileSystem

PIECE = 8 << 20  # bytes of an object that `cat` holds in memory at once
RANGE_HELP = "Only these bytes: as Python slices, so -1000: are the last 1000."
MOST_BLOCKS = 100_000  # `ls -l` omits the cached share for listings with more blocks than this


@command(
    "cachedfs ls gs://my-bucket/data",
    "cachedfs ls -l 'gs://my-bucket/data/*.parquet'",
    "cachedfs ls -R --json gs://my-bucket/data",
    "cachedfs ls -o token=anon gs://gcp-public-data-arco-era5",
)
def ls(
    common: CommonOptions,
    urls: Urls,
    long: Annotated[bool, flag("Also size, time of change, and cached share.", "-l", "--long")] = False,
    recursive: Annotated[bool, flag("Everything below folders.", "-R", "--recursive")] = False,
) -> None:
    """List folders and objects."""

    def list_one(location: Location) -> list[dict[str, Any]]:
        with common.progress(f"listing {location.text}"):
            found = entries_of(location, recursive=recursive, with_cached=long)
        if long and not common.as_json and sys.stdout.isatty():
            print_table(listing_of(location, found))
        else:
            for entry in found:
                common.say("\t".join(columns_of(entry)) if long else name_of(entry))
        return found

    common.show([entry for found in at_each(urls, common, list_one) for entry in found])


def entries_of(location: Location, *, recursive: bool, with_cached: bool) -> list[dict[str, Any]]:
    """Return the entries that a URL lists, with their cached bytes. Raises FileNotFoundError if it does not exist."""
    fs, path = location.fs, location.path
    if location.is_pattern:
        found = location.entries()
    elif recursive:
        found = list(fs.find(path, withdirs=True, detail=True).values())
        found = [info for info in found if info["type"] == "file" or info["name"] != path]
    else:
        found = fs.ls(path, detail=True)
    if not found:
        fs.info(path)  # raises an error if the path does not exist; otherwise the folder is empty
    n_blocks = sum((info["size"] or 0) // fs.config.block_size + 1 for info in found)
    # With max_age=0, each lookup would send a request.
    with_cached = with_cached and fs.config.lifetime_s > 0 and n_blocks <= MOST_BLOCKS
    entries = []
    for info in sorted(found, key=lambda info: str(info["name"])):
        is_file = info["type"] == "file"
        entry = {
            "url": location.url(info["name"]),
            "type": info["type"],
            "size": info["size"] if is_file else None,
        }
        cached = location.cached_bytes(info["name"]) if is_file and with_cached else None
        entries.append({**entry, "modified": modified_of(info), "cached": cached})
    return entries


def name_of(entry: dict[str, Any]) -> str:
    url = str(entry["url"])
    return url if entry["type"] == "file" else f"{url.rstrip('/')}/"


def columns_of(entry: dict[str, Any]) -> list[str]:
    """Return the columns for a pipe, with "-" for unknown values."""
    when = entry["modified"] and entry["modified"].isoformat(timespec="seconds")
    return [
        "-" if value is None else str(value)
        for value in (entry["size"], when, entry["cached"], name_of(entry))
    ]


def listing_of(location: Location, entries: list[dict[str, Any]]) -> Table:
    """Return a listing as a table for a terminal, with names relative to the folder."""
    above = "" if location.is_pattern else f"{location.url(location.path).rstrip('/')}/"
    more = () if is_narrow() else ("modified", "cached")
    rows = []
    for entry in entries:
        size, cached = entry["size"], entry["cached"]
        share = f"{100 * cached // size}%" if cached is not None and size else ""
        texts = "" if size is None else decimal(size), minute_of(entry["modified"]), share
        rows.append((*texts[: 1 + len(more)], name_of(entry).removeprefix(above)))
    return table_of(("size", *more, "name"), rows, left=("modified",))


@command(
    "cachedfs cat gs://my-bucket/train.jsonl | head -3",
    "cachedfs cat --range 0:1000 gs://my-bucket/big.bin | xxd",
    "cachedfs cat --range -1000: gs://my-bucket/big.bin > tail.bin",
    "cachedfs cat 'gs://my-bucket/logs/*.txt' > all.txt",
)
def cat(
    common: CommonOptions,
    urls: Urls,
    range_: Annotated[str, option("START:STOP", RANGE_HELP, "--range")] = ":",
) -> None:
    """Write the bytes of objects to standard output."""
    found = re.fullmatch(r"(-?\d+)?:(-?\d+)?", range_)
    if found is None:
        raise typer.BadParameter(f"{range_!r} is not START:STOP in bytes", param_hint="--range")
    start, stop = (None if part is None else int(part) for part in found.groups())
    is_quiet = common.as_json or sys.stdout.isatty()  # output on a terminal shows the progress by itself

    def write_one(location: Location) -> None:
        paths = location.paths()
        with progress(is_quiet=is_quiet) as bar:
            for done, path in enumerate(paths):
                bar.files(done, len(paths))
                bar.absolute_update(0)
                for piece in pieces_of(location.fs, path, start, stop, bar):
                    sys.stdout.buffer.write(piece)
                    bar.relative_update(len(piece))

    at_each(urls, common, write_one)
    sys.stdout.buffer.flush()


def pieces_of(
    fs: CachedFileSystem, path: str, start: int | None, stop: int | None, callback: Any
) -> Iterator[bytes]:
    """Yield the bytes `[start:stop]` of an object in pieces of at most PIECE bytes; tell `callback` their size."""
    is_small = stop is not None and 0 <= (start or 0) <= stop <= (start or 0) + PIECE
    if is_small or (start is not None and -PIECE <= start < 0 and stop is None):
        # A single request; opening the file would also fetch its first bytes.
        yield fs.cat_file(path, start, stop)
        return
    with fs.open(path, "rb") as file:
        first, end, _ = slice(start, stop).indices(file.size)
        callback.set_size(max(0, end - first))
        file.seek(first)
        left = end - first
        while left > 0 and (piece := file.read(min(PIECE, left))):
            yield piece
            left -= len(piece)
