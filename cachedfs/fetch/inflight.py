"""A request on its way: who waits for its bytes, and how far it may run ahead of them."""

from __future__ import annotations

import asyncio

from cachedfs.common.types import ObjectInfo, ObjectKey, Range
from cachedfs.origins.request_slots import is_speculative

__all__ = ["InflightRequest", "RequestStopped"]


_APART = 1 << 20  # bytes that are held together of what has no blocks


class RequestStopped(Exception):
    """The request was stopped before the bytes that somebody waited for: ask for them anew. Internal."""


class InflightRequest:
    """The bytes `[start, stop)` of one object version, filled from the front by one request.

    Made and fed on the runtime's loop. Any thread may look at `filled` and take bytes below it: no buffer ever
    moves, and bytes once there never change. Only `began`, `arrival`, `want` and `stop_soon` need the loop.

    Each block has a buffer of its own, which is made when its first byte comes: one for all is zeros first, and the
    first byte of eight megabytes would wait for them.

    `demand` is how far the request may read; past it the body is left in the socket until somebody wants more. A
    flight that nobody wants any more ends at its demand.
    """

    def __init__(self, *, demand: int) -> None:
        self.info: ObjectInfo | None = None  # known at the headers
        self.key: ObjectKey | None = None  # None as well where the origin gives no fingerprint
        self.start = 0
        self.stop = 0
        self.filled = 0  # Invariant: start <= filled <= stop, and it only grows
        self.demand = demand
        self.is_speculative = is_speculative()  # nobody waited for it when it began
        self.is_wanted = False  # somebody has waited for it since
        self.task: asyncio.Task[None] | None = None  # that runs it, once it has begun
        self.done = False
        self.stopped = False  # asked to end at `demand`
        self.paused = False
        self.error: Exception | None = None
        self.forgotten = False
        self.refused = False  # its object turned out to be wrong: nothing of it is given or stored any more
        self.n_received = 0  # blocks that were given to be stored; changed on the loop
        self._n_stored = 0  # of them, those that were dealt with; changed by the writer
        self._all_kept = True
        self._block_size = _APART
        # Invariant: [start, filled), by blocks; or empty, once it is let go.
        self._blocks: list[memoryview] = []
        self._headers = asyncio.Event()
        self._wanted = asyncio.Event()
        self._arrivals: list[tuple[int, asyncio.Future[None]]] = []

    # From any thread.

    @property
    def memory(self) -> int:
        """Bytes that are held, or will be; 0 once all of them are stored, or when none came."""
        if self.forgotten:
            return 0
        return (self.filled if self.done else self.stop) - self.start

    @property
    def is_settled(self) -> bool:
        """True once the request is over and each block that it brought was stored, or could not be."""
        return self.done and self._n_stored >= self.n_received

    @property
    def is_kept(self) -> bool:
        """True while every block that was to be stored could be."""
        return self._all_kept

    @property
    def coming(self) -> range:
        """The blocks that came, or are on their way: those that a request which is ended now still brings."""
        return range(self.start // self._block_size, -(-self.filled // self._block_size))

    def covers(self, position: int) -> bool:
        """True when the byte at `position` is here or is still to come, and not on the disk yet."""
        is_given = not (self.forgotten or self.refused)
        return is_given and self.start <= position < (self.filled if self.done else self.stop)

    def holds(self, index: int) -> bool:
        """True when all of a block came and is in memory."""
        start = index * self._block_size
        return self.covers(start) and min(start + self._block_size, self.stop) <= self.filled

    def take(self, position: int, into: memoryview) -> int:
        """Copy what is here from `position` on into `into`; return the bytes copied, 0 when none is here yet."""
        n = min(len(into), self.filled - position)
        if n <= 0 or position < self.start or self.refused:
            return 0
        done = 0
        for view in self._views(position, position + n):
            into[done : done + len(view)] = view
            done += len(view)
        return done

    def piece(self, want: Range) -> memoryview:
        """Return bytes of one block, which must have arrived, without copying; FlightStopped: they are on the disk."""
        views = self._views(want.start, want.stop)
        if not views and want.size:
            raise RequestStopped
        (piece,) = views or [memoryview(b"")]
        return piece

    def copy(self, want: Range) -> bytes:
        """Return the bytes of `want`, which must have arrived; FlightStopped: they are on the disk."""
        views = self._views(want.start, want.stop)
        if not views and want.size:
            raise RequestStopped
        return b"".join(views)

    def _views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes `[start, stop)`, which are here, by blocks; nothing when they were let go."""
        size, blocks = self._block_size, self._blocks  # another thread may let them go
        if not blocks or stop <= start:
            return []
        first, views = self.start // size, []
        for index in range(start // size, -(-stop // size)):
            begins = max(self.start, index * size)
            views.append(blocks[index - first][max(start - begins, 0) : stop - begins])
        return views

    def stored(self, is_kept: bool) -> None:
        """Another block that arrived was stored, or could not be. With all of them on the disk, the bytes here go."""
        self._n_stored += 1
        self._all_kept &= is_kept
        self._forget_if_stored()

    # On the loop.

    async def began(self) -> ObjectInfo:
        """Wait for the headers and return what they say; raises what the request raised."""
        await self._headers.wait()
        if self.info is None:
            raise self.error or RequestStopped
        return self.info

    async def arrival(self, position: int) -> None:
        """Wait until all bytes below `position` are here; raises the request's error, or `FlightStopped`."""
        if self.filled >= position and not self.refused:
            return
        if self.done:
            raise self.error or RequestStopped
        self.is_wanted |= not is_speculative()  # a plan waits for its own requests, too
        self.want(position)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.append((position, future))
        await future

    def want(self, position: int) -> None:
        """Let the request read on up to `position`."""
        if position > self.demand:
            self.demand, self.stopped = position, False
            self._wanted.set()

    def stop_soon(self, position: int) -> None:
        """Nobody wants more than the bytes below `position`, except those who wait for them."""
        self.demand = min(self.demand, max([position, *(p for p, f in self._arrivals if not f.done())]))
        self.stopped = True
        self._wanted.set()

    def stop_at_block(self) -> None:
        """Nobody wants more than the block that comes now, except those who wait for more."""
        self.stop_soon(-(-self.filled // self._block_size) * self._block_size)

    def give_up(self) -> None:
        """End at the next block; or at once while nothing came, be it tried for the first time or again, and nobody waits."""
        is_awaited = any(not future.done() for _, future in self._arrivals)
        self.stop_at_block()
        if self.task is not None and self.filled == self.start and not (is_awaited or self.done):
            self.task.cancel()

    async def may_go_on(self, patience_s: float) -> bool:
        """Wait while the body is as far as the demand; False when the request should end there."""
        while self.demand <= self.filled < self.stop:
            if self.stopped:
                return False
            self._wanted.clear()
            self.paused = True
            try:
                await asyncio.wait_for(self._wanted.wait(), patience_s)
            except TimeoutError:
                return False
            finally:
                self.paused = False
        return True

    def begin(self, info: ObjectInfo, key: ObjectKey | None, bytes_: Range) -> None:
        """The version and the range are known."""
        self.info, self.key, self.start, self.stop, self.filled = (
            info,
            key,
            bytes_.start,
            bytes_.stop,
            bytes_.start,
        )
        if key is not None:
            self._block_size = key.block_size
        self._headers.set()

    def feed(self, data: bytes) -> None:
        """Add bytes at the end of what is here, and wake those who waited for them."""
        if len(data) > self.stop - self.filled:
            raise ValueError(f"{len(data)} bytes at {self.filled} go past the end at {self.stop}")
        view, size = memoryview(data), self._block_size
        while view:
            index = self.filled // size
            begins, ends = max(self.start, index * size), min(self.stop, (index + 1) * size)
            if self.filled == begins:
                self._blocks.append(memoryview(bytearray(ends - begins)))
            part, view = view[: ends - self.filled], view[ends - self.filled :]
            offset = self.filled - begins
            self._blocks[-1][offset : offset + len(part)] = part
            self.filled += len(part)
        self._wake()

    def finish(self, error: Exception | None = None) -> None:
        """The request is over: complete, stopped, or failed with `error`."""
        self.error, self.done = error, True
        self._headers.set()
        self._wake()
        self._forget_if_stored()

    def let_go(self) -> None:
        """Hold no bytes any more: who still wants some finds them on the disk, or asks for them anew."""
        self.forgotten = True
        self._blocks = []

    def _forget_if_stored(self) -> None:
        if self.done and self.n_received and self.n_received == self._n_stored and self._all_kept:
            self.let_go()

    def _wake(self) -> None:
        waiting = []
        for position, future in self._arrivals:
            if future.done():
                continue
            if self.filled >= position and not self.refused:
                future.set_result(None)
            elif self.done:
                future.set_exception(self.error or RequestStopped())
            else:
                waiting.append((position, future))
        self._arrivals = waiting
