"""Chunk grids: map the name of a Zarr chunk, or of a numbered object, to its index and back.

Only names and metadata documents are needed; zarr is not imported.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

__all__ = ["METADATA", "ChunkGrid", "NumberedNames", "Place", "grids_in", "numbered"]

METADATA = ("zarr.json", ".zarray", ".zmetadata")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,18})([^0-9/]*)", re.DOTALL)

Place = tuple[int, ...]  # index of a chunk along each axis of its grid


class ChunkGrid(NamedTuple):
    """The chunk grid of one Zarr array, and how its chunks are named below the array's folder.

    For a sharded array, the chunks are its shards.
    """

    extents: tuple[int, ...]  # number of chunks along each axis
    head: str  # prefix of every chunk name: "c/", "c." or ""
    separator: str

    def place(self, name: str) -> Place | None:
        """Return the index of the chunk called `name`; None when the grid has no such chunk."""
        parts = name.removeprefix(self.head).split(self.separator)
        if not name.startswith(self.head) or len(parts) != len(self.extents):
            return None
        if not all(part.isascii() and part.isdigit() for part in parts):
            return None
        place = tuple(map(int, parts))
        is_here = self.name(place) == name and all(map(int.__lt__, place, self.extents))
        return place if is_here else None

    def name(self, place: Place) -> str:
        """Return the name of the chunk at index `place`."""
        return self.head + self.separator.join(map(str, place))


class NumberedNames(NamedTuple):
    """Objects whose names differ only in their last number. How many there are is unknown."""

    head: str
    tail: str
    width: int  # digits of zero-padded numbers; 0 without padding

    def name(self, place: Place) -> str:
        """Return the name of the object with number `place[0]`."""
        return f"{self.head}{place[0]:0{self.width}}{self.tail}"


def numbered(path: str) -> tuple[NumberedNames, Place] | None:
    """Return the naming scheme of `path` and its number; None for a name without a number."""
    found = _LAST_NUMBER.fullmatch(path)
    if found is None:
        return None
    # The second group takes the whole last number, so `head` ends in a digit only beyond 18 digits.
    head, digits, tail = found.groups()
    is_padded = len(digits) > 1 and digits[0] == "0"
    return NumberedNames(head, tail, len(digits) if is_padded else 0), (int(digits),)


def grids_in(name: str, data: bytes) -> dict[str, ChunkGrid]:
    """Return the grids of the arrays in a metadata document, by path below the document's folder.

    `name` is the document's own name, without its folder. Malformed arrays, and arrays of an unknown kind,
    are left out.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    nodes = _nodes(name, document)
    found = {path: _grid(node) for path, node in nodes.items()}
    return {path: grid for path, grid in found.items() if grid is not None}


def _nodes(name: str, document: Any) -> dict[str, Any]:
    """Return the metadata of each node by path: of the document itself, or consolidated in it."""
    if not isinstance(document, dict):
        return {}
    if name != ".zmetadata" and "shape" in document:
        return {"": document}
    consolidated = document if name == ".zmetadata" else document.get("consolidated_metadata")
    nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if not isinstance(nodes, dict):
        return {}
    if name == ".zmetadata":
        ending = ".zarray"
        arrays = {path: node for path, node in nodes.items() if path.rpartition("/")[2] == ending}
        return {path.removesuffix(ending).rstrip("/"): node for path, node in arrays.items()}
    return nodes


def _grid(node: Any) -> ChunkGrid | None:
    try:
        return _grid_v2(node) if node.get("zarr_format") == 2 else _grid_v3(node)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _grid_v2(node: dict[str, Any]) -> ChunkGrid | None:
    return _checked(node["shape"], node["chunks"], "", node.get("dimension_separator") or ".")


def _grid_v3(node: dict[str, Any]) -> ChunkGrid | None:
    grid, keys = node["chunk_grid"], node["chunk_key_encoding"]
    if grid["name"] != "regular":
        return None
    is_default = {"default": True, "v2": False}[keys["name"]]
    separator = (keys.get("configuration") or {}).get("separator", "/" if is_default else ".")
    head = f"c{separator}" if is_default else ""
    return _checked(node["shape"], grid["configuration"]["chunk_shape"], head, separator)


def _checked(shape: list[int], chunk: list[int], head: str, separator: str) -> ChunkGrid | None:
    is_sound = all(type(number) is int and number >= 0 for number in (*shape, *chunk))
    if not (is_sound and shape and separator in (".", "/")):
        return None
    extents = tuple(-(-whole // part) for whole, part in zip(shape, chunk, strict=True))
    return ChunkGrid(extents, head, separator)
