"""The cache: the local, persistent set of blocks that all processes of a machine share, and what is known of objects.

`BlockCache` is the one door of this room. Everything is sync, safe in threads, across processes and over forks. A read
never raises for the cache's sake: what is absent, damaged or out of reach is a miss. What cannot be stored is a
`CacheError`, which only the reader handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachedfs.cache import block_file
from cachedfs.cache.block_file import FORMAT, BadBlock, OpenBlock
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.counters import SharedCounters, SharedRecord, SharedRecords
from cachedfs.cache.directory import layer_roots
from cachedfs.cache.disk import Buffer, is_network
from cachedfs.cache.eviction.plan_registry import FutureUseSource
from cachedfs.cache.eviction.policy import likely_allowance
from cachedfs.cache.fsck import CheckReport
from cachedfs.cache.index.block_rows import CachedPath
from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedPosition,
    FeedSnapshot,
    ListingRecord,
    MetadataRecord,
    decode_info,
    encode_info,
    hash_of,
)
from cachedfs.cache.layers import CacheLayers
from cachedfs.cache.local_copies import LocalCopy
from cachedfs.cache.mapped_files import MappedFiles
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.cache.writable_directory import WritableDirectory
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import BlockKey, CacheBounds, ObjectKey
from cachedfs.errors import CacheError

__all__ = [
    "FORMAT",
    "BadBlock",
    "BlockCache",
    "SharedCounters",
    "MetadataRecord",
    "FeedPosition",
    "OpenBlock",
    "CachedPath",
    "MetadataStore",
    "LocalCopy",
    "ListingRecord",
    "FutureUseSource",
    "CheckReport",
    "FeedConfirmation",
    "FeedSnapshot",
    "decode_info",
    "encode_info",
    "hash_of",
    "is_network",
]


class BlockCache:
    """The cache in `cache_dirs`: the first is written, the others are read-only layers.

    `root` is our own subdirectory of the first, None when nothing can be stored; `cannot_store` says why, also
    after the last put failed. `known` is what it knows of objects. `explicit`: the user named the directory, so that
    one that is not safely ours is a ValueError and not a warning.
    """

    def __init__(self, cache_dirs: Sequence[str], *, explicit: bool) -> None:
        self._handles = BlockPool()
        self._complaints = WarnOnce()
        self._layers = CacheLayers(
            layer_roots(cache_dirs[1:]), self._handles, discard=self.discard, complaints=self._complaints
        )
        self._mapped = MappedFiles(self._complaints)
        self._own = WritableDirectory(
            cache_dirs[0],
            explicit=explicit,
            handles=self._handles,
            layers=self._layers,
            mapped=self._mapped,
            complaints=self._complaints,
        )
        self.metadata = MetadataStore(self._own, self._mapped)
        self._budgets = SharedRecords(lambda: self._own.directory, lambda: self._own.locks)
        self.counts = SharedCounters(self._budgets.record("what all processes counted"))

    def __repr__(self) -> str:
        return f"<BlockCache {self.root or self.cannot_store}>"

    @property
    def root(self) -> str | None:
        return self._own.path

    @property
    def cannot_store(self) -> str | None:
        return self._own.cannot_store

    # Reading blocks: no SQLite, no lock

    def read(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        stop: int,
        *,
        touch: bool = True,
        nowait: bool = False,
        verify: bool = False,
    ) -> bytes | None:
        """Return bytes `[start, stop)` of a block, clipped to its length; None is a miss: absent, or found bad.

        With `nowait` only the page cache is asked: BlockingIOError when it lacks the bytes, or cannot be asked.
        `verify` checks the touched pages even if this process did before.
        """
        handles = self._handles
        handle = handles.take(key, index) or self._layers.open(key, index, nowait)
        if handle is None:
            return None
        try:
            data = handle.read(start, stop, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: the handle is in our hands alone
            if not self._layers.is_miss(key, index, handle, error):
                raise
            return None
        handles.give(key, index, handle)
        if touch:
            (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))
        return data

    def read_into(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        buffer: memoryview,
        *,
        touch: bool = True,
        nowait: bool = False,
        verify: bool = False,
    ) -> int:
        """Fill `buffer` (bytes) from offset `start` of a block; return how many bytes it had, -1 for a miss.

        Otherwise like `read`. After a miss the buffer may hold anything.
        """
        handles = self._handles
        handle = handles.take(key, index) or self._layers.open(key, index, nowait)
        if handle is None:
            return -1
        try:
            size = handle.read_into(start, buffer, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: see `read`
            if not self._layers.is_miss(key, index, handle, error):
                raise
            return -1
        handles.give(key, index, handle)
        if touch:
            (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))
        return size

    def borrow(
        self, key: ObjectKey, index: int, instead: tuple[int, OpenBlock] | None = None
    ) -> OpenBlock | None:
        """Return a block to read from again and again, touched once; None is a miss. One reader has it until `give_back`.

        `instead`: another block of the object that is given back for it.
        """
        handles = self._handles
        if instead is not None:
            handles.give(key, *instead)
        handle = handles.take(key, index) or self._layers.open(key, index, nowait=False)
        if handle is not None:
            (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))
        return handle

    def give_back(
        self, key: ObjectKey, index: int, handle: OpenBlock, error: BaseException | None = None
    ) -> None:
        """Take back what was borrowed; with the `error` that reading it raised, the block is dropped if it is bad."""
        if error is None:
            self._handles.give(key, index, handle)
        elif not self._layers.is_miss(key, index, handle, error):
            raise error

    def touch(self, key: ObjectKey, index: int) -> None:
        """Note the use of a block that was not read from here: its bytes came with a request."""
        (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))

    def last_use(self, key: ObjectKey, index: int) -> int | None:
        """Return the clock of touches at the last use of a block by any process; None when no use of it is known."""
        return (self._mapped.touches or self._mapped.open_touches()).last_use_of(key.hash64(index))

    def clock(self, bounds: CacheBounds) -> int:
        """Return how many uses of blocks all processes have noted, in 32 bits."""
        touches = self._mapped.touches
        if touches is None:
            # Of their final size at once: what is noted in fewer records is lost when there are more.
            touches = self._mapped.open_touches(size=self.allowed or likely_allowance(self.root, bounds))
        return touches.now

    def call_now_and_then(self, function: Callable[[], object]) -> None:
        """Have `function` called about once a second while blocks are read, in the thread of whoever reads."""
        self._handles.on_sweep = function

    def missed(self, key: ObjectKey, index: int, bounds: CacheBounds, *, of: int | None = None) -> None:
        """Note that a block is not here and has to be fetched: whether it stays depends on its uses before.

        `of`: the size of its object. The first time that one larger than the cache passes through, it drives nothing out.
        """
        most = self.allowed or likely_allowance(self.root, bounds)
        touches = self._mapped.touches or self._mapped.open_touches(size=most)
        touches.missed(key.hash64(index), passes=None not in (of, most) and (of or 0) > (most or 0))

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return all of a block, its file opened anew and every byte of it read from the disk and checked; None: absent.

        Raises BadBlock for one that was found bad: it is a miss from now on. No touch: who looks it over does not use it.
        """
        return self._layers.read_anew(key, index)

    def has(self, key: ObjectKey, index: int) -> bool:
        """Return whether the block's file is there, without looking into it; not one that was found unusable."""
        return self._layers.has(key, index)

    # Writing blocks

    def put(
        self,
        given: Sequence[tuple[BlockKey, Buffer]],
        bounds: CacheBounds,
        *,
        plan: FutureUseSource | None = None,
    ) -> None:
        """Store blocks, dropping others to stay within `bounds`; those that are there already are skipped.

        `plan`: whose blocks these are. Then what it gives up goes, as long as room is needed and nothing else is due to go.
        Raises CacheError when not all could be stored. No block is ever there in part.
        """
        try:
            self._own.writable().put(given, bounds, instead_of=self._layers.rejected, plan=plan)
        except CacheError as error:
            self._own.cannot_store = error.message
            self._complaints.not_stored(error.message)
            raise
        self._own.cannot_store = None
        self._layers.accept(block_file.place(key.object.digest, key.index) for key, _ in given)

    def evict(self, identity: str | None, path: str | None = None) -> int:
        """Drop the blocks of `path` and of all below it, of a whole origin, or (`identity` None) of all origins.

        Pinned or not. Returns the bytes that came free; raises CacheError.
        """
        return self._own.writable().evict(identity, path)

    def packed(self, key: ObjectKey, index: int) -> bytes | None:
        """Return a block as its file has it, data and trailer, read anew and every byte of it checked; None: absent.

        Raises BadBlock as `read_anew` does.
        """
        data = self.read_anew(key, index)
        return None if data is None else data + block_file.encode_trailer(key, index, data)

    def unpacked(self, packed: Buffer) -> tuple[BlockKey, memoryview]:
        """Return the key and the data of what `packed` gave, here or elsewhere. Raises BadBlock if a byte of it is wrong."""
        return block_file.unpack(packed)

    def room(self, bounds: CacheBounds) -> int:
        """Return how many bytes blocks may have beside what is pinned or in use. Raises CacheError."""
        allowed = self._own.writable().allowance(bounds)
        return max(0, allowed - self._own.asked(lambda rows: rows.number("fixed") or 0, 0))

    def size_on_disk(self, key: ObjectKey, size: int) -> int:
        """Return the bytes that a block with `size` bytes of data takes."""
        return size + block_file.trailer_size(key, size)

    def discard(self, key: ObjectKey, index: int) -> None:
        """Drop one block because it is bad. Never raises: without its file it is a miss."""
        self._handles.drop([(key.digest, index)])
        if self._own.store is not None:
            self._own.store.discard(key, index)

    def refuse(self, key: ObjectKey, index: int) -> None:
        """Drop a block that is whole and yet not what the origin has; in layers, which are not ours, pass over it."""
        self.discard(key, index)
        self._layers.refuse(key, index)

    def pin(self, identity: str, *paths: str) -> None:
        """Store the wish that blocks of `paths` stay, those that are here and those to come: of all of them, or none.

        Raises CacheError.
        """
        self._own.writable().pin(identity, paths, wanted=True)

    def unpin(self, identity: str, *paths: str) -> None:
        self._own.writable().pin(identity, paths, wanted=False)

    def pins(self) -> list[tuple[str, str]]:
        """Return (identity, path) of every pin."""
        return self._own.asked(lambda rows: rows.pins(), [])

    def lease(self, size: int, bounds: CacheBounds) -> LocalCopy:
        """Return a private file of `size` bytes, counted in the bound until it is closed. Raises CacheError."""
        return self._own.writable().lease(size, bounds)

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths of which blocks are counted: `path` itself and all below it, by name."""
        return self._own.asked(lambda rows: rows.paths_below(identity, path), [])

    def held(self) -> list[CachedPath]:
        """Return what is here of each object, by its path, of all origins. Looks at the rows of all blocks."""
        return self._own.asked(lambda rows: rows.held(), [])

    # Plans

    def take_seat(self) -> int | None:
        """Count one more plan on this machine until `leave_seat`, or the end of this process; None: it is not counted."""
        return None if self._own.store is None else self._own.store.room.seats.take()

    def clear_seat(self, seat: int) -> None:
        """Note that the plan that took this seat has nothing of the cache yet, whatever the one before it had.

        Raises CacheError where nothing can be stored.
        """
        if self._own.store is not None:
            self._own.store.clear_seat(seat)

    def leave_seat(self, seat: int) -> None:
        if self._own.store is not None:
            self._own.store.room.seats.leave(seat)

    def share(self, seat: int | None, bounds: CacheBounds) -> int:
        """Return how many bytes the plan that has this seat may have of what is about the bound; puts know it exactly."""
        allowed = self.allowed or likely_allowance(self.root, bounds) or 0
        return allowed if self._own.store is None else self._own.store.room.share(allowed, seat)

    # Claims

    def take_lock(self, hash64: int) -> bool:
        """Take the right to fetch a block; False when another process, or another thread, has it."""
        is_ours = self._own.locks.take(hash64)
        self._complaints.slower(self._own.locks.trouble)
        return is_ours

    def release_lock(self, hash64: int) -> None:
        self._own.locks.drop(hash64)
        self._complaints.slower(self._own.locks.trouble)

    # Request budgets: shared memory, no SQLite

    def budget(self, account: str) -> SharedRecord:
        """Return what the processes of the machine have sent of what a service lets one account send."""
        return self._budgets.record(account)

    # The whole

    @property
    def evictions(self) -> int:
        """How many blocks this process dropped to make room, or when told to."""
        return self._own.store.room.evictions if self._own.store else 0

    def usage(self) -> tuple[int, int]:
        """Return the number of blocks and the bytes of blocks and leases; zeros when nobody can tell."""
        return self._own.asked(lambda rows: (rows.number("blocks") or 0, rows.number("bytes") or 0), (0, 0))

    def allowance(self, bounds: CacheBounds) -> int | None:
        """Return how many bytes blocks and leases may have in all under `bounds` now; None when nobody can tell."""
        return None if self._own.store is None else self._own.store.allowance(bounds)

    @property
    def allowed(self) -> int | None:
        """What `allowance` was when this process put or asked last, without asking; None before that."""
        return None if self._own.store is None else self._own.store.allowed

    def check(self, *, repair: bool = False) -> CheckReport:
        """Compare every file with its row and its checksums; with `repair` set right what can be. Raises CacheError."""
        return self._own.store.check(repair=repair) if self._own.store else CheckReport()

    def rebuild(self) -> None:
        """Forget what is counted and count the files anew. A lost index does so by itself. Raises CacheError."""
        self._own.writable().rebuild()

    def leave(self) -> None:
        """In the child of a fork, which goes on with a cache of its own: close the blocks that are open, and nothing else."""
        self._handles.leave()

    def close(self) -> None:
        """Close files and connections; they open again when needed. Claims are kept until the process ends."""
        self._handles.close_all()
        self._budgets.close()
        if self._own.index is not None:
            self._own.index.close()
