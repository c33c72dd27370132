"""Choose how many threads make batches, by what is measured."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["ThreadChoice"]

FIRST, REST = 16, 512  # batches before the first trial of a loop, and after it
TRIED = 6  # batches of a trial
COUNTED = 4  # the last of them: while the first are made, those before the trial are not done yet
BUSY_CORES = 1.3  # threads that use more cores than this do not only wait for each other
FASTER = 0.9  # one thread must need at most this share of the time of all threads
FOR_CERTAIN = 2.0  # if it needs more than this, later loops need no trial either


class ThreadChoice:
    """Choose all threads, or only one where several wait for each other, as for Python's lock (GIL).

    A trial makes a few batches with the other number of threads. The next ones are made by the faster.
    """

    def __init__(self, most: int, *, is_fixed: bool) -> None:
        """Choose at most `most`; with `is_fixed`, always these."""
        self.most = self.current = most
        self._is_fixed, self._rest = is_fixed or most == 1, REST
        self._left = FIRST  # batches until the next trial
        self._n_tried = self._n_done = 0
        # By the number of threads: seconds of the latest batches, and those on a core.
        self._times = {n: deque[tuple[float, float]](maxlen=COUNTED) for n in (1, most)}

    def begin(self) -> None:
        """Begin a loop: what was read from the network before may be cached now."""
        self._n_tried = self._n_done = 0
        if self._rest == REST:
            self._left = FIRST

    def next(self) -> int:
        """Return the number of threads that make the next batch."""
        if self._is_fixed or self._left > 0 or (not self._n_tried and self._is_parallel()):
            self._left -= 1
        elif self._n_tried < TRIED:
            self._n_tried += 1
            return 1 if self.current == self.most else self.most
        return self.current

    def add(self, n_threads: int, load_s: float, core_s: float) -> None:
        """Record the seconds that a batch took, and those of them on a core."""
        self._times[n_threads].append((load_s, core_s))
        if self._n_tried and n_threads != self.current:
            self._n_done += 1
            if self._n_done == TRIED:
                self._decide()

    def _is_parallel(self) -> bool:
        times = self._times[self.most]
        used = sum(core_s for _, core_s in times) * self.most
        return self.current == self.most and used > BUSY_CORES * sum(load_s for load_s, _ in times)

    def _decide(self) -> None:
        one, all_ = (median(load_s for load_s, _ in self._times[n]) for n in (1, self.most))
        ratio = one * self.most / all_ if all_ else 1.0
        self.current = 1 if ratio < (FASTER if self.current > 1 else 1.0) else self.most
        self._rest = 2 * self._rest if ratio > FOR_CERTAIN else REST
        self._left, self._n_tried, self._n_done = self._rest, 0, 0
