"""Reads from a shared cache, and of the origin for all who share it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.types import CacheBounds, ObjectInfo, ObjectKey, Range
from cachedfs.errors import ObjectChanged
from cachedfs.origins.base import Reply
from cachedfs.shared.gatherer import FILE
from cachedfs.shared.in_place import BlocksInPlace
from cachedfs.shared.leases import Leases
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import Piece, PlacedPiece, is_gathered, shareable_key
from cachedfs.shared.read_leases import ReadLease, ReadLeases
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_index import SharedIndex
from cachedfs.shared.shared_store import StoredFile
from cachedfs.shared.whole_files import WholeFiles

BEFORE_LEASE = 1 << 20  # bytes read, about, while a lease is taken: another node may fetch the same
LEASE_S = 1.0  # longest wait for the lease then: without a limit, reads could wait for each other
TRIES = 3  # of one read, at files that cannot be used

Ask = Callable[[Range], AbstractAsyncContextManager[Reply]]


class SharedReply(Reply):
    """A read that begins with bytes of the shared cache, and may go on with those of the origin."""


class SharedReads:
    """Reads from a shared cache, and what all of them share. The coroutines run on the engine's event loop.

    `accepts` returns whether what is fetched of an object is put there.
    """

    def __init__(
        self,
        place: SharedFolder | SharedBucket,
        index: SharedIndex,
        cache: BlockStore,
        leases: Leases,
        accepts: Callable[[ObjectInfo], bool],
        pool: DaemonThreadPool,
    ) -> None:
        self.place, self.index, self.known = place, index, index.known
        self.leases = ReadLeases(place, index, leases, accepts, pool)
        self.in_place = cache.beside = BlocksInPlace(place, index.known, index.reject)
        self.whole_files = WholeFiles(place, cache, pool, index.written_at)
        self.body_bytes = self.bytes_apart = 0  # in the bodies of reads; of these, not from whole files

    @property
    def bytes_read(self) -> int:
        """The bytes of objects that were read from it, wanted or not."""
        return self.bytes_apart + sum(self.whole_files.sizes) + self.in_place.bytes_read

    def read(
        self,
        version: ObjectKey,
        info: ObjectInfo,
        want: Range,
        ask: Ask,
        *,
        is_complete: Callable[[], bool],
        waits: bool,
        bounds: CacheBounds,
    ) -> AbstractAsyncContextManager[Reply]:
        """Read bytes of one version as `Origin.read` does: those that are there, then from `ask`, which asks the origin.

        `is_complete` returns at the end whether all of them were read. Other objects in the same file may come to the
        local cache, within `bounds`. The body is empty if the first block is read in place: it needs no request.
        """
        key = shareable_key(version.identity, info)
        if key is None:
            return ask(want)
        return _Read(self, key, version, info, want, ask, is_complete, waits, bounds).reply()


class _Read(NamedTuple):
    """One read; the fields are the arguments of `SharedReads.read`."""

    reads: SharedReads
    key: str
    version: ObjectKey
    info: ObjectInfo
    want: Range
    ask: Ask
    is_complete: Callable[[], bool]
    waits: bool
    bounds: CacheBounds

    @contextlib.asynccontextmanager
    async def reply(self) -> AsyncIterator[Reply]:
        reads, info, want = self.reads, self.info, self.want
        placed, lease = await reads.index.find(self.key, info, want.start, waits=self.waits), None
        if placed is None and not self.waits and reads.place.has_leases(info.size or 0):
            lease = reads.leases.begin(self.key, info, want.start)
        try:
            if lease is not None and not lease.asks_first:
                await lease.task
            if reads.place.is_off or reads.known.find(self.key, want.start) is None:
                async with self._ask_first(lease) if lease and lease.asks_first else self.ask(want) as asked:
                    yield asked
                return
        finally:
            if lease is not None:
                reads.leases.end(lease, is_complete=self.is_complete())
        if reads.in_place.has(self.version, want.start // self.version.block_size):
            yield SharedReply(info, want.start, want.stop, _no_bytes())
            return
        async with contextlib.aclosing(self._body(want)) as found:
            yield SharedReply(info, want.start, want.stop, found)

    @contextlib.asynccontextmanager
    async def _ask_first(self, lease: ReadLease) -> AsyncIterator[Reply]:
        """Ask the origin before it is known whether another node has the lease."""
        async with contextlib.AsyncExitStack() as origin:
            reply = await origin.enter_async_context(self.ask(self.want))
            async with contextlib.aclosing(self._switching_body(lease, reply.body, origin)) as body:
                yield Reply(reply.info, reply.start, reply.stop, body, reply.is_checked_at_end)

    async def _switching_body(
        self, lease: ReadLease, asked: AsyncIterator[bytes], origin: contextlib.AsyncExitStack
    ) -> AsyncGenerator[bytes, None]:
        """Yield what the origin sends. If another node has the lease, end the request, and yield what it puts there."""
        at, stop, waits, reads = self.want.start, self.want.stop, True, self.reads
        async for data in asked:
            at += len(data)
            yield data
            if at >= stop:
                continue  # the end of the body may still raise, as ChecksumMismatch
            if waits and at - self.want.start >= BEFORE_LEASE:
                waits, first = False, asyncio.FIRST_COMPLETED
                done: list[asyncio.Future[Any]] = [lease.task, lease.answered]
                await asyncio.wait(done, timeout=LEASE_S, return_when=first)
            is_there = reads.leases.is_elsewhere(lease) or reads.known.find(self.key, at) is not None
            if is_there and not reads.place.is_off:
                break
        if at < stop:
            await origin.aclose()
            await asyncio.wait([lease.task])
            async with contextlib.aclosing(self._body(Range(at, stop))) as rest:
                async for data in rest:
                    yield data

    async def _body(self, want: Range) -> AsyncGenerator[bytes, None]:
        at, opened, n_left = want.start, dict[str, tuple[StoredFile, Piece, int]](), TRIES
        reads, n_readers = self.reads, self.reads.whole_files.n_readers
        while at < want.stop and n_left:
            if (placed := await reads.index.find(self.key, self.info, at, waits=self.waits)) is None:
                break
            n_readers[placed.file] += 1
            try:
                data = await self._whole_bytes(placed, at, want.stop)
                if data is None:
                    data = await reads.index.in_time(partial(self._bytes_of, placed, opened, at, want.stop))
                    reads.bytes_apart += len(data or b"")
            finally:
                n_readers -= Counter((placed.file,))  # keeps no zeros
            n_left -= not data
            if data:
                reads.body_bytes += len(data)
                at += len(data)
                yield data
        if at == want.stop:
            return
        async with self.ask(Range(at, want.stop)) as reply:
            if (reply.start, reply.stop) != (at, want.stop):
                raise ObjectChanged(
                    f"{self.info.path}: the origin sent other bytes than requested; open it again"
                )
            async for data in reply.body:
                yield data

    async def _whole_bytes(self, placed: PlacedPiece, at: int, stop: int) -> bytes | None:
        """Return some bytes from `at` on of a small object, from its whole file; None if it is not read as a whole."""
        reads, counts = self.reads, self.reads.place.counts_requests
        if not is_gathered(placed.file.rpartition("/")[2]):
            return None
        found = reads.whole_files.get(placed.file, self.version, self.bounds, with_next=counts)
        if found is None:
            return None
        try:
            if not await reads.place.wait_for(found) or (file := found.result()) is None:
                return None
            piece, offset = file.find(placed)
            return file.read(piece, offset, at, min(stop, piece.stop))
        except (DamagedFile, OSError) as error:
            reads.index.reject(placed.file, error)
            return None

    def _bytes_of(
        self, placed: PlacedPiece, opened: dict[str, tuple[StoredFile, Piece, int]], at: int, stop: int
    ) -> bytes | None:
        """Return some bytes from `at` on; None if they cannot be used. In a thread."""
        place, index = self.reads.place, self.reads.index
        try:
            with place.asking():
                if placed.file not in opened:
                    opened.clear()
                    found = place.open(placed.file)
                    if place.times_itself and found.size <= 2 * min(stop - at, FILE):
                        found = found.whole()  # with its index, in one request
                    opened[placed.file] = found, *found.find(placed)
                file, piece, offset = opened[placed.file]
                return file.read(piece, offset, at, min(stop, piece.stop, at + place.chunk))
        except (DamagedFile, OSError) as error:
            index.reject(placed.file, error)
            if isinstance(error, FileNotFoundError):  # it was replaced by one with more in it
                index.look(placed.file.rpartition("/")[0])
            return None


async def _no_bytes() -> AsyncIterator[bytes]:
    for data in tuple[bytes, ...]():
        yield data
