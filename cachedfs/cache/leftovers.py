"""Temporary files: whose they are, which of them nobody will finish, and what the others hold.

A block on its way is named after the process that writes it, which has the claim on that number while it lives: what
a dead one left may go at once. Anything else (an index that was replaced, a mapped file in the making) tells
nobody's name, and goes when it is an hour old.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from cachedfs.cache import disk
from cachedfs.cache.claims import Claims
from cachedfs.cache.directory import Directory

__all__ = ["abandoned", "clear_away", "name_for_block"]

_STALE_S = 3600  # a temporary file of this age has no living writer
_BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")


def name_for_block(directory: Directory, writer: int) -> str:
    """Return a new name for the temporary file of a block that the process with the number `writer` reserved."""
    return f"{directory.root}/tmp/{writer:016x}-{disk.nonce():016x}"


def clear_away(directory: Directory, claims: Claims, now_s: float) -> int:
    """Remove the temporary files that no living process writes; return the bytes of those that no row counts."""
    uncounted = 0
    for found in _found(directory):
        if _is_abandoned(found, claims, now_s):
            with contextlib.suppress(OSError):
                (disk.remove_tree if found.is_folder else disk.unlink)(found.path)
        elif not (_BLOCK.fullmatch(found.name) and claims.works_across_processes):
            uncounted += found.size
    return uncounted


def abandoned(directory: Directory, claims: Claims, now_s: float) -> list[str]:
    """Return the temporary files that no living process writes."""
    return [found.path for found in _found(directory) if _is_abandoned(found, claims, now_s)]


def _found(directory: Directory) -> Iterator[disk.Found]:
    return disk.scan(f"{directory.root}/tmp")


def _is_abandoned(found: disk.Found, claims: Claims, now_s: float) -> bool:
    block = _BLOCK.fullmatch(found.name)
    return found.modified_s < now_s - _STALE_S or bool(block and not claims.is_held(int(block[1], 16)))
