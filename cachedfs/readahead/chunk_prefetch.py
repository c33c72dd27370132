"""Readahead across objects: fetch the next chunks of an array, or the next numbered objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from cachedfs.common.blocks import block_range, clip, covering
from cachedfs.common.types import ObjectKey, Range, Suffix
from cachedfs.fetch.fetch_queue import SpeculativeRequest
from cachedfs.fetch.fetcher import Fetcher
from cachedfs.fetch.inflight import InflightRequest, RequestStopped
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.metadata.resolver import MetadataResolver
from cachedfs.readahead.chunk_grid import METADATA, ChunkGrid, NumberedNames, Place, grids_in, numbered
from cachedfs.readahead.chunk_sequence import ChunkHistory, Extents, ahead

__all__ = ["ALL", "ChunkPrefetch", "first_want"]

ALL = 1 << 62  # a demand beyond the end of any object
MOST_SERIES = 256  # series of objects remembered
MOST_AWAITED = 20_000  # names requested ahead and not read yet
# bytes; larger metadata documents are not parsed, because that would delay the event loop
MOST_METADATA = 2 << 20
MOST_ABOVE = 8  # levels searched for metadata, from the array's folder upward


Send = Callable[[], Iterable[InflightRequest] | asyncio.Task[Iterable[InflightRequest]]]


class _Series:
    """A series of objects (the chunks of a grid, or numbered names): how they are read, and their size."""

    def __init__(self, root: str, names: ChunkGrid | NumberedNames) -> None:
        self.root = root
        self.names = names
        self.extents: Extents = names.extents if isinstance(names, ChunkGrid) else (None,)
        self.history = ChunkHistory()
        # The first range that is read of each object: `[start:stop]`.
        self.start: int | None = None
        self.stop: int | None = None
        self.is_whole = False  # earlier objects were read completely, even if `[start:stop]` is less
        self.queued: set[str] = set()  # names whose requests are queued and not sent
        self._n_seen = self._n_bytes = 0

    @property
    def asks_all(self) -> bool:
        """True when the first read of each object covers all of it."""
        return not self.start and self.stop is None

    @property
    def size(self) -> int:
        """Mean size in bytes of the objects seen; before that, of an uncompressed chunk."""
        if self._n_seen:
            return max(1, self._n_bytes // self._n_seen)
        return self.names.chunk_bytes if isinstance(self.names, ChunkGrid) else 1

    def see(self, size: int) -> None:
        self._n_seen, self._n_bytes = self._n_seen + 1, self._n_bytes + size

    def path(self, place: Place) -> str:
        return self.root + self.names.name(place)


class ChunkPrefetch:
    """Predict and fetch the next objects of each series. Event loop thread only, except `reached`.

    An object is requested only if the array's shape or a fresh metadata entry says that it exists. The
    request covers the range that was read first of its predecessors, so the next reader finds that range
    cached or in flight.
    """

    def __init__(self, source: Source, fetcher: Fetcher, resolver: MetadataResolver) -> None:
        self._source = source
        self._fetcher = fetcher
        self._catalog = resolver
        # Names requested ahead and not read yet. Any thread looks names up, and removes those it reads.
        self.awaited: dict[str, _Series] = {}
        # reads of these names that are not processed yet
        self._reached: deque[tuple[str, int | None, int | None]] = deque()
        self._is_told = False  # a call that processes them is scheduled on the event loop
        self._series: dict[str | NumberedNames, _Series] = {}
        self._unsure: set[str] = set()  # arrays whose metadata was read again since they were parsed
        self._no_arrays: set[str] = set()  # folders without an array, according to the cached metadata
        self._documents: dict[str, tuple[ObjectKey, dict[str, ChunkGrid]]] = {}

    def reached(self, path: str, start: int | None, stop: int | None) -> None:
        """Record a read of a name that was requested ahead, even if it is already cached. From any thread."""
        if self.awaited.pop(path, None) is None:
            return
        self._reached.append((path, start, stop))
        if not self._is_told:  # otherwise a call is scheduled already
            self._is_told = True
            self._source.runtime.call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._is_told = False  # first, so that a read recorded from now on schedules another call
        while self._reached:
            self._told(*self._reached.popleft())

    def observe(self, path: str, start: int | None = None, stop: int | None = None) -> None:
        """Record a read of `[start:stop]` of `path`, and request what will probably be read next."""
        self._tell_all()
        self._told(path, start, stop)

    def _told(self, path: str, start: int | None, stop: int | None) -> None:
        self.awaited.pop(path, None)
        if not self._is_on():
            return
        if path.endswith(METADATA):
            self._doubt(path)
            return
        if start is not None and start > 0:
            return  # a read inside an object says nothing about the next object
        found = self._find(path)
        if found is None:
            return
        series, place = found
        before = series.history
        series.history = before.after(place, series.extents)
        if series.history is before:
            return  # read a moment ago
        series.start, series.stop = start, stop
        series.is_whole = series.asks_all or self._was_whole(series)
        if series.history.misled > before.misled:
            self._withdraw(series)
        if not self._look_ahead(series):
            # the request for `path` is no longer speculative, so its slot is free
            self._source.runtime.fetch_queue.pump()

    def _was_whole(self, series: _Series) -> bool:
        """Return whether all of the previous object is cached or being fetched."""
        before = series.history.before
        entry = None if before is None else self._source.metadata.get(series.path(before))
        key = self._source.key(entry) if entry is not None else None
        if entry is None or key is None:
            return False
        runtime = self._source.runtime
        for index in covering(Range(0, entry.object.size or 0), key.block_size):
            inflight = runtime.inflight_requests.get(key.name(index))
            # The request of an open file may cover more than its reader wants; `demand` is how far it reads.
            is_coming = inflight is not None and inflight.demand > index * key.block_size
            if not is_coming and not runtime.cache.has(key, index):
                return False
        return True

    def _is_on(self) -> bool:
        """Return whether readahead is useful: its results are stored, and still fresh when they are read."""
        config, cache = self._source.config, self._source.runtime.cache
        return (
            config.read_ahead > 0
            and config.lifetime_s > 0
            and not config.offline
            and cache.cannot_store is None
        )

    # Find the series of a name.

    def _find(self, path: str) -> tuple[_Series, Place] | None:
        """Return the series that `path` belongs to, and its index there."""
        for root in _roots(path):
            series = self._sure(root)
            place = (
                series.names.place(path[len(root) :])
                if series is not None and isinstance(series.names, ChunkGrid)
                else None
            )
            if series is not None and place is not None:
                return series, place
        names = numbered(path)
        if names is None:
            return None
        name, place = names
        # A zero-padded series goes from 0099 to 0100, which has no leading zero.
        padded = self._series.get(name._replace(width=len(str(place[0]))))
        series = padded or self._series.get(name)
        return (series or self._keep(name, _Series("", name))), place

    def _begin(self, root: str) -> _Series | None:
        if root in self._no_arrays:
            return None
        grid = self._grid(root.removesuffix("/"))
        if grid is not None:
            return self._keep(root, _Series(root, grid))
        if len(self._no_arrays) >= MOST_AWAITED:
            self._no_arrays.clear()
        self._no_arrays.add(root)
        return None

    def _keep(self, slot: str | NumberedNames, series: _Series) -> _Series:
        self._series[slot] = series
        while len(self._series) > MOST_SERIES:
            self._withdraw(self._series.pop(next(iter(self._series))))
        return series

    def _grid(self, folder: str) -> ChunkGrid | None:
        """Return the grid of the array in `folder` from cached metadata: its own, or consolidated above it."""
        below, name = "", folder
        for level in range(MOST_ABOVE):
            for kind in ("zarr.json", ".zmetadata" if level else ".zarray"):
                if (grid := self._told_by(name, kind).get(below)) is not None:
                    return grid
            name, _, last = name.rpartition("/")
            below = f"{last}/{below}" if below else last
            if not name:
                break
        return None

    def _told_by(self, folder: str, kind: str) -> dict[str, ChunkGrid]:
        """Return the grids in a cached metadata document. Sends no request."""
        path = f"{folder}/{kind}"
        entry = self._source.metadata.get(path)
        key = None if entry is None else self._source.key(entry)
        if entry is None or key is None or (entry.object.size or 0) > MOST_METADATA:
            return {}
        here = self._documents.get(path)
        if here is not None and here[0] == key:
            return here[1]
        data = self._held(key, entry.object.size or 0)
        if data is None:
            return {}
        self._documents[path] = key, grids_in(kind, data)
        while len(self._documents) > MOST_SERIES:
            del self._documents[next(iter(self._documents))]
        return self._documents[path][1]

    def _held(self, key: ObjectKey, size: int) -> bytes | None:
        """Return all bytes of a small object, from the cache or an in-flight request; None for a miss."""
        runtime, pieces = self._source.runtime, []
        for index in covering(Range(0, size), key.block_size):
            want = block_range(index, key.block_size, size)
            inflight = runtime.inflight_requests.get(key.name(index))
            piece: bytes | None = None
            if inflight is not None and want.stop <= inflight.filled:
                try:
                    piece = inflight.copy(want)
                except RequestStopped:
                    pass  # just stored: the cache has it
            piece = piece or runtime.cache.read(
                key, index, 0, want.size, verify=self._source.config.verify_always
            )
            if piece is None or len(piece) != want.size:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    def _doubt(self, path: str) -> None:
        """Have the arrays below a metadata document checked: it was read again, so shapes may differ."""
        folder = path.rpartition("/")[0]
        self._no_arrays.clear()
        self._unsure |= {
            root for root in self._series if isinstance(root, str) and root.startswith(f"{folder}/")
        }

    def _sure(self, root: str) -> _Series | None:
        """Return the series of the array at `root`, replaced if its shape has changed."""
        series = self._series.get(root)
        if root in self._unsure:
            self._unsure.discard(root)
            if series is not None and self._grid(root.removesuffix("/")) != series.names:
                self._withdraw(self._series.pop(root))
                series = None
        return series or self._begin(root)

    # Request what comes next.

    def _look_ahead(self, series: _Series) -> int:
        """Request the objects that the history predicts; return how many objects were handled."""
        runtime, config = self._source.runtime, self._source.config
        most = max(1, runtime.window(config) // series.size)
        n = 0
        for place in ahead(series.history, extents=series.extents, most=most):
            path = series.path(place)
            if path not in self.awaited:
                if isinstance(series.names, NumberedNames) and not self._is_listed(series, path):
                    break
                self._ask(series, path)
            n += 1
        if n:
            series.history = series.history.having_asked(n)
        return n

    def _ask(self, series: _Series, path: str) -> None:
        self.awaited[path] = series
        if len(self.awaited) > MOST_AWAITED:
            with contextlib.suppress(RuntimeError):  # another thread removed an entry meanwhile
                self.awaited.pop(next(iter(self.awaited)), None)
        series.queued.add(path)
        size = min(series.size, self._source.config.whole_request)
        send = partial(self._send, series, path)
        # A reader that gets to the object before this request is sent fetches it by itself.
        self._submit(series, path, size, send, is_over=partial(self._is_reached, series, path))

    def _is_reached(self, series: _Series, path: str) -> bool:
        if path in self.awaited:
            return False
        series.queued.discard(path)
        return True

    def _submit(
        self, series: _Series, path: str, size: int, send: Send, *, is_over: Callable[[], bool] = bool
    ) -> None:
        origin, is_wanted = partial(self._source.origin, path), lambda: path not in self.awaited
        self._source.runtime.fetch_queue.submit(
            SpeculativeRequest(series, size, send, origin, is_wanted=is_wanted, is_over=is_over)
        )

    def _withdraw(self, series: _Series) -> None:
        """Drop the unsent requests of a series whose reader went elsewhere."""
        self._source.runtime.fetch_queue.withdraw(series)
        for path in series.queued:
            self.awaited.pop(path, None)
        series.queued.clear()

    def _is_listed(self, series: _Series, path: str) -> bool:
        """Return whether a fresh metadata entry says that `path` exists; record its size."""
        entry = self._source.fresh(path)
        if entry is None or self._source.key(entry) is None:
            return False
        series.see(entry.object.size or 0)
        return True

    def _send(self, series: _Series, path: str) -> asyncio.Task[Iterable[InflightRequest]]:
        """Request the range of `path` that was read first of its predecessors, if it is missing."""
        series.queued.discard(path)
        return self._source.runtime.spawn(self._learn(series, path))

    async def _learn(self, series: _Series, path: str) -> Iterable[InflightRequest]:
        config = self._source.config
        want = first_want(series.start, series.stop, config.block_size, config.whole_request)
        entry, inflight = await self._catalog.resolve(path, want, demand=ALL)
        if inflight is None:
            return self._launch(series, entry)
        self._note(series, entry)
        return (inflight,)

    def _launch(self, series: _Series, entry: MetadataEntry) -> Iterable[InflightRequest]:
        """Request the first missing blocks of the series' range in an object whose metadata is known."""
        key = self._source.key(entry) if entry.info is not None else None
        if key is None:
            return ()
        self._note(series, entry)
        blocks = covering(clip(series.start, series.stop, entry.object.size or 0), key.block_size)
        return self._launch_blocks(entry, key, blocks[: self._source.config.whole_request // key.block_size])

    def _launch_blocks(
        self, entry: MetadataEntry, key: ObjectKey, blocks: range
    ) -> Iterable[InflightRequest]:
        missing = [index for index in blocks if not self._source.runtime.cache.has(key, index)]
        return dict.fromkeys(self._fetcher.launch(entry, key, missing).values())

    def _note(self, series: _Series, entry: MetadataEntry) -> None:
        """Record the object's size. In a series that is read completely, request what is left of the object."""
        key = self._source.key(entry) if entry.info is not None else None
        if key is None:
            return
        size, step = entry.object.size or 0, self._source.config.whole_request
        series.see(size)
        if not series.is_whole:
            return
        most = min(size, self._source.runtime.window(self._source.config))
        for start in range(step if series.asks_all else 0, most, step):
            blocks = covering(Range(start, min(size, start + step)), key.block_size)
            self._submit(series, entry.path, step, partial(self._launch_blocks, entry, key, blocks))


def first_want(start: int | None, stop: int | None, block_size: int, most: int) -> Range | Suffix:
    """Return the range to request of an object of unknown size to serve `[start:stop]`.

    It consists of whole blocks. It has at most `most` bytes, unless `start` is negative.
    """
    if start is not None and start < 0:
        # Enough to have the blocks of the last -start bytes complete, whatever the size of the object.
        return Suffix(-start + block_size - 1)
    first = (start or 0) - (start or 0) % block_size
    if stop is None or stop < 0:
        return Range(first, first + most)
    whole = -(-max(first + 1, stop) // block_size) * block_size
    return Range(first, min(whole, first + most))


def _roots(path: str) -> list[str]:
    """Return the folders, with trailing "/", that may hold the array of chunk `path`; the likeliest first."""
    parts = path.split("/")
    at = len(parts) - 1
    is_flat = parts[at].removeprefix("c.").replace(".", "").isdecimal()
    found = ["/".join(parts[:at]) + "/"] if is_flat else []
    while at > 0 and parts[at].isdecimal():
        at -= 1
        if parts[at] == "c":
            return ["/".join(parts[:at]) + "/", *found]
        if at < len(parts) - 1 and parts[at].isdecimal():
            found.append("/".join(parts[:at]) + "/")
    return found
