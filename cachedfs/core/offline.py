"""Serve stale metadata while the origin is unreachable (`stale_if_error`) or `offline` is set."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cachedfs.common.clock import clock
from cachedfs.core.objects import ABSENCE_S, Entry, Objects
from cachedfs.errors import OriginUnreachable
from cachedfs.origins.base import has_stale_answer

# A node of version 3 has the first one. A reader that does not know the version asks for all of them.
ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")

logger = logging.getLogger("cachedfs.core")

T = TypeVar("T")


async def answer_of(
    objects: Objects, request: Callable[[], Awaitable[T]], path: str, stale: Callable[[], T | None] | None
) -> T:
    """Return the answer of `request`, or `stale()` if the origin cannot be reached. The first time, log a warning.

    Where there may be a stale answer (`stale` is not None), requests connect within seconds, and none is sent if the
    origin was unreachable a moment ago. Raises OriginUnreachable without one, or without `stale_if_error`.
    """
    engine, identity, old, reason = objects.engine, objects.identity, None, ""
    stale = stale if objects.config.stale_if_error else None
    if stale is None or not engine.is_unreachable(identity) or (old := stale()) is None:
        is_set = has_stale_answer.get() == (stale is not None)  # usually: a change copies the context
        token = None if is_set else has_stale_answer.set(stale is not None)
        try:
            return await request()
        except OriginUnreachable as error:
            engine.mark_unreachable(identity)
            if stale is None or (old := stale()) is None:
                raise
            reason = str(error)
        finally:
            if token is not None:
                has_stale_answer.reset(token)
    if not objects.has_warned_of_stale:
        objects.has_warned_of_stale = True
        reason = reason or f"{objects.url(path)}: the origin could not be reached a moment ago"
        logger.warning(
            "%s; serving the versions known to the cache (stale_if_error=False forbids it)", reason
        )
    return old


def can_stand(objects: Objects, old: Entry) -> bool:
    """Return whether a stale entry can stand for the origin's answer.

    An object or folder can. An absence becomes the fill value of a Zarr array, so it needs a complete listing that lacks
    the path, and no known object beside or above it may be newer than the listing: a writer that appends to an array
    also replaces its metadata. A 404 can stand only for one of the metadata files of a Zarr node.
    """
    if old.info is not None:
        return True
    (folder, _, name), now = old.path.rpartition("/"), clock.now()
    newest_at = objects.store.newest_version(objects.identity, folder)
    unlisted_at = objects.unlisted_at(old.path)
    # A time to come is that of a clock that was wrong, and proves nothing.
    if unlisted_at is not None and newest_at <= unlisted_at <= now:
        return True
    # Requests of one open overlap, so its 404 may be a little older than what it was used with.
    if name not in ZARR_METADATA or newest_at > old.asked_at + ABSENCE_S or old.asked_at > now:
        return False
    others = (objects.known(f"{folder}/{other}") for other in ZARR_METADATA if other != name)
    return any(entry is not None and entry.info is not None for entry in others)
