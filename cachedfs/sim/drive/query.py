"""Parsers for the search queries (`q`) and field masks (`fields`) of Drive requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["Mask", "Query", "parse_mask", "parse_query", "project"]

_TOKEN = re.compile(r"\s*(?:('(?:[^'\\]|\\.)*')|(<=|>=|!=|[=<>()])|([A-Za-z]\w*)|(\S))", re.DOTALL)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
# Type of each term, for the names of v2 and v3.
_KINDS = {"title": "text", "name": "text", "mimeType": "mime", "modifiedDate": "date", "modifiedTime": "date"}
_KINDS |= {"createdTime": "date", "trashed": "bool", "starred": "bool", "sharedWithMe": "bool"}


@dataclass(frozen=True, slots=True)
class Query:
    """Node of a parsed query: `and`, `or` and `not` have parts; every other node is a term."""

    op: str
    parts: tuple[Query, ...] = ()
    field: str = ""
    value: Any = None

    def parents(self) -> list[str] | None:
        """Return the ids of folders that contain every match; None if any folder may."""
        if self.op == "in":
            return [self.value]
        found = [part.parents() for part in self.parts]
        if self.op == "and":
            return next((ids for ids in found if ids is not None), None)
        if self.op == "or" and None not in found:
            return list(dict.fromkeys(i for ids in found for i in ids or ()))
        return None

    def title(self) -> str | None:
        """Return the lowercase title that every match has; None if the query does not restrict it."""
        if self.op == "=" and self.field in ("title", "name"):
            return str(self.value)
        titles = [part.title() for part in self.parts] if self.op == "and" else []
        return next((title for title in titles if title is not None), None)

    def test(self, read: Callable[[Any, str], Any]) -> Callable[[Any], bool]:
        """Return a predicate for items. `read` returns the value of an item's field."""
        op, field, value = self.op, self.field, self.value
        tests = [part.test(read) for part in self.parts]
        if op == "and":
            return lambda item: all(test(item) for test in tests)
        if op == "or":
            return lambda item: any(test(item) for test in tests)
        if op == "not":
            return lambda item: not tests[0](item)
        if op == "in":
            return lambda item: value in read(item, "parents")
        if op == "contains" and _KINDS[field] == "text":
            # The service matches prefixes of words: 'World' does not find HelloWorld.
            word = re.compile(r"(?<!\w)" + re.escape(value), re.IGNORECASE)
            return lambda item: word.search(read(item, field)) is not None
        if op == "contains":
            return lambda item: value in read(item, field)
        compare = _OPERATORS[op]
        if _KINDS[field] == "text":
            return lambda item: compare(read(item, field).lower(), value)
        return lambda item: compare(read(item, field), value)


class _Parser:
    def __init__(self, text: str, fields: frozenset[str]) -> None:
        self._tokens = [found.group().strip() for found in _TOKEN.finditer(text)]
        self._at, self._fields = 0, fields

    def whole(self) -> Query:
        query = self._joined("or", lambda: self._joined("and", self._single))
        if self._at < len(self._tokens):
            raise ValueError(f"not understood: {self._tokens[self._at]}")
        return query

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]  # raises IndexError if the query ends too early

    def _joined(self, word: str, part: Callable[[], Query]) -> Query:
        parts = [part()]
        while self._peek() == word:
            self._take()
            parts.append(part())
        return parts[0] if len(parts) == 1 else Query(word, tuple(parts))

    def _single(self) -> Query:
        token = self._take()
        if token == "not":
            return Query("not", (self._single(),))
        if token == "(":
            inner = self._joined("or", lambda: self._joined("and", self._single))
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
            return inner
        if token.startswith("'"):
            if (self._take(), self._take()) != ("in", "parents"):
                raise ValueError(f"{token} is in nothing known")
            return Query("in", value=_text(token))
        if token not in self._fields:
            raise ValueError(f"no such term: {token}")
        return self._term(token, _KINDS[token])

    def _term(self, field: str, kind: str) -> Query:
        if kind == "bool" and self._peek() not in ("=", "!="):
            return Query("=", field=field, value=True)
        op, token = self._take(), self._take()
        allowed = {"bool": ("=", "!="), "date": tuple(_OPERATORS)}.get(kind, ("=", "!=", "contains"))
        if op not in allowed:
            raise ValueError(f"{field} has no operator {op}")
        return Query(op, field=field, value=_value(kind, op, token))


def _text(token: str) -> str:
    if len(token) < 2 or token[0] != "'":
        raise ValueError(f"not a string: {token}")
    return re.sub(r"\\(.)", r"\1", token[1:-1], flags=re.DOTALL)


def _value(kind: str, op: str, token: str) -> Any:
    if kind == "bool":
        return {"true": True, "false": False}[token]
    text = _text(token)
    if kind == "date":
        at = datetime.fromisoformat(text)
        at = at if at.tzinfo else datetime.fromisoformat(text + "+00:00")
        return round(at.timestamp() * 1000)
    return text.lower() if kind == "text" and op != "contains" else text


def parse_query(text: str, fields: frozenset[str]) -> Query:
    """Parse a query with these terms. Raises ValueError or LookupError if it is invalid."""
    return _Parser(text, fields).whole()


Mask = Mapping[str, "Mask"]  # fields to keep of an object; an empty mask keeps all


def parse_mask(text: str) -> Mask:
    """Parse a `fields` parameter, such as `nextPageToken,items(id,labels/trashed)`.

    Raises ValueError or IndexError if it is invalid.
    """
    tokens = re.findall(r"[\w*-]+|\S", text)
    mask = _masks(tokens)
    if tokens:
        raise ValueError(f"not understood in fields: {tokens[0]}")
    return mask


def _masks(tokens: list[str]) -> Mask:
    """Parse the mask at the start of the tokens, and remove its tokens."""
    out: dict[str, Mask] = {}
    while True:
        name = tokens.pop(0)
        if not re.fullmatch(r"[\w*-]+", name):
            raise ValueError(f"not a field: {name}")
        path = [name]
        inner: Mask = {}
        while tokens and tokens[0] == "/":
            del tokens[0]
            path.append(tokens.pop(0))
        if tokens and tokens[0] == "(":
            del tokens[0]
            inner = _masks(tokens)
            if tokens.pop(0) != ")":
                raise ValueError("a parenthesis in fields is not closed")
        for step in reversed(path[1:]):
            inner = {step: inner}
        known = out.get(name)
        out[name] = inner if known is None else _merged(known, inner)
        if not tokens or tokens[0] != ",":
            return out
        del tokens[0]


def _merged(a: Mask, b: Mask) -> Mask:
    if not a or not b:
        return {}
    both = {name: _merged(a[name], b[name]) for name in a.keys() & b.keys()}
    return {**a, **b, **both}


def project(value: Any, mask: Mask) -> Any:
    """Return a value with only the fields in the mask; applies to each element of a list."""
    if isinstance(value, list):
        return [project(element, mask) for element in value]
    if not mask or not isinstance(value, dict):
        return value
    if "*" in mask:
        mask = {name: mask.get(name, mask["*"]) for name in value}
    return {name: project(value[name], inner) for name, inner in mask.items() if name in value}
