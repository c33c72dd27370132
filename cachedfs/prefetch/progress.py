"""Progress of a prefetch plan: the state of each object, and counts for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachedfs.common.blocks import block_range, clip, covering
from cachedfs.common.types import Range
from cachedfs.core.version import Version
from cachedfs.errors import CachedFSError, without_frames
from cachedfs.prefetch.belady import Use

__all__ = ["PrefetchObject", "Progress", "ProgressCounts", "Slice"]

Slice = tuple[int | None, int | None]  # start and stop, as in a Python slice
MOST_ERRORS = 100  # errors kept


@dataclass(eq=False, slots=True)
class PrefetchObject:
    """One object of a plan, or a byte range of it. `position` is that of its first use in the plan."""

    position: float
    path: str
    listed_size: int | None = None  # bytes counted for it in the plan's total; None: not counted
    bounds: Slice | None = None
    version: Version | None = None  # set by `begin`, as `wanted` and `left`
    wanted: range = range(0)  # its blocks
    left: range = range(0)  # of these, the blocks that the plan has not asked for
    span: int = 0  # the positions that its uses share; the next object follows
    n_tasks: int = 0
    n_tries: int = 0
    is_failed: bool = False
    is_over: bool = False  # cached, failed, or replaced by the objects below it

    def begin(self, version: Version) -> None:
        """Set the object's version, and its blocks to fetch."""
        want = clip(*(self.bounds or (None, None)), version.size)
        self.version, self.wanted = version, covering(want, version.block_size)
        self.left, self.span = self.wanted, self.span or max(1, len(self.wanted))

    @property
    def wanted_size(self) -> int:
        """Bytes of the blocks to fetch. Requires `begin`."""
        return self.bytes_of(self.wanted[-1]).stop - self.bytes_of(self.wanted[0]).start if self.wanted else 0

    @property
    def begun(self) -> Version:
        """The version. Requires `begin`."""
        assert self.version is not None
        return self.version

    def bytes_of(self, index: int) -> Range:
        return block_range(index, self.begun.block_size, self.begun.size)

    def use(self, index: int) -> Use:
        """Return the plan's use of block `index`. Requires `begin`."""
        position = self.position + (index - self.wanted.start) * self.span / len(self.wanted)
        return Use(position, self.begun, index, self.bytes_of(index).size)


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
        self.fetched = 0  # bytes from the origin
        self.arrived = (
            0  # bytes of blocks that are cached or on their way to the cache, from the origin or not
        )
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

    def sized(self, obj: PrefetchObject) -> None:
        """Set the bytes of an item that has begun."""
        self.n_unsized -= obj.listed_size is None
        self.size += obj.wanted_size - (obj.listed_size or 0)
        obj.listed_size = obj.wanted_size

    def failed(self, path: str, error: CachedFSError, listed_size: int | None) -> None:
        """Count an item as finished and failed."""
        self.n_done += 1
        self.n_unsized -= listed_size is None
        self.size -= listed_size or 0
        self.failed_late(path, error)

    def failed_late(self, path: str, error: CachedFSError) -> None:
        """Count a failure of an item that is already counted as finished."""
        self.n_failed += 1
        if len(self.errors) < MOST_ERRORS:
            self.errors.append((path, without_frames(error)))

    def end(self, state: str) -> None:
        self.state, self._ended = state, time.monotonic()

    def progress(self, *, n_left: int | None, coming: int, is_held: bool) -> Progress:
        """Return the counts. `n_left` items are not taken; active requests have received `coming` bytes."""
        is_known = n_left == 0 and not self.n_unsized
        fetched = self.fetched + coming
        return Progress(
            state="held" if is_held and self.state == "running" else self.state,
            items=self.n_done,
            items_total=None if n_left is None else self.n_items + n_left,
            bytes_fetched=fetched,
            bytes_here=max(0, self.arrived - fetched),
            bytes_total=self.size if is_known else None,
            requests=self.n_requests,
            errors=self.n_failed,
            seconds=(self._ended or time.monotonic()) - self._began,
        )
