"""The queue of speculative requests, and an estimate of the link that limits their number.

Response bodies share a link fairly, so each speculative body slows down the reads that callers wait for. Their number
is limited so that a read of one block takes at most COURTESY times as long as without them. FEWEST are always allowed:
they fill a link of published speed. A request that still waits for its first byte uses no bandwidth, so more requests
run on a link of high latency.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from cachedfs.common.types import LinkStats
from cachedfs.core.download import Download
from cachedfs.origins.base import Origin
from cachedfs.origins.request_slots import SPECULATIVE_FACTOR, speculative

__all__ = ["COURTESY", "FEWEST", "SpeculativeQueue", "LinkEstimate", "LinkTotals", "SpeculativeRequest"]


COURTESY = 1.2
FEWEST = 4
_BLOCK = 1 << 20  # size of the read to protect; smaller bodies say little about the speed of the link
_WEIGHT = 1 / 8  # weight of the newest request in the moving averages
_ROUNDS = 2  # `n_bodies` changes at most once per _ROUNDS * n_bodies bodies

logger = logging.getLogger("cachedfs.core")
MEMORY = 256 << 20  # limit of speculative bytes that are not on disk yet
_POSITION = attrgetter("position")
ONE_MORE = 1  # extra body per link, as first bytes come unevenly: uses 96 % of the link instead of 91 %


class LinkEstimate(NamedTuple):
    """Moving averages of a link: seconds to the first byte, and bytes per second of one body.

    `best_per_s` is the best average so far, `per_s` the current one with `n_bodies` bodies in parallel.
    The defaults are between the published figures of Google Drive and of GCS in the same region.
    """

    wait_s: float = 0.05
    best_per_s: float = 60e6
    per_s: float = 50e6
    n_bodies: int = FEWEST
    n_since: int = 0  # bodies received since `n_bodies` changed

    @property
    def total_per_s(self) -> float:
        return self.n_bodies * self.per_s

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int, most: int) -> LinkEstimate:
        """Return the estimate after one more request.

        Its first byte came after `wait_s` seconds, its body of `size` bytes took `took_s` seconds from then on.
        `n_others` is the number of other requests in flight; `most` is the upper limit of `n_bodies`.
        """
        link = self._replace(wait_s=self.wait_s + (wait_s - self.wait_s) * _WEIGHT)
        if size < _BLOCK or took_s <= 0:
            return link
        per_s = self.per_s + (size / took_s - self.per_s) * _WEIGHT
        link = link._replace(per_s=per_s, best_per_s=max(per_s, self.best_per_s), n_since=self.n_since + 1)
        if n_others + 1 < self.n_bodies or link.n_since < _ROUNDS * self.n_bodies:
            return link  # too few bodies to judge `n_bodies`
        step = (link._most_bodies() > self.n_bodies) - (link._most_bodies() < self.n_bodies)
        n_bodies = max(FEWEST, min(most, self.n_bodies + step))
        return link if n_bodies == self.n_bodies else link._replace(n_bodies=n_bodies, n_since=0)

    def _most_bodies(self) -> int:
        """Return how many bodies may run at a time.

        With them, a one-block read takes at most COURTESY times as long as alone. This assumes that the link is full.
        If it is not, the estimate grows later.
        """
        alone_s = self.wait_s + _BLOCK / self.best_per_s
        least_per_s = _BLOCK / (COURTESY * alone_s - self.wait_s)
        return int(self.total_per_s / least_per_s) - 1

    def load(self, size: int) -> float:
        """Return the share of its lifetime in which a request for `size` bytes receives its body."""
        body_s = size / self.per_s
        return body_s / (self.wait_s + body_s)


class LinkTotals(NamedTuple):
    """Sums of the measurements of a link.

    Unlike `LinkEstimate`, they start from zero, not from assumed values.
    """

    n: int = 0
    wait_s: float = 0.0
    received: float = 0.0  # bytes received by all bodies on the link while a body of _BLOCK or more was timed
    took_s: float = 0.0  # sum of the seconds that the timed bodies took

    @property
    def per_s(self) -> float | None:
        """Bytes per second of the link, over all bodies that shared it; None if no body was timed."""
        return self.received / self.took_s if self.took_s else None

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int) -> LinkTotals:
        """Return the sums after one more request; the parameters are those of `LinkEstimate.after`."""
        totals = self._replace(n=self.n + 1, wait_s=self.wait_s + wait_s)
        if size < _BLOCK or took_s <= 0:
            return totals
        # Assumes that the other requests wait as long for their first byte.
        n_bodies = 1 + n_others * took_s / (wait_s + took_s)
        return totals._replace(received=self.received + size * n_bodies, took_s=self.took_s + took_s)


class SpeculativeRequest(NamedTuple):
    """A request worth sending before a reader needs it. It is sent once, or dropped.

    `size` is the memory in bytes that it takes until its blocks are stored. `send` sends it, unless its blocks are
    cached by now, and returns the downloads: directly, or as an awaitable if the object must be looked up.
    """

    owner: object
    size: int
    send: Callable[[], Iterable[Download] | Awaitable[Iterable[Download]]]
    origin: Callable[[], Origin]
    position: float = 0  # requests of one owner are sent in this order
    is_declared: bool = False  # from a prefetch plan; inferred requests are sent first
    is_wanted: Callable[[], bool] = bool  # a caller waits for it by now: it uses no speculative slot
    is_over: Callable[[], bool] = bool  # fetched in the meantime: it is dropped


class SpeculativeQueue:
    """Sends speculative requests, in request slots of their own.

    They slow down the reads that callers wait for, by a factor of at most about COURTESY (FEWEST requests may always
    run).

    Limits: `concurrency` speculative requests per origin, the capacity of the link, MEMORY, and the request rate
    of the origin. Owners take turns. Use it on the event loop thread only, except for `link_stats` and `bytes_per_s`.
    """

    def __init__(self) -> None:
        # (inferred, declared) requests by id(owner); each request keeps its owner alive. The owner served last is
        # at the end. Invariant: no deque is empty.
        self._queues: tuple[dict[int, deque[SpeculativeRequest]], dict[int, deque[SpeculativeRequest]]] = (
            {},
            {},
        )
        # Sent requests that are not over: origin and link load of each.
        self._active: dict[Download, tuple[Origin, float]] = {}
        self._lookups: dict[asyncio.Future[Any], tuple[SpeculativeRequest, Origin, float]] = {}  # the same
        # Sent requests that may hold memory, until no other reference is left.
        self._sent: WeakKeyDictionary[Download, None] = WeakKeyDictionary()
        # Origins whose limits were reached since a request ended or blocks were stored: nothing more is sent to them.
        self._at_limit: set[Origin] = set()
        self._most_memory = 0  # Invariant: at least `memory`, which takes a pass over _sent to compute
        self._links: WeakKeyDictionary[Origin, LinkEstimate] = WeakKeyDictionary()
        self._totals: WeakKeyDictionary[Origin, LinkTotals] = WeakKeyDictionary()
        self.bytes_per_s: int | None = None  # measured rate of the fastest link; read from any thread
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, candidate: SpeculativeRequest) -> None:
        """Queue a request and send it as soon as the limits allow."""
        queue = self._queues[candidate.is_declared].setdefault(id(candidate.owner), deque())
        insort(queue, candidate, key=_POSITION)
        if not (self._active or self._lookups):
            self._at_limit.clear()  # nothing would end, and call `pump`
        self._send_allowed()

    def cancel(self, owner: object) -> None:
        """Cancel the unsent requests of `owner`."""
        for queues in self._queues:
            queues.pop(id(owner), None)

    @property
    def memory(self) -> int:
        """Bytes that sent requests hold, or will hold once they are received."""
        held = sum(download.memory for download in list(self._sent))
        return held + sum(candidate.size for candidate, _, _ in self._lookups.values())

    def link(self, origin: Origin) -> LinkEstimate:
        """Return the estimate of the link to an origin."""
        return self._links.get(origin) or LinkEstimate()

    def link_stats(self, origin: Origin) -> LinkStats:
        """Return what was measured of the link to an origin, without assumed values.

        Safe from any thread.
        """
        totals = self._totals.get(origin) or LinkTotals()
        n_at_once = SPECULATIVE_FACTOR * origin.concurrency
        return LinkStats(totals.n, totals.wait_s, totals.per_s, n_at_once, origin.requests_per_s)

    def record_timing(self, origin: Origin, *, wait_s: float, size: int, took_s: float) -> None:
        """Record a finished request: `wait_s` seconds to its first byte, then `took_s` seconds for `size` bytes."""
        n_others = sum(at is origin and not download.done for download, (at, _) in self._active.items())
        self._links[origin] = self.link(origin).after(
            wait_s=wait_s, size=size, took_s=took_s, n_others=n_others, most=origin.concurrency
        )
        totals = self._totals.get(origin) or LinkTotals()
        self._totals[origin] = totals.after(wait_s=wait_s, size=size, took_s=took_s, n_others=n_others)
        per_s = (each.per_s for each in self._totals.values())
        self.bytes_per_s = max((int(rate) for rate in per_s if rate), default=None)

    def pump(self) -> None:
        """Send what the limits allow. Call it when a request has ended and when blocks were stored."""
        self._at_limit.clear()
        for download in [download for download in self._active if download.done]:
            del self._active[download]
        self._send_allowed()

    def _send_allowed(self) -> None:
        usage: dict[Origin, tuple[int, float]] = {}  # computed once, and counted up
        while any(self._queues) and (found := self._next(usage)) is not None:
            candidate, origin = found
            load = self.link(origin).load(candidate.size)
            if self._send(candidate, origin, load):
                n, loads = usage[origin]
                usage[origin] = n + 1, loads + load

    def _next(self, usage: dict[Origin, tuple[int, float]]) -> tuple[SpeculativeRequest, Origin] | None:
        """Remove and return the next request that may be sent now, with its origin."""
        for queues in self._queues:
            for owner in list(queues):
                found = self._head(queues, owner)
                if found is None or not self._may_send(*found, usage):
                    continue
                queue = queues.pop(owner)
                queue.popleft()
                if queue:
                    queues[owner] = queue  # behind the other owners
                return found
        return None

    def _head(
        self, queues: dict[int, deque[SpeculativeRequest]], owner: int
    ) -> tuple[SpeculativeRequest, Origin] | None:
        """Return the first useful request of an owner, with its origin; drop the ones before it."""
        queue = queues[owner]
        while queue:
            candidate = queue[0]
            if not candidate.is_over() and (origin := self._origin(candidate)) is not None:
                return candidate, origin
            queue.popleft()
        del queues[owner]
        return None

    def _origin(self, candidate: SpeculativeRequest) -> Origin | None:
        try:
            return candidate.origin()
        except Exception as error:  # of any kind: a read of these bytes raises it, other requests go on
            logger.debug("speculative request not sent: %s", error)
            return None

    def _may_send(
        self, candidate: SpeculativeRequest, origin: Origin, usage: dict[Origin, tuple[int, float]]
    ) -> bool:
        if origin in self._at_limit:
            return False
        if origin not in usage:
            usage[origin] = self._usage(origin)
        (n_requests, load), link = usage[origin], self.link(origin)
        is_crowded = n_requests and load + link.load(candidate.size) > link.n_bodies + ONE_MORE
        if n_requests >= origin.concurrency or is_crowded or not self._has_memory(candidate.size):
            self._at_limit.add(origin)
            return False
        if wait_s := origin.spare_s():
            self._schedule_pump(wait_s)
        return not wait_s

    def _usage(self, origin: Origin) -> tuple[int, float]:
        """Return how many speculative requests an origin has that no caller waits for, and the sum of their loads."""
        loads = [
            load
            for download, (at, load) in self._active.items()
            if at is origin and not (download.done or download.is_wanted)
        ]
        loads += [
            load
            for candidate, at, load in self._lookups.values()
            if at is origin and not candidate.is_wanted()
        ]
        return len(loads), sum(loads)

    def _has_memory(self, size: int) -> bool:
        """Return whether `size` more bytes fit in MEMORY, dropping blocks that could not be stored, oldest first.

        Drops blocks that could not be stored, oldest first, to make space. If no reader comes for those blocks, they
        would otherwise stall the queue for ever.
        """
        most = max(0, MEMORY - size)
        if self._most_memory <= most:
            return True
        for download in [download for download in self._sent if not download.memory]:
            del self._sent[download]
        self._most_memory = self.memory
        for download in list(self._sent) if self._most_memory > most else ():
            if download.is_finished:
                self._most_memory -= download.memory
                download.release()
            if self._most_memory <= most:
                break
        return self._most_memory <= most

    def _schedule_pump(self, wait_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()

    def _send(self, candidate: SpeculativeRequest, origin: Origin, load: float) -> bool:
        """Send a request; return whether it started a download or a lookup."""
        self._most_memory += candidate.size
        with speculative():
            try:
                started = candidate.send()
            except Exception as error:  # of any kind: a read of these bytes raises it, other requests go on
                logger.debug("speculative request not sent: %s", error)
                return False
            if not isinstance(started, Awaitable):
                return self._track(started, origin)
            lookup = asyncio.ensure_future(started)
        self._lookups[lookup] = candidate, origin, load
        lookup.add_done_callback(self._lookup_ended)
        return True

    def _lookup_ended(self, task: asyncio.Future[Iterable[Download]]) -> None:
        _, origin, _ = self._lookups.pop(task)
        if not task.cancelled() and (error := task.exception()) is None:
            self._track(task.result(), origin)
        elif not task.cancelled():
            logger.debug("speculative request not sent: %s", error)
        self.pump()

    def _track(self, by_block: Iterable[Download], origin: Origin) -> bool:
        """Track the downloads that are speculative; return whether there are any."""
        tracked = [download for download in by_block if download.is_speculative]
        for download in tracked:
            self._active[download] = origin, self.link(origin).load(download.stop - download.start)
            self._sent[download] = None
        return bool(tracked)
