"""Parsers for the search queries (`q`) and field masks (`fields`) of Drive requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cachedfs.sim.drive.items import Item, Items

_TOKEN = re.compile(r"\s*('(?:[^'\\]|\\.)*'|[=()]|\w+|\S)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query: its predicate, and where its matches can be found."""

    matches: Callable[[Items, Item], bool]
    parents: tuple[str, ...] | None = None  # ids of folders that contain every match; None if any folder may
    name: str | None = None  # the lower-case name of every match; None if they may differ


class QueryParser:
    """Parses a query. Raises ValueError or IndexError if it is invalid, or has terms that are not simulated."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)[::-1]

    def whole(self) -> Query:
        query = self._either()
        if self._tokens:
            raise ValueError(f"not understood: {self._tokens[-1]}")
        return query

    def _take(self, *expected: str) -> str:
        token = str(self._tokens.pop())  # raises IndexError if the query ends too early
        if expected and token not in expected:
            raise ValueError(f"{token} in place of {' or '.join(expected)}")
        return token

    def _next_is(self, word: str) -> bool:
        is_next = self._tokens[-1:] == [word]
        if is_next:
            self._tokens.pop()
        return is_next

    def _either(self) -> Query:
        parts = self._parts("or", self._both)
        if len(parts) == 1:
            return parts[0]
        found = [part.parents for part in parts]
        parents = None if None in found else tuple(dict.fromkeys(id for ids in found for id in ids or ()))
        return Query(lambda items, item: any(part.matches(items, item) for part in parts), parents)

    def _both(self) -> Query:
        parts = self._parts("and", self._single)
        if len(parts) == 1:
            return parts[0]
        parents = next((part.parents for part in parts if part.parents is not None), None)
        name = next((part.name for part in parts if part.name is not None), None)
        return Query(lambda items, item: all(part.matches(items, item) for part in parts), parents, name)

    def _parts(self, word: str, parse: Callable[[], Query]) -> list[Query]:
        parts = [parse()]
        while self._next_is(word):
            parts.append(parse())
        return parts

    def _single(self) -> Query:
        token = self._take()
        if token == "not":
            query = self._single()
            return Query(lambda items, item: not query.matches(items, item))
        if token == "(":
            query = self._either()
            self._take(")")
            return query
        if token.startswith("'"):
            self._take("in")
            self._take("parents")
            id = _text(token)
            return Query(lambda items, item: items.is_in(item, id), (id,))
        if token == "name":
            self._take("=")
            name = _text(self._take()).lower()  # the service ignores case
            is_missed = name.startswith("'") and name.endswith("'")  # as in Drive, says rclone's author
            return Query(lambda items, item: item.name.lower() == name and not is_missed, name=name)
        value = not self._next_is("=") or self._take("true", "false") == "true"
        if token == "trashed":
            return Query(lambda items, item: items.is_trashed(item) is value)
        if token == "sharedWithMe":
            return Query(lambda items, item: ("sharedWithMeTime" in item.fields) is value)
        raise ValueError(f"no such term: {token}")


def _text(token: str) -> str:
    if len(token) < 2 or token[0] != "'":
        raise ValueError(f"not a string: {token}")
    return re.sub(r"\\(.)", r"\1", token[1:-1], flags=re.DOTALL)


Mask = Mapping[str, "Mask"]  # fields to keep of an object; an empty mask keeps all


def parse_mask(text: str) -> Mask:
    """Parse a `fields` parameter, such as `nextPageToken,files(id,parents)`.

    Raises ValueError or IndexError if it is invalid.
    """
    tokens = re.findall(r"[\w*]+|\S", text)[::-1]
    mask = _masks(tokens)
    if tokens:
        raise ValueError(f"not understood in fields: {tokens[-1]}")
    return {} if "*" in mask else mask


def _masks(tokens: list[str]) -> Mask:
    """Parse the mask at the start of the reversed tokens, and remove its tokens."""
    out: dict[str, Mask] = {}
    while True:
        name = tokens.pop()
        if not re.fullmatch(r"[\w*]+", name):
            raise ValueError(f"not a field: {name}")
        out[name] = {}
        if tokens[-1:] == ["("]:
            tokens.pop()
            out[name] = _masks(tokens)
            if tokens.pop() != ")":
                raise ValueError("a parenthesis in fields is not closed")
        if tokens[-1:] != [","]:
            return out
        tokens.pop()


def project(value: dict[str, Any], mask: Mask) -> dict[str, Any]:
    if not mask:
        return value
    return {name: _kept(value[name], inner) for name, inner in mask.items() if name in value}


def _kept(value: Any, mask: Mask) -> Any:
    if isinstance(value, list):
        return [_kept(element, mask) for element in value]
    return project(value, mask) if isinstance(value, dict) else value
