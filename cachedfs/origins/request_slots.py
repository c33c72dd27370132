"""Running requests: the slots of one origin, adapted to its throughput and to answers such as 429, and the log.

Every request is logged once, when it ends: as a debug line, and as an event where events are recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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


class _Slots(asyncio.Semaphore):
    """The slots of one kind of requests; their number can change while some are used."""

    n_used = 0
    n_excess = 0  # slots to take away when they are released

    def add(self, n: int) -> None:
        """Add `n` slots; if `n` is negative, take slots away, as soon as they are free."""
        self.n_excess -= n
        while self.n_excess > 0 and not self.locked():
            with suppress(StopIteration):  # a free slot is taken at once
                self.acquire().send(None)
            self.n_excess -= 1
        while self.n_excess < 0:
            self.n_excess += 1
            self.release()


class RequestSlots:
    """The slots of an origin: how many of its requests run at a time, adapted to those that have ended.

    There are `window` slots for requests that callers wait for, and twice as many for speculative ones, which never take
    a slot that a waiting caller needs. A speculative request keeps its slot when a caller starts to wait for it; then
    there is still room for a full window of others.

    A round ends when `window` requests have succeeded. If the window was full in a round, it doubles. If the next round
    is not at least 5 % faster, the window returns to its old size for _PAUSE rounds. A refusal, such as 429 or 503,
    halves it.
    """

    def __init__(self, concurrency: int) -> None:
        self.most, self.max_requests = concurrency, (1 + SPECULATIVE_FACTOR) * concurrency
        self.window = min(FIRST_AT_ONCE, concurrency)
        self.kinds = _Slots(self.window), _Slots(SPECULATIVE_FACTOR * self.window)  # by `is_speculative`
        self._before = 0  # the window before it grew; 0 if the last round did not follow a growth
        self._rate = 0.0  # of the last round, in bytes per second with _REQUEST for each request
        self._pause = 0  # rounds until the window may grow again
        self.begin_round(0.0)

    @asynccontextmanager
    async def slot(self, method: str = "", url: str = "", range_: str = "") -> AsyncIterator[OpenRequest]:
        """Take a slot for one request, which is sent when the block begins and has its answer when the block ends.

        Without a method, the block sends the requests, and this one is not logged.
        """
        is_ahead = is_speculative()
        await self.kinds[is_ahead].acquire()
        self.kinds[is_ahead].n_used += 1
        with OpenRequest(method, url, range_, self, is_ahead) as request:
            yield request

    def begin_round(self, now: float) -> None:
        """Begin a round at the time `now`; 0.0: when the next request is sent."""
        self.n_ended, self.n_bytes, self.started, self.was_full = 0, 0, now, False

    def end_round(self, now: float) -> None:
        """Adapt the window to the round that ends at the time `now` (seconds of the monotonic clock)."""
        rate = (self.n_bytes + self.n_ended * _REQUEST) / max(now - self.started, 1e-6)
        if self._before and rate < self._rate * _GAIN:
            self._resize(self._before)
            self._before, self._pause = 0, _PAUSE
        elif self.was_full and not self._pause and self.window < self.most:
            self._before = self.window
            self._resize(min(self.most, 2 * self.window))
        else:
            self._before, self._pause = 0, max(0, self._pause - 1)
        self._rate = rate
        self.begin_round(now)

    def refused(self, sent_at: float, now: float) -> None:
        """Halve the window after a refusal of a request sent at `sent_at`; one from before this round does not count."""
        if sent_at >= self.started:
            self._resize(max(min(LEAST_WINDOW, self.most), self.window // 2))
            self._before, self._pause = 0, _PAUSE
            self.begin_round(now)

    def _resize(self, size: int) -> None:
        demand, ahead = self.kinds
        demand.add(size - self.window)
        ahead.add(SPECULATIVE_FACTOR * (size - self.window))
        self.window = size


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
            kind = slots.kinds[self.is_speculative]
            slots.was_full |= kind.n_used >= slots.window
            if self.is_good:
                slots.n_ended, slots.n_bytes = slots.n_ended + 1, slots.n_bytes + self.size
                slots.started = slots.started or self.began or 0.0
                if slots.n_ended >= slots.window:
                    slots.end_round(time.monotonic())
            kind.n_used -= 1
            kind.add(1) if kind.n_excess else kind.release()
            if not (slots.kinds[0].n_used or slots.kinds[1].n_used):  # a pause would look like a slow service
                slots.n_ended, slots.n_bytes, slots.started, slots.was_full = 0, 0, 0.0, False
        if self.at_close is not None:
            self.at_close(self.size)
        if event_log.active is not None or logger.isEnabledFor(logging.DEBUG):
            self._log(error)

    def _log(self, error: BaseException | None) -> None:
        if (began := self.began) is None or not self.method:  # it was not sent
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
