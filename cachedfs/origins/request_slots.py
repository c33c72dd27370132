"""Limits on the requests in flight at one origin, which adapt to its throughput and its refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cachedfs.config import FIRST_AT_ONCE

__all__ = [
    "SPECULATIVE_FACTOR",
    "ConcurrencyWindow",
    "RequestSlots",
    "is_speculative",
    "speculative",
]

SPECULATIVE_FACTOR = 2  # times the window, for speculative requests
_LEAST = 4  # requests in flight that refusals leave
_GROWTH = 1.5  # of the window, while throughput grows
_GAIN = 1.05  # a larger window must increase throughput by this factor
_PAUSE = 8  # rounds until a larger window is tried again
_REQUEST = (
    64 << 10
)  # bytes that a request counts beside its body: for small objects, requests are the throughput

_is_speculative = ContextVar("cachedfs_is_ahead", default=False)


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
    """How many requests should be in flight, learned from finished requests.

    A round is as many finished requests as the window has. After a round in which the window was full it grows
    by half. If the next round is not faster, it goes back and stays for _PAUSE rounds. A refusal ("too many
    requests", "service unavailable") halves it.
    """

    most: int
    size: int = 0
    before: int = 0  # the window before it grew; 0 if the last round did not follow a growth
    rate: float = 0.0  # of the last round, in bytes per second with _REQUEST for each request
    pause: int = 0  # rounds until the window may grow again
    n: int = 0  # requests finished in this round
    total: int = 0  # bytes of this round
    started: float = 0.0
    was_full: bool = False  # as many requests as the window has were in flight during this round

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
            self.before, self.size = self.size, min(self.most, int(self.size * _GROWTH) + 1)
        else:
            self.before, self.pause = 0, max(0, self.pause - 1)
        self.rate = rate
        self._begin(now)

    def refused(self, sent_at: float, now: float) -> None:
        """Record a refusal; one sent before the window last changed says nothing about the window of now."""
        if sent_at >= self.started:
            self.size, self.before, self.pause = max(min(_LEAST, self.most), self.size // 2), 0, _PAUSE
            self._begin(now)

    def _begin(self, now: float) -> None:
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
        self.most = (1 + SPECULATIVE_FACTOR) * concurrency
        self._demand = _Slots(self.window)
        self._speculative = _Slots(SPECULATIVE_FACTOR * self.window)

    @property
    def window(self) -> int:
        """The present number of slots for waiting callers."""
        return self._window.size

    @property
    def mine(self) -> asyncio.Semaphore:
        """The semaphore for the running task, to be held while the answer is being read."""
        slots = self._speculative if is_speculative() else self._demand
        self._window.was_full |= slots.n_used + 1 >= self.window
        return slots

    def finished(self, n_bytes: int) -> None:
        """Record a request that ended, to adapt the window."""
        self._window.finished(n_bytes, self._clock())
        self._resize()

    def refused(self, sent_at: float) -> None:
        """Record that the service refused a request, sent at the time `sent_at` of `now`, as one too many."""
        self._window.refused(sent_at, self._clock())
        self._resize()

    def now(self) -> float:
        """Return the time in seconds of the clock that `refused` uses."""
        return self._clock()

    def _resize(self) -> None:
        if self._demand.size != self.window:
            self._demand.resize(self.window)
            self._speculative.resize(SPECULATIVE_FACTOR * self.window)
