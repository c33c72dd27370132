"""Reads from a shared cache, and of the origin for all who share it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.types import CacheBounds, ObjectInfo, ObjectKey, Range
from cachedfs.errors import ObjectChanged
from cachedfs.origins.base import Reply
from cachedfs.shared.gatherer import FILE
from cachedfs.shared.in_place import BlocksInPlace
from cachedfs.shared.leases import EXPIRES_S, Leases, lease_of
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import (
    GATHERED,
    LARGE,
    Piece,
    PlacedPiece,
    folder_of_runs,
    is_gathered,
    shareable_key,
)
from cachedfs.shared.read_leases import ReadLeases
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_index import SharedIndex
from cachedfs.shared.shared_store import FilePart, StoredFile
from cachedfs.shared.whole_files import WholeFiles

BEFORE_LEASE = 1 << 20  # bytes read, about, while a lease is taken: another node may fetch the same
LEASE_S = 1.0  # longest wait for it then: it may wait for reads that wait for this one
TRIES = 3  # of one read, at files that cannot be used

Ask = Callable[[Range], AbstractAsyncContextManager[Reply]]
GetWhole = Callable[[str], asyncio.Future[FilePart | None] | None]


class SharedReply(Reply):
    """A read that begins with bytes of the shared cache, and may go on with those of the origin."""


class SharedReads:
    """Reads from a shared cache, and takes leases on what is not there. The coroutines run on the engine's event loop.

    `accepts` returns whether what is fetched of an object is put there.
    """

    def __init__(
        self,
        folder: SharedFolder | SharedBucket,
        index: SharedIndex,
        cache: BlockStore,
        leases: Leases,
        accepts: Callable[[ObjectInfo], bool],
        pool: DaemonThreadPool,
    ) -> None:
        self._folder, self._index, self._known, self._leases = folder, index, index.known, leases
        self._accepts = accepts
        self._in_place = cache.beside = BlocksInPlace(folder, index.known, index.reject)
        self._whole_files = WholeFiles(folder, cache, pool, index.written_at)
        self._awaited: set[str] = set()  # leases that another node had at the last try of a read
        self._met_at = -math.inf  # when another node last had a lease that this one wanted
        self._read_leases = ReadLeases(leases, self._take, pool)
        self.bytes_given = self._bytes_apart = 0  # to reads; of these, not from whole files

    @property
    def bytes_read(self) -> int:
        """The bytes of objects that were read from it, wanted or not."""
        return self._bytes_apart + sum(self._whole_files.sizes) + self._in_place.bytes_read

    @contextlib.asynccontextmanager
    async def read(
        self,
        version: ObjectKey,
        info: ObjectInfo,
        want: Range,
        ask: Ask,
        *,
        is_complete: Callable[[], bool],
        waits: bool,
        bounds: CacheBounds,
    ) -> AsyncIterator[Reply]:
        """Read bytes of one version as `Origin.read` does: those that are there, then from `ask`, which asks the origin.

        `is_complete` returns at the end whether all of them were read. Other objects in the same file may come to the
        local cache, within `bounds`. The body is empty if the first block is read in place: it needs no request.
        """
        key, counts = shareable_key(version.identity, info), self._folder.counts_requests
        get_whole = partial(self._whole_files.get, version=version, bounds=bounds, with_next=counts)
        if key is None or await self._index.at(key, info, want.start, waits=waits) is None:
            has_lease = key is not None and not waits and self._folder.has_leases(info.size or 0)
            if key and has_lease and self._asks_first(info):
                async with self._ask_first(key, info, want, ask, is_complete, get_whole) as reply:
                    yield reply
                return
            lease = await self._lease(key, info, want.start) if key and has_lease else None
            if key is None or self._folder.is_off or self._known.at(key, want.start) is None:
                try:
                    async with ask(want) as reply:
                        yield reply
                finally:
                    if lease is not None:
                        self._read_leases.end(lease, is_complete=is_complete())
                return
            if lease is not None:
                self._read_leases.end(lease, is_complete=False)
        if self._in_place.has(version, want.start // version.block_size):
            yield SharedReply(info, want.start, want.stop, _no_bytes())
            return
        async with contextlib.aclosing(self._body(key, info, want, ask, waits, get_whole)) as body:
            yield SharedReply(info, want.start, want.stop, body)

    def _asks_first(self, info: ObjectInfo) -> bool:
        """Return whether to ask the origin before a lease is taken: that takes a request, and no other node reads."""
        is_alone = time.monotonic() - self._met_at >= EXPIRES_S
        return is_alone and self._folder.times_itself and self._folder.is_ready and self._accepts(info)

    @contextlib.asynccontextmanager
    async def _ask_first(
        self,
        key: str,
        info: ObjectInfo,
        want: Range,
        ask: Ask,
        is_complete: Callable[[], bool],
        get_whole: GetWhole,
    ) -> AsyncIterator[Reply]:
        """Ask the origin, and take a lease meanwhile.

        If another node has the lease, end the request, and read what that node puts there.
        """
        name, answered = lease_of(key, want.start), asyncio.get_running_loop().create_future()
        lease = asyncio.ensure_future(self._lease(key, info, want.start, answered))

        async def body(asked: Reply) -> AsyncGenerator[bytes, None]:
            at, waits = want.start, True
            async for data in asked.body:
                at += len(data)
                yield data
                if at >= want.stop:
                    continue  # its end may be an error
                if waits and at - want.start >= BEFORE_LEASE:
                    waits, first = False, asyncio.FIRST_COMPLETED
                    await asyncio.wait([lease, answered], timeout=LEASE_S, return_when=first)
                is_there = name in self._awaited or self._known.at(key, at) is not None
                if is_there and not self._folder.is_off:
                    break
            if at < want.stop:
                await origin.aclose()
                await asyncio.wait([lease])
                rest = self._body(key, info, Range(at, want.stop), ask, False, get_whole)
                async with contextlib.aclosing(rest):
                    async for data in rest:
                        yield data

        try:
            async with contextlib.AsyncExitStack() as origin:
                asked = await origin.enter_async_context(ask(want))
                async with contextlib.aclosing(body(asked)) as both:
                    yield Reply(asked.info, asked.start, asked.stop, both, asked.is_checked_at_end)
        finally:
            if is_whole := is_complete():
                answered.add_done_callback(lambda _: lease.cancel())  # unless it has the lease then
            else:
                lease.cancel()
            lease.add_done_callback(partial(self._end, is_complete=is_whole))

    def _end(self, lease: asyncio.Task[str | None], *, is_complete: bool) -> None:
        failed = lease.cancelled() or lease.exception() is not None
        if not failed and (ours := lease.result()) is not None:
            self._read_leases.end(ours, is_complete=is_complete)

    async def _lease(
        self, key: str, info: ObjectInfo, position: int, answered: asyncio.Future[None] | None = None
    ) -> str | None:
        """Return the lease with which this node is to fetch what nobody else does.

        Wait while another node fetches it, until it is there or the lease expires; None then, or without a lease.
        `answered` gets a result once it is known who has the lease.
        """
        name, (pause_s, longest_s) = lease_of(key, position), self._folder.pauses_s
        until = time.monotonic() + EXPIRES_S
        subfolder = folder_of_runs(key) if (info.size or 0) >= LARGE else GATHERED
        if subfolder == GATHERED and self._read_leases.is_alone():
            return None
        try:
            while self._folder.is_ready and self._accepts(info) and time.monotonic() < until:
                is_ours = await self._read_leases.take(name, subfolder)
                if is_ours:
                    self._read_leases.begin(name)
                if answered is not None and not answered.done():
                    answered.set_result(None)
                if is_ours or self._known.at(key, position) is not None:
                    return name if is_ours else None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            return None
        finally:
            self._awaited.discard(name)

    async def _take(self, names: Sequence[str], subfolder: str) -> set[str]:
        return await self._index.in_time(partial(self._take_and_look, names, subfolder)) or set()

    def _take_and_look(self, names: Sequence[str], subfolder: str) -> set[str]:
        """Take leases, unless nobody would wait for them, and see what came there before they were free. In a thread."""
        if subfolder == GATHERED and self._leases.is_alone():
            return set(names)
        taken, were_awaited = self._leases.take(names), not self._awaited.isdisjoint(names)
        if self._index.is_recent(subfolder) and taken.issuperset(names) and not were_awaited:
            return taken
        if others := set(names) - taken:
            self._met_at = time.monotonic()
        self._awaited.difference_update(taken)
        self._awaited.update(others)
        self._index.look_again(subfolder)
        if were_awaited and subfolder != GATHERED and not self._folder.lists_all:
            self._index.look(GATHERED)  # the other node may have put less than LARGE there
        return taken

    async def _body(
        self, key: str, info: ObjectInfo, want: Range, ask: Ask, waits: bool, get_whole: GetWhole
    ) -> AsyncGenerator[bytes, None]:
        at, opened, n_left = want.start, dict[str, tuple[StoredFile, Piece, int]](), TRIES
        n_readers = self._whole_files.n_readers
        while at < want.stop and n_left:
            if (placed := await self._index.at(key, info, at, waits=waits)) is None:
                break
            n_readers[placed.file] += 1
            try:
                data = await self._whole_bytes(placed, at, want.stop, get_whole)
                if data is None:
                    data = await self._index.in_time(partial(self._bytes_of, placed, opened, at, want.stop))
                    self._bytes_apart += len(data or b"")
            finally:
                n_readers -= Counter((placed.file,))  # keeps no zeros
            n_left -= not data
            if data:
                self.bytes_given += len(data)
                at += len(data)
                yield data
        if at == want.stop:
            return
        async with ask(Range(at, want.stop)) as reply:
            if (reply.start, reply.stop) != (at, want.stop):
                raise ObjectChanged(f"{info.path}: the origin sent other bytes than requested; open it again")
            async for data in reply.body:
                yield data

    async def _whole_bytes(
        self, placed: PlacedPiece, at: int, stop: int, get_whole: GetWhole
    ) -> bytes | None:
        """Return some bytes from `at` on of a small object, from its whole file; None if it is not read as a whole."""
        if not is_gathered(placed.file.rpartition("/")[2]) or (found := get_whole(placed.file)) is None:
            return None
        try:
            limit_s = None if self._folder.times_itself else self._folder.answers_s
            while not (await asyncio.wait([found], timeout=limit_s))[0]:  # what was read is stored, too
                if self._whole_files.is_late(placed.file, limit_s):
                    self._folder.did_not_answer()
                if self._folder.is_off:  # also if all threads wait for it
                    return None
            if (file := found.result()) is None:
                return None
            piece, offset = file.find(placed)
            return file.read(piece, offset, at, min(stop, piece.stop))
        except (DamagedFile, OSError) as error:
            self._index.reject(placed.file, error)
            return None

    def _bytes_of(
        self, placed: PlacedPiece, opened: dict[str, tuple[StoredFile, Piece, int]], at: int, stop: int
    ) -> bytes | None:
        """Return some bytes from `at` on; None if they cannot be used. In a thread."""
        try:
            if placed.file not in opened:
                opened.clear()
                found = self._folder.open(placed.file)
                if self._folder.times_itself and found.size <= 2 * min(stop - at, FILE):
                    found = found.whole()  # with its index, in one request
                opened[placed.file] = found, *found.find(placed)
            file, piece, offset = opened[placed.file]
            return file.read(piece, offset, at, min(stop, piece.stop, at + self._folder.chunk))
        except (DamagedFile, OSError) as error:
            self._index.reject(placed.file, error)
            if isinstance(error, FileNotFoundError):  # it was replaced by one with more in it
                self._index.look(placed.file.rpartition("/")[0])
            return None


async def _no_bytes() -> AsyncIterator[bytes]:
    for data in tuple[bytes, ...]():
        yield data
