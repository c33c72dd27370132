"""What does not hold any more after an item changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cachedfs.common.types import ObjectInfo

__all__ = ["overtaken"]


def overtaken(
    stored: Mapping[str, Sequence[ObjectInfo | None]], now: Mapping[str, ObjectInfo | None]
) -> set[str]:
    """Return the paths of which something is stored that may not hold any more.

    `stored` has all that is stored of every path where an item was or is, `now` what it is at those where it is now. Where
    all of it says the same, nothing happened that anybody asked about: a comment, a share.
    """
    return {
        path
        for path, infos in stored.items()
        if any(not _is_same(info, now.get(path), path) for info in infos)
    }


def _is_same(info: ObjectInfo | None, now: ObjectInfo | None, path: str) -> bool:
    if info is None or now is None:
        return False  # absent: but another of that name may have come to light
    return info == replace(now, path=path) and dict(info.details) == dict(now.details)
