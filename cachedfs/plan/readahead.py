"""What to read next of one open file, from what was read before."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["History", "ahead"]


class History(NamedTuple):
    """The block reads of one open file: `last` block touched, `streak` of blocks touched in ascending order.

    `requested`: all blocks of the present streak below this index have been asked for.
    """

    last: int = -1
    streak: int = 0
    requested: int = 0

    def after(self, index: int) -> History:
        """Return the history after a read that touched block `index`; anywhere but the next block starts anew."""
        if index == self.last:
            return self
        if index == self.last + 1:
            return History(index, self.streak + 1, max(self.requested, index + 1))
        return History(index, 0, index + 1)

    def having_requested(self, stop: int) -> History:
        """Return the history after the blocks below `stop` were asked for."""
        return self._replace(requested=max(self.requested, stop))


def ahead(history: History, *, n_blocks: int, blocks_per_request: int, most: int) -> range:
    """Return the blocks to ask for now: whole requests while the file is read in sequence, else nothing.

    The window starts at one request and doubles with every block read in sequence, up to `most` blocks; it is refilled
    in steps of one request, so that requests overlap instead of waiting for one another. Never past the end.
    """
    if history.streak < 2 or most <= 0:
        return range(0)
    window = min(most, blocks_per_request << min(history.streak - 2, 32))
    start = max(history.requested, history.last + 1)
    stop = min(n_blocks, history.last + 1 + window)
    if stop < n_blocks:
        stop -= (stop - start) % blocks_per_request
    return range(start, max(start, stop))
