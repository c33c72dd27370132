"""Verify cached blocks against their own checksums and the origin's, and remove the wrong ones.

The functions block on the disk: call them off the event loop. The origin is asked only if the version of an object is
unknown, or if the object is completely cached and its checksum is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.blocks import block_range
from cachedfs.common.checksums import RunningChecksum, StatedChecksum, stated_of
from cachedfs.common.version import Version
from cachedfs.core.lookups import Lookups
from cachedfs.core.objects import Entry, Objects
from cachedfs.errors import BadBlock, CachedFSError

logger = logging.getLogger("cachedfs.core")


class Verified(NamedTuple):
    """Result of `fs.verify` for one object, in the version that the cache knows.

    path: of the object. size: of the object in bytes, None if unknown. blocks: how many cached blocks are intact. bad:
    indexes of blocks that were not, and were removed. missing: how many blocks are not cached. whole: True if the
    complete object is cached and has the checksum that the origin states; False if its checksum differs, and then all
    blocks count as bad and were removed; None if there was nothing to compare. reason: the finding in words.
    """

    path: str
    blocks: int
    bad: tuple[int, ...]
    missing: int
    size: int | None
    whole: bool | None
    reason: str

    @property
    def ok(self) -> bool:
        """True if no cached block was wrong."""
        return not self.bad and self.whole is not False


def extent(cache: BlockStore, version: Version) -> list[tuple[int, int]]:
    """Return the cached byte ranges `(start, stop)` of a version, merged, without reading the blocks."""
    found: list[tuple[int, int]] = []
    for index in range(version.n_blocks):
        if cache.has(version, index):
            part = block_range(index, version.block_size, version.size)
            start = found.pop()[0] if found and found[-1][1] == part.start else part.start
            found.append((start, part.stop))
    return found


def paths_to_verify(objects: Objects, lookups: Lookups, path: str) -> list[str]:
    """Return the sorted paths of the object `path`, and of the objects below it that have cached blocks.

    Raises ObjectNotFound if there are none and `path` is known to be absent. Asks the origin, and raises its errors, if
    nothing is known about `path`.
    """
    found = objects.engine.cache.paths_below(objects.identity, path)
    entry = objects.known(path)
    if entry is None and path and not found:
        entry = _look_up(objects, lookups, path)
    if entry is not None and entry.info is None and not found:
        raise objects.not_found(entry)
    is_object = entry is not None and entry.info is not None and entry.info.kind == "file"
    return sorted({*found, path}) if is_object else found


def verify(objects: Objects, lookups: Lookups, path: str, advance: Callable[[int], object]) -> Verified:
    """Verify one object; `advance` is called with the size in bytes of each block read."""
    try:
        entry = objects.known(path) or _look_up(objects, lookups, path)
    except CachedFSError as error:
        return Verified(path, 0, (), 0, None, None, f"the version to verify is unknown: {error}")
    if (version := objects.version(entry)) is None:
        reason = "the origin does not distinguish versions, so nothing of it is cached"
        if entry.info is None:
            reason = "the origin has no such object any more"
        return Verified(path, 0, (), 0, None, None, reason)
    cache, stated = objects.engine.cache, stated_of(entry.object.details)
    if stated is None and all(cache.has(version, index) for index in range(version.n_blocks)):
        stated = _asked_checksum(objects, lookups, version)
    checksum = RunningChecksum(stated) if stated is not None else None
    n_good, n_missing, bad = 0, 0, dict[int, str]()
    for index in range(version.n_blocks):
        try:
            data = _block(cache, version, index)
        except BadBlock as error:
            bad[index] = str(error)
            continue
        if data is None:
            n_missing += 1
            continue
        n_good += 1
        if checksum is not None and not bad and not n_missing:
            checksum.add(data)
        advance(len(data))
    found = Verified(version.path, n_good, tuple(bad), n_missing, version.size, None, "")
    if bad:
        first = min(bad)
        return found._replace(reason=f"damaged on the disk; block {first}: {bad[first]}")
    if n_missing:
        return found._replace(reason="not all of it is in the cache")
    return _compare(objects, version, found, stated, checksum)


def _look_up(objects: Objects, lookups: Lookups, path: str) -> Entry:
    return objects.engine.run(lookups.ask(path))


def _asked_checksum(objects: Objects, lookups: Lookups, version: Version) -> StatedChecksum | None:
    """Return the checksum that the origin states of this version, if it is still the current one."""
    try:
        now = _look_up(objects, lookups, version.info.path).info
    except CachedFSError as error:
        logger.debug("no checksum: %s", error)  # the blocks are verified without it
        return None
    is_same = now is not None and now.fingerprint == version.fingerprint
    return stated_of(now.details) if now is not None and is_same else None


def _block(cache: BlockStore, version: Version, index: int) -> bytes | None:
    """Return a block after checking all of it; None if it is absent. Raises BadBlock if it is damaged."""
    data = cache.read_anew(version, index)
    expected = block_range(index, version.block_size, version.size).size
    if data is None or len(data) == expected:
        return data
    cache.remove_wrong(version, index)
    raise BadBlock(f"it has {len(data)} bytes, not {expected}")


def _compare(
    objects: Objects,
    version: Version,
    found: Verified,
    stated: StatedChecksum | None,
    checksum: RunningChecksum | None,
) -> Verified:
    """Compare a completely cached object, of which no block is damaged, with the origin's checksum."""
    if stated is None or checksum is None:
        return found._replace(reason="the origin states no checksum that could be compared")
    difference = checksum.contradiction()
    if difference is None:
        return found._replace(whole=True, reason=f"its {stated.name.upper()} is the origin's")
    logger.warning("%s: all its cached blocks are removed: %s", objects.url(version.path), difference)
    for index in range(found.blocks):
        objects.engine.cache.remove_wrong(version, index)
    return found._replace(blocks=0, bad=tuple(range(found.blocks)), whole=False, reason=difference)
