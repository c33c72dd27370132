"""Read-ahead across names: the next chunks of an array, or the next of numbered objects, when they are read in order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
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

ALL = 1 << 62  # a demand that no object reaches
MOST_SERIES = 256  # arrays whose reads are remembered
MOST_AWAITED = 20_000  # names that were asked for ahead and not read yet
MOST_METADATA = 2 << 20  # bytes; longer documents are not parsed between two reads
MOST_ABOVE = 8  # folders above an array in which consolidated metadata are looked for


Send = Callable[[], Iterable[InflightRequest] | Awaitable[Iterable[InflightRequest]]]


class _Series:
    """Objects whose names are places: how they are read, and how large they are."""

    def __init__(self, root: str, names: ChunkGrid | NumberedNames) -> None:
        self.root = root
        self.names = names
        self.extents: Extents = names.extents if isinstance(names, ChunkGrid) else (None,)
        self.history = ChunkHistory()
        self.start: int | None = None  # what is asked first of each: `[start:stop]`
        self.stop: int | None = None
        self.is_whole = False  # those that were passed were read whole, whatever was asked first
        self.queued: set[str] = set()  # names asked for, and not sent for yet
        self._n_seen = self._n_bytes = 0

    @property
    def asks_all(self) -> bool:
        """True when the first thing that is asked of each is all of it."""
        return not self.start and self.stop is None

    @property
    def size(self) -> int:
        """Bytes of one of them, by those that were seen; before that, of a chunk in memory."""
        if self._n_seen:
            return max(1, self._n_bytes // self._n_seen)
        return self.names.chunk_bytes if isinstance(self.names, ChunkGrid) else 1

    def see(self, size: int) -> None:
        self._n_seen, self._n_bytes = self._n_seen + 1, self._n_bytes + size

    def path(self, place: Place) -> str:
        return self.root + self.names.name(place)


class ChunkPrefetch:
    """What was read last of each array, and what was sent for because of it. On the runtime's loop, but for `reached`.

    A name is asked for ahead when the array's own shape, or a listing, says that it exists; what it is asked is what its
    predecessors were asked first, so that its reader finds the answer to that.
    """

    def __init__(self, source: Source, fetcher: Fetcher, resolver: MetadataResolver) -> None:
        self._source = source
        self._fetcher = fetcher
        self._catalog = resolver
        # What was asked for ahead and not read yet. Any thread looks, and takes out what it reads.
        self.awaited: dict[str, _Series] = {}
        self._reached: deque[tuple[str, int | None, int | None]] = deque()  # and that is not noted yet
        self._is_told = False  # the loop was asked to note it
        self._series: dict[str | NumberedNames, _Series] = {}
        self._unsure: set[str] = set()  # arrays whose metadata were read anew since
        self._no_arrays: set[str] = set()  # folders that are none, as far as the metadata say that are here
        self._documents: dict[str, tuple[ObjectKey, dict[str, ChunkGrid]]] = {}

    def reached(self, path: str, start: int | None, stop: int | None) -> None:
        """A name that was asked for ahead is read, and perhaps here already. From any thread."""
        if self.awaited.pop(path, None) is None:
            return
        self._reached.append((path, start, stop))
        if not self._is_told:  # else the loop is on its way to them
            self._is_told = True
            self._source.runtime.call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._is_told = False  # first: what is noted from here on has it called again
        while self._reached:
            self._told(*self._reached.popleft())

    def observe(self, path: str, start: int | None = None, stop: int | None = None) -> None:
        """Note that `[start:stop]` of `path` is being read, and send for what will probably be read next."""
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
            return  # from the middle of one nothing follows for the next
        found = self._find(path)
        if found is None:
            return
        series, place = found
        before = series.history
        series.history = before.after(place, series.extents)
        if series.history is before:
            return  # it was read a moment ago
        series.start, series.stop = start, stop
        series.is_whole = series.asks_all or self._was_whole(series)
        if series.history.misled > before.misled:
            self._withdraw(series)
        if not self._look_ahead(series):
            self._source.runtime.fetch_queue.pump()  # what is read now takes no slot of what nobody waits for

    def _was_whole(self, series: _Series) -> bool:
        """Return whether all of the one before is here, or on its way."""
        before = series.history.before
        known = None if before is None else self._source.metadata.get(series.path(before))
        key = self._source.key(known) if known is not None else None
        if known is None or key is None:
            return False
        runtime = self._source.runtime
        for index in covering(Range(0, known.object.size or 0), key.block_size):
            inflight = runtime.inflight_requests.get(key.name(index))
            # A request that opened a file brings more than its reader wants so far.
            is_coming = inflight is not None and inflight.demand > index * key.block_size
            if not is_coming and not runtime.cache.has(key, index):
                return False
        return True

    def _is_on(self) -> bool:
        """Return whether what is sent ahead can be of use: kept until it is read, and still held to be true then."""
        config, cache = self._source.config, self._source.runtime.cache
        return (
            config.read_ahead > 0
            and config.lifetime_s > 0
            and not config.offline
            and cache.cannot_store is None
        )

    # What a name is.

    def _find(self, path: str) -> tuple[_Series, Place] | None:
        """Return the series that `path` is in, and where."""
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
        # In order to 0099 and on to 0100, which looks like one that is not padded.
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
        """Return the grid of the array in `folder`, from metadata that were read before: its own, or consolidated ones."""
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
        """Return the grids in a metadata object, if that is here; nobody is asked for it."""
        path = f"{folder}/{kind}"
        known = self._source.metadata.get(path)
        key = None if known is None else self._source.key(known)
        if known is None or key is None or (known.object.size or 0) > MOST_METADATA:
            return {}
        here = self._documents.get(path)
        if here is not None and here[0] == key:
            return here[1]
        data = self._held(key, known.object.size or 0)
        if data is None:
            return {}
        self._documents[path] = key, grids_in(kind, data)
        while len(self._documents) > MOST_SERIES:
            del self._documents[next(iter(self._documents))]
        return self._documents[path][1]

    def _held(self, key: ObjectKey, size: int) -> bytes | None:
        """Return all of a small object, from the cache or from requests that brought it a moment ago; None for a miss."""
        runtime, pieces = self._source.runtime, []
        for index in covering(Range(0, size), key.block_size):
            want = block_range(index, key.block_size, size)
            inflight = runtime.inflight_requests.get(key.name(index))
            piece: bytes | None = None
            if inflight is not None and want.stop <= inflight.filled:
                try:
                    piece = inflight.copy(want)
                except RequestStopped:
                    pass  # it has just been stored
            piece = piece or runtime.cache.read(
                key, index, 0, want.size, verify=self._source.config.verify_always
            )
            if piece is None or len(piece) != want.size:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    def _doubt(self, path: str) -> None:
        """Metadata are read anew: the shapes that they told of may be others."""
        folder = path.rpartition("/")[0]
        self._no_arrays.clear()
        self._unsure |= {
            root for root in self._series if isinstance(root, str) and root.startswith(f"{folder}/")
        }

    def _sure(self, root: str) -> _Series | None:
        """Return the array at `root`, of the shape that it has now."""
        series = self._series.get(root)
        if root in self._unsure:
            self._unsure.discard(root)
            if series is not None and self._grid(root.removesuffix("/")) != series.names:
                self._withdraw(self._series.pop(root))
                series = None
        return series or self._begin(root)

    # What is sent for.

    def _look_ahead(self, series: _Series) -> int:
        """Ask for what the history of a series says will be read next; return how many places that are."""
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
            with contextlib.suppress(RuntimeError):  # another thread took one out meanwhile
                self.awaited.pop(next(iter(self.awaited)), None)
        series.queued.add(path)
        size = min(series.size, self._source.config.whole_request)
        send = partial(self._send, series, path)
        # What its reader came to before it was sent for is the reader's.
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
        """The reader went elsewhere: what was not sent for yet is not wanted."""
        self._source.runtime.fetch_queue.withdraw(series)
        for path in series.queued:
            self.awaited.pop(path, None)
        series.queued.clear()

    def _is_listed(self, series: _Series, path: str) -> bool:
        """Return whether there is such an object, by a listing that is young enough; note its size."""
        known = self._source.fresh(path)
        if known is None or self._source.key(known) is None:
            return False
        series.see(known.object.size or 0)
        return True

    def _send(self, series: _Series, path: str) -> Awaitable[Iterable[InflightRequest]]:
        """Ask of `path` what its predecessors were asked first, unless that is here, or known to be absent."""
        series.queued.discard(path)
        return self._source.runtime.spawn(self._learn(series, path))

    async def _learn(self, series: _Series, path: str) -> Iterable[InflightRequest]:
        config = self._source.config
        want = first_want(series.start, series.stop, config.block_size, config.whole_request)
        known, inflight = await self._catalog.resolve(path, want, demand=ALL)
        if inflight is None:
            return self._launch(series, known)
        self._note(series, known)
        return (inflight,)

    def _launch(self, series: _Series, known: MetadataEntry) -> Iterable[InflightRequest]:
        """Send for the first blocks that are missing of what is asked of an object that is known."""
        key = self._source.key(known) if known.info is not None else None
        if key is None:
            return ()
        self._note(series, known)
        blocks = covering(clip(series.start, series.stop, known.object.size or 0), key.block_size)
        return self._launch_blocks(known, key, blocks[: self._source.config.whole_request // key.block_size])

    def _launch_blocks(
        self, known: MetadataEntry, key: ObjectKey, blocks: range
    ) -> Iterable[InflightRequest]:
        missing = [index for index in blocks if not self._source.runtime.cache.has(key, index)]
        return dict.fromkeys(self._fetcher.launch(known, key, missing).values())

    def _note(self, series: _Series, known: MetadataEntry) -> None:
        """Learn how large they are, and ask for the rest of one that will be read whole and is more than one request."""
        key = self._source.key(known) if known.info is not None else None
        if key is None:
            return
        size, step = known.object.size or 0, self._source.config.whole_request
        series.see(size)
        if not series.is_whole:
            return
        most = min(size, self._source.runtime.window(self._source.config))
        for start in range(step if series.asks_all else 0, most, step):
            blocks = covering(Range(start, min(size, start + step)), key.block_size)
            self._submit(series, known.path, step, partial(self._launch_blocks, known, key, blocks))


def first_want(start: int | None, stop: int | None, block_size: int, most: int) -> Range | Suffix:
    """Return what to ask of an object of unknown size to serve `[start:stop]`: whole blocks, `most` bytes of them."""
    if start is not None and start < 0:
        # Whatever its size: the blocks that hold the last -start bytes are whole then.
        return Suffix(-start + block_size - 1)
    first = (start or 0) - (start or 0) % block_size
    if stop is None or stop < 0:
        return Range(first, first + most)
    whole = -(-max(first + 1, stop) // block_size) * block_size
    return Range(first, min(whole, first + most))


def _roots(path: str) -> list[str]:
    """Return the folders, with "/", whose chunk `path` may be, by its name: the most likely first."""
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
