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
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from cachedfs.core.download import Download
from cachedfs.core.statistics import LinkStats
from cachedfs.origins.base import Origin
from cachedfs.origins.request_slots import SPECULATIVE_FACTOR, speculative

logger = logging.getLogger("cachedfs.core")

COURTESY = 1.2
FEWEST = 4
MEMORY = 256 << 20  # limit of speculative bytes that are not on disk yet
ONE_MORE = 1  # extra body per link, as first bytes come unevenly: uses 96 % of the link instead of 91 %
_BLOCK = 1 << 20  # size of the read to protect; smaller bodies say little about the speed of the link
_WEIGHT = 1 / 8  # weight of the newest request in the moving averages
_ROUNDS = 2  # `n_bodies` changes at most once per _ROUNDS * n_bodies bodies

_POSITION = attrgetter("position")


class LinkEstimate(NamedTuple):
    """Measurements of the link to an origin: moving averages, and sums.

    `wait_s` is the time to the first byte, `best_per_s` the best average rate of one body in bytes per second so far,
    `per_s` the current one with `n_bodies` bodies in parallel. The defaults are between the published figures of Google
    Drive and of GCS in the same region. The sums start from zero.
    """

    wait_s: float = 0.05
    best_per_s: float = 60e6
    per_s: float = 50e6
    n_bodies: int = FEWEST
    n_since: int = 0  # bodies received since `n_bodies` changed
    n: int = 0  # requests
    waited_s: float = 0.0  # sum of their times to the first byte
    received: float = 0.0  # bytes received by all bodies on the link while a body of _BLOCK or more was timed
    took_s: float = 0.0  # sum of the seconds that the timed bodies took

    @property
    def total_per_s(self) -> float:
        return self.n_bodies * self.per_s

    @property
    def measured_per_s(self) -> float | None:
        """Bytes per second over all bodies that shared the link; None if no body was timed."""
        return self.received / self.took_s if self.took_s else None

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int, most: int) -> LinkEstimate:
        """Return the link after one more request.

        Its first byte came after `wait_s` seconds, its body of `size` bytes took `took_s` seconds from then on.
        `n_others` is the number of other requests in flight; `most` is the upper limit of `n_bodies`.
        """
        link = self._replace(
            wait_s=self.wait_s + (wait_s - self.wait_s) * _WEIGHT,
            n=self.n + 1,
            waited_s=self.waited_s + wait_s,
        )
        if size < _BLOCK or took_s <= 0:
            return link
        per_s = self.per_s + (size / took_s - self.per_s) * _WEIGHT
        # Assumes that the other requests wait as long for their first byte.
        n_at_once = 1 + n_others * took_s / (wait_s + took_s)
        link = link._replace(
            per_s=per_s,
            best_per_s=max(per_s, self.best_per_s),
            n_since=self.n_since + 1,
            received=self.received + size * n_at_once,
            took_s=self.took_s + took_s,
        )
        if n_others + 1 < self.n_bodies or link.n_since < _ROUNDS * self.n_bodies:
            return link  # too few bodies to judge `n_bodies`
        step = (link._most_bodies() > self.n_bodies) - (link._most_bodies() < self.n_bodies)
        n_bodies = max(FEWEST, min(most, self.n_bodies + step))
        return link if n_bodies == self.n_bodies else link._replace(n_bodies=n_bodies, n_since=0)

    def _most_bodies(self) -> int:
        """Return with how many bodies a one-block read takes at most COURTESY times as long as alone.

        This assumes that the link is full. If it is not, the estimate grows later.
        """
        alone_s = self.wait_s + _BLOCK / self.best_per_s
        least_per_s = _BLOCK / (COURTESY * alone_s - self.wait_s)
        return int(self.total_per_s / least_per_s) - 1

    def load(self, size: int) -> float:
        """Return the share of its lifetime in which a request for `size` bytes receives its body."""
        body_s = size / self.per_s
        return body_s / (self.wait_s + body_s)


class SpeculativeRequest(NamedTuple):
    """A request worth sending before a reader needs it. It is sent at most once.

    `size` is the memory in bytes that it takes until its blocks are stored. `send` sends it, unless its blocks are
    cached by now, and returns the downloads: directly, or as an awaitable if the object must be looked up.
    """

    owner: object
    size: int
    send: Callable[[], Iterable[Download] | Awaitable[Iterable[Download]]]
    origin: Callable[[], Origin]
    position: float = 0  # requests of one owner are sent in this order
    is_declared: bool = False  # from a prefetch plan; inferred requests are sent first
    # A reader has come to its object: it is not sent any more, and its lookup uses no speculative slot.
    is_wanted: Callable[[], bool] = bool


class _Usage:
    """The speculative requests in flight at one origin, and the share of the link that they use."""

    def __init__(self, link: LinkEstimate) -> None:
        self.link = link
        self.n, self.load = 0, 0.0
        self.is_full = False  # nothing more is sent until it is counted again

    def add(self, size: int) -> None:
        self.n, self.load = self.n + 1, self.load + self.link.load(size)

    def has_room(self, size: int, concurrency: int) -> bool:
        is_crowded = self.n and self.load + self.link.load(size) > self.link.n_bodies + ONE_MORE
        return self.n < concurrency and not is_crowded


class SpeculativeQueue:
    """Sends speculative requests within their share of the requests and of the link.

    Limits: `concurrency` requests per origin that no caller waits for, the capacity of the link, MEMORY, and the request
    rate of the origin. Owners take turns. Use it on the event loop thread only, except for `link_stats` and
    `bytes_per_s`.
    """

    def __init__(self) -> None:
        # By `is_declared` and the id of the owner, whom each request keeps alive. The owner served last is at the end.
        # Invariant: no deque is empty.
        self.queued: dict[tuple[bool, int], deque[SpeculativeRequest]] = {}
        # Sent requests that are not over.
        self._active: dict[Download, Origin] = {}
        self._lookups: dict[asyncio.Future[Any], tuple[SpeculativeRequest, Origin]] = {}
        # Sent requests that may hold memory, until no other reference is left.
        self._sent: WeakKeyDictionary[Download, None] = WeakKeyDictionary()
        # Counted when first needed, then added to, until a request ends or blocks are stored.
        self._usages: dict[Origin, _Usage] = {}
        self._most_memory = 0  # Invariant: at least `memory`, which takes a pass over _sent to compute
        self._links: WeakKeyDictionary[Origin, LinkEstimate] = WeakKeyDictionary()
        self.bytes_per_s: int | None = None  # measured rate of the fastest link; read from any thread
        self._timer: asyncio.TimerHandle | None = None

    @property
    def memory(self) -> int:
        """Bytes that sent requests hold, or will hold once they are received."""
        held = sum(download.memory for download in list(self._sent))
        return held + sum(request.size for request, _ in self._lookups.values())

    def link(self, origin: Origin) -> LinkEstimate:
        return self._links.get(origin) or LinkEstimate()

    def link_stats(self, origin: Origin) -> LinkStats:
        """Return what was measured of the link to an origin, without assumed values. From any thread."""
        link, n_at_once = self.link(origin), SPECULATIVE_FACTOR * origin.concurrency
        return LinkStats(link.n, link.waited_s, link.measured_per_s, n_at_once, origin.requests_per_s)

    def record_timing(self, origin: Origin, *, wait_s: float, size: int, took_s: float) -> None:
        """Record a finished request: `wait_s` seconds to its first byte, then `took_s` seconds for `size` bytes."""
        n_others = sum(at is origin and not download.done for download, at in self._active.items())
        self._links[origin] = self.link(origin).after(
            wait_s=wait_s, size=size, took_s=took_s, n_others=n_others, most=origin.concurrency
        )
        rates = (link.measured_per_s for link in self._links.values())
        self.bytes_per_s = max((int(rate) for rate in rates if rate), default=None)

    def submit(self, request: SpeculativeRequest) -> None:
        """Queue a request and send it as soon as the limits allow."""
        queue = self.queued.setdefault((request.is_declared, id(request.owner)), deque())
        insort(queue, request, key=_POSITION)
        if not (self._active or self._lookups):
            self._usages.clear()  # nothing would end, and call `pump`
        self._send_allowed()

    def cancel(self, owner: object) -> None:
        """Cancel the unsent requests of `owner`."""
        for is_declared in (False, True):
            self.queued.pop((is_declared, id(owner)), None)

    def pump(self) -> None:
        """Send what the limits allow. Call it when a request has ended and when blocks were stored."""
        self._usages.clear()
        for download in [download for download in self._active if download.done]:
            del self._active[download]
        if self.queued:
            self._send_allowed()

    def _send_allowed(self) -> None:
        while (found := self._next()) is not None:
            self._send(*found)

    def _next(self) -> tuple[SpeculativeRequest, Origin] | None:
        """Remove and return the next request that may be sent now, with its origin."""
        for key in sorted(self.queued, key=itemgetter(0)):
            queue, origin = self.queued[key], None
            while queue and (origin := self._origin(queue[0])) is None:
                queue.popleft()
            may_send = origin is not None and self._may_send(queue[0], origin)
            if may_send or not queue:
                del self.queued[key]
            if origin is not None and may_send:
                request = queue.popleft()
                if queue:
                    self.queued[key] = queue  # behind the other owners
                return request, origin
        return None

    def _origin(self, request: SpeculativeRequest) -> Origin | None:
        """Return the origin of a request; None if it should not be sent."""
        try:
            return None if request.is_wanted() else request.origin()
        except Exception as error:  # of any kind: a read of these bytes raises it, other requests go on
            logger.debug("speculative request not sent: %s", error)
            return None

    def _may_send(self, request: SpeculativeRequest, origin: Origin) -> bool:
        usage = self._usages.get(origin)
        if usage is not None and usage.is_full:
            return False
        if usage is None or not usage.has_room(request.size, origin.concurrency):
            usage = self._usages[origin] = self._count(origin)  # what was sent may have had nothing to fetch
        if not (usage.has_room(request.size, origin.concurrency) and self._has_memory(request.size)):
            usage.is_full = True
            return False
        wait_s = origin.spare_s()
        if wait_s and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)
        return not wait_s

    def _count(self, origin: Origin) -> _Usage:
        usage = _Usage(self.link(origin))
        for download, at in self._active.items():
            if at is origin and not (download.done or download.is_wanted):
                usage.add(download.stop - download.start)
        for request, at in self._lookups.values():
            if at is origin and not request.is_wanted():
                usage.add(request.size)
        return usage

    def _has_memory(self, size: int) -> bool:
        """Return whether `size` more bytes fit in MEMORY, releasing blocks that could not be stored, oldest first.

        If no reader comes for those blocks, they would otherwise stall the queue for ever.
        """
        most = max(0, MEMORY - size)
        if self._most_memory <= most:
            return True
        for download in [download for download in self._sent if not download.memory]:
            del self._sent[download]
        self._most_memory = self.memory
        for download in list(self._sent):
            if self._most_memory <= most:
                break
            if download.is_finished:
                self._most_memory -= download.memory
                download.release()
        return self._most_memory <= most

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()

    def _send(self, request: SpeculativeRequest, origin: Origin) -> None:
        self._most_memory += request.size
        self._usages[origin].add(request.size)
        with speculative():
            try:
                started = request.send()
            except Exception as error:  # of any kind: a read of these bytes raises it, other requests go on
                logger.debug("speculative request not sent: %s", error)
                return
            if not isinstance(started, Awaitable):
                self._track(started, origin)
                return
            lookup = asyncio.ensure_future(started)
        self._lookups[lookup] = request, origin
        lookup.add_done_callback(self._lookup_ended)

    def _lookup_ended(self, task: asyncio.Future[Iterable[Download]]) -> None:
        _, origin = self._lookups.pop(task)
        if not task.cancelled() and (error := task.exception()) is None:
            self._track(task.result(), origin)
        elif not task.cancelled():
            logger.debug("speculative request not sent: %s", error)
        self.pump()

    def _track(self, downloads: Iterable[Download], origin: Origin) -> None:
        """Track the downloads that are speculative."""
        tracked = dict.fromkeys(download for download in downloads if download.is_speculative)
        self._active.update(dict.fromkeys(tracked, origin))
        self._sent.update(tracked)
