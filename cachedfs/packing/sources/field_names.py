"""Check that fields can be arrays of one Zarr group, without name conflicts. No I/O."""

from __future__ import annotations

from collections import Counter

from cachedfs.packing.pack_types import OFFSETS, Field
from cachedfs.packing.store import BESIDE

__all__ = ["checked"]


def checked(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the fields.

    Raises ValueError for an invalid or duplicate name, or a field without values.
    """
    taken = Counter(
        name
        for field in fields
        for name in ([field.name, field.name + OFFSETS] if field.is_ragged else [field.name])
    )
    folders = {
        "/".join(parts[:i]) for parts in (name.split("/") for name in taken) for i in range(1, len(parts))
    }
    for field in fields:
        if not _is_name(field.name) or field.name in folders:
            raise ValueError(
                f"{field.name!r} cannot be the name of an array; columns= says which columns to pack"
            )
        if not all(field.shape):
            raise ValueError(
                f"{field.name!r} is {field}, which has no values; columns= says which columns to pack"
            )
    if twice := [name for name, n in taken.items() if n > 1]:
        raise ValueError(
            f"two arrays would be called {twice[0]!r}, of {[field.name for field in fields]}; columns= says which columns to pack"
        )
    return fields


def _is_name(name: str) -> bool:
    parts = name.split("/")
    return (
        all(part and set(part) != {"."} and not part.startswith("__") for part in parts)
        and "\\" not in name  # a path separator on Windows
        and parts[-1] != "zarr.json"
        and parts[0] != BESIDE
    )
