"""Validate the arguments of a Loader."""

from __future__ import annotations

import operator
from typing import Any

from cachedfs.common.executor import n_cores
from cachedfs.config import parse_size
from cachedfs.datasets.sampler import Shuffle

__all__ = ["at_least", "default_threads", "ranks_of", "shuffle_of", "size"]

THREADS = 4, 8  # minimum and maximum of the default number of threads, which is one per core
SHUFFLES: dict[Any, Shuffle | None] = {
    False: None,
    None: None,
    True: "full",
    "full": "full",
    "window": "window",
}


def default_threads() -> int:
    """Return the default number of threads that make batches: one per core, 4 to 8."""
    return min(max(n_cores(), THREADS[0]), THREADS[1])


def at_least(least: int, **given: Any) -> int:
    """Return the single keyword argument.

    Raises ValueError if it is less than `least` or not an integer.
    """
    [(name, value)] = given.items()
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name}={value!r}: expected a whole number, {least} or more")
    return operator.index(value)


def size(**given: Any) -> int:
    """Return the single keyword argument, a size, in bytes.

    Raises ValueError if it is not a positive size.
    """
    [(name, value)] = given.items()
    try:
        size = parse_size(value)
    except ValueError:
        size = 0
    if isinstance(size, float) or size == 0:
        raise ValueError(f"{name}={value!r}: expected bytes or a size like '1GiB', more than 0")
    return size


def shuffle_of(given: Any) -> Shuffle | None:
    """Return the shuffle mode for a `shuffle` argument. Raises ValueError if it is unknown."""
    if isinstance(given, str | bool | None) and given in SHUFFLES:
        return SHUFFLES[given]
    raise ValueError(f"shuffle={given!r}: expected True, False, 'full' or 'window'")


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return the checked `(rank, world_size)`.

    None if both are None: then those of torch.distributed are used.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: give both, or neither")
    rank, world_size = at_least(0, rank=rank), at_least(1, world_size=world_size)
    if rank >= world_size:
        raise ValueError(f"rank={rank!r}: expected 0 to {world_size - 1}, because world_size={world_size}")
    return rank, world_size
