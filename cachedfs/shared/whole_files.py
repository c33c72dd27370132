"""Files with many objects, read as a whole: one read for many, and their objects are stored together."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import BlockKey, CacheBounds, ObjectKey
from cachedfs.common.urls import stored_path
from cachedfs.errors import CacheError
from cachedfs.shared.metadata_rows import infos_in
from cachedfs.shared.piece import blocks_in, shareable_key
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_store import FilePart

MANY = 8  # readers at a time of objects in one file
_LARGEST = 32 << 20  # bytes of a file, which are in memory
_MOST = 8  # files in memory, for those who wait for other objects in them
_KEPT_S = 5.0  # for so long
# A file is read as a whole if it takes at most 1 / _SHARE of the local cache, where its objects go.
_SHARE = 4


class WholeFiles:
    """Reads each file as a whole once, and puts the objects in it into the local cache. On the event loop thread.

    `n_readers` counts those who read objects in a file now, `written_at` has the times of the files. What was evicted since,
    or did not fit, is read from the file object by object.
    """

    def __init__(
        self,
        place: SharedFolder | SharedBucket,
        cache: BlockStore,
        pool: Executor,
        written_at: Mapping[str, float],
    ) -> None:
        self._place, self._cache, self._pool, self._written_at = place, cache, pool, written_at
        self._recent: dict[str, asyncio.Future[FilePart | None]] = {}  # being read, or in memory
        self._known: set[str] = set()  # were read, or are
        self._used: set[str] = set()  # `with_next`: the next one was begun, if there is one
        self.n_readers = Counter[str]()
        self.sizes: list[int] = []  # bytes of the objects in each file that was read; changed in any thread

    def get(
        self, name: str, version: ObjectKey, bounds: CacheBounds, *, with_next: bool
    ) -> asyncio.Future[FilePart | None] | None:
        """Return the file in which the object of `version` is, if enough of its objects are wanted, or it was just read.

        The future has None for a file that is to be read object by object, and raises DamagedFile and OSError. Do not cancel
        it. `with_next`: read the file too that was written next, as objects are often read in the same order.
        """
        if with_next or self.n_readers[name] >= MANY:
            self._start(name, version, bounds)
        if with_next and name not in self._used:
            self._used.add(name)
            at = self._written_at.get(name, math.inf)
            later = [(when, each) for each, when in list(self._written_at.items()) if when > at]
            if later:
                self._start(min(later)[1], version, bounds)
        return self._recent.get(name)

    def _start(self, name: str, version: ObjectKey, bounds: CacheBounds) -> None:
        if name not in self._known:
            self._known.add(name)
            loop = asyncio.get_running_loop()
            found = loop.run_in_executor(self._pool, self._read, name, version, bounds)
            found.add_done_callback(lambda _: loop.call_later(_KEPT_S, self._recent.pop, name, None))
            # Nobody may wait for it: keep asyncio from reporting its error.
            found.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._recent[name] = found
            if len(self._recent) > _MOST:
                del self._recent[next(iter(self._recent))]

    def _read(self, name: str, version: ObjectKey, bounds: CacheBounds) -> FilePart | None:
        try:
            most = min(_LARGEST, self._cache.room(bounds) // _SHARE)
        except CacheError:
            return None
        with self._place.asking():
            file = self._place.open(name)
            if file.size > most:
                return None
            found = file.whole()
        self._keep(found, version, bounds)
        return found

    def _keep(self, file: FilePart, version: ObjectKey, bounds: CacheBounds) -> None:
        """Put the objects in a file into the local cache, if they are of the origin and account of `version`."""
        identity, _, pieces, rows = file.index()
        self.sizes.append(sum([piece.stop - piece.start for piece, _ in pieces]))
        if identity != version.identity:
            return
        infos = {shareable_key(identity, info): info for info in infos_in(rows)}
        blocks = list[tuple[BlockKey, bytes]]()
        for piece, offset in pieces:
            if (info := infos.get(piece.key)) is None:
                continue
            name = stored_path(info.path) if "://" in info.path else info.path
            key = ObjectKey(identity, name, info.fingerprint or "", version.block_size)
            for index in blocks_in(piece, piece.size, key.block_size):
                start, stop = index * key.block_size, min((index + 1) * key.block_size, piece.size)
                if not self._cache.has(key, index, only_own=True):
                    blocks.append((key.block(index), file.read(piece, offset, start, stop)))
        with contextlib.suppress(CacheError):
            self._cache.put(blocks, bounds, shared={block for block, _ in blocks})
