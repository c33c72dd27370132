"""Helpers of several sources: which files to look at, names of fields, and texts as arrays. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from cachedfs.packing.pack_types import BESIDE, OFFSETS, Array, Field
from cachedfs.packing.sources.sample_source import BadFile

__all__ = ["checked_fields", "is_array_name", "joined", "looked_at", "names_of", "spread"]

Looked = TypeVar("Looked")


def joined(parts: Iterable[bytes | str]) -> tuple[Array, Array]:
    """Return texts as one array of bytes (UTF-8), and the length of each."""
    datas = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts]
    return np.frombuffer(b"".join(datas), "u1"), np.fromiter(map(len, datas), np.int64, len(datas))


def checked_fields(fields: Iterable[Field]) -> tuple[Field, ...]:
    """Return the fields. Raises ValueError if they cannot be arrays of one Zarr group."""
    fields, advice = tuple(fields), "columns= says which columns to pack"
    taken = Counter(field.name for field in fields)
    taken.update(field.name + OFFSETS for field in fields if field.is_ragged)
    folders = {name[:i] for name in taken for i, character in enumerate(name) if character == "/"}
    for field in fields:
        if not is_array_name(field.name) or field.name in folders:
            raise ValueError(f"{field.name!r} cannot be the name of an array; {advice}")
        if not all(field.shape):
            raise ValueError(f"{field.name!r} is {field}, which has no values; {advice}")
    if twice := [name for name, n in taken.items() if n > 1]:
        names = [field.name for field in fields]
        raise ValueError(f"two arrays would be called {twice[0]!r}, of {names}; {advice}")
    return fields


def is_array_name(name: str) -> bool:
    parts = name.split("/")
    return (
        all(part and set(part) != {"."} and not part.startswith("__") for part in parts)
        and "\\" not in name  # a path separator on Windows
        and parts[-1] != "zarr.json"
        and parts[0] != BESIDE
    )


def names_of(columns: Any, advice: str) -> list[str] | None:
    """Return the user's `columns` as a list of names. Raises ValueError, with advice, for anything else."""
    if columns is None:
        return None
    names = [columns] if isinstance(columns, str) else list(columns)
    if isinstance(columns, Mapping) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"columns={columns!r}: {advice}")
    return names


def looked_at(numbers: Iterable[int], look: Callable[[int], Looked]) -> Iterator[tuple[int, Looked]]:
    """Yield the number of each file and what `look` returns for it, except bad ones.

    If all are bad, it raises the first error.
    """
    bad: tuple[Any, ...] = ()
    is_any = False
    for number in numbers:
        try:
            found = look(number)
        except BadFile as error:
            bad = bad or error.args  # not the error: its traceback would keep files open
            continue
        is_any = True
        yield number, found
    if bad and not is_any:
        raise BadFile(*bad)


def spread(n: int, most: int) -> list[int]:
    """Return up to `most` numbers below `n`, evenly spaced, with the first and the last."""
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / max(1, most - 1)) for i in range(most)})
