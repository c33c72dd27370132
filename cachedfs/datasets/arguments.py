"""Check arguments, and find the rank of this process."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

from cachedfs.config import parse_size


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


def raise_if_ranks_differ(state: Mapping[str, Any]) -> None:
    """Raise RuntimeError on all ranks of torch.distributed if they begin an epoch with different states."""
    from torch import distributed

    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, dict(state))
    for rank, other in enumerate(states):
        if other.get("objects") != states[0].get("objects"):
            raise RuntimeError(
                f"rank 0 and rank {rank} found different files, or other sizes: list them while nobody writes there, or give "
                "FileDataset a list; shuffle='node' divides them by their names and sizes"
            )
        if differ := [name for name in other if other[name] != states[0][name]]:
            said = ", ".join(f"{name}={states[0][name]!r} and {other[name]!r}" for name in differ)
            raise RuntimeError(
                f"rank 0 and rank {rank} would read different epochs: {said}. Begin and leave the loops of a Loader on all "
                "ranks alike, or call set_epoch with the same number before each; a loop of one rank takes rank=0, world_size=1"
            )
