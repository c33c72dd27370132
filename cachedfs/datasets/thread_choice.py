"""Choose how many threads make batches, by what is measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

FIRST, REST = 8, 512  # batches before the first trial of a loop, and after it
TRIED = 8  # batches of a trial
COUNTED = 4  # the last of them: while the first are made, those before the trial are not done yet
LONG_S = 0.25  # batches that take longer are not slowed down much by other threads
BUSY_CORES = 1.6  # threads that use more cores than this do not only wait for each other
FASTER = 0.8  # one thread is chosen if a batch of it takes less than this share of one of all
CERTAIN = 2.0  # where one takes so many times as long as the other, twice, trials become rare


class MadeBatch(NamedTuple):
    """Measurements of one batch, in seconds: when it was begun and ended, its CPU time, and the wait for its bytes."""

    began: float
    ended: float
    core_s: float
    read_s: float = 0.0
    size: int = 0  # bytes
    n_samples: int = 0


class ThreadChoice:
    """Choose all threads, or only one where several wait for each other, as for Python's lock (GIL).

    A trial makes a few batches with the other number of threads. The next ones are made by the faster.
    """

    def __init__(self, most: int, *, is_fixed: bool) -> None:
        """Choose at most `most`; with `is_fixed`, always these."""
        self.most = self.current = most
        self._is_fixed, self._rest = is_fixed or most == 1, REST
        self._left = FIRST  # batches until the next trial
        self._n_tried: int | None = None  # batches of this trial that were made; None: there is none
        # The latest batches by the number of threads.
        self._made = {1: deque[MadeBatch](maxlen=COUNTED)} | {most: deque[MadeBatch](maxlen=FIRST)}

    def begin(self) -> None:
        """Begin a loop: what was read from the network before may be cached now."""
        self._n_tried = None
        if self._rest <= 2 * REST:
            self._left = FIRST

    def next(self) -> int:
        """Return the number of threads that make the next batch."""
        self._left -= 1
        if self._left < 0 and self._n_tried is None and self._is_worth_a_trial():
            self._n_tried = 0
        if self._n_tried is None:
            return self.current
        return 1 if self.current == self.most else self.most  # all of them: others would slow them down

    def add(self, n_threads: int, made: MadeBatch) -> None:
        """Record a batch that these threads made."""
        self._made[n_threads].append(made)
        if self._n_tried is not None and n_threads != self.current:
            self._n_tried += 1
            if self._n_tried == TRIED:
                self._decide()

    def _is_worth_a_trial(self) -> bool:
        made = self._made[self.current]
        if self._is_fixed or len(made) != made.maxlen:
            return False
        core_s, longest_s = median(m.core_s for m in made), max(m.ended - m.began for m in made)
        is_parallel = self.current > 1 and core_s > BUSY_CORES * _each_s(made)
        return not is_parallel and longest_s < LONG_S

    def _decide(self) -> None:
        one_s, all_s = _each_s(self._made[1]), _each_s(self._made[self.most])
        self.current = 1 if one_s < (FASTER if self.current > 1 else 1.0) * all_s else self.most
        self._rest = 2 * self._rest if max(one_s, all_s) > CERTAIN * min(one_s, all_s) else REST
        self._left, self._n_tried = self._rest, None


def _each_s(made: Iterable[MadeBatch]) -> float:
    """Return the seconds from the end of one batch to that of the next, without those in which none was being made."""
    first, *others = sorted(made, key=lambda batch: batch.ended)
    busy_s, until = 0.0, first.ended
    for began, ended, *_ in others:
        busy_s += ended - min(max(began, until), ended)
        until = ended
    return busy_s / len(others)
