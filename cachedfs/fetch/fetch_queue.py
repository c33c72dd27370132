"""What is known of the way to an origin, and how many bodies may be on it before somebody has to wait for them. Pure.

Streams share a link fairly, so a read that somebody waits for is as slow as there are other bodies on it. What is sent
ahead takes so many that a read of one block takes COURTESY times as long as without them, at most; and never fewer than
FEWEST, which fill the links that are published. A request that still waits for its first byte takes nothing of the
link, so where answers are late more of them may be under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from cachedfs.common.types import LinkStats
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.origins.base import Origin
from cachedfs.origins.request_slots import SPECULATIVE_FACTOR, speculative

__all__ = ["FetchQueue", "COURTESY", "FEWEST", "LinkEstimate", "LinkTotals", "SpeculativeRequest"]


COURTESY = 1.2
FEWEST = 4
_BLOCK = 1 << 20  # what somebody may wait for; and less says little of how fast the link is
_WEIGHT = 1 / 8  # of the newest request in an average
_ROUNDS = 2  # of as many bodies as there may be, between two changes of that


class LinkEstimate(NamedTuple):
    """Seconds to the first byte, and bytes a second: of a body at best, and as they come now, `n_bodies` at a time.

    The default is between the published figures of Google Drive and of GCS in its region.
    """

    wait_s: float = 0.05
    best_per_s: float = 60e6
    per_s: float = 50e6
    n_bodies: int = FEWEST
    n_since: int = 0  # bodies that came since that changed

    @property
    def total_per_s(self) -> float:
        return self.n_bodies * self.per_s

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int, most: int) -> LinkEstimate:
        """Return what is known after a request whose body of `size` bytes took `took_s` after its first byte.

        `n_others`: the requests that were in flight with it; `most`: how many bodies there may be at all.
        """
        link = self._replace(wait_s=self.wait_s + (wait_s - self.wait_s) * _WEIGHT)
        if size < _BLOCK or took_s <= 0:
            return link
        per_s = self.per_s + (size / took_s - self.per_s) * _WEIGHT
        link = link._replace(per_s=per_s, best_per_s=max(per_s, self.best_per_s), n_since=self.n_since + 1)
        if n_others + 1 < self.n_bodies or link.n_since < _ROUNDS * self.n_bodies:
            return link  # it says nothing of so many
        step = (link._courteous() > self.n_bodies) - (link._courteous() < self.n_bodies)
        n_bodies = max(FEWEST, min(most, self.n_bodies + step))
        return link if n_bodies == self.n_bodies else link._replace(n_bodies=n_bodies, n_since=0)

    def _courteous(self) -> int:
        """Return how many bodies leave a block its share, if the link is full now; else there will be more."""
        alone_s = self.wait_s + _BLOCK / self.best_per_s
        least_per_s = _BLOCK / (COURTESY * alone_s - self.wait_s)
        return int(self.total_per_s / least_per_s) - 1

    def load(self, size: int) -> float:
        """Return how many bodies a request for `size` bytes is, on average over its life."""
        body_s = size / self.per_s
        return body_s / (self.wait_s + body_s)


class LinkTotals(NamedTuple):
    """What was measured of it, in sums; nothing is assumed, as a `Link` does that saw little yet."""

    n: int = 0
    wait_s: float = 0.0
    came: float = (
        0.0  # bytes, while bodies came whose rate says something, in all of those that shared the link
    )
    took_s: float = 0.0  # of each of these bodies

    @property
    def per_s(self) -> float | None:
        """Bytes a second of the link as it was shared; None: no body came that says it."""
        return self.came / self.took_s if self.took_s else None

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int) -> LinkTotals:
        """Return the sums with one more request, as `Link.after` is told of it."""
        timed = self._replace(n=self.n + 1, wait_s=self.wait_s + wait_s)
        if size < _BLOCK or took_s <= 0:
            return timed
        n_bodies = 1 + n_others * took_s / (wait_s + took_s)  # the others wait for their first bytes as long
        return timed._replace(came=self.came + size * n_bodies, took_s=self.took_s + took_s)


logger = logging.getLogger("cachedfs.fetch")

MEMORY = 256 << 20  # bytes that were sent for ahead and are not on the disk yet
ONE_MORE = 1  # body on the link than it is given, as first bytes come unevenly: 96 % of it is used, not 91


class SpeculativeRequest(NamedTuple):
    """One request that would be worth sending. It is sent once, or forgotten.

    `size` is the memory that it takes until its blocks are stored; `send` sends it, unless what it brings is here by
    now, and returns the requests that bring it, at once or, where the object has to be looked up first, later.
    """

    owner: object  # whose it is; those of one owner go in their order
    size: int
    send: Callable[[], Iterable[InflightRequest] | Awaitable[Iterable[InflightRequest]]]
    origin: Callable[[], Origin]
    is_declared: bool = False  # somebody said that it will be needed; what is inferred goes before
    is_wanted: Callable[[], bool] = bool  # somebody waits for it by now: then it takes none of these slots
    is_over: Callable[[], bool] = bool  # somebody fetched it meanwhile: then it is not sent any more


class _Busy:
    """What is taken of the slots, of the links and of the memory."""

    def __init__(self) -> None:
        self.requests: Counter[Origin] = Counter()  # that nobody waits for yet
        self.bodies: dict[Origin, float] = defaultdict(float)  # and how many bodies they are
        self.memory = 0

    def add(self, origin: Origin, load: float) -> None:
        self.requests[origin] += 1
        self.bodies[origin] += load


class FetchQueue:
    """Sends wishes while nobody has to wait for it: in slots of their own, no more bodies than fill the link, within a
    bound of memory, and as their origin has requests to spare. Owners take turns. On the runtime's loop.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        # Inferred and declared ones by the id of their owner, who is in each of them; who was served last is at the end.
        # Invariant: no queue is empty.
        self._queues: tuple[dict[int, deque[SpeculativeRequest]], dict[int, deque[SpeculativeRequest]]] = (
            {},
            {},
        )
        # What was sent, until all of it is stored or nobody has it any more.
        self._sent: WeakKeyDictionary[InflightRequest, Origin] = WeakKeyDictionary()
        self._asking: dict[asyncio.Task[Any], tuple[SpeculativeRequest, Origin]] = {}
        self._links: WeakKeyDictionary[Origin, LinkEstimate] = WeakKeyDictionary()
        self._timed: WeakKeyDictionary[Origin, LinkTotals] = WeakKeyDictionary()
        self.bytes_per_s: int | None = (
            None  # as measured of the fastest way to an origin; any thread reads it
        )
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, wish: SpeculativeRequest) -> None:
        """Send `wish` as soon as it may be."""
        self._queues[wish.is_declared].setdefault(id(wish.owner), deque()).append(wish)
        self.pump()

    def withdraw(self, owner: object) -> None:
        """Forget the wishes of `owner` that were not sent."""
        for queues in self._queues:
            queues.pop(id(owner), None)

    @property
    def memory(self) -> int:
        """Bytes that what was sent takes, or will."""
        held = sum(inflight.memory for inflight in list(self._sent))
        return held + sum(wish.size for wish, _ in self._asking.values())

    def link(self, origin: Origin) -> LinkEstimate:
        """Return what was seen of the way to an origin."""
        return self._links.get(origin) or LinkEstimate()

    def link_stats(self, origin: Origin) -> LinkStats:
        """Return what was measured of the way to an origin, and nothing that is assumed of it. In any thread."""
        timed = self._timed.get(origin) or LinkTotals()
        return LinkStats(timed.n, timed.wait_s, timed.per_s, SPECULATIVE_FACTOR * origin.concurrency)

    def saw(self, origin: Origin, *, wait_s: float, size: int, took_s: float) -> None:
        """A body of `size` bytes came, `wait_s` after its request, and took so long."""
        n_others = sum(at is origin and not inflight.done for inflight, at in list(self._sent.items()))
        self._links[origin] = self.link(origin).after(
            wait_s=wait_s, size=size, took_s=took_s, n_others=n_others, most=origin.concurrency
        )
        timed = self._timed.get(origin) or LinkTotals()
        self._timed[origin] = timed.after(wait_s=wait_s, size=size, took_s=took_s, n_others=n_others)
        per_s = (each.per_s for each in self._timed.values())
        self.bytes_per_s = max((int(rate) for rate in per_s if rate), default=None)

    def pump(self) -> None:
        """Send what may be sent: to be called whenever a request has ended, or blocks were stored."""
        if not any(self._queues):
            return
        for inflight in [inflight for inflight in self._sent if not inflight.memory]:
            del self._sent[inflight]
        busy = self._busy()
        while (found := self._next(busy)) is not None:
            wish, origin = found
            if self._send(wish, origin):
                busy.add(origin, self.link(origin).load(wish.size))
                busy.memory += wish.size

    def _next(self, busy: _Busy) -> tuple[SpeculativeRequest, Origin] | None:
        """Take the next wish that may be sent now, with its origin."""
        for queues in self._queues:
            for owner in list(queues):
                found = self._head(queues, owner)
                if found is None or not self._may_send(*found, busy):
                    continue
                queue = queues.pop(owner)
                queue.popleft()
                if queue:
                    queues[owner] = queue  # behind the others
                return found
        return None

    def _head(
        self, queues: dict[int, deque[SpeculativeRequest]], owner: int
    ) -> tuple[SpeculativeRequest, Origin] | None:
        """Return the first wish of an owner that is worth sending, with its origin; forget those before it."""
        queue = queues[owner]
        while queue:
            wish = queue[0]
            if not wish.is_over() and (origin := self._origin(wish)) is not None:
                return wish, origin
            queue.popleft()
        del queues[owner]
        return None

    def _busy(self) -> _Busy:
        """Return what is taken now by what was sent."""
        busy = _Busy()
        links = defaultdict(LinkEstimate, self._links)
        for inflight, origin in self._sent.items():
            busy.memory += inflight.memory
            if not (inflight.done or inflight.is_wanted):
                busy.add(origin, links[origin].load(inflight.stop - inflight.start))
        for wish, origin in self._asking.values():
            busy.memory += wish.size
            if not wish.is_wanted():
                busy.add(origin, links[origin].load(wish.size))
        return busy

    def _origin(self, wish: SpeculativeRequest) -> Origin | None:
        try:
            return wish.origin()
        except Exception as error:  # of any kind: who needs it is told, and the other wishes go on
            logger.debug("not sent ahead: %s", error)
            return None

    def _may_send(self, wish: SpeculativeRequest, origin: Origin, busy: _Busy) -> bool:
        n_requests, link = busy.requests[origin], self.link(origin)
        if n_requests >= origin.concurrency or not self._has_memory(wish.size, busy):
            return False
        if n_requests and busy.bodies[origin] + link.load(wish.size) > link.n_bodies + ONE_MORE:
            return False
        if wait_s := origin.spare_s():
            self._look_again_in(wait_s)
        return not wait_s

    def _has_memory(self, size: int, busy: _Busy) -> bool:
        """Return whether `size` bytes more may be held, after what could not be stored was let go, oldest first.

        Nobody may come for that any more, and then nothing would ever be sent ahead again.
        """
        most = MEMORY - size
        for inflight in list(self._sent) if busy.memory > most else ():
            if inflight.is_settled:
                busy.memory -= inflight.memory
                inflight.let_go()
            if busy.memory <= most:
                break
        return busy.memory <= max(0, most)

    def _look_again_in(self, wait_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.pump()

    def _send(self, wish: SpeculativeRequest, origin: Origin) -> bool:
        """Send a wish; return whether anything is on its way because of it."""
        with speculative():
            try:
                answer = wish.send()
            except Exception as error:  # of any kind: who needs it is told, and the other wishes go on
                logger.debug("not sent ahead: %s", error)
                return False
            if not isinstance(answer, Awaitable):
                return self._note(answer, origin)
            task = self._spawn(_awaited(answer))
        self._asking[task] = wish, origin
        task.add_done_callback(self._answered)
        return True

    def _answered(self, task: asyncio.Task[Iterable[InflightRequest]]) -> None:
        _, origin = self._asking.pop(task)
        if not task.cancelled() and (error := task.exception()) is None:
            self._note(task.result(), origin)
        elif not task.cancelled():
            logger.debug("not sent ahead: %s", error)
        self.pump()

    def _note(self, inflight_requests: Iterable[InflightRequest], origin: Origin) -> bool:
        """Count what was sent, but for requests that are not ours: somebody waited for them before."""
        ours = [inflight for inflight in inflight_requests if inflight.is_speculative]
        self._sent.update(dict.fromkeys(ours, origin))
        return bool(ours)


async def _awaited(answer: Awaitable[Iterable[InflightRequest]]) -> Iterable[InflightRequest]:
    return await answer
