"""The order of a prefetch plan's requests: who may be ahead of the reader next, and whose request is sent next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from cachedfs.cache.eviction.future_uses import FutureUses, Use
from cachedfs.core.download import Download
from cachedfs.core.objects import Objects
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.errors import CachedFSError
from cachedfs.origins.base import Origin
from cachedfs.prefetch.failure_limit import FailureLimit

__all__ = ["Send", "Turns", "n_to_request"]

QUARTER = 4  # the part of a window whose free space suffices for a request: it arrives while the rest is read

Send = Callable[[], Iterable[Download] | asyncio.Task[Iterable[Download]]]


@dataclass(order=True, slots=True)
class _Turn:
    """A task that waits for its turn. Turns go to the lowest position."""

    position: int
    tie: int
    future: asyncio.Future[Any] = field(compare=False)
    size: int = field(compare=False)  # bytes of the request
    uses: Sequence[Use] = field(default=(), compare=False)  # to be admitted
    send: tuple[str, Send] | None = field(default=None, compare=False)  # path, and how to send its request


class Turns:
    """The tasks of a plan that wait for space ahead of the reader, or for a request slot. Event loop thread only.

    `changed` is called when the plan has to look again. `failed` is called with an error that ends the plan.
    """

    def __init__(
        self,
        objects: Objects,
        failures: FailureLimit,
        *,
        changed: Callable[[], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self._objects, self._failures, self._changed, self._failed = objects, failures, changed, failed
        self.uses: FutureUses | None = None  # None: there is no limit
        self._ties = count()
        self._waiting: list[_Turn] = []  # for space: a heap
        self._ready: list[_Turn] = []  # for a slot: a heap
        self._n_submitted = 0  # Invariant: requests submitted to the fetch queue and not sent
        self._is_broken = False  # the origin cannot be created
        self.is_held = False  # the reader has to read before more is requested

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def is_ready(self) -> bool:
        """True when a request waits for a slot."""
        return bool(self._ready)

    def close(self) -> None:
        self._objects.engine.speculation.cancel(self)
        self._waiting, self._ready = [], []

    # Space ahead of the reader.

    def fits(self, use: Use) -> bool:
        """Return whether a cached block may be ahead of the reader now."""
        if self.uses is None:
            return True
        is_first = not self._waiting or use.position < self._waiting[0].position
        return is_first and (not self.uses.ahead or self.uses.ahead + use.size <= self.uses.limit)

    async def admit(self, uses: Sequence[Use]) -> int:
        """Wait until blocks may be ahead of the reader; return how many of `uses`, and count them as ahead."""
        return await self._admit(uses[0].position, 0, uses) if self.uses is not None else len(uses)

    async def admit_unknown(self, position: int, size: int) -> None:
        """Wait until a request of `size` bytes may be ahead of the reader, and reserve these bytes."""
        await self._admit(position, size, ())

    async def _admit(self, position: int, size: int, uses: Sequence[Use]) -> int:
        turn = _Turn(position, next(self._ties), asyncio.get_running_loop().create_future(), size, uses)
        if (not self._waiting or turn < self._waiting[0]) and (n := self._n_admitted(turn)):
            return n
        heappush(self._waiting, turn)
        self._changed()
        return int(await turn.future)

    def admit_waiting(self) -> None:
        """Admit those that wait, as far as there is space now."""
        self.is_held = False
        while self._waiting and not self.is_held:
            if self._waiting[0].future.done():  # cancelled
                heappop(self._waiting)
            elif n := self._n_admitted(self._waiting[0]):
                heappop(self._waiting).future.set_result(n)
                self._changed()  # it may wait again
            else:
                self.is_held = True

    def _n_admitted(self, turn: _Turn) -> int:
        """Return how many blocks may be ahead of the reader now; 0 if the reader has to read first."""
        assert self.uses is not None
        sizes = [use.size for use in turn.uses] or [turn.size]
        most = self._objects.config.whole_request
        n = n_to_request(sizes, ahead=self.uses.ahead, limit=self.uses.limit, most=most)
        if not turn.uses:
            self.uses.reserve(turn.size if n else 0)
            return n
        n = next((i for i, use in enumerate(turn.uses[:n]) if not self.uses.ask(use)), n)
        if not n and (self.uses.is_short or self.uses.is_over(turn.uses[0].position)):
            self.uses.ask(turn.uses[0], is_awaited=True)
            n = 1
        return n

    # Request slots.

    async def send(self, path: str, position: int, size: int, send: Send) -> Any:
        """Wait for a request slot and call `send`, which sends a request of `size` bytes; return its result."""
        future = asyncio.get_running_loop().create_future()
        heappush(self._ready, _Turn(position, next(self._ties), future, size, send=(path, send)))
        self.submit()
        return await future

    def submit(self) -> None:
        """Submit a speculative request for each one that waits, unless the origin is unreachable."""
        # The queue may send or drop a request at once, which changes both counts.
        while self._n_submitted < len(self._ready) and self._may_send:
            self._n_submitted += 1
            turn = self._ready[0]
            assert turn.send is not None
            origin = partial(self._origin, turn.send[0])
            self._objects.engine.speculation.submit(
                SpeculativeRequest(self, turn.size, self._send_next, origin, is_declared=True)
            )

    @property
    def _may_send(self) -> bool:
        return not (self._is_broken or self._failures.pause_s(time.monotonic()))

    def _origin(self, path: str) -> Origin:
        """Return the origin of a path. An error ends the plan, whose requests would otherwise wait forever."""
        try:
            return self._objects.origin(path)
        except Exception as error:  # of any kind: it is the same for all objects
            self._n_submitted -= 1
            self._is_broken = True
            self._failed(error)
            raise

    def _send_next(self) -> Iterable[Download] | asyncio.Task[Iterable[Download]]:
        """Send the first request; its object may be an earlier one than when it was submitted."""
        self._n_submitted -= 1
        self._changed()
        while self._ready and self._may_send:
            turn = heappop(self._ready)
            if turn.future.done() or turn.send is None:  # cancelled
                continue
            try:
                sent = turn.send[1]()
            except CachedFSError as error:  # the process is shutting down
                turn.future.set_exception(error)
                return ()
            turn.future.set_result(sent)
            return sent
        return ()


def n_to_request(sizes: Sequence[int], *, ahead: int, limit: float, most: int) -> int:
    """Return how many of these adjacent blocks to request now; 0 while the reader has to read first.

    `sizes` has the bytes of each block, `ahead` the bytes that are ahead of the reader, of at most `limit`. A request
    brings at most `most` bytes. It is sent when there is room for a full request, or for a quarter of the window if
    that is less. If nothing else is ahead, one block is requested in any case.
    """
    whole = max(1, _n_fitting(sizes, min(most, limit / QUARTER)))
    now = _n_fitting(sizes, min(most, limit - ahead))
    return max(1, now) if now >= whole or not ahead else 0


def _n_fitting(sizes: Sequence[int], room: float) -> int:
    n = 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        n += 1
    return n
