"""Concurrency limits for one origin, adapted to its throughput and to refusals such as 429 and 503."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cachedfs.config import FIRST_AT_ONCE

__all__ = [
    "LEAST_WINDOW",
    "SPECULATIVE_FACTOR",
    "ConcurrencyWindow",
    "RequestSlots",
    "is_speculative",
    "speculative",
]

SPECULATIVE_FACTOR = 2  # times the window, for speculative requests
LEAST_WINDOW = 4  # the smallest window that refusals leave
_GAIN = 1.05  # a larger window must increase throughput by this factor
_PAUSE = 8  # rounds to wait before the window may grow again
# Bytes added per request when throughput is computed: with small objects the request rate counts, not the bytes.
_REQUEST = 64 << 10

_is_speculative = ContextVar("cachedfs_is_speculative", default=False)


def is_speculative() -> bool:
    """Return whether the running task was started before any caller waited for its result."""
    return _is_speculative.get()


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
    """The number of requests to keep in flight, adapted to finished requests.

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
    was_full: bool = False  # `size` requests of one kind, speculative or not, were in flight in this round

    def __post_init__(self) -> None:
        self.size = min(FIRST_AT_ONCE, self.most)

    def finished(self, n_bytes: int, now: float) -> None:
        """Record a request that ended with `n_bytes` bytes of body at the time `now` (seconds of a monotonic clock)."""
        self.n, self.total = self.n + 1, self.total + n_bytes + _REQUEST
        if self.n < self.size:
            return
        rate, was_full = self.total / max(now - self.started, 1e-6), self.was_full
        if self.before and rate < self.rate * _GAIN:
            self.size, self.before, self.pause = self.before, 0, _PAUSE
        elif was_full and not self.pause and self.size < self.most:
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


class _Slots(asyncio.Semaphore):
    """A semaphore whose size can change; it shrinks as slots are released."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
        self._to_remove = 0

    @property
    def n_used(self) -> int:
        """Slots in use now."""
        return self.size + self._to_remove - self._value

    def resize(self, size: int) -> None:
        change, self.size = size - self.size, size
        self._to_remove -= change
        while self._to_remove < 0:
            self._to_remove += 1
            super().release()

    def release(self) -> None:
        if self._to_remove > 0:
            self._to_remove -= 1
        else:
            super().release()


class RequestSlots:
    """Two semaphores: speculative requests never take a slot that a waiting caller needs.

    There are as many slots for waiting callers as the window has, at most `concurrency`, and twice as many for
    speculative requests. A speculative request keeps its slot when a caller starts to wait for it; then there is still
    room for a full window of others.
    """

    def __init__(self, concurrency: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window, self._clock = ConcurrencyWindow(concurrency), clock
        self.max_requests = (1 + SPECULATIVE_FACTOR) * concurrency
        self._demand = _Slots(self.window)
        self._speculative = _Slots(SPECULATIVE_FACTOR * self.window)

    @property
    def window(self) -> int:
        """The present number of slots for waiting callers."""
        return self._window.size

    def semaphore(self) -> asyncio.Semaphore:
        """Return the semaphore that the running task takes for one request, until it has read the body."""
        if not (self._demand.n_used or self._speculative.n_used):
            self._window.begin(
                self._clock()
            )  # a round has no pause in it, which would look like a slow service
        return self._speculative if is_speculative() else self._demand

    def finished(self, n_bytes: int) -> None:
        """Record a request that ended and still has its slot, to adapt the window."""
        # Requests of one call wait for their slots from its start on, so only the slots in use tell whether it is full.
        self._window.was_full |= max(self._demand.n_used, self._speculative.n_used) >= self.window
        self._window.finished(n_bytes, self._clock())
        self._resize()

    def refused(self, sent_at: float) -> None:
        """Record that the service refused a request as one too many; `sent_at` is when it was sent, by `now()`."""
        self._window.refused(sent_at, self._clock())
        self._resize()

    def now(self) -> float:
        """Return the time in seconds of the clock that `refused` uses."""
        return self._clock()

    def _resize(self) -> None:
        if self._demand.size != self.window:
            self._demand.resize(self.window)
            self._speculative.resize(SPECULATIVE_FACTOR * self.window)
