"""Declare commands, with the options that all of them have, and turn their errors into lines and exit statuses."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

import cachedfs
from cachedfs.cli.output import log_in_lines, print_error, print_json, print_traceback, progress, say
from cachedfs.config import FSSPEC_KEYWORDS, Config

FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141  # exit statuses; typer exits with 2 on wrong usage
STATUS = "[bold]Exit status[/bold] 0: success, 1: failure, 2: wrong usage, 130: Ctrl-C"
PANEL = "Options of all commands"
OPTION_HELP = "An option of cachedfs (max_age=0) or of the origin (token=anon); repeatable."
TYPED = "cachedfs.cli.typed"  # name of the command line in `Context.meta`
COMMON = ("as_json", "debug", "cache_dir", "options")
F = TypeVar("F", bound=Callable[..., None])
# A Drive path that is not quoted, as a shell splits it: one word a line.
SPLIT = re.compile(
    r".*(drive://|/content/g?drive/|(?<![^\n]))(My\nDrive|Shared\nwith\nme|Shared\ndrives).*", re.IGNORECASE
)


class Program(TyperGroup):
    """The program, which knows its whole command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="cachedfs",
    cls=Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Return a typer argument without a default, shown by its name and help text."""
    return typer.Argument(metavar=metavar, show_default=False, help=help, **settings)


def option(metavar: str, help: str, *names: str, default: bool | str = False, **settings: Any) -> Any:
    """Return a typer option. `default` is the text shown as its default, or False to show none."""
    return typer.Option(*names, metavar=metavar, show_default=default, help=help, **settings)


def flag(help: str, *names: str, **settings: Any) -> Any:
    """Return a typer option without a value."""
    return typer.Option(*names, metavar="", help=help, **settings)


class CommonOptions(typer.Context):
    """The context of a command, with the options that all commands have, before and after the command's name.

    `url` is the URL being processed, for error messages. With `has_failed` the command ends with exit status 1.
    """

    url: str | None = None
    has_failed = False

    def _values(self, name: str) -> list[Any]:
        """Return the values of an option, those that come later and win at the end."""
        given = (each.params.get(name) for each in (self.find_root(), self))
        return [value for value in given if value is not None]

    @property
    def as_json(self) -> bool:
        return any(self._values("as_json"))

    @property
    def debug(self) -> bool:
        return any(self._values("debug"))

    @property
    def cache_dir(self) -> str | None:
        given: list[str | None] = [None, *self._values("cache_dir")]
        return given[-1]

    @property
    def options(self) -> list[str]:
        return [text for texts in self._values("options") for text in texts]

    def in_foreground(self, *more: str) -> list[str]:
        """Return this command line without `--daemon` and `--json`; options in `more` win over typed ones."""
        typed = [text for text in self.meta[TYPED] if text not in ("--daemon", "--json")]
        at = typed.index("--") if "--" in typed else len(typed)
        return [*typed[:at], *more, *typed[at:]]

    def split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of cachedfs and those of the origin. Raises BadParameter for an invalid one."""
        names = Config._fields
        of_cachedfs: dict[str, Any] = {}
        of_origin: dict[str, Any] = {}
        for text in self.options:
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="-o")
            if name not in names and (near := difflib.get_close_matches(name, names, n=1, cutoff=0.85)):
                raise typer.BadParameter(f"{name!r} is no option; did you mean {near[0]!r}?", param_hint="-o")
            to = of_cachedfs if name in names else of_origin
            to[name] = value
            with contextlib.suppress(ValueError):  # not JSON: a text
                to[name] = json.loads(value)
        if self.cache_dir is not None:
            of_cachedfs["cache_dir"] = self.cache_dir
        try:
            Config.resolve(of_cachedfs)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="-o") from None
        return of_cachedfs, of_origin

    def config(self) -> Config:
        """Return the options of cachedfs for all URLs, including those of the fsspec configuration."""
        from fsspec.config import conf

        # Not passed as defaults: misspelled defaults are ignored, but a misspelled option must be an error here.
        configured = {k: v for k, v in conf.get("cachedfs", {}).items() if k not in FSSPEC_KEYWORDS}
        return Config.resolve(configured | self.split()[0])

    def config_of_existing(self) -> Config:
        """Return `config()` for a command that looks at a cache: it must not create a mistyped `--cache-dir`."""
        config = self.config()
        if "cache_dir" in self.split()[0] and config.cache_dir is not None:
            directory = os.path.expanduser(config.cache_dir[0])
            if not os.path.lexists(directory):
                raise FileNotFoundError(
                    f"{directory} does not exist, so nothing is cached there: correct cache_dir, or make the folder"
                )
        return config

    def say(self, line: str, *, err: bool = False) -> None:
        """Print a line, unless the result is one JSON document."""
        if not self.as_json:
            say(line, err=err)

    def show(self, value: Any, *lines: str, err: bool = True) -> None:
        """Print a result: as JSON on stdout, or as lines on stderr, or on stdout unless `err`."""
        if self.as_json:
            print_json(value)
        for line in lines:
            self.say(line, err=err)

    def progress(self, text: str = "", *, total: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Show on a terminal how far the command is, unless its result is JSON: see `output.progress`."""
        return progress(text, is_quiet=self.as_json, total=total)

    def show_with_errors(
        self, value: dict[str, Any], text: str, errors: Sequence[tuple[str, Exception]]
    ) -> None:
        """Print a result and the errors of single URLs, with which the command fails."""
        failed = [{"url": url, "type": type(e).__name__, "message": str(e)} for url, e in errors]
        self.show(value | {"failed": failed}, *(f"cachedfs: {each['message']}" for each in failed), text)
        self.has_failed |= bool(failed)


def epilog(*examples: str) -> str:
    """Return the end of a help text. Blank lines keep rich from joining its lines."""
    return "\n\n".join([STATUS, "[bold]Examples[/bold]", *(each.replace("[", r"\[") for each in examples)])


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachedfs {cachedfs.__version__}")
        raise typer.Exit


@app.callback(
    epilog=epilog(
        "cachedfs ls -l gs://my-bucket/data",
        "cachedfs get -r gs://my-bucket/data .",
        "cachedfs COMMAND --help shows more.",
    )
)
def before_command(
    version: Annotated[
        bool, flag("Show the version.", "--version", is_eager=True, callback=show_version)
    ] = False,
    as_json: Annotated[
        bool, flag("Print one JSON document; errors too.", "--json", rich_help_panel=PANEL)
    ] = False,
    debug: Annotated[
        bool, flag("Show the traceback of an error, and the log.", "--debug", rich_help_panel=PANEL)
    ] = False,
    cache_dir: Annotated[str | None, option("DIR", "Use the cache in DIR.", rich_help_panel=PANEL)] = None,
    options: Annotated[
        list[str] | None, option("NAME=VALUE", OPTION_HELP, "--option", "-o", rich_help_panel=PANEL)
    ] = None,
) -> None:
    """Read Google Cloud Storage, Google Drive and other fsspec URLs through a local cache."""


class Command(TyperCommand):
    """A command with common options, whose errors become lines and exit statuses."""

    context_class = CommonOptions
    common: Sequence[str] = COMMON

    def get_params(self, ctx: CommonOptions) -> list[Any]:  # type: ignore[override]  # click's own
        of_all = ctx.find_root().command.params
        return [*super().get_params(ctx), *(each for each in of_all if each.name in self.common)]

    def parse_args(self, ctx: CommonOptions, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; say which URL to quote, in place of taking its parts for several arguments."""
        if found := SPLIT.search("\n".join(args)):
            protocol = "" if found[1] else "drive://"
            whole = shlex.quote(protocol + found[0].replace("\n", " "))
            raise typer.BadParameter(f"the shell split it at its blanks; quote it: {whole}", param_hint="URL")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: CommonOptions) -> None:  # type: ignore[override]
        assert self.callback is not None
        with handling_errors(ctx):
            ctx.invoke(self.callback, **{k: v for k, v in ctx.params.items() if k not in self.common})


def command(
    *examples: str, name: str | None = None, common: Sequence[str] = COMMON, **context_settings: Any
) -> Callable[[F], F]:
    """Add a function to the app as a command, with these usage examples, under its own name or `name`.

    Its first parameter is the CommonOptions. `common` names the common options that users may write after the
    command's name; common options before the name apply to every command.
    """
    kind = type("Command", (Command,), {"common": common})
    return app.command(name, cls=kind, epilog=epilog(*examples), context_settings=context_settings)


@contextlib.contextmanager
def handling_errors(options: CommonOptions) -> Iterator[None]:
    """Turn every exception of a command into an error line and an exit status."""
    try:
        with log_in_lines(options.debug):
            yield
            sys.stdout.flush()
            if engines := sys.modules.get("cachedfs.core.engines"):
                with options.progress("writing to the cache"):
                    engines.drain_all()  # while its warnings still go through our handler
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
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # else Python complains about unwritten output at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except Exception as error:  # outermost handler: every error becomes a line and a status
        if options.debug:
            print_traceback()
        print_error(with_configuration(error), options.url, as_json=options.as_json)
        raise typer.Exit(FAILED) from None


def with_configuration(error: Exception) -> Exception:
    """Return the error, with the name of the file if fsspec could not read its configuration."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "set_conf_files":
            path = os.path.join(frame.f_locals["cdir"], frame.f_locals["fn"])
            return ValueError(
                f"{path}: fsspec cannot read this configuration: correct or remove it ({error})"
            )
    return error
