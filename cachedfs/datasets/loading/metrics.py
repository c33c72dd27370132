"""How long a thread waited for bytes: what making a batch took apart from that is decoding."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["KEPT", "BatchTiming", "EpochTimings", "reading", "reading_s"]


class _Sum(threading.local):
    seconds = 0.0


_sum = _Sum()


@contextmanager
def reading() -> Iterator[None]:
    """Count the time inside as this thread's waiting for bytes. Not one inside another."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _sum.seconds += time.perf_counter() - began


def reading_s() -> float:
    """Return how long this thread waited for bytes so far."""
    return _sum.seconds


KEPT = 1000  # batches that are remembered one by one


class BatchTiming(NamedTuple):
    """One batch. In seconds: how long the loop waited for it, a thread made it, and the loop went on with it."""

    wait_s: float
    load_s: float
    compute_s: float
    size: int  # bytes
    n_samples: int
    read_s: float  # of `load_s`, for bytes; 0 where the dataset does not tell


@dataclass
class EpochTimings:
    """Sums over the batches since a `for` began, the last ones one by one, and the wait for the first, which is no other's.

    With echo the times of a batch are those of all its turns. The batch in use counts when the next is asked for.
    """

    n_batches: int = 0
    n_samples: int = 0
    wait_s: float = 0.0
    load_s: float = 0.0
    read_s: float = 0.0
    compute_s: float = 0.0
    size: int = 0  # bytes
    first_wait_s: float = 0.0  # counts among the others as well
    recent: deque[BatchTiming] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, timing: BatchTiming) -> None:
        if not self.n_batches:
            self.first_wait_s = timing.wait_s
        self.n_batches += 1
        self.n_samples += timing.n_samples
        self.wait_s += timing.wait_s
        self.load_s += timing.load_s
        self.read_s += timing.read_s
        self.compute_s += timing.compute_s
        self.size += timing.size
        self.recent.append(timing)
