"""The only orchestrator of a read: is it known? is it here? else fetch once, hand out what arrives."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from cachedfs.catalog import Catalog
from cachedfs.chunks import ALL, Chunks, first_want
from cachedfs.errors import CachedFSError, ObjectChanged, ObjectNotFound, WrongBytes
from cachedfs.events import waiting
from cachedfs.facts import Known
from cachedfs.fetcher import Fetcher
from cachedfs.flights import Flight, FlightStopped
from cachedfs.habits import Habits
from cachedfs.model import ObjectInfo, ObjectKey, Range
from cachedfs.plan.blocks import align, clip, covering
from cachedfs.source import Source

__all__ = ["TRIES", "Reader"]

logger = logging.getLogger("cachedfs.reader")

TRIES = 3  # versions that a read in one call begins with: what was known may be old, and the next one be replaced too
POLL_S = 0.002, 0.05  # shortest and longest wait between two looks at a block that another process fetches
HITS_INLINE = 4  # more cached blocks than this are copied in a thread, so that the loop serves others


class Reader:
    """Reads and writes the objects of one source.

    `cached` and `cached_range` answer at once from what is here, in any thread: no loop, no request. The coroutines run on
    the engine's loop only (`engine.run`, `engine.hop`).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.fetcher = Fetcher(source)
        self.catalog = Catalog(source, self.fetcher)
        self.chunks = Chunks(source, self.fetcher, self.catalog)
        self._awaited = self.chunks.awaited
        self.habits = Habits(source, self.fetcher)

    # What is here.

    def cached(self, path: str, start: int | None, stop: int | None, *, nowait: bool = False) -> bytes | None:
        """Return `[start:stop]` of an object when all of it is here; None when the origin must be asked.

        `nowait`: raise BlockingIOError instead of waiting for the disk.
        """
        if is_awaited := path in self._awaited:
            self.chunks.reached(path, start, stop)
            if self.source.facts.in_memory(path) is None:
                return None  # asked for by this process, and not answered yet
        known = self.source.existing(path)
        key = None if known is None else self.source.key(known)
        if known is None or key is None:
            return None
        size = known.object.size
        assert size is not None  # what has a key has a size
        want = clip(start, stop, size)
        data = self._landed(key, want) if is_awaited else None
        if data is None:
            data = self.cached_range(key, want, nowait=nowait)
        followed = self.source.engine.followed
        if followed and data is not None and want.stop > followed.get(key.digest, size):
            self.source.engine.call_soon(self.habits.went_on, known, key, want)
        return data

    def cached_ranges(
        self, path: str, ranges: Sequence[tuple[int | None, int | None]]
    ) -> list[bytes | OSError | None]:
        """Return what `cached` does of several ranges of one object, and errors in their places: looked up once."""
        if len(ranges) < 2 or path in self._awaited:
            return [self._or_error(path, *bounds) for bounds in ranges]
        try:
            known = self.source.existing(path)
        except ObjectNotFound as error:
            return [error] * len(ranges)
        key = None if known is None else self.source.key(known)
        if known is None or key is None:
            return [None] * len(ranges)
        size = known.object.size
        assert size is not None  # what has a key has a size
        found: list[bytes | OSError | None] = []
        furthest = Range(0, 0)
        for start, stop in ranges:
            want = clip(start, stop, size)
            try:
                data = self.cached_range(key, want)
            except OSError as error:
                found.append(error)
                continue
            found.append(data)
            if data is not None and want.stop > furthest.stop:
                furthest = want
        followed = self.source.engine.followed
        if followed and furthest.stop > followed.get(key.digest, size):
            self.source.engine.call_soon(self.habits.went_on, known, key, furthest)
        return found

    def _or_error(self, path: str, start: int | None, stop: int | None) -> bytes | OSError | None:
        try:
            return self.cached(path, start, stop)
        except OSError as error:
            return error

    def opened(self, path: str) -> None:
        """Note that a handle will read an object that is known; from any thread."""
        if path in self._awaited:
            self.chunks.reached(path, 0, self.source.config.block_size)

    def _landed(self, key: ObjectKey, want: Range) -> bytes | None:
        """Return the bytes of `want` when a request that is over brought all of them and they are not on the disk yet."""
        engine = self.source.engine
        flight = engine.flights.get(key.name(want.start // key.block_size))
        if flight is None or not flight.done or flight.error is not None or flight.refused:
            return None
        if want.start < flight.start or flight.filled < want.stop:
            return None
        try:
            data = flight.copy(want)
        except FlightStopped:  # they have just been stored
            return None
        blocks = covering(want, key.block_size)
        for index in blocks:
            engine.cache.touch(key, index)
        engine.hits += len(blocks)
        engine.bytes_served += want.size
        return data

    def cached_range(self, key: ObjectKey, want: Range, *, nowait: bool = False) -> bytes | None:
        """Return the bytes of `want` when all of them are here; see `cached`."""
        engine, size = self.source.engine, key.block_size
        first = want.start // size
        if want.stop <= (first + 1) * size:
            if want.start == want.stop:
                return b""
            data = engine.cache.read(
                key,
                first,
                want.start - first * size,
                want.stop - first * size,
                nowait=nowait,
                verify=self.source.config.verify_always,
            )
            if data is None or len(data) != want.size:
                return None
            engine.hits += 1
            engine.bytes_served += want.size
            return data
        blocks = covering(want, size)
        if not all(engine.cache.has(key, index) for index in blocks):
            return None
        out = Assembly(want)
        if not all(self._copy(key, index, out, nowait=nowait) for index in blocks):
            return None
        engine.hits += len(blocks)
        engine.bytes_served += want.size
        return out.finish()

    def _copy(self, key: ObjectKey, index: int, out: Assembly, *, nowait: bool = False) -> bool:
        """Copy one block into place; False for a miss."""
        place, offset = out.place(index, key.block_size)
        # Let go of here: a view that is collected with the frames of an error, after its BytesIO, is an error
        # itself in Python 3.13.
        with place:
            n = self.source.engine.cache.read_into(
                key, index, offset, place, nowait=nowait, verify=self.source.config.verify_always
            )
            if (
                0 <= n < len(place)
            ):  # sound, but shorter than the object says: found, and found too short, for ever
                self.source.engine.cache.refuse(key, index)
            return n == len(place)

    async def open(self, path: str) -> tuple[Known, Flight | None]:
        """Return the version that a new handle reads, and the request that already brings its first bytes, if any.

        Returns at the headers: one request for an unknown object, none for a known one.
        """
        want, block_size = Range(0, self.source.config.whole_request), self.source.config.block_size
        self.chunks.told(path, 0, block_size)
        with waiting(path):
            known, flight = await self.catalog.resolve(path, want, demand=block_size)
        if known.info is None:
            raise await self._missing(known)
        if known.info.kind == "directory":
            raise self.source.is_a_folder(path)
        return known, flight

    # What has to be fetched.

    async def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return `[start:stop]` of one version of an object, fetching what is not here.

        A version that is replaced between the question and the read, or that came with wrong bytes, is asked for again.
        """
        with waiting(path, start, stop):
            return await self._read(path, start, stop)

    async def _read(self, path: str, start: int | None, stop: int | None) -> bytes:
        config = self.source.config
        want = first_want(start, stop, config.block_size, config.whole_request)
        self.chunks.told(path, start, stop)
        for tries_left in reversed(range(TRIES)):
            known, flight = await self.catalog.resolve(path, want, demand=ALL)
            if known.info is None:
                raise self.source.not_found(path, known)
            try:
                return await self._collect(known, start, stop, flight)
            except (ObjectChanged, WrongBytes):
                if not tries_left:
                    raise
                self.source.facts.expire(path)
        raise AssertionError("unreachable")

    async def collect(
        self, known: Known, start: int | None, stop: int | None, flight: Flight | None = None
    ) -> bytes:
        """Return `[start:stop]` of exactly the version known: blocks from the cache, from requests in flight, or new ones.

        Raises ObjectChanged when a block that is not here is not to be had any more, and WrongBytes when all of the
        object came meanwhile and is not what its checksum says.
        """
        self.chunks.told(known.path, start, stop)
        with waiting(known.path, start, stop):
            return await self._collect(known, start, stop, flight)

    async def _collect(
        self, known: Known, start: int | None, stop: int | None, flight: Flight | None
    ) -> bytes:
        info = known.info
        assert info is not None
        if info.kind == "directory":
            raise self.source.is_a_folder(known.path)
        key = self.source.key(known)
        if key is None or info.size is None:
            return await self._uncached(known, info, start, stop, flight)
        refusal = self.source.engine.refusals.last(key)
        want = clip(start, stop, info.size)
        out = Assembly(want)
        runs = _runs(
            covering(want, key.block_size), max(1, self.source.config.request_size // key.block_size)
        )
        fetched = set() if flight is None else set(covering(Range(flight.start, flight.stop), key.block_size))
        if 0 < want.size < info.size:
            self.habits.ranged(known, key, want, is_first=flight is not None)
        gate = asyncio.Semaphore(2 * self.source.config.concurrency)  # bounds the buffers of one huge read

        async def one(run: range) -> None:
            async with gate:
                await self._gather(known, key, run, out, fetched)

        if len(runs) == 1:
            await one(runs[0])
        else:
            await _all(one(run) for run in runs)
        self.source.engine.refusals.check(key, refusal)
        self.source.engine.bytes_served += want.size
        return out.finish()

    async def _gather(
        self, known: Known, key: ObjectKey, run: Iterable[int], out: Assembly, fetched: set[int]
    ) -> None:
        """Copy the blocks of `run` into place, from wherever they come first; those that are `fetched` are no hits."""
        engine, pending, pause = self.source.engine, list(run), POLL_S[0]
        while pending:
            taken = await self._take_cached(key, pending, out)
            pending = [index for index in pending if index not in taken]
            flights = self.fetcher.launch(known, key, pending)
            here = {i for i, flight in flights.items() if flight.filled >= out.part(i, key.block_size).stop}
            engine.hits += len((taken | here) - fetched)
            fetched.update(pending)
            again = []
            for index in pending:
                flight = flights.get(index)
                try:
                    if flight is None:
                        raise FlightStopped  # another process fetches it, or it has just been stored
                    want = out.part(index, key.block_size)
                    await flight.arrival(want.stop)
                    out.fill(want, flight.piece(want))
                    engine.cache.touch(key, index)
                except FlightStopped:
                    again.append(index)
            pending = again
            if pending:
                await asyncio.sleep(pause)
                pause = min(2 * pause, POLL_S[1])

    async def _take_cached(self, key: ObjectKey, indexes: list[int], out: Assembly) -> set[int]:
        """Copy the blocks that are on the disk into place; return which these are."""
        cache = self.source.engine.cache
        here = [i for i in indexes if key.name(i) not in self.source.engine.flights and cache.has(key, i)]

        def copy() -> set[int]:
            return {index for index in here if self._copy(key, index, out)}

        return copy() if len(here) <= HITS_INLINE else await asyncio.to_thread(copy)

    async def _uncached(
        self, known: Known, info: ObjectInfo, start: int | None, stop: int | None, flight: Flight | None
    ) -> bytes:
        """Read an object that has no fingerprint, or no size, past the cache."""
        if info.size is not None:
            want = clip(start, stop, info.size)
            if flight is not None and flight.start <= want.start and want.stop <= flight.stop:
                with contextlib.suppress(FlightStopped):  # it ended unread, before these bytes
                    await flight.arrival(want.stop)
                    return flight.copy(want)
            if want.size == 0:
                return b""
        async with self.source.origin(known.path).read(
            known.path, want if info.size is not None else None, info
        ) as reply:
            data = b"".join([piece async for piece in reply])
        self.source.engine.bytes_fetched += len(data)
        return data if info.size is not None else data[start:stop]

    async def fetch(
        self,
        known: Known,
        key: ObjectKey,
        want: Range,
        *,
        check: Callable[[], None],
        n_reads: int = 1,
        up_to: int = 0,
    ) -> Flight | None:
        """Wait for the first bytes of `want`, and send for all of it; None when they are in the cache now.

        `check` is called before anything is sent; it raises where the reader may not go on. `n_reads` of the object came
        since its last wait. `up_to`: send for more than `want`, whose bodies are read further when that is wanted.
        """
        blocks = covering(want, key.block_size)
        pause = POLL_S[0]
        check()
        self.habits.waited(known, key, blocks, n_reads=n_reads)
        if not blocks[0]:
            self.chunks.told(known.path, 0, key.block_size)
        if key.name(blocks[0]) in self.source.engine.flights:
            up_to = 0  # it is on its way: what follows is somebody's already, or will be asked for
        with waiting(known.path, want.start, want.stop):
            while True:
                check()
                wanted = [
                    i
                    for i in covering(Range(want.start, max(want.stop, up_to)), key.block_size)
                    if key.name(i) in self.source.engine.flights or not self.source.engine.cache.has(key, i)
                ]
                if not wanted or wanted[0] != blocks[0]:
                    return None
                demand = align(want, key.block_size).stop if up_to else None
                flight = self.fetcher.launch(known, key, wanted, demand=demand).get(blocks[0])
                try:
                    if flight is not None:
                        await flight.arrival(min(want.stop, flight.stop))
                        return flight
                except FlightStopped:
                    pass
                await asyncio.sleep(pause)  # another process fetches it
                pause = min(2 * pause, POLL_S[1])

    # Writes.

    async def write(
        self, paths: Iterable[str], method: str, *args: Any, tree: bool = False, **options: Any
    ) -> Any:
        """Call a method of the inner filesystem that changes `paths`; all processes of the machine see it at once.

        The marks move before and after: an answer that the origin gave before or during the write never counts.
        """
        shared, paths = self.source.engine.cache.known, list(paths)
        origin = self.source.origin(paths[0])
        shared.changed(self.source.identity, paths, tree=tree)
        try:
            return await origin.call(method, *args, **options)
        finally:
            shared.changed(self.source.identity, paths, tree=tree)

    # Errors.

    async def _missing(self, known: Known) -> CachedFSError:
        """Return why what is absent cannot be opened: it may be a folder, which only a second question tells."""
        path = known.path
        try:
            folder = await self.catalog.is_folder(path)
        except CachedFSError as error:
            logger.debug("not listed: %s", error)  # the first answer, that there is no such object, stands
            folder = False
        return self.source.is_a_folder(path) if folder else self.source.not_found(path, known)


class Assembly:
    """The bytes of one read, put together in place."""

    def __init__(self, want: Range) -> None:
        self._want = want
        # A BytesIO gives its bytes away without copying them once more; seek and write size it in one step.
        self._bytes = io.BytesIO()
        if want.size:
            self._bytes.seek(want.size - 1)
            self._bytes.write(b"\0")

    def part(self, index: int, block_size: int) -> Range:
        """Return the bytes of block `index` that are wanted."""
        return Range(
            max(self._want.start, index * block_size), min(self._want.stop, (index + 1) * block_size)
        )

    def place(self, index: int, block_size: int) -> tuple[memoryview, int]:
        """Return where the wanted bytes of block `index` belong, and their offset in the block."""
        part = self.part(index, block_size)
        start = part.start - self._want.start
        return self._bytes.getbuffer()[start : start + part.size], part.start - index * block_size

    def fill(self, part: Range, data: memoryview) -> None:
        start = part.start - self._want.start
        with self._bytes.getbuffer() as view:
            view[start : start + part.size] = data

    def finish(self) -> bytes:
        return self._bytes.getvalue()


def _runs(indexes: range, length: int) -> list[range]:
    return [indexes[i : i + length] for i in range(0, len(indexes), length)]


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error is raised, plain, after the others were cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:  # a cancellation too: no task goes on that nobody awaits
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
