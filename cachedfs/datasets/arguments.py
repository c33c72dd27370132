"""Check arguments, and find the rank of this process."""

from __future__ import annotations

import operator
import sys
from typing import Any

from cachedfs.config import parse_size

__all__ = ["at_least", "current_ranks", "ranks_of", "size"]


def at_least(least: int, **given: Any) -> int:
    """Return the single keyword argument. Raises ValueError if it is less than `least` or not an integer."""
    [(name, value)] = given.items()
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name}={value!r}: expected a whole number, {least} or more")
    return operator.index(value)


def size(**given: Any) -> int:
    """Return the single keyword argument, a size, in bytes. Raises ValueError if it is not a positive size."""
    [(name, value)] = given.items()
    try:
        size = parse_size(value)
    except ValueError:
        size = 0
    if isinstance(size, float) or size == 0:
        raise ValueError(f"{name}={value!r}: expected bytes or a size like '1GiB', more than 0")
    return size


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return the checked `(rank, world_size)`; None if both are None."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: give both, or neither")
    rank, world_size = at_least(0, rank=rank), at_least(1, world_size=world_size)
    if rank >= world_size:
        raise ValueError(f"rank={rank!r}: expected 0 to {world_size - 1}, because world_size={world_size}")
    return rank, world_size


def current_ranks() -> tuple[int, int] | None:
    """Return `(rank, world_size)` of torch.distributed; None if it is not initialized."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
