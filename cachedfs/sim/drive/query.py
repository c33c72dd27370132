"""Parsers for the search queries (`q`) and field masks (`fields`) of Drive requests."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cachedfs.sim.drive.items import Item, Items

_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|[=#\x22]|\s+|\b(?:true|false|True|False)\b", re.DOTALL)
# What only Python understands becomes what nobody does.
_IN_PYTHON = {"=": "==", "true": "True", "false": "False"} | dict.fromkeys(("#", '"', "True", "False"), "?")


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query: its predicate, and where its matches can be found."""

    matches: Callable[[Items, Item], bool]
    parents: tuple[str, ...] | None = None  # ids of folders that contain every match; None if any folder may
    name: str | None = None  # the lower-case name of every match; None if they may differ


def parse_query(text: str) -> Query:
    """Parse a query. Raises ValueError if it is invalid, or has terms that are not simulated.

    Its grammar is that of Python's expressions, but for a few words and for what is escaped in strings.
    """
    try:
        return _query(ast.parse(_TOKEN.sub(_in_python, text).strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not understood: {text}") from error


def _in_python(found: re.Match[str]) -> str:
    if found[0].startswith("'"):  # in parentheses: Python would join adjacent strings
        text = re.sub(r"\\(.)", r"\1", found[0][1:-1], flags=re.DOTALL)
        return f"({text!r})"
    return _IN_PYTHON.get(found[0], " ")


def _query(node: ast.expr) -> Query:
    match node:
        case ast.BoolOp(op=ast.Or()):
            parts = [_query(value) for value in node.values]
            found = [part.parents for part in parts]
            parents = None if None in found else tuple(dict.fromkeys(id for ids in found for id in ids or ()))
            return Query(lambda items, item: any(part.matches(items, item) for part in parts), parents)
        case ast.BoolOp():
            parts = [_query(value) for value in node.values]
            parents = next((part.parents for part in parts if part.parents is not None), None)
            name = next((part.name for part in parts if part.name is not None), None)
            return Query(lambda items, item: all(part.matches(items, item) for part in parts), parents, name)
        case ast.UnaryOp(op=ast.Not()):
            query = _query(node.operand)
            return Query(lambda items, item: not query.matches(items, item))
        case ast.Compare(ast.Constant(str(id)), [ast.In()], [ast.Name("parents")]):
            return Query(lambda items, item: items.is_in(item, id), (id,))
        case ast.Compare(ast.Name("name"), [ast.Eq()], [ast.Constant(str(name))]):
            wanted = name.lower()  # the service ignores case
            is_missed = name.startswith("'") and name.endswith("'")  # as in Drive, says rclone's author
            return Query(lambda items, item: item.name.lower() == wanted and not is_missed, name=wanted)
        case ast.Name(term):
            value = True
        case ast.Compare(ast.Name(term), [ast.Eq()], [ast.Constant(bool(value))]):
            pass
        case _:
            raise ValueError(f"not understood: {ast.unparse(node)}")
    if term == "trashed":
        return Query(lambda items, item: items.is_trashed(item) is value)
    if term == "sharedWithMe":
        return Query(lambda items, item: ("sharedWithMeTime" in item.fields) is value)
    raise ValueError(f"no such term: {term}")


Mask = Mapping[str, "Mask"]  # fields to keep of an object; an empty mask keeps all


def parse_mask(text: str) -> Mask:
    """Parse a `fields` parameter, such as `nextPageToken,files(id,parents)`. Raises ValueError if it is invalid."""
    if re.search(r"[^\w*,()\s]|\(\s*\)|^\s*$", text):
        raise ValueError(f"not understood: {text}")
    # Rewritten as JSON, where each field is an object with the fields in its parentheses.
    opened = re.sub(r"([\w*]+)(\s*\()?", lambda m: f'"{m[1]}": {{' + ("" if m[2] else "}"), text)
    mask: Mask = json.loads("{" + opened.replace(")", "}") + "}")
    return {} if "*" in mask else mask


def project(value: dict[str, Any], mask: Mask) -> dict[str, Any]:
    if not mask:
        return value
    return {name: _kept(value[name], inner) for name, inner in mask.items() if name in value}


def _kept(value: Any, mask: Mask) -> Any:
    if isinstance(value, list):
        return [_kept(element, mask) for element in value]
    return project(value, mask) if isinstance(value, dict) else value
