"""The typer app: the options and errors of all commands, and the commands in the order of the help."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

import cachedfs
from cachedfs.cli.arguments import Command, CommonOptions, flag, option
from cachedfs.cli.cache import evict, pin, unpin, verify
from cachedfs.cli.doctor import doctor
from cachedfs.cli.get import get
from cachedfs.cli.login import accounts, login, logout
from cachedfs.cli.monitoring import report, stats
from cachedfs.cli.mount import mount, unmount
from cachedfs.cli.output import (
    FAILED,
    INTERRUPTED,
    PIPE_CLOSED,
    busy,
    log_in_lines,
    print_error,
    print_traceback,
)
from cachedfs.cli.pack import pack
from cachedfs.cli.reading import cat, ls
from cachedfs.cli.sim import demo, sim
from cachedfs.cli.transfer import export, import_, prefetch

__all__ = ["app"]

PANEL = "Options of all commands"
STATUS = "[bold]Exit status[/bold] 0: success, 1: failure, 2: wrong usage, 130: Ctrl-C"

app = typer.Typer(
    name="cachedfs",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def examples(*lines: str) -> str:
    """Return the exit status and the examples for the end of a help text. Blank lines keep rich from joining them."""
    return "\n\n".join([STATUS, "[bold]Examples[/bold]", *(line.replace("[", r"\[") for line in lines)])


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
        bool, flag("--version", help="Show the version.", is_eager=True, callback=show_version)
    ] = False,
    as_json: Annotated[
        bool, flag("--json", help="Print one JSON document; errors too.", rich_help_panel=PANEL)
    ] = False,
    debug: Annotated[
        bool, flag("--debug", help="Show the traceback of an error, and the log.", rich_help_panel=PANEL)
    ] = False,
    cache_dir: Annotated[
        str | None, option(metavar="DIR", help="Use the cache in DIR.", rich_help_panel=PANEL)
    ] = None,
    options: Annotated[
        list[str] | None,
        option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of cachedfs (max_age=0) or of the origin (token=anon); repeatable.",
            rich_help_panel=PANEL,
        ),
    ] = None,
) -> None:
    """Read Google Cloud Storage, Google Drive and other fsspec URLs through a local cache."""
    ctx.obj = CommonOptions(as_json, debug, cache_dir, options)


def add(command: Command) -> None:
    """Add a command to the app."""

    @functools.wraps(command.function)
    def run(ctx: typer.Context, **values: Any) -> None:
        options = ctx.obj.then(CommonOptions(**{name: values.pop(name) for name in command.common}))
        with handling_errors(options):
            command.function(options, **values)

    # Typer reads the parameters of a command from its signature and annotations.
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    _, *own = inspect.signature(command.function, eval_str=True).parameters.values()
    of_all = inspect.signature(common, eval_str=True).parameters
    parameters = [context, *own, *(of_all[name] for name in command.common)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # mypy knows none
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(
        command.name,
        cls=command.cls,
        epilog=examples(*command.examples),
        context_settings=command.context_settings,
    )(run)


@contextlib.contextmanager
def handling_errors(options: CommonOptions) -> Iterator[None]:
    """Turn every exception of a command into an error line and an exit status."""
    try:
        with log_in_lines(options.debug):
            yield
            sys.stdout.flush()
            if runtimes := sys.modules.get("cachedfs.fetch.runtimes"):
                with busy("writing to the cache", is_quiet=options.as_json):
                    runtimes.settle()  # while its warnings still go through our handler
        if options.has_failed:
            raise typer.Exit(FAILED)
    except (typer.Exit, typer.BadParameter):
        raise
    except typer.Abort as answer:
        if isinstance(answer.__context__, KeyboardInterrupt):  # Ctrl-C at a prompt, not a "no"
            raise typer.Exit(INTERRUPTED) from None
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader closed the pipe
        drop_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except Exception as error:  # outermost handler: every error becomes a line and a status
        if options.debug:
            print_traceback()
        print_error(error, options.url, as_json=options.as_json)
        raise typer.Exit(FAILED) from None


def drop_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python does not complain about unwritten output at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


for _each in (  # in the order of the help and of docs/cli.md, most used first
    *(ls, cat, get, prefetch, pack, mount, unmount, stats, pin, unpin, evict, verify),
    *(export, import_, report, login, logout, accounts, doctor, sim, demo),
):
    add(_each)
