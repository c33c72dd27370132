"""Change objects at the origin; all processes of the machine see a change at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from cachedfs.common.clock import clock
from cachedfs.common.optional_imports import importing
from cachedfs.common.types import AnyVersion, ObjectInfo
from cachedfs.core.objects import Objects
from cachedfs.errors import ObjectChanged, ObjectExists, ObjectNotFound
from cachedfs.origins.base import Uploader


async def call(
    objects: Objects, paths: Iterable[str], method: str, *args: Any, tree: bool = False, **options: Any
) -> Any:
    """Call a method of the inner filesystem that changes `paths`; `tree` includes everything below them."""
    paths = list(paths)
    origin = objects.origin(paths[0])
    with _changing(objects, paths, tree=tree):
        return await origin.call(method, *args, **options)


async def upload(
    objects: Objects,
    origin: Uploader,
    path: str,
    file: BinaryIO,
    *,
    replaces: ObjectInfo | AnyVersion | None,
    mtime_ns: int | None,
) -> ObjectInfo:
    """Make the bytes of `file` the object at `path`, by the upload of the origin itself: see `Uploader`."""
    with _changing(objects, [path]):
        return await origin.upload(path, file, replaces=replaces, mtime_ns=mtime_ns)


@contextlib.contextmanager
def _changing(objects: Objects, paths: list[str], *, tree: bool = False) -> Iterator[None]:
    """Change the counters of `paths` before and after a write: metadata requested until its end is never valid."""
    objects.store.changed(objects.identity, paths, tree=tree)
    try:
        yield
    finally:
        objects.store.changed(objects.identity, paths, tree=tree)


async def check(objects: Objects, path: str, expected: ObjectInfo | AnyVersion | None) -> None:
    """Raise ObjectExists or ObjectChanged unless the origin has this version (None: no object), by one lookup."""
    found = None
    if not isinstance(expected, AnyVersion):
        with contextlib.suppress(ObjectNotFound):
            found = await objects.origin(path).lookup(path)
    with importing():
        from cachedfs.origins.upload import check_version
    try:
        check_version(objects.url(path), expected, found)
    except (ObjectChanged, ObjectExists):
        objects.expire(path)  # it is of an older version
        raise


async def look_up(objects: Objects, path: str) -> ObjectInfo:
    """Return the metadata of an object that was just written, by one lookup, and store it."""
    asked_at, counter = clock.now(), objects.counter(path)
    info = await objects.origin(path).lookup(path)
    objects.learn(path, info, asked_at=asked_at, counter=counter)
    return info
