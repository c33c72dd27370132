"""The command line: argv, printing, exit codes. `cachedfs --help` says what there is, docs/cli.md shows it.

What a command needs is imported where it runs: help and shell completion import no filesystem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
import shlex
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import cachedfs

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:  # an exit, not an error: the script imports this module before it calls anything
    raise SystemExit('The command line needs typer and rich: pip install "cachedfs[cli]"') from error

if TYPE_CHECKING:
    from cachedfs.cache import BlockCache
    from cachedfs.config import Config
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["app", "main"]

PIECE = 8 << 20  # bytes of an object that `cat` has in memory at once
AT_ONCE = 128  # files that `get` copies at the same time: an eighth of the usual limit of open files
WINDOW = 64 << 20  # bytes of each of them that may be in memory, and of all of them together:
ALL_WINDOWS = 512 << 20
MOST_BLOCKS = 100_000  # more blocks than this are not looked for only to show which share of them is cached
PROBE = 8 << 20  # bytes that `doctor` writes into the cache directory, and reads from the origin

FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141  # exit statuses; 0 is fine, 2 is typer's: wrong usage

OURS = {
    "cachedfs": "",
    "cgs": "gs",
    "cdrive": "drive",
}  # protocols that read through the cache, and their target's
EXTRAS = {"gcsfs": "gcs", "pydrive2": "drive", "zarr": "zarr", "torch": "torch"}
PORTS = {"gcs": 4443, "drive": 4444}


# What every command takes.

PANEL = "Options of all commands"
Urls = Annotated[list[str], typer.Argument(metavar="URL", show_default=False, help="What to read.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; errors too.", rich_help_panel=PANEL)
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error, and the log.", rich_help_panel=PANEL),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir", metavar="DIR", help="Use the cache in DIR.", rich_help_panel=PANEL, show_default=False
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="An option of cachedfs (max_age=0) or of the origin (token=anon); repeatable.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]

app = typer.Typer(
    name="cachedfs",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process's run with SystemExit and its status."""
    # What is in flight when Ctrl-C ends a process is given up, also what did not begin: nobody needs to read that.
    warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="cachedfs")
    except KeyboardInterrupt:  # before a command began
        sys.exit(INTERRUPTED)


def examples(*lines: str) -> str:
    """Return the end of a help text; a blank line between two keeps rich from joining them."""
    return "\n\n".join(["[bold]Examples[/bold]", *(line.replace("[", r"\[") for line in lines)])


@dataclasses.dataclass
class Given:
    """What the options that all commands share say; `url` is what is worked on, for the message of an error."""

    as_json: bool = False
    debug: bool = False
    cache_dir: str | None = None
    options: tuple[str, ...] = ()
    url: str | None = None

    def ours_and_theirs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of cachedfs and those of the origin."""
        from cachedfs.config import Config

        names = {field.name for field in dataclasses.fields(Config)}
        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        for text in self.options:
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="-o")
            if name not in names and (near := difflib.get_close_matches(name, names, n=1, cutoff=0.85)):
                raise typer.BadParameter(f"{name!r} is no option; did you mean {near[0]!r}?", param_hint="-o")
            (ours if name in names else theirs)[name] = value_of(value)
        if self.cache_dir is not None:
            ours["cache_dir"] = self.cache_dir
        return ours, theirs


def value_of(text: str) -> Any:
    """Return what the text says as JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachedfs {cachedfs.__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "cachedfs ls -l gs://my-bucket/data",
        "cachedfs get -r gs://my-bucket/data .",
        "cachedfs COMMAND --help shows more.",
    )
)
def common(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=show_version)
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """Read Google Cloud Storage, Google Drive and other fsspec URLs through a local cache."""
    ctx.obj = Given(as_json, debug, cache_dir, tuple(option or ()))


@contextlib.contextmanager
def running(
    ctx: typer.Context,
    as_json: bool = False,
    debug: bool = False,
    cache_dir: str | None = None,
    option: Iterable[str] | None = None,
) -> Iterator[Given]:
    """Give a command its options, from before and after its name, and turn what goes wrong into a line and a status."""
    first: Given = ctx.obj or Given()
    given = Given(
        as_json=first.as_json or as_json,
        debug=first.debug or debug,
        cache_dir=cache_dir if cache_dir is not None else first.cache_dir,
        options=(*first.options, *(option or ())),
    )
    try:
        with told_in_one_line(given.debug):
            yield given
            sys.stdout.flush()
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # who read us has seen enough
        drop_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except Exception as error:  # nobody is above us: whatever it is becomes a line and a status
        if given.debug:
            traceback.print_exc()
        tell(error, given)
        raise typer.Exit(FAILED) from None


@contextlib.contextmanager
def told_in_one_line(debug: bool) -> Iterator[None]:
    """Show what cachedfs logs and what Python warns of as single lines on stderr."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            typer.echo(f"cachedfs: {record.levelname.lower()}: {record.getMessage()}", err=True)

    def show(message: Warning | str, *args: Any, **options: Any) -> None:
        typer.echo(f"cachedfs: warning: {message}", err=True)

    logger, handler = logging.getLogger("cachedfs"), Handler(logging.DEBUG if debug else logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    if debug:
        logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def drop_stdout() -> None:
    """Send what is still to be written nowhere: Python would complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(error: Exception, given: Given) -> None:
    """Say what went wrong, on stderr."""
    text = message_of(error)
    if not given.as_json:
        typer.echo(f"cachedfs: {text}", err=True)
        return
    found = {"type": type(error).__name__, "message": text}
    if given.url is not None:
        found["url"] = given.url
    typer.echo(json.dumps({"error": found}), err=True)


def message_of(error: Exception) -> str:
    """Return one line: the error's own words, and where they are unexpected what to do."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and not isinstance(error, cachedfs.CachedFSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OSError, ValueError, ImportError)):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text} (run with --debug for the traceback; please report)"


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_table(table: Table) -> None:
    """Print a table: to fit a terminal, else a row a line, for grep."""
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=10_000, no_color=True)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def plain_table(*columns: str) -> Table:
    """Return a table without frames; with no columns it has no head either."""
    table = Table(box=box.SIMPLE_HEAD if columns else None, show_edge=False, pad_edge=False)
    table.show_header = bool(columns)
    for name in columns:
        table.add_column(name)
    return table


# URLs.


@dataclasses.dataclass(frozen=True)
class Place:
    """One URL as the user wrote it, and the filesystem and path that it means."""

    text: str
    fs: CachedFileSystem
    path: str

    def url(self, path: str) -> str:
        """Return the URL of another path of this filesystem in the form in which the user wrote his."""
        url = self.fs.unstrip_protocol(path)
        if not self.text.startswith("cachedfs::"):
            url = url.removeprefix("cachedfs::")
        return url if "://" in self.text else url.removeprefix("file://")

    @property
    def is_pattern(self) -> bool:
        return "*" in self.path


def place_of(text: str, given: Given, **more: Any) -> Place:
    """Return what a URL means under the options given, and `more` of ours; it is the URL of errors from now on."""
    from fsspec.core import url_to_fs

    given.url = text
    ours, theirs = given.ours_and_theirs()
    ours |= more
    url = cached_url(text)
    protocol = url.partition("::")[2].rpartition("::")[2].partition("://")[0]
    if url.startswith("cachedfs::"):
        fs, path = url_to_fs(url, cachedfs=ours, **{protocol: theirs})
    else:
        target = OURS[url.partition("://")[0]]
        fs, path = url_to_fs(url, **ours, **({target: theirs} if theirs else {}))
    return Place(text, fs, path)


def cached_url(text: str) -> str:
    """Return the URL that reads what the user wrote through the cache. Raises ValueError for what cannot be one."""
    if "://" in text or "::" in text:
        first = re.split("::|://", text, maxsplit=1)[0]
        return text if first in OURS else f"cachedfs::{text}"
    path = os.path.expanduser(text)
    if os.path.isabs(path) or text.startswith((".", "~")) or os.path.lexists(path):
        return f"cachedfs::file://{os.path.abspath(path)}"
    raise ValueError(
        f"{text!r} has no protocol, and no local file has this name: "
        f"write gs://{text} for Google Cloud Storage, 'drive://My Drive/{text}' for Google Drive"
    )


# ls


@app.command(
    epilog=examples(
        "cachedfs ls gs://my-bucket/data",
        "cachedfs ls -l 'gs://my-bucket/data/*.parquet'",
        "cachedfs ls -R --json gs://my-bucket/data",
        "cachedfs ls -o token=anon gs://gcp-public-data-arco-era5",
    )
)
def ls(
    ctx: typer.Context,
    urls: Urls,
    long: Annotated[
        bool, typer.Option("-l", "--long", help="Also size, time of change, and cached share.")
    ] = False,
    recursive: Annotated[bool, typer.Option("-R", "--recursive", help="Everything below folders.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """List folders and objects."""
    with running(ctx, as_json, debug, cache_dir, option) as given:
        entries: list[Entry] = []
        for text in urls:
            place = place_of(text, given)
            found = entries_of(place, recursive=recursive, with_cached=long)
            entries += found
            if long and not given.as_json and sys.stdout.isatty():
                print_table(table_of(place, found))
            elif not given.as_json:
                for entry in found:
                    typer.echo(entry.line(long=long))
        if given.as_json:
            print_json([entry.as_json() for entry in entries])


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a listing; `cached` is None where it was not looked for, or is of no use."""

    url: str
    is_folder: bool
    size: int | None
    modified: datetime.datetime | None
    cached: int | None

    @property
    def name(self) -> str:
        return f"{self.url.rstrip('/')}/" if self.is_folder else self.url

    def line(self, *, long: bool) -> str:
        """Return what is printed for a program to read: tabs between the columns, "-" for what is not known."""
        if not long:
            return self.name
        when = self.modified.isoformat(timespec="seconds") if self.modified else "-"
        shown = ["-" if value is None else str(value) for value in (self.size, when, self.cached)]
        return "\t".join([*shown, self.name])

    def as_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "type": "directory" if self.is_folder else "file",
            "size": self.size,
            "modified": self.modified.isoformat() if self.modified else None,
            "cached": self.cached,
        }


def entries_of(place: Place, *, recursive: bool, with_cached: bool) -> list[Entry]:
    """Return what a URL lists. Raises FileNotFoundError when there is no such thing."""
    fs, path = place.fs, place.path
    if place.is_pattern:
        found = list(fs.glob(path, detail=True).values())
        if not found:
            raise FileNotFoundError(f"{place.text}: nothing has such a name")
    elif recursive:
        found = list(fs.find(path, withdirs=True, detail=True).values())
        found = [info for info in found if info["type"] == "file" or info["name"] != path]
    else:
        found = fs.ls(path, detail=True)
    if not found:
        fs.info(path)  # an empty folder, or an error that says what is wrong
    n_blocks = sum((info["size"] or 0) // fs.config.block_size + 1 for info in found)
    # With max_age=0 each object would be asked for.
    with_cached = with_cached and fs.config.lifetime_s > 0 and n_blocks <= MOST_BLOCKS
    return [entry_of(place, info, with_cached) for info in sorted(found, key=lambda info: str(info["name"]))]


def entry_of(place: Place, info: dict[str, Any], with_cached: bool) -> Entry:
    is_folder = info["type"] == "directory"
    cached = None
    if with_cached and not is_folder:
        cached = sum(stop - start for start, stop in place.fs.cached_extent(info["name"]))
    size = None if is_folder else info["size"]
    return Entry(place.url(info["name"]), is_folder, size, modified_of(info), cached)


def modified_of(info: dict[str, Any]) -> datetime.datetime | None:
    """Return when an object was written last, from what filesystems call it."""
    for name in ("mtime", "modified", "updated", "last_modified", "LastModified"):
        value = info.get(name)
        with contextlib.suppress(ValueError, OSError, OverflowError):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                value = datetime.datetime.fromtimestamp(value, datetime.UTC)
            elif isinstance(value, str):
                value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    return None


def table_of(place: Place, entries: list[Entry]) -> Table:
    """Return a listing for a person: names as they are below the folder."""
    table = plain_table("size", "modified", "cached", "name")
    for column in table.columns[:3]:
        column.no_wrap = True
    table.columns[0].justify = table.columns[2].justify = "right"
    table.columns[3].overflow = "fold"
    above = "" if place.is_pattern else f"{place.url(place.path).rstrip('/')}/"
    for entry in entries:
        when = entry.modified.astimezone().strftime("%Y-%m-%d %H:%M") if entry.modified else ""
        share = f"{100 * entry.cached // entry.size}%" if entry.cached is not None and entry.size else ""
        size = decimal(entry.size) if entry.size is not None else ""
        table.add_row(size, when, share, Text(entry.name.removeprefix(above)))
    return table


# cat


@app.command(
    epilog=examples(
        "cachedfs cat gs://my-bucket/train.jsonl | head -3",
        "cachedfs cat --range 0:1000 gs://my-bucket/big.bin | xxd",
        "cachedfs cat --range -1000: gs://my-bucket/big.bin > tail.bin",
    )
)
def cat(
    ctx: typer.Context,
    urls: Urls,
    range_: Annotated[
        str | None,
        typer.Option(
            "--range",
            metavar="START:STOP",
            show_default=False,
            help="Only these bytes: as Python slices, so -1000: are the last 1000.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """Write the bytes of objects to standard output."""
    with running(ctx, as_json, debug, cache_dir, option) as given:
        start, stop = range_of(range_)
        for text in urls:
            place = place_of(text, given)
            for piece in pieces_of(place.fs, place.path, start, stop):
                sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def range_of(text: str | None) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(-?\d+)?:(-?\d+)?", text or ":")
    if found is None:
        raise typer.BadParameter(f"{text!r} is not START:STOP in bytes", param_hint="--range")
    start, stop = (None if part is None else int(part) for part in found.groups())
    return start, stop


def pieces_of(fs: CachedFileSystem, path: str, start: int | None, stop: int | None) -> Iterator[bytes]:
    """Yield `[start:stop]` of an object, never more than a few MiB of it at once."""
    is_small = stop is not None and 0 <= (start or 0) <= stop <= (start or 0) + PIECE
    if is_small or (start is not None and -PIECE <= start < 0 and stop is None):
        yield fs.cat_file(
            path, start, stop
        )  # one request for these bytes; opening would ask for the first ones
        return
    with fs.open(path, "rb") as file:
        position, end, _ = slice(start, stop).indices(file.size)
        if position:
            file.seek(position)
        while position < end and (piece := file.read(min(PIECE, end - position))):
            yield piece
            position += len(piece)


# get


@app.command(
    epilog=examples(
        "cachedfs get gs://my-bucket/train.jsonl .",
        "cachedfs get -r gs://my-bucket/data /tmp/data",
        "cachedfs get 'gs://my-bucket/data/*.parquet' /tmp/tables/",
    )
)
def get(
    ctx: typer.Context,
    urls: Urls,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            show_default=False,
            help="A local file or directory; the latter for several URLs.",
        ),
    ],
    recursive: Annotated[bool, typer.Option("-r", "--recursive", help="Copy folders too.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """Copy objects and folders to the local disk.

    As with cp, what goes to a directory that exists goes into it. A file is there when it is complete, not before.
    """
    with running(ctx, as_json, debug, cache_dir, option) as given:
        done = Done()
        is_into = os.path.isdir(target) or target.endswith("/") or len(urls) > 1
        for text in urls:
            place = place_of(text, given)
            before = place.fs.stats().bytes_fetched
            copies = copies_of(place, target, is_into=is_into, recursive=recursive)
            done.seconds += copy(place.fs, copies, is_quiet=given.as_json)
            size = sum(each.size or os.path.getsize(each.local) for each in copies if not each.is_folder)
            done.files += sum(not each.is_folder for each in copies)
            done.bytes += size
            done.from_cache += max(0, size - (place.fs.stats().bytes_fetched - before))
        done.seconds = round(done.seconds, 3)
        if given.as_json:
            print_json(dataclasses.asdict(done))
        else:
            typer.echo(str(done), err=True)


@dataclasses.dataclass
class Done:
    """What `get` did; `from_cache`: bytes that were not fetched for it."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    from_cache: int = 0

    def __str__(self) -> str:
        rate = f", {decimal(int(self.bytes / self.seconds))}/s" if self.seconds else ""
        files = f"{self.files:,} file{'' if self.files == 1 else 's'}"
        return (
            f"{files}, {decimal(self.bytes)} in {self.seconds:.1f} s{rate}; "
            f"{decimal(self.from_cache)} of them from the cache"
        )


@dataclasses.dataclass(frozen=True)
class Copy:
    """One object or folder, and where it goes."""

    path: str
    local: str
    size: int | None
    is_folder: bool = False


def copies_of(place: Place, target: str, *, is_into: bool, recursive: bool) -> list[Copy]:
    """Return what a URL means to copy where; refuses what cannot be done before anything is written."""
    if place.is_pattern:
        found = list(place.fs.glob(place.path, detail=True).values())
        if not found:
            raise FileNotFoundError(f"{place.text}: nothing has such a name")
        copies = []
        for info in found:
            if info["type"] == "file" or recursive:
                copies += copies_of_one(place, info, target, is_into=True)
    else:
        info = place.fs.info(place.path)
        if info["type"] == "directory" and not recursive:
            raise IsADirectoryError(f"{place.text} is a folder: -r copies folders")
        copies = copies_of_one(place, info, target, is_into=is_into)
    for each in copies:
        if os.path.isdir(each.local) != each.is_folder and os.path.lexists(each.local):
            kind = "is no directory" if each.is_folder else "is a directory"
            raise FileExistsError(f"{place.url(each.path)} cannot replace {each.local}, which {kind}")
    return copies


def copies_of_one(place: Place, info: dict[str, Any], target: str, *, is_into: bool) -> list[Copy]:
    path = str(info["name"])
    local = os.path.abspath(os.path.expanduser(target))
    if is_into:
        local = below(local, path.rstrip("/").rpartition("/")[2])
    if info["type"] == "file":
        return [Copy(path, local, info["size"])]
    copies = [Copy(path, local, None, is_folder=True)]
    for child in place.fs.find(path, withdirs=True, detail=True).values():
        name = str(child["name"]).removeprefix(path).lstrip("/")
        if name:
            is_folder = child["type"] == "directory"
            copies.append(Copy(str(child["name"]), below(local, name), child["size"], is_folder))
    return copies


def below(folder: str, name: str) -> str:
    """Return the local path of `name` in `folder`; an object's name may say anything, and must not lead out of it."""
    parts = PurePosixPath(name.lstrip("/")).parts
    if not parts or ".." in parts:
        raise ValueError(f"the name {name!r} leads out of {folder}: copy this object by itself, with cat")
    return os.path.join(folder, *parts)


def copy(fs: CachedFileSystem, copies: list[Copy], *, is_quiet: bool) -> float:
    """Make folders and files; return how many seconds that took."""
    started = time.perf_counter()
    for each in copies:
        os.makedirs(each.local if each.is_folder else os.path.dirname(each.local), exist_ok=True)
    files = [each for each in copies if not each.is_folder]
    with progress(sum(each.size or 0 for each in files), is_quiet=is_quiet) as advance:
        for wave in waves(files):
            fs.get(
                [each.path for each in wave],
                [each.local for each in wave],
                callback=counting(advance),
                batch_size=-1,
            )
    return time.perf_counter() - started


def waves(files: list[Copy]) -> Iterator[list[Copy]]:
    """Yield the files in groups that are copied at the same time: few enough for memory and open files."""
    wave: list[Copy] = []
    room = ALL_WINDOWS
    for each in files:
        need = min(WINDOW, each.size if each.size is not None else WINDOW)
        if wave and (need > room or len(wave) == AT_ONCE):
            yield wave
            wave, room = [], ALL_WINDOWS
        wave.append(each)
        room -= need
    if wave:
        yield wave


@contextlib.contextmanager
def progress(total: int, *, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """Give a function that moves a bar on by bytes; there is none unless stderr is a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=is_quiet or not console.is_terminal)
    with bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)


def counting(advance: Callable[[int], None]) -> Any:
    """Return a callback for fsspec that tells `advance` of the bytes of all files."""
    from fsspec.callbacks import Callback

    class OfFile(Callback):  # type: ignore[misc]  # fsspec has no types
        def call(self, *args: Any, **kwargs: Any) -> None:
            advance(self.value - self.told)
            self.told = self.value

        told = 0

    class OfAll(Callback):  # type: ignore[misc]  # see above
        def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
            return OfFile()

    return OfAll()


# stats and evict


@app.command(
    epilog=examples(
        "cachedfs stats",
        "cachedfs stats --cache-dir /fast/nvme --json",
        "cachedfs stats -o cache_size=200GB",
    )
)
def stats(
    ctx: typer.Context,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """Show what the cache holds, and how much it may hold."""
    with running(ctx, as_json, debug, cache_dir, option) as given:
        config = config_of(given)
        found = contents(cache_of(config), config)
        if given.as_json:
            print_json(found)
            return
        table = plain_table()
        for name, value in found.items():
            table.add_row(
                Text(name.replace("_", " "), style="bold"), Text(said(name, value), overflow="fold")
            )
        print_table(table)


def config_of(given: Given) -> Config:
    """Return the options of cachedfs that hold for all URLs: given, or configured."""
    from fsspec.config import conf

    from cachedfs.config import FSSPEC_KEYWORDS, Config

    configured = {
        name: value for name, value in conf.get("cachedfs", {}).items() if name not in FSSPEC_KEYWORDS
    }
    return Config.resolve(configured | given.ours_and_theirs()[0])


def cache_of(config: Config) -> BlockCache:
    from cachedfs.engine import engine_for

    return engine_for(config).cache


def contents(cache: BlockCache, config: Config) -> dict[str, Any]:
    """Return what `stats` shows, sizes in bytes."""
    blocks, size = cache.usage()
    found: dict[str, Any] = {"directory": cache.root, "blocks": blocks, "bytes": size}
    if cache.root is not None:
        disk = os.statvfs(cache.root)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        found |= {
            "cache_size": bound_of(config.cache_size, total),
            "keep_free": bound_of(config.keep_free, total),
            "disk_free": free,
            "disk_size": total,
        }
    found["pins"] = [path for _, path in cache.pins()]
    found["cannot_store"] = cache.cannot_store
    return found


def bound_of(bound: int | float | None, total: int) -> int | str:
    """Return a bound in bytes; a float is a share of the disk."""
    if bound is None:
        return "auto"
    return int(bound * total) if isinstance(bound, float) else bound


def said(name: str, value: Any) -> str:
    """Return a value of `contents` in words."""
    if name == "cache_size" and value == "auto":
        return "auto: half of what was free when the directory was used first"
    if name == "pins":
        return ", ".join(value) or "none"
    if name == "blocks":
        return f"{value:,}"
    if isinstance(value, int):
        return decimal(value)
    return value or ("no: everything can be kept" if name == "cannot_store" else "none")


@app.command(
    epilog=examples(
        "cachedfs evict gs://my-bucket/train.jsonl",
        "cachedfs evict gs://my-bucket/data",
        "cachedfs evict --all --yes",
    )
)
def evict(
    ctx: typer.Context,
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            show_default=False,
            help="Objects, or folders that were listed, with all below them.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole cache, of all origins.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """Drop what is cached of objects, folders or everything.

    Pinned or not. Nothing changes at the origin, and it is not asked.
    """
    with running(ctx, as_json, debug, cache_dir, option) as given:
        if everything == bool(urls):
            raise typer.BadParameter("give URLs, or --all", param_hint="URL")
        if everything and not yes and sys.stdin.isatty():
            typer.confirm("Drop the whole cache?", abort=True, err=True)
        if everything:
            freed = {"all": evict_everything(cache_of(config_of(given)))}
        else:
            freed = {text: evict_below(place_of(text, given, offline=True)) for text in urls or ()}
        if given.as_json:
            print_json({"freed": sum(freed.values()), "of": freed})
            return
        for text, size in freed.items():
            typer.echo(f"{text}: {decimal(size) + ' freed' if size else 'nothing was cached'}")


def evict_everything(cache: BlockCache) -> int:
    """Remove all files of blocks, which may be done at any time, and let the index see it; return the bytes freed."""
    freed = 0
    for folder, _, names in os.walk(f"{cache.root}/blocks") if cache.root else ():
        for path in (os.path.join(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # somebody else evicts
                size = os.path.getsize(path)
                os.unlink(path)
                freed += size
    cache.check(repair=True)
    return freed


def evict_below(place: Place) -> int:
    """Drop an object, or what is known to be below a folder; return the bytes freed. REQUIRES: a filesystem that is offline."""
    fs, path = place.fs, place.path
    freed = fs.evict(path or None)
    if freed or not path:
        return freed
    try:
        return sum(fs.evict(name) for name in (fs.glob(path) if place.is_pattern else fs.find(path)))
    except cachedfs.OriginUnavailable:  # never listed
        logging.getLogger("cachedfs.cli").warning(
            "%s: nothing of this name is cached; if it is a folder, it was not listed here, so name its objects",
            place.text,
        )
        return 0


# sim and demo


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        "cachedfs sim gcs --profile table",
        "cachedfs sim gcs --folder /data --port 4443",
        "cachedfs sim drive --profile drive-typical",
    ),
)
def sim(
    ctx: typer.Context,
    cloud: Annotated[str, typer.Argument(metavar="gcs|drive", show_default=False, help="Which cloud.")],
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How far away: off, table, gcs-region, drive-typical...", show_default="off"
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", help="0 takes a free one.", show_default="4443, for Drive 4444"),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Serve the files below DIR, not memory.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a simulated cloud on this machine until Ctrl-C.

    What else is given, such as --seed 1 or --bucket NAME, goes to python -m cachedfs.sim.
    """
    with running(ctx, debug=debug):
        try:
            from cachedfs.sim.__main__ import main as run
        except ModuleNotFoundError as error:
            raise ImportError(
                f'The simulated cloud needs {error.name}: pip install "cachedfs[sim]"'
            ) from error
        port = usable_port(PORTS.get(cloud, 0) if port is None else port)
        arguments = [cloud, "--port", str(port), *ctx.args]
        arguments += [] if profile is None else ["--profile", profile]
        arguments += [] if folder is None else ["--folder", folder]
        if cloud == "gcs" and folder is None and "--bucket" not in ctx.args:
            arguments += ["--bucket", "my-bucket"]
        for line in how_to_reach(cloud, port, arguments):
            typer.echo(line, err=True)
        raise typer.Exit(run(arguments))


def usable_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises OSError before anybody is told of a port that is taken."""
    try:
        with socket.create_server(("127.0.0.1", port)) as sock:
            return int(sock.getsockname()[1])
    except OSError as error:
        raise OSError(f"port {port}: {os.strerror(error.errno or 0)}; --port 0 takes a free one") from error


def how_to_reach(cloud: str, port: int, arguments: list[str]) -> list[str]:
    """Return what to type in another terminal."""
    section, url = (
        ("DRIVE", "drive://My Drive") if cloud == "drive" else ("GS", f"gs://{bucket_of(arguments)}")
    )
    variables = {
        f"FSSPEC_{section}_TOKEN": "anon",
        f"FSSPEC_{section}_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    exports = [f"  export {name}={value}" for name, value in variables.items()]
    return [
        "A simulated cloud; Ctrl-C ends it. In another terminal:",
        *exports,
        f"  cachedfs ls -l {shlex.quote(url)}",
    ]


def bucket_of(arguments: list[str]) -> str:
    """Return a bucket that the simulated cloud will have."""
    given = dict(itertools.pairwise(arguments))
    if "--bucket" in given:
        return given["--bucket"]
    with contextlib.suppress(OSError):
        folders = [entry.name for entry in os.scandir(given.get("--folder", "")) if entry.is_dir()]
        return min(folders, default="BUCKET")
    return "BUCKET"


@app.command(epilog=examples("cachedfs demo"))
def demo(ctx: typer.Context, debug: Debug = False) -> None:
    """Measure cachedfs against a simulated cloud.

    Reads real data with cachedfs and without, and prints one table. Takes a minute or two.
    """
    with running(ctx, debug=debug):
        from cachedfs.demo import main as run

        raise typer.Exit(run([]))


# doctor


@app.command(
    epilog=examples(
        "cachedfs doctor",
        "cachedfs doctor gs://my-bucket/train.jsonl",
        "cachedfs doctor --json --cache-dir /fast/nvme",
    )
)
def doctor(
    ctx: typer.Context,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", show_default=False, help="Also look at the way to this object or folder."
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
    cache_dir: CacheDir = None,
    option: Options = None,
) -> None:
    """Check installation, cache and the way to the data.

    Each check is ok, warn or fail, and says what to do. The exit status is 1 when one fails.
    """
    with running(ctx, as_json, debug, cache_dir, option) as given:
        checks: list[Check] = []
        for group in (of_installation(), of_cache(given), *([of_origin(url, given)] if url else [])):
            checks += survived(group, given)
        if given.as_json:
            print_json([dataclasses.asdict(check) for check in checks])
        else:
            print_table(table_of_checks(checks))
        if any(check.state == "fail" for check in checks):
            raise typer.Exit(FAILED)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that `doctor` looked at; `state` is ok, warn or fail."""

    name: str
    state: str
    found: str
    advice: str = ""


def survived(checks: Iterator[Check], given: Given) -> Iterator[Check]:
    """Yield the checks of a group; an error ends it, and is a failed check."""
    try:
        yield from checks
    except typer.BadParameter:
        raise
    except Exception as error:  # whatever it is, finding it is what the doctor is for
        if given.debug:
            traceback.print_exc()
        yield Check("error", "fail", message_of(error))


def table_of_checks(checks: list[Check]) -> Table:
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = plain_table()
    for check in checks:
        text = Text(check.found, overflow="fold")
        if check.advice:
            text.append(f"\n{check.advice}", style="italic")
        table.add_row(Text(check.state, style=colours[check.state]), Text(check.name, style="bold"), text)
    for column in table.columns[:2]:
        column.no_wrap = True
    return table


def of_installation() -> Iterator[Check]:
    from fsspec import available_protocols

    yield Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    versions = {name: version_of(name) for name in ("cachedfs", "fsspec", "aiohttp", *EXTRAS)}
    have = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lack = ", ".join(f'{name} ("cachedfs[{EXTRAS[name]}]")' for name in EXTRAS if not versions[name])
    yield Check("packages", "ok", have, f"Not installed: {lack}" if lack else "")
    known = [name for name in ("cachedfs", "cgs", "drive", "cdrive") if name in available_protocols()]
    if "cachedfs" in known and "cgs" in known:
        yield Check("protocols", "ok", ", ".join(known))
    else:
        yield Check("protocols", "fail", f"fsspec knows {known}", "Install cachedfs with pip again")


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def of_cache(given: Given) -> Iterator[Check]:
    from cachedfs.cache import is_network

    config = config_of(given)
    yield Check("options", "ok", options_of(config))
    cache = cache_of(config)
    if cache.root is None:
        advice = "Reads work, but everything is fetched every time; --cache-dir or cache_dir= chooses another"
        yield Check("cache directory", "fail", cache.cannot_store or "none", advice)
        return
    yield Check("cache directory", "ok", f"{cache.root} ({source_of_directory(given)})")
    if is_network(cache.root):
        advice = "A cache belongs on a local disk: set cache_dir"
        yield Check("file system", "warn", "a network file system, or FUSE", advice)
    rate = write_rate(f"{cache.root}/tmp")
    slow = "Slower than most links: set cache_dir to a faster disk" if rate < 30e6 else ""
    yield Check("write speed", "warn" if slow else "ok", f"{decimal(int(rate))}/s", slow)
    yield from of_room(cache, config)


def options_of(config: Config) -> str:
    """Return the options that are not the defaults."""
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name != "cache_dir" and getattr(config, field.name) != field.default
    ]
    return ", ".join(changed) or "all are the defaults"


def source_of_directory(given: Given) -> str:
    from fsspec.config import conf

    if "cache_dir" in given.ours_and_theirs()[0]:
        return "as given"
    if "FSSPEC_CACHEDFS_CACHE_DIR" in os.environ:
        return "FSSPEC_CACHEDFS_CACHE_DIR"
    return "fsspec's configuration" if "cache_dir" in conf.get("cachedfs", {}) else "the default"


def write_rate(folder: str) -> float:
    """Return the bytes a second at which a small file reaches the disk."""
    data = os.urandom(PROBE)
    started = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return PROBE / (time.perf_counter() - started)


def of_room(cache: BlockCache, config: Config) -> Iterator[Check]:
    from cachedfs.errors import CacheError

    found = contents(cache, config)
    size, keep = (said(name, found[name]).partition(":")[0] for name in ("cache_size", "keep_free"))
    room = f"bound {size}, {keep} stay free; the disk has {decimal(found['disk_free'])} free"
    try:
        cache.lease(config.block_size, config.bounds).close()  # room for a block: bound, disk and index agree
        yield Check("room", "ok", room)
    except CacheError as error:
        yield Check(
            "room", "fail", error.message, f"{room}: raise cache_size, lower keep_free, or free space"
        )
    try:
        cache.evict("doctor", None)  # nobody's blocks: it only takes the index that can be written
        state = f"{found['blocks']:,} blocks, {decimal(found['bytes'])}, {len(found['pins'])} pins"
        yield Check("index", "ok", state)
    except CacheError as error:
        yield Check("index", "fail", error.message, "The directory may be removed: it is only a cache")


def of_origin(text: str, given: Given) -> Iterator[Check]:
    place = place_of(text, given, max_age=0, stale_if_error=False)
    fs, path = place.fs, place.path
    try:
        info: dict[str, Any] = fs.info(path) if path else {"name": path, "type": "directory"}
        found = [info] if info["type"] == "file" else fs.ls(path, detail=True)
    except Exception as error:  # whatever the way to the origin raises is the answer
        if given.debug:
            traceback.print_exc()
        yield Check("access", "fail", message_of(error), advice_for(error, fs.target_protocol))
        return
    if info["type"] == "directory":
        yield Check("access", "ok", f"{text} is a folder with {len(found):,} entries")
    else:
        yield Check("access", "ok", f"{text} is an object of {decimal(info['size'] or 0)}")
    origin = fs.origin_fs
    seconds = statistics.median(timed(lambda: ask(origin, path, info["type"])) for _ in range(3))
    yield Check("metadata", "ok", f"{1e3 * seconds:.0f} ms a request (median of 3, past the cache)")
    objects = [each for each in found if each["type"] == "file" and each["size"]]
    if objects:
        yield from of_reading(origin, max(objects, key=lambda each: int(each["size"])), fs)


def advice_for(error: Exception, protocol: str) -> str:
    """Return what to do about it, where the error does not say so itself."""
    if isinstance(error, PermissionError) and protocol in ("gs", "gcs"):
        return "Log in (gcloud auth application-default login), or for public data: -o token=anon"
    if isinstance(error, ImportError):
        return 'Install what reads it: pip install "cachedfs[gcs]", "cachedfs[drive]", or its own package'
    return ""


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def ask(origin: Any, path: str, kind: str) -> None:
    """Send one metadata request, whatever the inner filesystem remembers."""
    origin.invalidate_cache()
    if kind == "file":
        origin.info(path)
    else:
        origin.ls(path)


def of_reading(origin: Any, info: dict[str, Any], fs: CachedFileSystem) -> Iterator[Check]:
    """Read a little of an object past the cache, and say what follows for settings."""
    path, size = info["name"], min(PROBE, int(info["size"]))
    first = statistics.median(timed(lambda: origin.cat_file(path, 0, 1)) for _ in range(3))
    yield Check("first byte", "ok", f"{1e3 * first:.0f} ms (median of 3)")
    whole = timed(lambda: origin.cat_file(path, 0, size))
    yield Check(
        "one request", "ok", f"{decimal(size)} in {1e3 * whole:.0f} ms: {decimal(int(size / whole))}/s"
    )
    n = fs.config.concurrency
    advice = (
        f"Small objects one by one: {1 / first:,.0f} a second; as a list by fs.cat, {n} in flight: "
        f"up to {n / first:,.0f} a second."
    )
    if size == PROBE:
        needed = max(1, -(-125_000_000 * whole // size))
        advice += (
            f" concurrency={needed:.0f} fills a link of 1 Gbit/s, {10 * needed:.0f} one of 10 (now {n})."
        )
    if fs.target_protocol == "drive":
        advice += " Drive limits requests: keep many small files in one archive or sharded Zarr array."
    yield Check("settings", "ok", advice)


if __name__ == "__main__":
    main()
