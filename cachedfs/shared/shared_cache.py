"""The shared cache of one engine."""

from __future__ import annotations

from concurrent.futures import wait

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.types import ObjectInfo
from cachedfs.config import SharedOptions
from cachedfs.shared.leases import Leases
from cachedfs.shared.piece import shareable_key
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_drive import SharedDrive
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_index import SharedIndex
from cachedfs.shared.shared_reads import SharedReads
from cachedfs.shared.shared_writer import SharedWriter

THREADS = 32  # reads at a time


class SharedCache:
    """A shared cache behind the local one. The coroutines run on the engine's event loop.

    Nothing here raises an error of the place: what cannot be read is asked of the origin, what cannot be written is not
    shared.
    """

    def __init__(self, options: SharedOptions, cache: BlockStore) -> None:
        self._place = place_at(options)
        self._pool = DaemonThreadPool(THREADS, "cachedfs-shared")
        self._index = SharedIndex(self._place, cache.metadata, self._pool)
        self._leases = Leases(self._place, lambda: cache.name)
        self._writer = SharedWriter(self._place, cache, self._index, self._leases, most=options.size)
        self.reads = SharedReads(
            self._place, self._index, cache, self._leases, self._writer.accepts, self._pool
        )
        self.note, self.flush, self.finish = self._writer.note, self._writer.flush, self._writer.finish
        self.read, self.renew = self.reads.read, self._index.renew

    def __repr__(self) -> str:
        return self._place.url + (f" ({self._place.trouble})" if self._place.trouble else "")

    def close(self) -> None:
        """Write what waits if the place answers, and end the threads."""
        self._writer.close()
        if self._leases.are_held and not self._place.is_off:
            wait([self._pool.submit(self._leases.release_all)], self._place.answers_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._place.close()

    async def has(self, identity: str, info: ObjectInfo, position: int) -> bool:
        """Return whether the byte at `position` of an object version is there."""
        key = shareable_key(identity, info)
        return key is not None and await self._index.find(key, info, position, waits=False) is not None


def place_at(options: SharedOptions) -> SharedFolder | SharedBucket:
    """Return the shared cache that the options name, without using it."""
    if "://" in options.folder:
        kind = SharedDrive if options.folder.startswith("drive://") else SharedBucket
        return kind(options.folder, is_read_only=options.is_read_only)
    return SharedFolder(options.folder, trust=options.trust, is_read_only=options.is_read_only)
