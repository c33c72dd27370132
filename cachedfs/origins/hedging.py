"""When a request whose answer is late is worth a second one. Pure.

The rule: when its first byte is later than that of 99 in 100 requests before it. While fewer are known, when it is later
than `early_s`; never before `least_s`, as a second request has to be worth its price. And at most one request in
twenty is sent a second time, the first one that is late aside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

from cachedfs.origins.retry import RetryPolicy

__all__ = ["HedgedRequests", "LatencyStats", "late_s", "may_hedge"]


_LATEST = 500  # answers that are remembered
_ENOUGH = 100  # to tell what one in a hundred is
_ONE_IN = 20


class LatencyStats(NamedTuple):
    """What is known of the requests of one kind: seconds to the first byte, latest last, and how many were sent."""

    waits_s: tuple[float, ...] = ()
    n_sent: int = 0
    n_hedged: int = 0

    def sent(self) -> LatencyStats:
        return self._replace(n_sent=self.n_sent + 1)

    def hedged(self) -> LatencyStats:
        return self._replace(n_hedged=self.n_hedged + 1)

    def answered(self, wait_s: float) -> LatencyStats:
        """Return what is known after an answer; where a second request was faster, it came at least so late."""
        return self._replace(waits_s=(*self.waits_s[1 - _LATEST :], wait_s))


def late_s(seen: LatencyStats, *, least_s: float, early_s: float) -> float:
    """Return after how many seconds without an answer a request is late."""
    n = len(seen.waits_s)
    if n < _ENOUGH:
        return max(least_s, early_s)
    return max(least_s, sorted(seen.waits_s)[-1 - n // 100])


def may_hedge(seen: LatencyStats) -> bool:
    """Return whether one more second request is within the limit."""
    return seen.n_hedged < 1 + seen.n_sent // _ONE_IN


T = TypeVar("T")


class HedgedRequests:
    """What was seen of the requests of one kind, and the second requests that follow from it."""

    def __init__(self, policy: RetryPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._seen = LatencyStats()

    async def first(
        self,
        request: Coroutine[Any, Any, T],
        again: Callable[[], Coroutine[Any, Any, T]],
        discard: Callable[[T], object] = lambda answer: None,
    ) -> T:
        """Return the answer to `request`, or to the one that `again` makes when that is late: whichever is here first.

        The other is cancelled, and its answer discarded if it has one. A request that fails is no answer while the other
        is still under way.
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
        """Return what makes the second request, or None when there were too many of them."""

        def begin() -> Coroutine[Any, Any, T] | None:
            if not may_hedge(self._seen):
                return None
            self._seen = self._seen.hedged()
            return again()

        return begin


class _Second(Generic[T]):
    """A request that may follow one which runs in the task that makes this: that one then goes without a task of its own.

    A body that breaks with its answer would lose what came of it in the turns of the loop that another task takes.
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
        if task.cancelled() or task.exception() is not None:  # looking at it keeps asyncio from logging it
            return
        if not self._is_over:
            self._has_won = True
            self._owner.cancel()
        elif not self._is_taken:
            self._discard(task.result())

    async def or_first(self, request: Coroutine[Any, Any, T]) -> T:
        """Return the answer of `request`, or that of this one if it comes before."""
        try:
            return await request
        except asyncio.CancelledError:
            # As asyncio's own timeouts do: somebody else may have cancelled us as well.
            if not self._has_won or self._owner.uncancel() > self._n_cancelled:
                raise
        except Exception:  # whatever it is: the second request may still do better
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
        """Let nothing more come of it."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is None or self._is_taken:
            return
        if not self._task.cancel() and self._has_won:  # it has an answer, and somebody cancelled us with it
            self._discard(self._task.result())
