"""Output of the command line: text, tables, JSON, progress and errors."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachedfs.errors import CachedFSError

NARROW = 80  # terminal columns: below this, names need the space of the time columns
MOMENT_S = 0.5  # seconds: shorter operations show no spinner
HARMLESS = (
    "\u200c\u200d\u00a0\u3000"  # not printable for Python, but in the spelling of words and emoji, or a blank
)


def escaped(text: str) -> str:
    """Return text with invisible characters escaped as in Python: a name may contain terminal control sequences."""
    return "".join(
        letter if letter.isprintable() or letter in HARMLESS else repr(letter)[1:-1] for letter in text
    )


def _visible(text: str, stream: TextIO) -> str:
    return escaped(text) if stream.isatty() else text


def say(line: str, *, err: bool = False) -> None:
    """Print a line: escaped on a terminal, unchanged in a pipe."""
    typer.echo(_visible(line, sys.stderr if err else sys.stdout), err=err)


def cell(text: str, **style: Any) -> Text:
    """Return text for a table on stdout, escaped if stdout is a terminal."""
    return Text(_visible(text, sys.stdout), **style)


def rate(size: float, seconds: float) -> str:
    """Format a number of bytes in a time as a rate: "7.0 MB/s"."""
    return f"{decimal(int(size / seconds))}/s"


def moved(size: int, how: str, seconds: float) -> str:
    """Return how much was transferred and how fast, as text."""
    speed = f" in {seconds:.1f} s, {rate(size, seconds)}" if size and seconds else ""
    return f"{decimal(size)} {how}{speed}"


def minute_of(at: datetime.datetime | None) -> str:
    """Format a time in the local time zone; empty if it is None."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M") if at else ""


# Results


def print_json(value: Any, *, indent: int | None = 2, err: bool = False) -> None:
    typer.echo(json.dumps(value, indent=indent, default=datetime.datetime.isoformat), err=err)


def print_table(table: Table) -> None:
    """Print a table: fitted to a terminal, otherwise with one line per row, for grep."""
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=10_000, no_color=True)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def is_narrow() -> bool:
    """Return True if stdout is a terminal without space for columns of times beside names."""
    return sys.stdout.isatty() and Console().width < NARROW


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Collection[str] = ()) -> Table:
    """Return a table without borders: numbers, and a name in the last column. Without heads it has names only.

    Columns in `left` are aligned to the left.
    """
    style = box.SIMPLE_HEAD if heads else None
    table = Table(*heads, box=style, show_header=bool(heads), show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else cell(each) for each in row))
    for column in table.columns:
        is_number = bool(column.header) and column.header not in left
        column.no_wrap, column.justify = True, "right" if is_number else "left"
    for column in table.columns[-1:]:
        column.no_wrap, column.justify, column.overflow = False, "left", "fold"
    return table


# Progress


@contextlib.contextmanager
def progress(text: str = "", *, is_quiet: bool, total: int | None = None) -> Iterator[Any]:
    """Show on a terminal how far a command is; yield the fsspec callback that moves the bar of bytes.

    The callback's `files(done, total)` shows a number of files beside the bar. An operation of unknown size has `text`
    and no bar, and `say` replaces it. One that is shorter than `MOMENT_S` shows nothing.
    """
    from fsspec.callbacks import Callback
    from rich import progress as rich

    class Bar(Callback):  # type: ignore[misc]  # fsspec has no types
        def call(self, *args: Any, **kwargs: Any) -> None:
            text = "finishing" if self.size and self.value >= self.size else ""
            bar.update(task, total=self.size, completed=self.value, description=text)

        def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
            """Return the callback of one of the files, which moves this bar."""
            moved = 0

            def move(size: int | None, value: int) -> None:
                nonlocal moved
                self.relative_update(value - moved)
                moved = value

            return Callback(hooks={"bar": move})

        def files(self, done: int, total: int | None) -> None:
            of = "" if total is None else f"/{total:,}"
            bar.update(task, files=f"{done:,}{of} files")

        def say(self, text: str) -> None:
            bar.update(task, description=text)

    console = Console(stderr=True)
    columns: list[rich.ProgressColumn] = [rich.SpinnerColumn(finished_text=" ")]
    described = rich.TextColumn("{task.description}", markup=False)
    if text:
        columns += [described, rich.TimeElapsedColumn()]
    else:
        columns += [rich.BarColumn(20), rich.DownloadColumn(), rich.TextColumn("{task.fields[files]}")]
        columns += [rich.TransferSpeedColumn(), rich.TimeRemainingColumn(), described]
    is_on = console.is_interactive and not is_quiet
    bar = rich.Progress(*columns, console=console, transient=True, disable=not is_on)
    task, starter = bar.add_task(text, total=total, files=""), threading.Timer(MOMENT_S, bar.start)
    starter.daemon = True
    if is_on:
        starter.start()
    try:
        yield Bar(total)
    finally:
        starter.cancel()
        if is_on:
            starter.join()
        bar.stop()


# Errors


def message_of(error: Exception, url: str | None = None) -> str:
    """Return the error message in one line; for an unexpected error type, also how to report it.

    `url` is what was read or written; the system names no file where the disk is full.
    """
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and not isinstance(error, CachedFSError) and error.strerror:
        name = error.filename or url
        return f"{name}: {error.strerror}" if name else error.strerror
    if isinstance(error, (OSError, ValueError, ImportError)):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text} (run with --debug for the traceback; please report)"


def print_error(error: Exception, url: str | None, *, as_json: bool) -> None:
    """Print an error on stderr, in one line or as JSON with the URL that was being processed."""
    text = message_of(error, url)
    if as_json:
        named = {} if url is None else {"url": url}
        print_json({"error": {"type": type(error).__name__, "message": text, **named}}, indent=None, err=True)
    else:
        say(f"cachedfs: {text}", err=True)


def print_traceback() -> None:
    for line in traceback.format_exc().splitlines():
        say(line, err=True)


@contextlib.contextmanager
def log_in_lines(debug: bool) -> Iterator[None]:
    """Print log messages of cachedfs and Python warnings as single lines on stderr."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"cachedfs: {record.levelname.lower()}: {record.getMessage()}", err=True)

    def show(message: Warning | str, *args: Any, **options: Any) -> None:
        say(f"cachedfs: warning: {message}", err=True)

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
