"""Names of objects that differ in numbers only: the chunks of a Zarr array, and numbered files.

Only paths and metadata documents are needed; zarr is not imported.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

METADATA = ("zarr.json", ".zarray", ".zmetadata")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,18})([^0-9/]*)", re.DOTALL)

Place = tuple[int, ...]  # the numbers in a name: the index of a chunk along each axis of its grid


class ObjectNames(NamedTuple):
    """The paths of the chunks of one array (its shards, if it is sharded), or of numbered files."""

    head: str  # before the first number, with the folder
    separator: str = ""  # between numbers
    tail: str = ""
    width: int = 0  # digits of zero-padded numbers; 0 without padding
    extents: tuple[int | None, ...] = (None,)  # objects along each axis; None: unknown

    def path(self, place: Place) -> str:
        """Return the path of the object with these numbers."""
        return self.head + self.separator.join([f"{at:0{self.width}}" for at in place]) + self.tail

    def chunk(self, path: str) -> Place | None:
        """Return the index of the chunk at `path`; None if the array has no such chunk."""
        parts = path.removeprefix(self.head).split(self.separator)
        if len(parts) != len(self.extents) or not all(part.isascii() and part.isdigit() for part in parts):
            return None
        place = tuple(map(int, parts))
        is_inside = all(extent is None or at < extent for at, extent in zip(place, self.extents, strict=True))
        return place if is_inside and self.path(place) == path else None


def numbered(path: str) -> tuple[ObjectNames, Place] | None:
    """Return the names that differ from `path` in its last number, and that number; None without a number."""
    found = _LAST_NUMBER.fullmatch(path)
    if found is None:
        return None
    # The second group takes the whole last number, so `head` ends in a digit only beyond 18 digits.
    head, digits, tail = found.groups()
    is_padded = len(digits) > 1 and digits[0] == "0"
    return ObjectNames(head, tail=tail, width=len(digits) if is_padded else 0), (int(digits),)


def array_folders(path: str) -> list[str]:
    """Return the folders, with trailing "/", that may hold the array of chunk `path`; the likeliest first."""
    parts = path.split("/")
    at = len(parts) - 1
    is_flat = parts[at].removeprefix("c.").replace(".", "").isdecimal()
    found = ["/".join(parts[:at]) + "/"] if is_flat else []
    while at > 0 and parts[at].isdecimal():
        at -= 1
        if parts[at] == "c":
            return ["/".join(parts[:at]) + "/", *found]
        if at < len(parts) - 1 and parts[at].isdecimal():
            found.append("/".join(parts[:at]) + "/")
    return found


def arrays_in(path: str, data: bytes) -> dict[str, ObjectNames]:
    """Return the chunk names of the arrays in the metadata document at `path`, by folder with trailing "/".

    Malformed arrays, and arrays of an unknown kind, are left out.
    """
    folder, name = path[: path.rfind("/") + 1], path[path.rfind("/") + 1 :]
    try:
        nodes = _nodes(name, json.loads(data))
    except (ValueError, RecursionError):
        return {}
    arrays = {}
    for below, node in nodes.items():
        root = f"{folder}{below}/" if below else folder
        try:
            arrays[root] = _chunk_names(root, node)
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
            continue
    return arrays


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
    if name != ".zmetadata":
        return nodes
    return {at[:-7].rstrip("/"): node for at, node in nodes.items() if f"/{at}".endswith("/.zarray")}


def _chunk_names(root: str, node: dict[str, Any]) -> ObjectNames:
    """Return the names of the chunks of an array with this metadata."""
    if node.get("zarr_format") == 2:
        chunk, head, separator = node["chunks"], root, node.get("dimension_separator") or "."
    else:
        grid, keys = node["chunk_grid"], node["chunk_key_encoding"]
        chunk = {"regular": grid["configuration"]["chunk_shape"]}[grid["name"]]
        default = {"default": "/", "v2": "."}[keys["name"]]
        separator = (keys.get("configuration") or {}).get("separator", default)
        head = f"{root}c{separator}" if keys["name"] == "default" else root
    shape = node["shape"]
    is_sound = all(type(number) is int and number >= 0 for number in (*shape, *chunk))
    if not (is_sound and shape and separator in (".", "/")):
        raise ValueError("not an array with a grid of chunks")
    return ObjectNames(
        head, separator, extents=tuple(-(-n // size) for n, size in zip(shape, chunk, strict=True))
    )
