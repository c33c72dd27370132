"""Output of the command line: shared options, tables, JSON, progress, error messages and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import json
import logging
import os
import sys
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TextIO

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cachedfs.cli.exit_codes import FAILED, INTERRUPTED, PIPE_CLOSED
from cachedfs.config import Config
from cachedfs.errors import CachedFSError

__all__ = [
    "NARROW",
    "Given",
    "Summary",
    "busy",
    "cell",
    "escaped",
    "is_narrow",
    "message_of",
    "plain_table",
    "print_json",
    "print_summary",
    "print_table",
    "print_traceback",
    "running",
    "say",
    "tell",
    "told_in_one_line",
]

NARROW = 80  # terminal columns: below this, names need the space of the time columns
MOMENT_S = 0.5  # seconds: shorter operations show no progress
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories: control, format, surrogate, separators
JOINERS = "\u200c\u200d"  # format characters that are part of the spelling of words and emoji
C_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r"}


@dataclasses.dataclass
class Given:
    """Values of the options shared by all commands. `url` is the URL being processed, for error messages."""

    as_json: bool = False
    debug: bool = False
    cache_dir: str | None = None
    options: Sequence[str] | None = None
    url: str | None = None

    def then(self, more: Given) -> Given:
        """Return these options combined with `more`, which come later on the command line and win."""
        return Given(
            as_json=self.as_json or more.as_json,
            debug=self.debug or more.debug,
            cache_dir=self.cache_dir if more.cache_dir is None else more.cache_dir,
            options=(*(self.options or ()), *(more.options or ())),
        )

    def ours_and_theirs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of cachedfs and those of the origin. Raises BadParameter for an invalid one."""
        names = {field.name for field in dataclasses.fields(Config)}
        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        for text in self.options or ():
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="-o")
            if name not in names and (near := difflib.get_close_matches(name, names, n=1, cutoff=0.85)):
                raise typer.BadParameter(f"{name!r} is no option; did you mean {near[0]!r}?", param_hint="-o")
            (ours if name in names else theirs)[name] = _value_of(value)
        if self.cache_dir is not None:
            ours["cache_dir"] = self.cache_dir
        try:
            Config.resolve(ours)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="-o") from None
        return ours, theirs


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# Untrusted text: an object's name may contain terminal control sequences.


def escaped(text: str) -> str:
    """Return text with control and other invisible characters escaped as `ls -b` does."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(letter: str) -> str:
    if letter in JOINERS or unicodedata.category(letter) not in INVISIBLE:
        return letter
    return C_ESCAPES.get(ord(letter)) or "".join(
        f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogatepass")
    )


def _visible(text: str, stream: TextIO) -> str:
    return escaped(text) if stream.isatty() else text


def say(line: str, *, err: bool = False) -> None:
    """Print a line: escaped on a terminal, unchanged in a pipe."""
    typer.echo(_visible(line, sys.stderr if err else sys.stdout), err=err)


def cell(text: str, **style: Any) -> Text:
    """Return text for a table on stdout, escaped if stdout is a terminal."""
    return Text(_visible(text, sys.stdout), **style)


def print_traceback() -> None:
    """Print the traceback of the current error on stderr."""
    for line in traceback.format_exc().splitlines():
        say(line, err=True)


# Results


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=datetime.datetime.isoformat))


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


def is_narrow(columns: int) -> bool:
    """Return True if stdout is a terminal with fewer columns."""
    return sys.stdout.isatty() and Console().width < columns


def plain_table(*columns: str) -> Table:
    """Return a table without borders; without columns it has no header either."""
    style = box.SIMPLE_HEAD if columns else None
    return Table(*columns, box=style, show_header=bool(columns), show_edge=False, pad_edge=False)


@contextlib.contextmanager
def busy(text: str, *, is_quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a spinner with elapsed time on a terminal if the operation takes longer than `MOMENT_S`.

    For operations of unknown length. Yields a function that replaces the text. The spinner disappears at the
    end.
    """
    console = Console(stderr=True)
    if is_quiet or not console.is_interactive:
        yield lambda text: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(text, total=None)
    starter = threading.Timer(MOMENT_S, bar.start)
    starter.daemon = True
    starter.start()
    try:
        yield lambda text: bar.update(task, description=text)
    finally:
        starter.cancel()
        starter.join()
        if bar.live.is_started:
            bar.stop()


class Summary(Protocol):
    """Result of a command on several files: a dataclass with a `str` form; `failed` lists the errors."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    failed: list[dict[str, str]]


def print_summary(done: Summary, *, as_json: bool) -> None:
    """Print a result as JSON on stdout or as text on stderr. Exits with FAILED if any file failed."""
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        for each in done.failed:
            say(f"cachedfs: {each['message']}", err=True)
        say(str(done), err=True)
    if done.failed:
        raise typer.Exit(FAILED)


# Errors


@contextlib.contextmanager
def running(given: Given) -> Iterator[None]:
    """Turn every exception of a command into an error line and an exit status."""
    try:
        with told_in_one_line(given.debug):
            yield
            sys.stdout.flush()
            if "cachedfs.fetch.runtimes" in sys.modules:
                sys.modules[
                    "cachedfs.fetch.runtimes"
                ].settle()  # while its warnings still go through our handler
    except (typer.Exit, typer.BadParameter):
        raise
    except typer.Abort as answer:
        if isinstance(
            answer.__context__, KeyboardInterrupt
        ):  # Ctrl-C at a prompt; otherwise the user declined
            raise typer.Exit(INTERRUPTED) from None
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader closed the pipe
        _drop_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except Exception as error:  # outermost handler: every error becomes a line and a status
        if given.debug:
            print_traceback()
        tell(error, given)
        raise typer.Exit(FAILED) from None


@contextlib.contextmanager
def told_in_one_line(debug: bool) -> Iterator[None]:
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


def message_of(error: Exception) -> str:
    """Return the error message in one line; for an unexpected error type, also how to report it."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and not isinstance(error, CachedFSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OSError, ValueError, ImportError)):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text} (run with --debug for the traceback; please report)"


def tell(error: Exception, given: Given) -> None:
    """Print an error on stderr, as JSON if `--json` is set."""
    text = message_of(error)
    if given.as_json:
        url = {} if given.url is None else {"url": given.url}
        typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": text, **url}}), err=True)
    else:
        say(f"cachedfs: {text}", err=True)


def _drop_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python does not complain about unwritten output at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
