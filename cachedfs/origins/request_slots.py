"""Running requests: the slots of one origin, adapted to its throughput and to answers such as 429, and the log.

Every request is logged once, when it ends: as a debug line, and as an event where events are recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Self

from cachedfs.common import event_log
from cachedfs.common.logging import public_url
from cachedfs.config import FIRST_AT_ONCE

logger = logging.getLogger("cachedfs.origins")

SPECULATIVE_FACTOR = 2  # times the window, for speculative requests
LEAST_WINDOW = 4  # the smallest window that refusals leave
_GAIN = 1.05  # a larger window must increase throughput by this factor
_PAUSE = 8  # rounds to wait before the window may grow again
# Bytes added per request when throughput is computed: with small objects the request rate counts, not the bytes.
_REQUEST = 64 << 10

_is_speculative = ContextVar("cachedfs_is_speculative", default=False)
is_speculative = _is_speculative.get
"""Return whether the running task was started before any caller waited for its result."""


@contextmanager
def speculative() -> Iterator[None]:
    """Make all requests started in this block speculative, also those of tasks started in it."""
    token = _is_speculative.set(True)
    try:
        yield
    finally:
        _is_speculative.reset(token)


@dataclasses.dataclass(slots=True)
class ConcurrencyWindow:
    """The number of requests to keep running, adapted to finished requests.

    A round ends when `size` requests have finished. If the window was full in a round, it doubles. If the next round is
    not at least 5 % faster, the window returns to its old size for _PAUSE rounds. A refusal, such as 429 or 503, halves
    it.
    """

    most: int
    size: int = 0
    before: int = 0  # the window before it grew; 0 if the last round did not follow a growth
    rate: float = 0.0  # of the last round, in bytes per second with _REQUEST for each request
    pause: int = 0  # rounds until the window may grow again
    n: int = 0  # requests finished in this round
    total: int = 0  # bytes of this round
    started: float = 0.0
    was_full: bool = False  # `size` requests of one kind, speculative or not, ran in this round

    def __post_init__(self) -> None:
        self.size = min(FIRST_AT_ONCE, self.most)

    def end_round(self, now: float) -> None:
        """Adapt the window to the round that ends at the time `now` (seconds of a monotonic clock)."""
        rate = (self.total + self.n * _REQUEST) / max(now - self.started, 1e-6)
        if self.before and rate < self.rate * _GAIN:
            self.size, self.before, self.pause = self.before, 0, _PAUSE
        elif self.was_full and not self.pause and self.size < self.most:
            self.before, self.size = self.size, min(self.most, 2 * self.size)
        else:
            self.before, self.pause = 0, max(0, self.pause - 1)
        self.rate = rate
        self.begin(now)

    def refused(self, sent_at: float, now: float) -> None:
        """Halve the window after a refusal; ignore one of a request sent before this round began."""
        if sent_at >= self.started:
            self.size, self.before, self.pause = max(min(LEAST_WINDOW, self.most), self.size // 2), 0, _PAUSE
            self.begin(now)

    def begin(self, now: float) -> None:
        """Begin a round."""
        self.n, self.total, self.started, self.was_full = 0, 0, now, False


class _Slots:
    """The slots of one kind of requests; their number can change while some are used."""

    def __init__(self, size: int, window: ConcurrencyWindow) -> None:
        self.size, self.n_used, self._window = size, 0, window
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Take a slot when one is free, in the order of the calls."""
        taken = asyncio.get_running_loop().create_future()
        self.waiting.append(taken)
        try:
            await taken
        except BaseException:  # a cancellation
            if not taken.cancelled():  # this task was cancelled after it got the slot
                self.n_used -= 1
                self.wake()
            raise

    def wake(self) -> None:
        """Pass free slots to those who wait."""
        while self.waiting and self.n_used < self.size:
            if not (taken := self.waiting.popleft()).done():
                self.n_used += 1
                self._window.was_full |= self.n_used >= self._window.size
                taken.set_result(None)


class RequestSlots:
    """Two kinds of slots: speculative requests never take a slot that a waiting caller needs.

    There are as many slots for waiting callers as the window has, at most `concurrency`, and twice as many for
    speculative requests. A speculative request keeps its slot when a caller starts to wait for it; then there is still
    room for a full window of others.
    """

    def __init__(self, concurrency: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.adaptive, self._clock = ConcurrencyWindow(concurrency), clock
        self.most, self.max_requests = concurrency, (1 + SPECULATIVE_FACTOR) * concurrency
        self.demand = _Slots(self.window, self.adaptive)
        self.speculative = _Slots(SPECULATIVE_FACTOR * self.window, self.adaptive)

    @property
    def window(self) -> int:
        """The present number of slots for waiting callers."""
        return self.adaptive.size

    async def acquire(self) -> bool:
        """Take a slot for one request of the running task; return whether it is a speculative one.

        An `OpenRequest` releases it.
        """
        demand, speculative = self.demand, self.speculative
        if not (demand.n_used or speculative.n_used):
            # A round has no pause in it, which would look like a slow service.
            window, window.started = self.adaptive, self._clock()
            window.n, window.total, window.was_full = 0, 0, False
        slots = speculative if (is_speculative := _is_speculative.get()) else demand
        if slots.n_used < slots.size:
            slots.n_used += 1
            # Requests of one call wait for their slots from its start on, so only the slots in use tell whether it is full.
            self.adaptive.was_full |= slots.n_used >= self.adaptive.size
        else:
            await slots.wait()
        return is_speculative

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot during the block, which does not adapt the window."""
        request = OpenRequest("", "", "", self, await self.acquire())
        try:
            yield
        finally:
            request.close()

    def end_round(self) -> None:
        """Adapt the number of slots to the requests of a round."""
        self.adaptive.end_round(self._clock())
        self._resize()

    def refused(self, sent_at: float) -> None:
        """Record that the service refused a request as one too many; `sent_at` is when it was sent."""
        self.adaptive.refused(sent_at, self._clock())
        self._resize()

    def _resize(self) -> None:
        for slots, size in ((self.demand, self.window), (self.speculative, SPECULATIVE_FACTOR * self.window)):
            slots.size = size
            slots.wake()


@dataclasses.dataclass(eq=False)
class OpenRequest:
    """One request of an origin, until it is closed: it holds a slot, and is logged once, when it ends.

    As a context manager it is sent when it is entered, and its answer has arrived at the end.
    """

    method: str
    url: str
    range_: str = ""  # the Range header
    slots: RequestSlots | None = None  # where it has a slot
    is_speculative: bool = False
    began: float | None = None  # when it was sent; None: not yet
    wait_s: float | None = None  # time until the headers arrived
    status: int | str = "no answer"
    size: int = 0  # bytes of the body that have arrived
    is_good: bool = False  # the answer is no failure
    refused: bool = False  # for a rate limit or a quota
    answer: Any = None  # the library's response, which is closed with this
    at_close: Callable[[int], None] | None = None  # called with the size
    is_closed: bool = False

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.answered("ok")
        self.close(error)

    def answered(self, status: int | str) -> None:
        """Record the status and the latency of a good answer."""
        if self.began is not None and self.wait_s is None:
            self.status, self.wait_s, self.is_good = status, time.monotonic() - self.began, True

    def close(self, error: BaseException | None = None) -> None:
        """Release the slot, and log the request, which `error` ended if there is one. Further calls do nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.answer is not None and self.answer.connection is not None:
            self.answer.close()  # and the connection: the body was not read to its end
        if (slots := self.slots) is not None:
            used, window = slots.speculative if self.is_speculative else slots.demand, slots.adaptive
            if self.is_good:
                window.n, window.total = window.n + 1, window.total + self.size
                if window.n >= window.size:
                    slots.end_round()
            used.n_used -= 1
            if used.waiting:
                used.wake()
        if self.at_close is not None:
            self.at_close(self.size)
        if event_log.active is not None or logger.isEnabledFor(logging.DEBUG):
            self._log(error)

    def _log(self, error: BaseException | None) -> None:
        if (began := self.began) is None:  # it was not sent
            return
        if error is not None and self.wait_s is None:
            self.status = type(error.__cause__ or error).__name__
        took_s = time.monotonic() - began
        wait_s = took_s if self.wait_s is None else self.wait_s
        url = public_url(self.url)
        if (log := event_log.active) is not None:
            log.note(
                "request",
                began,
                method=self.method,
                url=url,
                range=self.range_,
                status=self.status,
                bytes=self.size,
                wait_s=round(wait_s, 6),
                took_s=round(took_s, 6),
                ahead=self.is_speculative,
                refused=self.refused,
            )
        target = f"{url} {self.range_}" if self.range_ else url
        logger.debug(
            "%s %s: %s, %d bytes in %.3f s, begun after %.3f s",
            *(self.method, target, self.status, self.size, took_s, wait_s),
        )
