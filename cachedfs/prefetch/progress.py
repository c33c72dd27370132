"""Progress of a prefetch plan: what callers see of it, and the counts behind it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from cachedfs.errors import CachedFSError, without_frames

MOST_ERRORS = 100  # errors kept


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
        self.n_items = self.n_unsized = self.n_done = self.n_failed = self.n_requests = 0
        self.size = 0  # bytes of all items but `n_unsized`
        self.fetched = 0  # bytes from the origin
        self.arrived = (
            0  # bytes of blocks that are cached or on their way to the cache, from the origin or not
        )
        self.errors: list[tuple[str, CachedFSError]] = []  # each with the path that failed
        self._began = time.monotonic()
        self._ended: float | None = None

    def replace(self, before: Sequence[int | None], now: Sequence[int | None]) -> None:
        """Replace items of the sizes `before` by items of the sizes `now`. None: not known yet."""
        self.n_items += len(now) - len(before)
        self.n_unsized += now.count(None) - before.count(None)
        self.size += sum(size or 0 for size in now) - sum(size or 0 for size in before)

    def failed(self, path: str, error: CachedFSError) -> None:
        self.n_failed += 1
        if len(self.errors) < MOST_ERRORS:
            self.errors.append((path, without_frames(error)))

    def end(self, state: str) -> None:
        self.state, self._ended = state, time.monotonic()

    def progress(self, *, n_left: int | None, coming: int, is_held: bool) -> Progress:
        """Return the counts. `n_left` items are not taken; active requests have received `coming` bytes."""
        fetched = self.fetched + coming
        return Progress(
            state="held" if is_held and self.state == "running" else self.state,
            items=self.n_done,
            items_total=None if n_left is None else self.n_items + n_left,
            bytes_fetched=fetched,
            bytes_here=max(0, self.arrived - fetched),
            bytes_total=self.size if n_left == 0 and not self.n_unsized else None,
            requests=self.n_requests,
            errors=self.n_failed,
            seconds=(self._ended or time.monotonic()) - self._began,
        )
