"""Hedged requests: send a request a second time when its answer is late.

A request is late when its first byte takes longer than for 99 % of the requests before it. While too few are known to
tell, it is late after `early_s`. It is never late before `least_s`, because a second request has to be worth its cost.
At most one request in twenty is sent a second time, not counting the first late one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

from cachedfs.origins.retry import RetryPolicy

__all__ = ["HedgedRequests", "LatencyStats", "late_s", "may_hedge"]


_LATEST = 500  # most recent answers that are remembered
_ENOUGH = 100  # answers needed to estimate the slowest 1 %
_ONE_IN = 20

T = TypeVar("T")


class LatencyStats(NamedTuple):
    """Latencies of one kind of request: seconds to the first byte, the newest last, and counts."""

    waits_s: tuple[float, ...] = ()
    n_sent: int = 0
    n_hedged: int = 0

    def sent(self) -> LatencyStats:
        return self._replace(n_sent=self.n_sent + 1)

    def hedged(self) -> LatencyStats:
        return self._replace(n_hedged=self.n_hedged + 1)

    def answered(self, wait_s: float) -> LatencyStats:
        """Return the statistics after an answer.

        If the second request was faster, `wait_s` is the least that the first one took.
        """
        return self._replace(waits_s=(*self.waits_s[1 - _LATEST :], wait_s))


def late_s(seen: LatencyStats, *, least_s: float, early_s: float) -> float:
    """Return after how many seconds without an answer a request is late."""
    n = len(seen.waits_s)
    if n < _ENOUGH:
        return max(least_s, early_s)
    return max(least_s, sorted(seen.waits_s)[-1 - n // 100])


def may_hedge(seen: LatencyStats) -> bool:
    """Return whether the limit allows one more second request."""
    return seen.n_hedged < 1 + seen.n_sent // _ONE_IN


class HedgedRequests:
    """Sends second requests for late requests of one kind, by the latencies seen so far."""

    def __init__(self, policy: RetryPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._seen = LatencyStats()

    async def first(
        self,
        request: Coroutine[Any, Any, T],
        again: Callable[[], Coroutine[Any, Any, T]],
        discard: Callable[[T], object] = lambda answer: None,
    ) -> T:
        """Return the answer to `request`, or to the second request that `again` makes if the first is late.

        The first answer wins. The other request is cancelled, and its answer, if it has one, goes to `discard`. A
        failure does not count as an answer while the other request is still running.
        """
        began, self._seen = self._clock(), self._seen.sent()
        second = _Second(self._worth(again), discard)
        policy = self._policy
        second.start_in(late_s(self._seen, least_s=policy.hedge_least_s, early_s=policy.hedge_early_s))
        try:
            answer = await second.or_first(request)
        finally:
            second.end()
        self._seen = self._seen.answered(self._clock() - began)
        return answer

    def _worth(
        self, again: Callable[[], Coroutine[Any, Any, T]]
    ) -> Callable[[], Coroutine[Any, Any, T] | None]:
        """Return a function that starts the second request, or returns None when the limit is reached."""

        def begin() -> Coroutine[Any, Any, T] | None:
            if not may_hedge(self._seen):
                return None
            self._seen = self._seen.hedged()
            return again()

        return begin


class _Second(Generic[T]):
    """The second of two requests; the first one runs in the current task, not in a task of its own.

    A separate task would take extra turns of the event loop. If the first answer's body breaks off at once, the bytes
    received in these turns would be lost.
    """

    def __init__(
        self, begin: Callable[[], Coroutine[Any, Any, T] | None], discard: Callable[[T], object]
    ) -> None:
        owner = asyncio.current_task()
        assert owner is not None  # this is called in a coroutine
        self._owner, self._n_cancelled = owner, owner.cancelling()
        self._begin, self._discard = begin, discard
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[T] | None = None
        self._has_won = self._is_taken = self._is_over = False

    def start_in(self, wait_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._start)

    def _start(self) -> None:
        request = self._begin()
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(request)
            self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:  # reading it keeps asyncio from logging it
            return
        if not self._is_over:
            self._has_won = True
            self._owner.cancel()
        elif not self._is_taken:
            self._discard(task.result())

    async def or_first(self, request: Coroutine[Any, Any, T]) -> T:
        """Return the answer of `request`, or of the second request if that comes first."""
        try:
            return await request
        except asyncio.CancelledError:
            # As in asyncio's timeouts: another caller may have cancelled this task too.
            if not self._has_won or self._owner.uncancel() > self._n_cancelled:
                raise
        except Exception:  # any error: the second request may still succeed
            if self._task is None:
                raise
            self._is_over = True
            await asyncio.wait([self._task])
            if self._task.cancelled() or self._task.exception() is not None:
                raise
        assert self._task is not None
        self._is_taken = True
        return self._task.result()

    def end(self) -> None:
        """Cancel the second request, and discard its answer if it has an unused one."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is None or self._is_taken:
            return
        if not self._task.cancel() and self._has_won:  # it has an answer, but this task was cancelled too
            self._discard(self._task.result())
