"""The only orchestrator: is it known? is it here? else ask once, hand out what arrives, store it behind."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cachedfs.config import Config
from cachedfs.engine import Engine, engine_for
from cachedfs.errors import (
    CachedFSError,
    IsAFolder,
    ObjectChanged,
    ObjectNotFound,
    OriginUnavailable,
)
from cachedfs.facts import Facts, Known
from cachedfs.flights import Flight, FlightStopped
from cachedfs.model import BlockKey, ObjectInfo, ObjectKey, Range, Suffix
from cachedfs.origins import Origin, Reply, identity_of
from cachedfs.plan.blocks import align, block_range, clip, covering, merge
from cachedfs.plan.freshness import is_fresh
from cachedfs.writebehind import Arrived

__all__ = ["Reader"]

logger = logging.getLogger("cachedfs.reader")

T = TypeVar("T")

PATIENCE_S = 0.2  # how long a request waits, unread, for its handle to read on
POLL_S = 0.002, 0.05  # shortest and longest wait between two looks at a block that another process fetches
HITS_INLINE = 4  # more cached blocks than this are copied in a thread, so that the loop serves others


class Reader:
    """Reads the objects of one origin through the cache.

    Cheap to make: engine, origin and inner filesystem come with the first need. The plain methods answer at once from
    what is here, in any thread; the coroutines run on the engine's loop only (`engine.run`, `engine.hop`).
    """

    def __init__(
        self, protocol: str, options: Mapping[str, Any], config: Config, url: Callable[[str], str]
    ) -> None:
        self.protocol = protocol
        self.options = options
        self.config = config
        self.url = url  # a path's full URL, for messages
        self.identity = identity_of(protocol, options)
        self._engine: Engine | None = None
        self._facts: Facts | None = None
        self._warned_stale = False

    # What belongs to the process.

    @property
    def engine(self) -> Engine:
        engine = self._engine
        if engine is None or engine.pid != os.getpid():
            engine = self._engine = engine_for(self.config)
            self._facts = engine.facts(self.identity)
        return engine

    @property
    def facts(self) -> Facts:
        _ = self.engine
        assert self._facts is not None
        return self._facts

    @property
    def origin(self) -> Origin:
        if self.config.offline:
            raise OriginUnavailable(f"{self.url('')}: offline=True forbids calling the origin")
        return self.engine.origin(self.protocol, self.options, concurrency=self.config.concurrency)

    # Answers from what is here: no loop, no request.

    def fresh(self, path: str) -> Known | None:
        """Return what is known of `path` and young enough to count."""
        known = self.facts.get(path)
        if known is None or not self._is_fresh(known):
            return None
        return known

    def existing(self, path: str) -> Known | None:
        """Return what is known of the object or folder; raises ObjectNotFound for a known absence."""
        known = self.fresh(path)
        if known is not None and known.info is None:
            raise self._not_found(path)
        return known

    def cached(self, path: str, start: int | None, stop: int | None, *, nowait: bool = False) -> bytes | None:
        """Return `[start:stop]` of an object when all of it is here; None when the origin must be asked.

        `nowait`: raise BlockingIOError instead of waiting for the disk.
        """
        known = self.existing(path)
        key = known and self.key(known)
        if known is None or key is None:
            return None
        assert known.info is not None
        assert known.info.size is not None
        want = clip(start, stop, known.info.size)
        return self._from_cache(key, want, nowait=nowait)

    def _from_cache(self, key: ObjectKey, want: Range, *, nowait: bool = False) -> bytes | None:
        engine, size = self.engine, key.block_size
        first = want.start // size
        verify = self.config.verify_always
        if want.stop <= (first + 1) * size:
            if want.start == want.stop:
                return b""
            data = engine.cache.read(
                key, first, want.start - first * size, want.stop - first * size, nowait=nowait, verify=verify
            )
            if data is not None:
                engine.hits += 1
                engine.bytes_served += len(data)
            return data
        blocks = covering(want, size)
        if not all(engine.cache.has(key, index) for index in blocks):
            return None
        out = Assembly(want)
        for index in blocks:
            place, offset = out.place(index, size)
            if engine.cache.read_into(key, index, offset, place, nowait=nowait, verify=verify) != len(place):
                return None
        engine.hits += len(blocks)
        engine.bytes_served += want.size
        return out.finish()

    def key(self, known: Known) -> ObjectKey | None:
        """Return the key of the version known; None for what cannot be cached."""
        return known.key(self.identity, self.config.block_size)

    def _is_fresh(self, known: Known) -> bool:
        return is_fresh(
            known.checked_at,
            time.time(),
            lifetime_s=self.config.lifetime_s,
            absence=known.info is None and not known.by_listing,
        )

    # What is it?

    async def know(self, path: str) -> ObjectInfo:
        """Return what `path` is; asks when that is unknown or too old. Raises ObjectNotFound."""
        known = self.fresh(path) or await self._ask(path)
        if known.info is None:
            raise self._not_found(path)
        return known.info

    async def open(self, path: str) -> tuple[Known, Flight | None]:
        """Return the version that a new handle reads, and the request that already brings its first bytes, if any.

        Returns at the headers: one request for an unknown object, none for a known one.
        """
        want = Range(0, max(self.config.request_size, self.config.block_size))
        known, flight = await self._resolve(path, want, demand=self.config.block_size)
        if known.info is None:
            raise await self._missing(path)
        if known.info.kind == "directory":
            raise IsAFolder(f"{self.url(path)} is a folder: open one of the objects in it (ls shows them)")
        return known, flight

    async def _resolve(self, path: str, want: Range | Suffix, *, demand: int) -> tuple[Known, Flight | None]:
        """Return what `path` is; the question is the read of `want` itself where that is cheapest.

        `demand`: how far into the object that read may go by itself.
        """
        known = self.fresh(path)
        if known is not None:
            return known, None
        old = self.facts.get(path)
        key = old and self.key(old)
        if self.config.offline or (key is not None and self.engine.cache.has(key, 0)):
            return await self._ask(path), None  # too old, but probably unchanged: ask without a body
        return await self._once(path, lambda: self._ask_by_reading(path, want, demand, old))

    async def _ask(self, path: str) -> Known:
        """Ask the origin what `path` is now."""
        known, _ = await self._once(path, lambda: self._lookup(path, self.facts.get(path)))
        return known

    async def _once(
        self, path: str, ask: Callable[[], Coroutine[Any, Any, tuple[Known, Flight | None]]]
    ) -> tuple[Known, Flight | None]:
        """Ask, or wait for the answer to the same question that somebody in this process asked already.

        With max_age=0 everyone asks for himself: the answer on its way may be older than this question.
        """
        if self.config.lifetime_s == 0:
            return await ask()
        asking = self.engine.asking
        slot = (self.identity, path)
        task = asking.get(slot)
        if task is None:
            task = asking[slot] = self.engine.spawn(ask())
            task.add_done_callback(lambda _: asking.pop(slot, None))
        return await asyncio.shield(task)

    async def _lookup(self, path: str, old: Known | None) -> tuple[Known, Flight | None]:
        if (standby := self._standby(path, old)) is not None:
            return standby, None
        now, mark = time.time(), self.facts.mark(path)
        info: ObjectInfo | None = None
        try:
            info = await self.origin.lookup(path)
        except ObjectNotFound:
            pass
        except OriginUnavailable as error:
            return self._despite(error, old), None
        return self.facts.learn(path, info, checked_at=now, mark=mark), None

    async def _ask_by_reading(
        self, path: str, want: Range | Suffix, demand: int, old: Known | None
    ) -> tuple[Known, Flight | None]:
        """Send the read of `want` and learn from its headers what the object is.

        Across processes one asks, the others wait for the fact: their reads then meet the claims on its blocks.
        """
        if (standby := self._standby(path, old)) is not None:
            return standby, None
        claim = ObjectKey(self.identity, path, "what is it?", 0).hash64(0)
        cache = self.engine.cache
        pause = POLL_S[0]
        while self.config.lifetime_s > 0 and not cache.take_claim(claim):
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
            if (known := self.fresh(path)) is not None:
                return known, None
        try:
            if (known := self.fresh(path)) is not None:
                return known, None
            flight = Flight(demand=demand)
            learnt: list[Known] = []
            self.engine.spawn(self._fly(flight, self._unknown(flight, path, want, learnt)))
            try:
                await flight.began()
            except ObjectNotFound:
                return learnt[0], None
            except OriginUnavailable as error:
                return self._despite(error, old), None
            return learnt[0], flight
        finally:
            if self.config.lifetime_s > 0:
                self.engine.writer.after_facts(lambda: cache.drop_claim(claim))

    def _standby(self, path: str, old: Known | None) -> Known | None:
        """Return the old fact while the origin may not or cannot be asked; raises when there is none."""
        if not self.config.offline and not self.engine.is_away(self.identity):
            return None
        if old is not None and old.info is not None and (self.config.offline or self.config.stale_if_error):
            return old
        if self.config.offline:
            raise OriginUnavailable(
                f"{self.url(path)} is not in the cache, and offline=True forbids asking for it"
            )
        return None

    def _despite(self, error: OriginUnavailable, old: Known | None) -> Known:
        """Return the known version although the origin is away, or raise that it is."""
        self.engine.mark_away(self.identity)
        if old is None or old.info is None or not self.config.stale_if_error:
            raise error
        if not self._warned_stale:
            self._warned_stale = True
            logger.warning(
                "%s; serving the versions known to the cache (stale_if_error=False forbids it)", error
            )
        return old

    # The bytes.

    async def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return `[start:stop]` of one version of an object, fetching what is not here.

        A version that is replaced between the question and the read is asked for once more.
        """
        for last in (False, True):
            known, flight = await self._resolve(path, *self._first_want(start, stop))
            if known.info is None:
                raise self._not_found(path)
            try:
                return await self.collect(known, start, stop, flight)
            except ObjectChanged:
                if last:
                    raise
                self.facts.expire(path)
        raise AssertionError("unreachable")

    def _first_want(self, start: int | None, stop: int | None) -> tuple[Range | Suffix, int]:
        """Return what to ask of an object of unknown size to serve `[start:stop]`, and how far to read it."""
        size, most = self.config.block_size, max(self.config.request_size, self.config.block_size)
        if start is not None and start < 0:
            suffix = Suffix(
                -start + size - 1
            )  # whichever its size, the blocks of the last -start bytes are whole
            return suffix, 1 << 62
        first = (start or 0) - (start or 0) % size
        if stop is None or stop < 0:
            return Range(first, first + most), 1 << 62
        want = align(Range(first, max(first + 1, stop)), size)
        return Range(want.start, min(want.stop, want.start + most)), 1 << 62

    async def collect(
        self, known: Known, start: int | None, stop: int | None, flight: Flight | None = None
    ) -> bytes:
        """Return `[start:stop]` of exactly the version known: blocks from the cache, from requests in flight, or new ones.

        Raises ObjectChanged when a block that is not here is not to be had any more.
        """
        info = known.info
        assert info is not None
        if info.kind == "directory":
            raise IsAFolder(f"{self.url(known.path)} is a folder, not an object")
        key = self.key(known)
        if key is None or info.size is None:
            return await self._uncached(known, info, start, stop, flight)
        want = clip(start, stop, info.size)
        out = Assembly(want)
        runs = _runs(covering(want, key.block_size), max(1, self.config.request_size // key.block_size))
        gate = asyncio.Semaphore(2 * self.config.concurrency)  # bounds the buffers of one huge read

        async def one(run: range) -> None:
            async with gate:
                await self._gather(known, key, run, out)

        if len(runs) == 1:
            await one(runs[0])
        else:
            await _all(one(run) for run in runs)
        self.engine.bytes_served += want.size
        return out.finish()

    async def _gather(self, known: Known, key: ObjectKey, run: Sequence[int], out: Assembly) -> None:
        """Copy the blocks of `run` into place, from wherever they come first."""
        pending, pause = list(run), POLL_S[0]
        while pending:
            pending = await self._take_cached(key, pending, out)
            flights = self.launch(known, key, pending)
            again = []
            for index in pending:
                flight = flights.get(index)
                try:
                    if flight is None:
                        raise FlightStopped  # another process fetches it, or it has just been stored
                    want = out.part(index, key.block_size)
                    await flight.arrival(want.stop)
                    out.fill(want, flight.piece(want))
                except FlightStopped:
                    again.append(index)
            pending = again
            if pending:
                await asyncio.sleep(pause)
                pause = min(2 * pause, POLL_S[1])

    async def _take_cached(self, key: ObjectKey, indexes: list[int], out: Assembly) -> list[int]:
        """Copy the blocks that are on the disk into place; return the others."""
        cache = self.engine.cache
        here = [i for i in indexes if key.name(i) not in self.engine.flights and cache.has(key, i)]
        if not here:
            return indexes

        def copy() -> set[int]:
            done = set()
            for index in here:
                place, offset = out.place(index, key.block_size)
                if cache.read_into(key, index, offset, place, verify=self.config.verify_always) == len(place):
                    done.add(index)
            return done

        done = copy() if len(here) <= HITS_INLINE else await asyncio.to_thread(copy)
        self.engine.hits += len(done)
        return [i for i in indexes if i not in done]

    async def _uncached(
        self, known: Known, info: ObjectInfo, start: int | None, stop: int | None, flight: Flight | None
    ) -> bytes:
        """Read an object that has no fingerprint, or no size, past the cache."""
        if info.size is not None:
            want = clip(start, stop, info.size)
            if flight is not None and flight.start <= want.start and want.stop <= flight.stop:
                await flight.arrival(want.stop)
                return bytes(flight.piece(want))
            if want.size == 0:
                return b""
        async with self.origin.read(known.path, want if info.size is not None else None, info) as reply:
            data = b"".join([piece async for piece in reply])
        self.engine.bytes_fetched += len(data)
        return data if info.size is not None else data[start:stop]

    # Requests.

    def launch(self, known: Known, key: ObjectKey, indexes: Iterable[int]) -> dict[int, Flight]:
        """Send the requests for those blocks that nobody fetches yet; return the flights that bring each block.

        Adjacent blocks share a request. A block that is not in the answer is being fetched by another process, or
        has just been stored. Claims are held from here until the block is stored or given up. On the loop.
        """
        engine, info = self.engine, known.info
        assert info is not None
        assert info.size is not None
        flights: dict[int, Flight] = {}
        mine = []
        for index in indexes:
            flight = engine.flights.get(key.name(index))
            if flight is not None and flight.covers(index * key.block_size):
                flights[index] = flight
            elif flight is None and engine.cache.take_claim(key.hash64(index)):
                if engine.cache.has(key, index):  # stored between the look and the claim
                    engine.cache.drop_claim(key.hash64(index))
                else:
                    mine.append(index)
        for bytes_ in merge(mine, key.block_size, size=info.size, request_size=self.config.request_size):
            flight = self._launch_one(known, key, info, bytes_)
            flights.update(dict.fromkeys(covering(bytes_, key.block_size), flight))
        return flights

    def _launch_one(self, known: Known, key: ObjectKey | None, info: ObjectInfo, bytes_: Range) -> Flight:
        flight = Flight(demand=bytes_.stop)
        flight.begin(info, key, bytes_)
        if key is not None:
            for index in covering(bytes_, key.block_size):
                self.engine.flights[key.name(index)] = flight
        self._make_room_in_the_air()
        self.engine.spawn(self._fly(flight, self._pinned(flight, known.path, info, bytes_)))
        return flight

    async def fetch(self, known: Known, key: ObjectKey, want: Range) -> Flight | None:
        """Wait for the first bytes of `want`, and send for all of it; None when they are in the cache now."""
        blocks = covering(want, key.block_size)
        pause = POLL_S[0]
        while True:
            wanted = [
                i for i in blocks if key.name(i) in self.engine.flights or not self.engine.cache.has(key, i)
            ]
            if not wanted or wanted[0] != blocks[0]:
                return None
            flight = self.launch(known, key, wanted).get(blocks[0])
            try:
                if flight is not None:
                    await flight.arrival(min(want.stop, flight.stop))
                    return flight
            except FlightStopped:
                pass
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_S[1])

    def launch_ahead(self, known: Known, key: ObjectKey, blocks: Iterable[int]) -> None:
        """Send the requests for blocks that a reader will probably want next. On the loop."""
        if not self.config.offline:
            self.launch(known, key, [i for i in blocks if not self.engine.cache.has(key, i)])

    def launch_uncached(self, known: Known, position: int) -> Flight:
        """Send a request from `position` on for an object that has no fingerprint: one handle's alone."""
        info = known.info
        assert info is not None
        assert info.size is not None
        bytes_ = Range(position, min(info.size, position + self.config.request_size))
        return self._launch_one(known, None, info, bytes_)

    def _make_room_in_the_air(self) -> None:
        """Stop requests that wait for their handles to read on, when a new one would have to wait for them."""
        if len(self.engine.airborne) >= self.config.concurrency:
            for flight in self.engine.airborne:
                if flight.paused:
                    flight.stop_soon(flight.filled)

    async def _fly(self, flight: Flight, request: Coroutine[Any, Any, None]) -> None:
        """Run one request to its end and tell those who wait how it ended."""
        self.engine.airborne.add(flight)
        error: CachedFSError | None = None
        try:
            await request
        except CachedFSError as failure:
            error = failure
        except OSError as failure:  # of a kind that no origin names: still an answer, with the URL on top
            error = CachedFSError(f"{self.url(flight.info.path if flight.info else '')}: {failure}")
            error.__cause__ = failure
        finally:
            self.engine.airborne.discard(flight)
            self._give_up_the_rest(flight)
            flight.finish(error)

    def _give_up_the_rest(self, flight: Flight) -> None:
        """Let go of the blocks that did not arrive."""
        if flight.key is None or flight.info is None or not flight.info.size:
            return
        size = flight.key.block_size
        for index in covering(Range(flight.start, flight.stop), size):
            bytes_ = block_range(index, size, flight.info.size)
            whole = flight.start <= bytes_.start and bytes_.stop <= flight.filled
            if not whole and self.engine.flights.get(flight.key.name(index)) is flight:
                self.engine.give_up(flight.key.name(index), flight.key.hash64(index))

    async def _pinned(self, flight: Flight, path: str, info: ObjectInfo, bytes_: Range) -> None:
        async with self.origin.read(path, bytes_, info) as reply:
            await self._pump(flight, reply)

    async def _unknown(self, flight: Flight, path: str, want: Range | Suffix, learnt: list[Known]) -> None:
        now, mark = time.time(), self.facts.mark(path)
        self._make_room_in_the_air()
        try:
            async with self.origin.read(path, want, None) as reply:
                known = self.facts.learn(path, reply.info, checked_at=now, mark=mark)
                learnt.append(known)
                key = self.key(known)
                flight.begin(reply.info, key, Range(reply.start, reply.stop))
                if key is not None:
                    self._register(flight, key)
                await self._pump(flight, reply)
        except ObjectNotFound:
            if not learnt:
                learnt.append(self.facts.learn(path, None, checked_at=now, mark=mark))
            raise

    def _register(self, flight: Flight, key: ObjectKey) -> None:
        """Announce the whole blocks that a request for an unknown object turned out to bring."""
        engine = self.engine
        for index in covering(Range(flight.start, flight.stop), key.block_size):
            if index * key.block_size >= flight.start and key.name(index) not in engine.flights:
                engine.cache.take_claim(key.hash64(index))  # taken elsewhere: then it comes twice, once
                engine.flights[key.name(index)] = flight

    async def _pump(self, flight: Flight, reply: Reply) -> None:
        """Take the body as fast as somebody wants it, and pass on every block that is whole."""
        engine, key, info = self.engine, flight.key, flight.info
        assert info is not None
        size = key.block_size if key is not None else self.config.block_size
        index = -(-flight.start // size)
        async for data in reply:
            flight.feed(data)
            engine.bytes_fetched += len(data)
            while key is not None and (bytes_ := _whole(index, size, info.size, flight.filled)) is not None:
                if engine.flights.get(key.name(index)) is flight:
                    engine.landed(Arrived(BlockKey(key, index), flight.piece(bytes_), self.config.bounds))
                index += 1
            if not await flight.may_go_on(PATIENCE_S):
                return
            await engine.room()

    # Listings.

    async def listing(self, folder: str) -> list[ObjectInfo]:
        """Return the children of `folder` by name; the object itself for an object. Raises ObjectNotFound."""
        here = self._listed(folder)
        if here is not None:
            return here
        known = self.fresh(folder)
        if known is not None and known.info is not None and known.info.kind == "file":
            return [known.info]
        children = await self._list(folder, deep=False)
        if not children:
            info = await self.know(folder)
            return [info] if info.kind == "file" else []
        return children

    async def find(self, folder: str) -> list[ObjectInfo]:
        """Return all objects below `folder`, and the folders between, by name."""
        here = self._listed_below(folder)
        if here is not None:
            return here
        return await self._list(folder, deep=True)

    async def _list(self, folder: str, *, deep: bool) -> list[ObjectInfo]:
        """Ask for a listing, one level or all, and remember it with every child it names."""
        cache, now = self.engine.cache, time.time()
        epoch = cache.epoch(self.identity)
        found: list[ObjectInfo] = []
        try:
            async for info in self.origin.list(folder, deep=deep):
                found.append(info)
        except OriginUnavailable:
            self.engine.mark_away(self.identity)
            raise
        listings = _by_folder(folder, found)
        await asyncio.to_thread(self._keep_listings, listings, now, epoch)
        return sorted(
            (child for children in listings.values() for child in children), key=lambda info: info.path
        )

    def _keep_listings(self, listings: dict[str, list[ObjectInfo]], now: float, epoch: int) -> None:
        cache = self.engine.cache
        paths = {info.path for children in listings.values() for info in children}
        marks = {path: cache.mark(self.identity, path) for path in paths}
        marks_of_folders = {folder: cache.listing_mark(self.identity, folder) for folder in listings}
        if cache.epoch(self.identity) != epoch:
            return  # something was written while the origin answered: the answer is given, not kept
        cache.keep_listings(
            self.identity, listings, checked_at=now, marks=marks, folder_marks=marks_of_folders
        )

    def _listed(self, folder: str) -> list[ObjectInfo] | None:
        """Return a listing that is here and young enough."""
        listing = self.engine.cache.listing(self.identity, folder)
        if listing is None or listing.mark != self.engine.cache.listing_mark(self.identity, folder):
            return None
        if is_fresh(listing.checked_at, time.time(), lifetime_s=self.config.lifetime_s):
            return sorted(listing.infos, key=lambda info: info.path)
        return None

    def _listed_below(self, folder: str) -> list[ObjectInfo] | None:
        """Return all that is below `folder` when every listing of it is here."""
        children = self._listed(folder)
        if children is None:
            return None
        found = []
        for child in children:
            found.append(child)
            if child.kind == "directory":
                below = self._listed_below(child.path)
                if below is None:
                    return None
                found += below
        return sorted(found, key=lambda info: info.path)

    # Writes.

    async def write(
        self, paths: Iterable[str], method: str, *args: Any, tree: bool = False, **options: Any
    ) -> Any:
        """Call a method of the inner filesystem that changes `paths`; all processes of the machine see it at once.

        The marks move before and after: an answer that the origin gave before or during the write never counts.
        """
        cache, paths = self.engine.cache, list(paths)
        cache.changed(self.identity, paths, tree=tree)
        try:
            return await self.origin.call(method, *args, **options)
        finally:
            cache.changed(self.identity, paths, tree=tree)

    # Errors.

    def _not_found(self, path: str) -> ObjectNotFound:
        return ObjectNotFound(f"{self.url(path)}: no such object")

    async def _missing(self, path: str) -> CachedFSError:
        """Return why `path` cannot be opened: it may be a folder, which only a second question tells."""
        try:
            async for _ in self.origin.list(path):
                return IsAFolder(
                    f"{self.url(path)} is a folder: open one of the objects in it (ls shows them)"
                )
        except CachedFSError as error:
            logger.debug("not listed: %s", error)  # the first answer, that there is no such object, stands
        return self._not_found(path)


class Assembly:
    """The bytes of one read, put together in place."""

    def __init__(self, want: Range) -> None:
        self._want = want
        # A BytesIO gives its bytes away without copying them once more; seek and write size it in one step.
        self._bytes = io.BytesIO()
        if want.size:
            self._bytes.seek(want.size - 1)
            self._bytes.write(b"\0")
        self._view = self._bytes.getbuffer()

    def part(self, index: int, block_size: int) -> Range:
        """Return the bytes of block `index` that are wanted."""
        return Range(
            max(self._want.start, index * block_size), min(self._want.stop, (index + 1) * block_size)
        )

    def place(self, index: int, block_size: int) -> tuple[memoryview, int]:
        """Return where the wanted bytes of block `index` belong, and their offset in the block."""
        part = self.part(index, block_size)
        start = part.start - self._want.start
        return self._view[start : start + part.size], part.start - index * block_size

    def fill(self, part: Range, data: memoryview) -> None:
        start = part.start - self._want.start
        self._view[start : start + part.size] = data

    def finish(self) -> bytes:
        self._view.release()
        return self._bytes.getvalue()


def _whole(index: int, block_size: int, size: int | None, filled: int) -> Range | None:
    """Return the bytes of block `index` when all of them are below `filled`."""
    if size is None or index * block_size >= size:
        return None
    bytes_ = block_range(index, block_size, size)
    return bytes_ if bytes_.stop <= filled else None


def _runs(indexes: range, length: int) -> list[range]:
    return [indexes[i : i + length] for i in range(0, len(indexes), length)]


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error is raised, plain, after the others were cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _by_folder(folder: str, found: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Return the complete listings that a listing of all that is below `folder` amounts to."""
    listings: dict[str, dict[str, ObjectInfo]] = {folder: {}}
    for info in found:
        child = info
        while child.path != folder:
            parent = child.path.rpartition("/")[0]
            known = child.path in listings.get(parent, {})
            listings.setdefault(parent, {}).setdefault(child.path, child)
            if child.kind == "directory":
                listings.setdefault(child.path, {})
            if known or parent == folder or not parent or not parent.startswith(folder):
                break
            child = ObjectInfo(path=parent, kind="directory", size=0)
    return {name: list(children.values()) for name, children in listings.items()}
