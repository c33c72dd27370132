"""Every request of the process that nobody waits for yet, and when it may be sent."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from cachedfs.flights import Flight
from cachedfs.model import LinkStats
from cachedfs.origins import Origin
from cachedfs.origins.slots import AHEAD, sent_ahead
from cachedfs.plan.link import Link, Timed

__all__ = ["Ahead", "Wish"]

logger = logging.getLogger("cachedfs.engine")

MEMORY = 256 << 20  # bytes that were sent for ahead and are not on the disk yet
ONE_MORE = 1  # body on the link than it is given, as first bytes come unevenly: 96 % of it is used, not 91


class Wish(NamedTuple):
    """One request that would be worth sending. It is sent once, or forgotten.

    `size` is the memory that it takes until its blocks are stored; `send` sends it, unless what it brings is here by
    now, and returns the requests that bring it, at once or, where the object has to be looked up first, later.
    """

    owner: object  # whose it is; those of one owner go in their order
    size: int
    send: Callable[[], Iterable[Flight] | Awaitable[Iterable[Flight]]]
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


class Ahead:
    """Sends wishes while nobody has to wait for it: in slots of their own, no more bodies than fill the link, within a
    bound of memory, and as their origin has requests to spare. Owners take turns. On the engine's loop.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        # Inferred and declared ones by the id of their owner, who is in each of them; who was served last is at the end.
        # Invariant: no queue is empty.
        self._queues: tuple[dict[int, deque[Wish]], dict[int, deque[Wish]]] = {}, {}
        # What was sent, until all of it is stored or nobody has it any more.
        self._sent: WeakKeyDictionary[Flight, Origin] = WeakKeyDictionary()
        self._asking: dict[asyncio.Task[Any], tuple[Wish, Origin]] = {}
        self._links: WeakKeyDictionary[Origin, Link] = WeakKeyDictionary()
        self._timed: WeakKeyDictionary[Origin, Timed] = WeakKeyDictionary()
        self.bytes_per_s: int | None = (
            None  # as measured of the fastest way to an origin; any thread reads it
        )
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, wish: Wish) -> None:
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
        held = sum(flight.memory for flight in list(self._sent))
        return held + sum(wish.size for wish, _ in self._asking.values())

    def link(self, origin: Origin) -> Link:
        """Return what was seen of the way to an origin."""
        return self._links.get(origin) or Link()

    def link_stats(self, origin: Origin) -> LinkStats:
        """Return what was measured of the way to an origin, and nothing that is assumed of it. In any thread."""
        timed = self._timed.get(origin) or Timed()
        return LinkStats(timed.n, timed.wait_s, timed.per_s, AHEAD * origin.concurrency)

    def saw(self, origin: Origin, *, wait_s: float, size: int, took_s: float) -> None:
        """A body of `size` bytes came, `wait_s` after its request, and took so long."""
        n_others = sum(at is origin and not flight.done for flight, at in list(self._sent.items()))
        self._links[origin] = self.link(origin).after(
            wait_s=wait_s, size=size, took_s=took_s, n_others=n_others, most=origin.concurrency
        )
        timed = self._timed.get(origin) or Timed()
        self._timed[origin] = timed.after(wait_s=wait_s, size=size, took_s=took_s, n_others=n_others)
        per_s = (each.per_s for each in self._timed.values())
        self.bytes_per_s = max((int(rate) for rate in per_s if rate), default=None)

    def pump(self) -> None:
        """Send what may be sent: to be called whenever a request has ended, or blocks were stored."""
        if not any(self._queues):
            return
        for flight in [flight for flight in self._sent if not flight.memory]:
            del self._sent[flight]
        busy = self._busy()
        while (found := self._next(busy)) is not None:
            wish, origin = found
            if self._send(wish, origin):
                busy.add(origin, self.link(origin).load(wish.size))
                busy.memory += wish.size

    def _next(self, busy: _Busy) -> tuple[Wish, Origin] | None:
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

    def _head(self, queues: dict[int, deque[Wish]], owner: int) -> tuple[Wish, Origin] | None:
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
        links = defaultdict(Link, self._links)
        for flight, origin in self._sent.items():
            busy.memory += flight.memory
            if not (flight.done or flight.is_wanted):
                busy.add(origin, links[origin].load(flight.stop - flight.start))
        for wish, origin in self._asking.values():
            busy.memory += wish.size
            if not wish.is_wanted():
                busy.add(origin, links[origin].load(wish.size))
        return busy

    def _origin(self, wish: Wish) -> Origin | None:
        try:
            return wish.origin()
        except Exception as error:  # of any kind: who needs it is told, and the other wishes go on
            logger.debug("not sent ahead: %s", error)
            return None

    def _may_send(self, wish: Wish, origin: Origin, busy: _Busy) -> bool:
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
        for flight in list(self._sent) if busy.memory > most else ():
            if flight.is_settled:
                busy.memory -= flight.memory
                flight.let_go()
            if busy.memory <= most:
                break
        return busy.memory <= max(0, most)

    def _look_again_in(self, wait_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.pump()

    def _send(self, wish: Wish, origin: Origin) -> bool:
        """Send a wish; return whether anything is on its way because of it."""
        with sent_ahead():
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

    def _answered(self, task: asyncio.Task[Iterable[Flight]]) -> None:
        _, origin = self._asking.pop(task)
        if not task.cancelled() and (error := task.exception()) is None:
            self._note(task.result(), origin)
        elif not task.cancelled():
            logger.debug("not sent ahead: %s", error)
        self.pump()

    def _note(self, flights: Iterable[Flight], origin: Origin) -> bool:
        """Count what was sent, but for requests that are not ours: somebody waited for them before."""
        ours = [flight for flight in flights if flight.is_ahead]
        self._sent.update(dict.fromkeys(ours, origin))
        return bool(ours)


async def _awaited(answer: Awaitable[Iterable[Flight]]) -> Iterable[Flight]:
    return await answer
