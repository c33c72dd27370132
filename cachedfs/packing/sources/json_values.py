"""Lines of JSON as Python's objects: for what Arrow would guess, fill up or drop. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

__all__ = ["as_json", "objects_of", "only", "texts_of", "whole_ranges", "why"]


def objects_of(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not empty. Raises ValueError for a line that is none, saying which."""
    for number, line in enumerate(filter(None, (line.strip() for line in data.split(b"\n")))):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as wrong:
            raise ValueError(f"line {number} of these is no JSON ({wrong}): {_shown(line)}") from wrong
        if not isinstance(found, dict):
            raise ValueError(
                f"line {number} of these is no JSON object: {_shown(line)}; kind='lines' packs lines as they are"
            )
        yield found


def only(objects: Iterable[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return lines that have of objects what is under these names."""
    return b"".join(as_json({name: each[name] for name in names if name in each}) + b"\n" for each in objects)


def texts_of(data: bytes, names: Iterable[str], known: Set[str] | None = None) -> dict[str, list[bytes]]:
    """Return what lines have under these names, as JSON; b"" for null, and where there is nothing.

    Raises ValueError for a line with other names than those known; None: there may be any.
    """
    found: dict[str, list[bytes]] = {name: [] for name in names}
    for number, each in enumerate(objects_of(data)):
        if known is not None and (more := sorted(each.keys() - known)):
            raise ValueError(_unknown(number, more, as_json(each)))
        for name, texts in found.items():
            value = each.get(name)
            texts.append(b"" if value is None else as_json(value))
    return found


def as_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8; what JSON has no word for as a text."""
    # A lone surrogate, which UTF-8 has not, stays the escape that JSON has for it.
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace")


def whole_ranges(objects: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the least and the largest number under each of these names that has integers alone, or lists of them."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for each in objects:
        for name, values in found.items():
            value = each.get(name)
            values.extend(one for one in (value if isinstance(value, list) else [value]) if one is not None)
    return {
        name: (min(values), max(values))
        for name, values in found.items()
        if values and all(isinstance(value, int) for value in values)
    }


def why(data: bytes, known: Set[str] | None, otherwise: str) -> str:
    """Return in words which line is wrong, as `texts_of` finds it; `otherwise`, where none is."""
    try:
        texts_of(data, (), known)
    except ValueError as wrong:
        return str(wrong)
    return otherwise


def _unknown(number: int, names: list[str], line: bytes) -> str:
    return (
        f"line {number} of these has {', '.join(map(repr, names))}, which the lines looked at first do not have: {_shown(line)}; "
        "name all that is to be packed: columns=[...]"
    )


def _shown(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace")) + ("..." if len(line) > 80 else "")
