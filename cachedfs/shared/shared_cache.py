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

    Nothing here raises an error of the folder: what cannot be read is asked of the origin, what cannot be written is not
    shared.
    """

    def __init__(self, options: SharedOptions, cache: BlockStore) -> None:
        self._folder = place_at(options)
        self._pool = DaemonThreadPool(THREADS, "cachedfs-shared")
        self._index = SharedIndex(self._folder, cache.metadata, self._pool)
        self._leases = Leases(self._folder, lambda: cache.name)
        self._writer = SharedWriter(self._folder, cache, self._index, self._leases, most=options.size)
        self._reads = SharedReads(
            self._folder, self._index, cache, self._leases, self._writer.accepts, self._pool
        )
        self.note, self.flush, self.finish = self._writer.note, self._writer.flush, self._writer.finish
        self.read, self.renew = self._reads.read, self._index.renew

    def __repr__(self) -> str:
        return self._folder.folder + (f" ({self._folder.trouble})" if self._folder.trouble else "")

    @property
    def bytes_given(self) -> int:
        """The bytes that reads got from it."""
        return self._reads.bytes_given

    @property
    def bytes_read(self) -> int:
        """The bytes of objects that were read from it, wanted or not."""
        return self._reads.bytes_read

    def close(self) -> None:
        """Write what waits if the folder answers, and end the threads."""
        self._writer.close()
        if self._leases.are_held and not self._folder.is_off:
            wait([self._pool.submit(self._leases.release_all)], self._folder.answers_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.close()

    async def has(self, identity: str, info: ObjectInfo, position: int) -> bool:
        """Return whether the byte at `position` of an object version is there."""
        key = shareable_key(identity, info)
        return key is not None and await self._index.at(key, info, position, waits=False) is not None


def place_at(options: SharedOptions) -> SharedFolder | SharedBucket:
    """Return the shared cache that the options name, without using it."""
    if "://" in options.folder:
        kind = SharedDrive if options.folder.startswith("drive://") else SharedBucket
        return kind(options.folder, is_read_only=options.is_read_only)
    return SharedFolder(options.folder, trust=options.trust, is_read_only=options.is_read_only)
