"""Declaration of a command's arguments: the options of all commands, and the decorator `command`."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from cachedfs.config import FSSPEC_KEYWORDS, Config

__all__ = ["Command", "CommonOptions", "CopyCommand", "argument", "command", "flag", "option"]

COMMON = ("as_json", "debug", "cache_dir", "options")


@dataclasses.dataclass
class CommonOptions:
    """Values of the options of all commands.

    `url` is the URL being processed, for error messages. With `has_failed` the command ends with exit status 1.
    """

    as_json: bool = False
    debug: bool = False
    cache_dir: str | None = None
    options: Sequence[str] | None = None
    url: str | None = None
    has_failed: bool = False

    def then(self, more: CommonOptions) -> CommonOptions:
        """Return these options combined with `more`, which come later on the command line and win."""
        return CommonOptions(
            as_json=self.as_json or more.as_json,
            debug=self.debug or more.debug,
            cache_dir=self.cache_dir if more.cache_dir is None else more.cache_dir,
            options=(*(self.options or ()), *(more.options or ())),
        )

    def split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of cachedfs and those of the origin. Raises BadParameter for an invalid one."""
        names = {field.name for field in dataclasses.fields(Config)}
        of_cachedfs: dict[str, Any] = {}
        of_origin: dict[str, Any] = {}
        for text in self.options or ():
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="-o")
            if name not in names and (near := difflib.get_close_matches(name, names, n=1, cutoff=0.85)):
                raise typer.BadParameter(f"{name!r} is no option; did you mean {near[0]!r}?", param_hint="-o")
            try:
                parsed = json.loads(value)
            except ValueError:
                parsed = value
            (of_cachedfs if name in names else of_origin)[name] = parsed
        if self.cache_dir is not None:
            of_cachedfs["cache_dir"] = self.cache_dir
        try:
            Config.resolve(of_cachedfs)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="-o") from None
        return of_cachedfs, of_origin

    def arguments(self) -> list[str]:
        """Return these options as arguments of a command line."""
        given = [*(["--debug"] if self.debug else []), *(f"--option={text}" for text in self.options or ())]
        return given if self.cache_dir is None else [*given, f"--cache-dir={self.cache_dir}"]

    def config(self) -> Config:
        """Return the options of cachedfs for all URLs, including those of the fsspec configuration."""
        from fsspec.config import conf

        # Not passed as defaults: misspelled defaults are ignored, but a misspelled option must be an error here.
        configured = {k: v for k, v in conf.get("cachedfs", {}).items() if k not in FSSPEC_KEYWORDS}
        return Config.resolve(configured | self.split()[0])


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Return a typer argument without a default, shown by its name and help text."""
    return typer.Argument(metavar=metavar, show_default=False, help=help, **settings)


def option(*names: str, metavar: str, help: str, default: bool | str = False, **settings: Any) -> Any:
    """Return a typer option. `default` is the text shown as its default, or False to show none."""
    return typer.Option(*names, metavar=metavar, show_default=default, help=help, **settings)


def flag(*names: str, help: str, **settings: Any) -> Any:
    """Return a typer option without a value."""
    return typer.Option(*names, metavar="", help=help, **settings)


@dataclasses.dataclass(frozen=True)
class Command:
    """A function and how it becomes a command of the typer app; see `command`."""

    function: Callable[..., None]
    name: str
    examples: Sequence[str]
    common: Sequence[str]
    cls: type[TyperCommand] | None
    context_settings: dict[str, Any]


def command(
    *examples: str,
    name: str | None = None,
    common: Sequence[str] = COMMON,
    cls: type[TyperCommand] | None = None,
    **context_settings: Any,
) -> Callable[[Callable[..., None]], Command]:
    """Declare a function as a command, with these usage examples, under its own name or `name`.

    The function is called with the CommonOptions and its own options. `common` names the common options that
    users may write after the command's name; common options before the name apply to every command.
    """

    def declare(function: Callable[..., None]) -> Command:
        return Command(function, name or function.__name__, examples, common, cls, context_settings)

    return declare


class CopyCommand(TyperCommand):
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
