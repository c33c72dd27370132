"""What the options that all commands share say."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from typing import Any

import typer

from cachedfs.config import Config

__all__ = ["Given"]


@dataclasses.dataclass
class Given:
    """What the options that all commands share say; `url` is what is worked on, for the message of an error."""

    as_json: bool = False
    debug: bool = False
    cache_dir: str | None = None
    options: Sequence[str] | None = None
    url: str | None = None

    def then(self, more: Given) -> Given:
        """Return what holds when `more` is given too, further to the right."""
        return Given(
            as_json=self.as_json or more.as_json,
            debug=self.debug or more.debug,
            cache_dir=self.cache_dir if more.cache_dir is None else more.cache_dir,
            options=(*(self.options or ()), *(more.options or ())),
        )

    def ours_and_theirs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of cachedfs and those of the origin. Raises BadParameter."""
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
