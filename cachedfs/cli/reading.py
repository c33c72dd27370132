"""The commands `ls` and `cat`: list folders, and write the bytes of objects to stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachedfs.cli.app import Urls, command, option
from cachedfs.cli.arguments import Place, at_each
from cachedfs.cli.exit_codes import FAILED
from cachedfs.cli.get import shown
from cachedfs.cli.output import (
    NARROW,
    Given,
    busy,
    cell,
    is_narrow,
    plain_table,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["cat", "ls"]

PIECE = 8 << 20  # bytes of an object that `cat` holds in memory at once
MOST_BLOCKS = 100_000  # `ls -l` omits the cached share for listings with more blocks than this


@command(
    "cachedfs ls gs://my-bucket/data",
    "cachedfs ls -l 'gs://my-bucket/data/*.parquet'",
    "cachedfs ls -R --json gs://my-bucket/data",
    "cachedfs ls -o token=anon gs://gcp-public-data-arco-era5",
)
def ls(
    given: Given,
    urls: Urls,
    long: Annotated[
        bool, typer.Option("-l", "--long", metavar="", help="Also size, time of change, and cached share.")
    ] = False,
    recursive: Annotated[
        bool, typer.Option("-R", "--recursive", metavar="", help="Everything below folders.")
    ] = False,
) -> None:
    """List folders and objects."""
    entries: list[Entry] = []

    def list_one(place: Place) -> None:
        with busy(f"listing {place.text}", is_quiet=given.as_json):
            found = entries_of(place, recursive=recursive, with_cached=long)
        entries.extend(found)
        if long and not given.as_json and sys.stdout.isatty():
            print_table(table_of(place, found))
        elif not given.as_json:
            for entry in found:
                say(entry.line(long=long))

    is_ok = at_each(urls, given, list_one)
    if given.as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
    if not is_ok:
        raise typer.Exit(FAILED)


@dataclasses.dataclass(frozen=True)
class Entry:
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
        when = self.modified.isoformat(timespec="seconds") if self.modified else "-"
        shown = ["-" if value is None else str(value) for value in (self.size, when, self.cached)]
        return "\t".join([*shown, self.name])


def entries_of(place: Place, *, recursive: bool, with_cached: bool) -> list[Entry]:
    """Return the entries that a URL lists. Raises FileNotFoundError if it does not exist."""
    fs, path = place.fs, place.path
    if place.is_pattern:
        found = place.matches()
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
    return [entry_of(place, info, with_cached) for info in sorted(found, key=lambda info: str(info["name"]))]


def entry_of(place: Place, info: dict[str, Any], with_cached: bool) -> Entry:
    is_file, cached = info["type"] == "file", None
    if with_cached and is_file:
        cached = sum(stop - start for start, stop in place.fs.cached_extent(info["name"]))
    size = info["size"] if is_file else None
    return Entry(place.url(info["name"]), info["type"], size, modified_of(info), cached)


def modified_of(info: dict[str, Any]) -> datetime.datetime | None:
    """Return the modification time of an object, from whichever key its filesystem uses; None if unknown."""
    for name in ("mtime", "modified", "updated", "last_modified", "LastModified"):
        value = info.get(name)
        with contextlib.suppress(ValueError, OSError, OverflowError):
            if isinstance(value, (int, float)):
                value = datetime.datetime.fromtimestamp(value, datetime.UTC)
            elif isinstance(value, str):
                value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    return None


def table_of(place: Place, entries: list[Entry]) -> Table:
    """Return a listing as a table for a terminal, with names relative to the folder."""
    heads = ["size", "name"] if is_narrow(NARROW) else ["size", "modified", "cached", "name"]
    table = plain_table(*heads)
    for column in table.columns[:-1]:
        column.no_wrap = True
        column.justify = "left" if column.header == "modified" else "right"
    table.columns[-1].overflow = "fold"
    above = "" if place.is_pattern else f"{place.url(place.path).rstrip('/')}/"
    for entry in entries:
        when = entry.modified.astimezone().strftime("%Y-%m-%d %H:%M") if entry.modified else ""
        share = f"{100 * entry.cached // entry.size}%" if entry.cached is not None and entry.size else ""
        size = decimal(entry.size) if entry.size is not None else ""
        cells: dict[str, str | Text] = {"size": size, "modified": when, "cached": share}
        cells["name"] = cell(entry.name.removeprefix(above))
        table.add_row(*(cells[head] for head in heads))
    return table


@command(
    "cachedfs cat gs://my-bucket/train.jsonl | head -3",
    "cachedfs cat --range 0:1000 gs://my-bucket/big.bin | xxd",
    "cachedfs cat --range -1000: gs://my-bucket/big.bin > tail.bin",
    "cachedfs cat 'gs://my-bucket/logs/*.txt' > all.txt",
)
def cat(
    given: Given,
    urls: Urls,
    range_: Annotated[
        str | None,
        option(
            "--range",
            metavar="START:STOP",
            help="Only these bytes: as Python slices, so -1000: are the last 1000.",
        ),
    ] = None,
) -> None:
    """Write the bytes of objects to standard output."""
    start, stop = range_of(range_ or ":")
    is_seen = sys.stdout.isatty()  # output on a terminal shows the progress by itself

    def write_one(place: Place) -> None:
        paths = [str(info["name"]) for info in place.matches()] if place.is_pattern else [place.path]
        for path in paths:
            with shown(is_quiet=given.as_json or is_seen) as show:
                for done, total, piece in pieces_of(place.fs, path, start, stop):
                    sys.stdout.buffer.write(piece)
                    show(done + len(piece), total)

    is_ok = at_each(urls, given, write_one)
    sys.stdout.buffer.flush()
    if not is_ok:
        raise typer.Exit(FAILED)


def range_of(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(-?\d+)?:(-?\d+)?", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not START:STOP in bytes", param_hint="--range")
    start, stop = (None if part is None else int(part) for part in found.groups())
    return start, stop


def pieces_of(
    fs: CachedFileSystem, path: str, start: int | None, stop: int | None
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the bytes `[start:stop]` of an object in pieces of at most PIECE bytes.

    Each item is the number of bytes before the piece, the total number of bytes, and the piece.
    """
    is_small = stop is not None and 0 <= (start or 0) <= stop <= (start or 0) + PIECE
    if is_small or (start is not None and -PIECE <= start < 0 and stop is None):
        # A single request; opening the file would also fetch its first bytes.
        data = fs.cat_file(path, start, stop)
        yield 0, len(data), data
        return
    with fs.open(path, "rb") as file:
        first, end, _ = slice(start, stop).indices(file.size)
        file.seek(first)
        position = first
        while position < end and (piece := file.read(min(PIECE, end - position))):
            yield position - first, end - first, piece
            position += len(piece)
