"""The objects of a plan one by one: what of each is still to be asked for, what is awaited, and how far all of them are."""

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

__all__ = ["PrefetchObject", "Progress", "BlockRequest", "Slice", "ProgressCounts"]

Slice = tuple[int | None, int | None]  # as of a slice
MOST_ERRORS = 100  # that are kept


@dataclass(eq=False, slots=True)
class PrefetchObject:
    """One object of a plan, or a range of one; `number` is its place in the plan."""

    number: int
    path: str
    listed_size: int | None = None  # its bytes as far as they are counted among those of the plan
    bounds: Slice | None = None
    tries: int = 0
    known: MetadataEntry | None = None
    key: ObjectKey | None = None
    # Blocks that were asked for and did not come, lowest first.
    again: list[int] = field(default_factory=list)
    left: range = range(0)  # blocks that were not asked for yet: all behind those
    n_awaited: int = 0  # blocks that were asked for and are not here yet
    overdue: set[int] = field(default_factory=set)  # blocks for which another process was waited for too long
    first: InflightRequest | None = None  # our request that told what it is
    is_over: bool = False  # nothing that still happens to it counts
    is_failed: bool = False  # it was given up

    def __lt__(self, other: PrefetchObject) -> bool:
        return self.number < other.number

    def begin(self, known: MetadataEntry, key: ObjectKey) -> int:
        """The version is known: note the blocks that are wanted of it, and return their bytes."""
        self.known, self.key = known, key
        blocks = self.left = self._wanted
        return self.bytes_of(blocks[-1]).stop - self.bytes_of(blocks[0]).start if blocks else 0

    @property
    def _wanted(self) -> range:
        return covering(clip(*(self.bounds or (None, None)), self.size), self.begun_key.block_size)

    @property
    def asked(self) -> range:
        """The blocks that were asked for so far, here or not; none before it has begun."""
        return range(0) if self.key is None else range(self._wanted.start, self.left.start)

    @property
    def size(self) -> int:
        """Bytes of the object. REQUIRES: it has begun."""
        assert self.known is not None
        return self.known.object.size or 0

    @property
    def begun_key(self) -> ObjectKey:
        """The key of its version. REQUIRES: it has begun."""
        assert self.key is not None
        return self.key

    @property
    def is_complete(self) -> bool:
        return not (self.n_awaited or self.again or self.left)

    @property
    def next(self) -> int:
        """The first block that is to be asked for. REQUIRES: there is one."""
        return self.again[0] if self.again else self.left[0]

    def took(self, n: int) -> None:
        """The first `n` blocks of those that are to be asked for again, or else of those left, are awaited now."""
        self.n_awaited += n
        if self.again:
            del self.again[:n]
        else:
            self.left = self.left[n:]

    def ask_again(self, indexes: Iterable[int]) -> None:
        """Blocks that were awaited did not come."""
        before = len(self.again)
        self.again = sorted({*self.again, *indexes})
        self.n_awaited -= len(self.again) - before

    def bytes_of(self, index: int) -> Range:
        return block_range(index, self.begun_key.block_size, self.size)


@dataclass(eq=False, slots=True)
class BlockRequest:
    """What is sent next for a part: for these of its blocks or, while nothing is known of it, for its first bytes."""

    part: PrefetchObject
    indexes: list[int]
    want: Range | None
    size: int  # bytes that it brings at most

    def __lt__(self, other: BlockRequest) -> bool:
        return (self.part.number, self.indexes[:1]) < (other.part.number, other.indexes[:1])


class Progress(NamedTuple):
    """How far a plan is. An item is an object, or a range of one; its bytes are those of the blocks that hold it.

    `state`: "running"; "held", while as much as may be is ahead of the reader; "done", "failed" or "cancelled".
    `items` were dealt with, `errors` of them in vain. `bytes_fetched` came from the origin, `bytes_here` had come before,
    or with the requests of others. Totals are None until they are known. `requests` are those for bytes.
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
        """Bytes a second that came from the origin."""
        return self.bytes_fetched / self.seconds if self.seconds else 0.0

    @property
    def is_over(self) -> bool:
        """True when nothing of it runs any more."""
        return self.state in ("done", "failed", "cancelled")


class ProgressCounts:
    """What a plan counts. Changed on the loop, read anywhere."""

    def __init__(self) -> None:
        self.state = "running"
        self.n_done = self.n_failed = self.n_requests = 0
        self.fetched = self.here = 0  # bytes
        self.n_items = self.n_unsized = self.size = 0  # of the plan, as far as it is known
        self.errors: list[tuple[str, CachedFSError]] = []  # each with the path of what could not be had
        self._began = time.monotonic()
        self._ended: float | None = None

    def declared(self) -> None:
        """The plan has one more item, of which nothing is known."""
        self.n_items += 1
        self.n_unsized += 1

    def expanded(self, sizes: Sequence[int | None]) -> None:
        """In the place of one of these items come objects of these sizes."""
        self.n_items += len(sizes) - 1
        self.n_unsized += sizes.count(None) - 1
        self.size += sum(size or 0 for size in sizes)

    def sized(self, part: PrefetchObject, size: int) -> None:
        """What is wanted of an item has so many bytes."""
        self.n_unsized -= part.listed_size is None
        self.size += size - (part.listed_size or 0)
        part.listed_size = size

    def passed(self, listed_size: int | None) -> None:
        """One item is over without its bytes."""
        self.n_done += 1
        self.n_unsized -= listed_size is None
        self.size -= listed_size or 0

    def failed(self, path: str, error: CachedFSError, listed_size: int | None) -> None:
        self.passed(listed_size)
        self.spoilt(path, error)

    def spoilt(self, path: str, error: CachedFSError) -> None:
        """An item that was over is not here after all."""
        self.n_failed += 1
        if len(self.errors) < MOST_ERRORS:
            self.errors.append((path, error))

    def end(self, state: str) -> None:
        self.state, self._ended = state, time.monotonic()

    def progress(self, *, n_left: int | None, coming: int, is_held: bool) -> Progress:
        """Return the sums; `n_left` items were not looked at yet, `coming` bytes came of requests under way."""
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
