"""Downloads: buffers that fill from the front, with readers that wait for their bytes."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Container
from typing import NamedTuple

from cachedfs.common.types import BlockKey, ObjectInfo, Range
from cachedfs.common.version import Version
from cachedfs.errors import ChecksumMismatch
from cachedfs.origins.request_slots import is_speculative

ALL = 1 << 62  # a demand beyond the end of any object
_UNKNOWN = Range(0, 0)
_NO_BLOCKS = 1 << 20  # stands for the block size of what cannot be cached, which has no blocks


class DownloadStopped(Exception):
    """The request ended before the bytes that a reader waited for. Internal.

    The reader fetches them again.
    """


class FetchedBlock(NamedTuple):
    """One complete block that was received, from the origin or a shared cache, and is not on disk yet."""

    key: BlockKey
    pieces: list[memoryview]
    size: int  # of all pieces, in bytes
    download: Download


class Download:
    """The bytes `[start, stop)` of one object, filled from the front by one request.

    Created and fed on the event loop thread. Any thread may read `filled` and copy bytes below it: received bytes never
    change. Methods below "Event loop thread only." need that thread. The bytes stay in the pieces in which they came
    from the socket: a copy of each would take as long as storing it.

    `demand` is the byte up to which the request may read. Past it, the body stays in the socket until a reader wants
    more. A stopped request ends at its demand. ALL: the whole range is
    read without a pause, and stays in memory.
    """

    is_shared = False  # its bytes, or some of them, come from a shared cache

    def __init__(self, *, demand: int, version: Version | None = None, bytes_: Range = _UNKNOWN) -> None:
        self.version = version  # None also if it cannot be cached
        self.info = None if version is None else version.info  # of an unknown object, set at the headers
        self.start = self.filled = bytes_.start  # `filled` never decreases
        self.stop = bytes_.stop  # Invariant: start <= filled <= stop
        self.demand = demand
        self.is_speculative = is_speculative()  # no caller waited for it when it was created
        self.is_wanted = False  # a caller has waited for it since then
        self.task: asyncio.Task[None] | None = None  # the task that runs it, once started
        self.done = False
        self.stopped = False  # it ends at `demand`
        self.error: Exception | None = None
        self.released = False
        self.blocks: Container[int] = ()  # indexes of those that are stored; others come from other downloads
        self.unstored: list[FetchedBlock] = []  # received blocks not yet passed to the store queue
        self.n_received = 0  # blocks passed to the store queue; changed on the event loop thread
        self._n_stored = 0  # of these, blocks stored or failed; changed by the writer thread
        self.is_storable = True  # no block failed to be stored
        # A reader of a whole object comes later than its lookup, and takes the bytes also if they are stored by then.
        self._keeps_bytes = demand == ALL
        self._block_size = _NO_BLOCKS if version is None else version.block_size
        # Received pieces, and the position after each: [start, filled), or nothing after release(), which replaces both.
        self._received: tuple[list[memoryview], list[int]] = [], []
        self._wanted: asyncio.Future[None] | None = None  # set while the body is paused
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    # Any thread.

    @property
    def memory(self) -> int:
        """Bytes of memory that the request holds now, or will hold once all is received.

        0 if all blocks are stored, or if none was received.
        """
        if self.released:
            return 0
        return (self.filled if self.done else self.stop) - self.start

    @property
    def is_finished(self) -> bool:
        """True once the request is over and the store queue has stored each of its blocks or failed to."""
        return self.done and self._n_stored >= self.n_received

    @property
    def blocks_until_stop(self) -> range:
        """Indexes of the received blocks and the current one: all that a request stopped now delivers."""
        return range(self.start // self._block_size, -(-self.filled // self._block_size))

    @property
    def mismatch(self) -> ChecksumMismatch | None:
        """The error, if its bytes failed their checksum: whoever has some must not go on with those of another."""
        return self.error if isinstance(self.error, ChecksumMismatch) else None

    def covers(self, position: int) -> bool:
        """Return whether the byte at `position` is in memory or will be received; False after `release`."""
        return not self.released and self.start <= position < (self.filled if self.done else self.stop)

    def holds(self, index: int) -> bool:
        """Return whether the complete block `index` is in memory."""
        start = index * self._block_size
        return self.covers(start) and min(start + self._block_size, self.stop) <= self.filled

    def take(self, position: int, into: memoryview) -> int:
        """Copy received bytes from `position` on into `into`; return their number, 0 if none is received yet."""
        n = min(len(into), self.filled - position)
        if n <= 0 or position < self.start:
            return 0
        done = 0
        for view in self.views(position, position + n):
            into[done : done + len(view)] = view
            done += len(view)
        return done

    def views(
        self, start: int, stop: int, received: tuple[list[memoryview], list[int]] | None = None
    ) -> list[memoryview]:
        """Return the received bytes `[start, stop)` in pieces, without copying; an empty list after `release`."""
        pieces, ends = received or self._received  # another thread may call release()
        if not pieces:
            return []
        number, views = bisect_right(ends, start), []
        begins = ends[number - 1] if number else self.start
        while begins < stop:
            views.append(pieces[number][max(start - begins, 0) : stop - begins])
            begins, number = ends[number], number + 1
        return views

    def stored(self, is_stored: bool) -> None:
        """Record that a block was stored, or failed to be. Release the buffers once all blocks are on disk."""
        self.is_storable &= is_stored  # first: `finish` looks at both in another thread
        self._n_stored += 1
        if self.done and self._n_stored == self.n_received and self.is_storable and not self._keeps_bytes:
            self.release()

    # Event loop thread only.

    async def read(self, start: int, stop: int) -> bytes:
        """Wait for the bytes `[start, stop)` and return them.

        Raises the request's error, or DownloadStopped, also if the request does not bring all of them.
        """
        if start < self.start or self.stop < stop:
            raise DownloadStopped
        received = self._received  # they stay here if their blocks are stored, and released, during the wait
        if self.filled < stop:
            await self.arrival(stop)
        views = self.views(start, stop, received)
        if len(views) == 1 and type(data := views[0].obj) is bytes and len(data) == stop - start:
            return data  # without copying
        data = b"".join(views)
        if len(data) < stop - start:
            raise DownloadStopped
        return data

    async def wait_until(self, position: int) -> None:
        """Wait until all bytes below `position` are received.

        Raises the request's error, or DownloadStopped.
        """
        if self.filled < position:
            await self.arrival(position)

    def arrival(self, position: int) -> asyncio.Future[None]:
        """Return a future of `wait_until`. Cancel it to wait no more."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.filled >= position:
            future.set_result(None)
        elif self.done:
            future.set_exception(self.error or DownloadStopped())
        else:
            # A prefetch plan that waits for its own request does not count.
            self.is_wanted |= not is_speculative()
            if position > self.demand:
                self.want(position)
            self._waiters.append((position, future))
        return future

    def want(self, position: int) -> None:
        """Let the request read at least up to `position`."""
        if position > self.demand:
            self.demand, self.stopped = position, False
            self._resume()

    def stop_soon(self, position: int) -> None:
        """End the request at `position`, or where the last current waiter needs it."""
        self.demand = min(self.demand, max([position, *(p for p, f in self._waiters if not f.done())]))
        self.stopped = True
        self._resume()

    def cancel(self) -> None:
        """End the request after the current block, or where the last current waiter needs it.

        End it at once, retries included, if no byte was received and no caller has waited for it.
        """
        self.stop_soon(-(-self.filled // self._block_size) * self._block_size)
        is_unused = self.is_speculative and not self.is_wanted and self.demand <= self.filled == self.start
        if is_unused and self.task is not None and not self.done:
            self.task.cancel()

    async def wait_for_demand(self, patience_s: float) -> bool:
        """Wait while the request has reached its demand; return False if it should end there.

        It should end if it was stopped, or if no reader wanted more within `patience_s` seconds.
        """
        while self.demand <= self.filled < self.stop:
            if self.stopped:
                return False
            self._wanted = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._wanted, patience_s)
            except TimeoutError:
                return False
            finally:
                self._wanted = None
        return True

    def _resume(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def begin(self, info: ObjectInfo, version: Version | None, bytes_: Range) -> None:
        """Set the object version and the byte range, which were unknown."""
        self.info, self.version = info, version
        self.start = self.filled = bytes_.start
        self.stop = bytes_.stop
        if version is not None:
            self._block_size = version.block_size

    def feed(self, data: bytes) -> None:
        """Append received bytes and wake their readers; add the blocks that are now complete to `unstored`."""
        before, version, filled = self.filled, self.version, self.filled + len(data)
        if filled > self.stop:
            raise ValueError(f"{len(data)} bytes at {before} go past the end at {self.stop}")
        pieces, ends = self._received
        pieces.append(memoryview(data))
        ends.append(filled)
        self.filled = filled  # last: other threads read what is below it
        for position, future in self._waiters:
            if position <= filled and not future.done():
                future.set_result(None)
        self._waiters = [each for each in self._waiters if not each[1].done()]
        if version is None:
            return
        size = version.block_size
        first = max(-(-self.start // size), before // size)
        for index in range(first, -(-filled // size) if filled == version.size else filled // size):
            if index in self.blocks:
                start, stop = index * size, min((index + 1) * size, version.size)
                key, views = BlockKey(version, index), self.views(start, stop)
                self.unstored.append(FetchedBlock(key, views, stop - start, self))

    def finish(self, error: Exception | None = None) -> None:
        """Mark the request as over (complete, stopped, or failed with `error`), and wake all waiters."""
        self.error, self.done, self.task = error, True, None
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(error or DownloadStopped())
        self._waiters = []
        if 0 < self.n_received == self._n_stored and self.is_storable and not self._keeps_bytes:
            self.release()

    def release(self) -> None:
        """Release the buffers. Readers take the bytes from disk, or fetch them again."""
        self.released = True
        self._received = [], []
