"""Verify cached blocks against their own checksums and the origin's, and remove the wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from cachedfs.common.blocks import block_range
from cachedfs.common.checksums import RunningChecksum, StatedChecksum, stated_of
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.reader import Reader
from cachedfs.errors import BadBlock, CachedFSError

__all__ = ["Verifier", "Verified"]

logger = logging.getLogger("cachedfs.core")


class Verified(NamedTuple):
    """Result of `fs.verify` for one object, in the version that the cache knows.

    path: of the object. size: of the object in bytes, None if unknown. blocks: how many cached blocks are intact. bad:
    indexes of blocks that were not, and were dropped. missing: how many blocks are not cached. whole: True if the
    complete object is cached and has the checksum that the origin states; False if its checksum differs, and then all
    blocks count as bad and were dropped; None if there was nothing to compare. reason: the finding in words.
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


class Verifier:
    """Verifies the cached blocks of one objects.

    Its methods block on the disk: call them off the event loop. The origin is asked only if the version of an object is
    unknown, or if the object is completely cached and its checksum is unknown.
    """

    def __init__(self, objects: Objects, reader: Reader) -> None:
        self._objects, self._reader = objects, reader

    def paths(self, path: str) -> list[str]:
        """Return the sorted paths to verify.

        These are the object `path`, and the objects below it that have cached blocks. Raises ObjectNotFound if there
        are none and `path` is known to be absent. Asks the origin, and raises its errors, if nothing is known about
        `path`.
        """
        found = self._objects.engine.cache.paths_below(self._objects.identity, path)
        entry = self._objects.known(path)
        if entry is None and path and not found:
            entry = self._look_up(path)
        if entry is not None and entry.info is None and not found:
            raise self._objects.not_found(path, entry)
        is_object = entry is not None and entry.info is not None and entry.info.kind == "file"
        return sorted({*found, path}) if is_object else found

    def extent(self, key: ObjectKey, info: ObjectInfo) -> list[tuple[int, int]]:
        """Return the cached byte ranges `(start, stop)` of a version, merged, without reading the blocks."""
        extent: list[tuple[int, int]] = []
        for index in _blocks(key, info):
            if self._objects.engine.cache.has(key, index):
                part = block_range(index, key.block_size, info.size or 0)
                start = extent.pop()[0] if extent and extent[-1][1] == part.start else part.start
                extent.append((start, part.stop))
        return extent

    def verify(self, path: str, advance: Callable[[int], object]) -> Verified:
        """Verify one object and return the result.

        `advance` is called with the size in bytes of each block read.
        """
        try:
            entry = self._objects.known(path) or self._look_up(path)
        except CachedFSError as error:
            return _unknown(path, f"the version to verify is unknown: {error}")
        info, key = entry.info, self._objects.version(entry)
        if info is None:
            return _unknown(path, "the origin has no such object any more")
        if key is None:
            return _unknown(path, "the origin does not distinguish versions, so nothing of it is cached")
        if stated_of(info.details) is None and self._is_complete(key, info):
            info = self._with_checksum(info)
        return self._verify_blocks(key, info, advance)

    def _look_up(self, path: str) -> Entry:
        return self._objects.engine.run(self._reader.lookups.ask(path))

    def _is_complete(self, key: ObjectKey, info: ObjectInfo) -> bool:
        return all(self._objects.engine.cache.has(key, index) for index in _blocks(key, info))

    def _with_checksum(self, info: ObjectInfo) -> ObjectInfo:
        """Return the metadata with the origin's checksum if the version is unchanged, else `info` itself."""
        try:
            now = self._look_up(info.path).info
        except CachedFSError as error:
            logger.debug("no checksum: %s", error)  # the blocks are verified without it
            return info
        return now if now is not None and now.fingerprint == info.fingerprint else info

    def _verify_blocks(self, key: ObjectKey, info: ObjectInfo, advance: Callable[[int], object]) -> Verified:
        stated = stated_of(info.details)
        checksum = RunningChecksum(stated) if stated is not None else None
        n_good = n_missing = 0
        bad: dict[int, str] = {}
        for index in _blocks(key, info):
            try:
                data = self._block(key, index, info)
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
        found = Verified(key.path, n_good, tuple(bad), n_missing, info.size, None, "")
        if bad:
            first = min(bad)
            return found._replace(reason=f"damaged on the disk; block {first}: {bad[first]}")
        if n_missing:
            return found._replace(reason="not all of it is in the cache")
        return self._compare(key, found, stated, checksum)

    def _block(self, key: ObjectKey, index: int, info: ObjectInfo) -> bytes | None:
        """Return a block after checking all of it, or None if it is absent.

        Raises BadBlock for damage or a wrong length.
        """
        cache = self._objects.engine.cache
        data = cache.read_anew(key, index)
        expected = block_range(index, key.block_size, info.size or 0).size
        if data is None or len(data) == expected:
            return data
        cache.remove_wrong(key, index)
        raise BadBlock(f"it has {len(data)} bytes, not {expected}")

    def _compare(
        self, key: ObjectKey, found: Verified, stated: StatedChecksum | None, checksum: RunningChecksum | None
    ) -> Verified:
        """Compare a completely cached object with the origin's checksum.

        None of its blocks may be damaged.
        """
        if stated is None or checksum is None:
            return found._replace(reason="the origin states no checksum that could be compared")
        difference = checksum.contradiction()
        if difference is None:
            return found._replace(whole=True, reason=f"its {stated.name.upper()} is the origin's")
        logger.warning("%s: all its cached blocks are removed: %s", self._objects.url(key.path), difference)
        for index in range(found.blocks):
            self._objects.engine.cache.remove_wrong(key, index)
        bad = tuple(range(found.blocks))
        return found._replace(blocks=0, bad=bad, whole=False, reason=difference)


def _blocks(key: ObjectKey, info: ObjectInfo) -> range:
    return range(-(-(info.size or 0) // key.block_size))


def _unknown(path: str, reason: str) -> Verified:
    return Verified(path, 0, (), 0, None, None, reason)
