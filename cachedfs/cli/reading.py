"""The commands `ls` and `cat`: list folders, and write the bytes of objects to stdout."""

from __future__ import annotations

import dataclasses
import datetime
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from cachedfs.cli.arguments import CommonOptions, command, flag, option
from cachedfs.cli.output import is_narrow, minute_of, print_json, print_table, progress, say, table_of
from cachedfs.cli.url_arguments import Urls
from cachedfs.cli.urls import Location, at_each
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

    def list_one(location: Location) -> list[ListedEntry]:
        with progress(f"listing {location.text}", is_quiet=common.as_json):
            found = entries_of(location, recursive=recursive, with_cached=long)
        if long and not common.as_json and sys.stdout.isatty():
            print_table(listing_of(location, found))
        elif not common.as_json:
            for entry in found:
                say(entry.line(long=long))
        return found

    entries = at_each(urls, common, list_one)
    if common.as_json:
        print_json([dataclasses.asdict(entry) for found in entries for entry in found])


@dataclasses.dataclass(frozen=True)
class ListedEntry:
    """One line of a listing. `cached` is the number of cached bytes, None if not looked up."""

    url: str
    type: str
    size: int | None
    modified: datetime.datetime | None
    cached: int | None

    @property
    def name(self) -> str:
        return self.url if self.type == "file" else f"{self.url.rstrip('/')}/"

    def line(self, *, long: bool) -> str:
        """Return the line for a pipe: columns separated by tabs, "-" for unknown values."""
        if not long:
            return self.name
        when = self.modified.isoformat(timespec="seconds") if self.modified else None
        shown = ["-" if value is None else str(value) for value in (self.size, when, self.cached)]
        return "\t".join([*shown, self.name])


def entries_of(location: Location, *, recursive: bool, with_cached: bool) -> list[ListedEntry]:
    """Return the entries that a URL lists. Raises FileNotFoundError if it does not exist."""
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
        size = cached = None
        if info["type"] == "file":
            size = info["size"]
            cached = location.cached_bytes(info["name"]) if with_cached else None
        entries.append(ListedEntry(location.url(info["name"]), info["type"], size, modified_of(info), cached))
    return entries


def listing_of(location: Location, entries: list[ListedEntry]) -> Table:
    """Return a listing as a table for a terminal, with names relative to the folder."""
    above = "" if location.is_pattern else f"{location.url(location.path).rstrip('/')}/"
    more = () if is_narrow() else ("modified", "cached")
    rows = []
    for entry in entries:
        share = f"{100 * entry.cached // entry.size}%" if entry.cached is not None and entry.size else ""
        size = decimal(entry.size) if entry.size is not None else ""
        rows.append((size, *(minute_of(entry.modified), share)[: len(more)], entry.name.removeprefix(above)))
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
