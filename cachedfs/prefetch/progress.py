"""Progress of a prefetch plan: the state of each object, and counts for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachedfs.common.blocks import block_range, clip, covering
from cachedfs.common.types import ObjectKey, Range
from cachedfs.errors import CachedFSError
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.metadata_cache import MetadataEntry

__all__ = ["BlockRequest", "PrefetchObject", "Progress", "ProgressCounts", "Slice"]

Slice = tuple[int | None, int | None]  # start and stop, as in a Python slice
MOST_ERRORS = 100  # errors kept


@dataclass(eq=False, slots=True)
class PrefetchObject:
    """One object of a plan, or a byte range of it. `number` is its position in the plan."""

    number: int
    path: str
    listed_size: int | None = None  # bytes counted for it in the plan's total; None: not counted
    bounds: Slice | None = None
    tries: int = 0
    entry: MetadataEntry | None = None
    key: ObjectKey | None = None
    # Blocks that were requested and did not arrive, lowest first.
    again: list[int] = field(default_factory=list)
    left: range = range(0)  # blocks not requested yet, all after those in `again`
    n_awaited: int = 0  # blocks that were requested and have not arrived
    # blocks that another process has been fetching for too long
    overdue: set[int] = field(default_factory=set)
    first: InflightRequest | None = None  # the plan's request that looked the object up
    is_over: bool = False  # finished; later events are ignored
    is_failed: bool = False  # given up

    def __lt__(self, other: PrefetchObject) -> bool:
        return self.number < other.number

    def begin(self, entry: MetadataEntry, key: ObjectKey) -> int:
        """Set the object's version and its blocks to fetch; return their bytes."""
        self.entry, self.key = entry, key
        blocks = self.left = self._wanted
        return self.bytes_of(blocks[-1]).stop - self.bytes_of(blocks[0]).start if blocks else 0

    @property
    def _wanted(self) -> range:
        return covering(clip(*(self.bounds or (None, None)), self.size), self.begun_key.block_size)

    @property
    def asked(self) -> range:
        """The blocks requested so far, arrived or not; empty before `begin`."""
        return range(0) if self.key is None else range(self._wanted.start, self.left.start)

    @property
    def size(self) -> int:
        """Bytes of the object. Requires `begin`."""
        assert self.entry is not None
        return self.entry.object.size or 0

    @property
    def begun_key(self) -> ObjectKey:
        """Key of the object version. Requires `begin`."""
        assert self.key is not None
        return self.key

    @property
    def is_complete(self) -> bool:
        """True when every wanted block has arrived."""
        return not (self.n_awaited or self.again or self.left)

    @property
    def next(self) -> int:
        """The first block to request. Requires that there is one."""
        return self.again[0] if self.again else self.left[0]

    def took(self, n: int) -> None:
        """Count the first `n` blocks of `again`, or if that is empty of `left`, as awaited."""
        self.n_awaited += n
        if self.again:
            del self.again[:n]
        else:
            self.left = self.left[n:]

    def ask_again(self, indexes: Iterable[int]) -> None:
        """Move awaited blocks that did not arrive to `again`."""
        before = len(self.again)
        self.again = sorted({*self.again, *indexes})
        self.n_awaited -= len(self.again) - before

    def bytes_of(self, index: int) -> Range:
        return block_range(index, self.begun_key.block_size, self.size)


@dataclass(eq=False, slots=True)
class BlockRequest:
    """A request to send for `part`: for the blocks `indexes`, or for `want` while its size is unknown."""

    part: PrefetchObject
    indexes: list[int]
    want: Range | None
    size: int  # most bytes it brings

    def __lt__(self, other: BlockRequest) -> bool:
        return (self.part.number, self.indexes[:1]) < (other.part.number, other.indexes[:1])


class Progress(NamedTuple):
    """Progress of a prefetch.

    An item is an object, or a byte range of one. Its bytes are those of the blocks that hold it.

    - `state`: "running"; "held" while the reader has to read before more is fetched; "done", "failed" or
      "cancelled".
    - `items`: items finished, including the failed ones. `items_total`: all items; None until known.
    - `bytes_fetched`: bytes that this prefetch got from the origin.
    - `bytes_here`: bytes that were cached before, or that other requests fetched.
    - `bytes_total`: bytes of all items; None until known.
    - `requests`: requests for object data. `errors`: items that failed. `seconds`: time so far.
    """

    state: str
    items: int
    items_total: int | None
    bytes_fetched: int
    bytes_here: int
    bytes_total: int | None
    requests: int
    errors: int
    seconds: float

    @property
    def rate(self) -> float:
        """Mean bytes per second from the origin."""
        return self.bytes_fetched / self.seconds if self.seconds else 0.0

    @property
    def is_over(self) -> bool:
        """True when the prefetch has ended."""
        return self.state in ("done", "failed", "cancelled")


class ProgressCounts:
    """The counts of a plan. Changed on the event loop thread, read by any thread."""

    def __init__(self) -> None:
        self.state = "running"
        self.n_done = self.n_failed = self.n_requests = 0
        self.fetched = self.here = 0  # bytes, from the origin and not
        # items, items of unknown size, and bytes of the plan so far
        self.n_items = self.n_unsized = self.size = 0
        self.errors: list[tuple[str, CachedFSError]] = []  # each with the path that failed
        self._began = time.monotonic()
        self._ended: float | None = None

    def declared(self) -> None:
        """Count one more item of unknown size."""
        self.n_items += 1
        self.n_unsized += 1

    def expanded(self, sizes: Sequence[int | None]) -> None:
        """Replace an item of unknown size by objects of these sizes."""
        self.n_items += len(sizes) - 1
        self.n_unsized += sizes.count(None) - 1
        self.size += sum(size or 0 for size in sizes)

    def sized(self, part: PrefetchObject, size: int) -> None:
        """Set the bytes of an item."""
        self.n_unsized -= part.listed_size is None
        self.size += size - (part.listed_size or 0)
        part.listed_size = size

    def passed(self, listed_size: int | None) -> None:
        """Count an item as finished, without its bytes."""
        self.n_done += 1
        self.n_unsized -= listed_size is None
        self.size -= listed_size or 0

    def failed(self, path: str, error: CachedFSError, listed_size: int | None) -> None:
        """Count an item as finished and failed."""
        self.passed(listed_size)
        self.spoilt(path, error)

    def spoilt(self, path: str, error: CachedFSError) -> None:
        """Count a failure of an item that is already counted as finished."""
        self.n_failed += 1
        if len(self.errors) < MOST_ERRORS:
            self.errors.append((path, error))

    def end(self, state: str) -> None:
        self.state, self._ended = state, time.monotonic()

    def progress(self, *, n_left: int | None, coming: int, is_held: bool) -> Progress:
        """Return the counts. `n_left` items are not taken; active requests have received `coming` bytes."""
        is_known = n_left == 0 and not self.n_unsized
        return Progress(
            state="held" if is_held and self.state == "running" else self.state,
            items=self.n_done,
            items_total=None if n_left is None else self.n_items + n_left,
            bytes_fetched=self.fetched + coming,
            bytes_here=self.here,
            bytes_total=self.size if is_known else None,
            requests=self.n_requests,
            errors=self.n_failed,
            seconds=(self._ended or time.monotonic()) - self._began,
        )
