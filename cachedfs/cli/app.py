"""The typer app, the options shared by all commands, and the decorator that registers a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import cachedfs
from cachedfs.cli.completion import urls_known
from cachedfs.cli.output import Given, running

__all__ = [
    "Copying",
    "Urls",
    "app",
    "argument",
    "command",
    "either",
    "option",
    "url_argument",
]

PANEL = "Options of all commands"
SHARED = ("as_json", "debug", "cache_dir", "options")


def argument(metavar: str, help: str) -> Any:
    """Return a typer argument without a default, shown by its name and help text."""
    return typer.Argument(metavar=metavar, show_default=False, help=help)


def url_argument(metavar: str, help: str) -> Any:
    """Return a typer argument for a URL, with shell completion from cached metadata."""
    return typer.Argument(metavar=metavar, show_default=False, help=help, autocompletion=urls_known)


def option(*names: str, metavar: str, help: str, default: bool | str = False) -> Any:
    """Return a typer option. `default` is the text shown as its default, or False to show none."""
    return typer.Option(*names, metavar=metavar, show_default=default, help=help)


Urls = Annotated[list[str], url_argument("URL", "What to read.")]


def either(urls: list[str] | None, *, everything: bool) -> None:
    """Raise BadParameter unless exactly one of URLs and `--all` is given."""
    if everything and urls:
        raise typer.BadParameter("give URLs, or --all, and not both", param_hint="--all")
    if not everything and not urls:
        raise typer.BadParameter("give URLs, or --all", param_hint="URL")


app = typer.Typer(
    name="cachedfs",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Copying(TyperCommand):
    """Command with URLs and a TARGET, which gives a correct error if TARGET is missing.

    With a single argument, typer assigns it to TARGET and reports the URL as missing.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_one = any(not each.startswith("-") for each in args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # MissingParameter; older versions of typer take it from click.
            if not is_one or type(error) is typer.BadParameter or getattr(error.param, "name", "") != "urls":
                raise
            raise typer.BadParameter("it is missing, after the URL", ctx=ctx, param_hint="TARGET") from None


def _examples(*lines: str) -> str:
    """Return the examples for the end of a help text. Blank lines keep rich from joining them."""
    return "\n\n".join(["[bold]Examples[/bold]", *(line.replace("[", r"\[") for line in lines)])


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachedfs {cachedfs.__version__}")
        raise typer.Exit


@app.callback(
    epilog=_examples(
        "cachedfs ls -l gs://my-bucket/data",
        "cachedfs get -r gs://my-bucket/data .",
        "cachedfs COMMAND --help shows more.",
    )
)
def common(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", help="Show the version.", is_eager=True, callback=_show_version
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="Print one JSON document; errors too.", rich_help_panel=PANEL
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", metavar="", help="Show the traceback of an error, and the log.", rich_help_panel=PANEL
        ),
    ] = False,
    cache_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Use the cache in DIR.", rich_help_panel=PANEL, show_default=False),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of cachedfs (max_age=0) or of the origin (token=anon); repeatable.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Read Google Cloud Storage, Google Drive and other fsspec URLs through a local cache."""
    ctx.obj = Given(as_json, debug, cache_dir, options)


def command(
    *examples: str,
    name: str | None = None,
    takes: Sequence[str] = SHARED,
    kind: type[TyperCommand] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, with these usage examples, under its own name or `name`.

    The function is called with a Given and its own options. `takes` names the shared options that users may
    write after the command's name; shared options before the name apply to every command.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> None:
            given = ctx.obj.then(Given(**{name: values.pop(name) for name in takes}))
            with running(given):
                function(given, **values)

        # Typer reads the parameters of a command from its signature and annotations.
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        shared = inspect.signature(common, eval_str=True).parameters
        parameters = [context, *own, *(shared[name] for name in takes)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # mypy knows none
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, cls=kind, epilog=_examples(*examples), context_settings=settings)(run)
        return function

    return register
