"""Parse JSON lines into Python objects, where Arrow would guess, fill in or drop values. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

__all__ = ["as_json", "objects_of", "only", "texts_of", "whole_ranges", "why"]


def objects_of(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not empty.

    Raises ValueError, with the number of the line, for a line that is not a JSON object.
    """
    for number, line in enumerate(filter(None, (line.strip() for line in data.split(b"\n")))):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as wrong:
            raise ValueError(f"line {number} of these is not JSON ({wrong}): {_shown(line)}") from wrong
        if not isinstance(found, dict):
            raise ValueError(
                f"line {number} of these is not a JSON object: {_shown(line)}; kind='lines' packs lines as they are"
            )
        yield found


def only(objects: Iterable[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return the objects as JSON lines with only the keys in `names`."""
    return b"".join(as_json({name: each[name] for name in names if name in each}) + b"\n" for each in objects)


def texts_of(data: bytes, names: Iterable[str], known: Set[str] | None = None) -> dict[str, list[bytes]]:
    """Return the values of each name as JSON, one for each line; b"" for null and for a missing key.

    Raises ValueError for a line with a key that is not in `known`. None allows any key.
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
    """Return a value as JSON in UTF-8. Types that JSON lacks become text."""
    # UTF-8 cannot encode a lone surrogate: it stays a JSON escape.
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace")


def whole_ranges(objects: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return (least, largest) for each name whose values are all integers or lists of integers."""
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
    """Return the error of `texts_of` for the first wrong line; `otherwise` if it finds none."""
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
