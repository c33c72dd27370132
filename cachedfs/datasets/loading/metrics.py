"""Timings of batches, and of each thread's waits for bytes.

The time that a thread takes to make a batch, less its waits for bytes, is the time of decoding.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["KEPT", "BatchTiming", "EpochTimings", "reading", "reading_s"]

KEPT = 1000  # recent batches whose timings are kept individually


class _Sum(threading.local):
    seconds = 0.0


_sum = _Sum()


@contextmanager
def reading() -> Iterator[None]:
    """Count the time spent inside as this thread's wait for bytes. Must not be nested."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _sum.seconds += time.perf_counter() - began


def reading_s() -> float:
    """Return how many seconds this thread has waited for bytes so far."""
    return _sum.seconds


class BatchTiming(NamedTuple):
    """Timing of one batch in seconds.

    The loop's wait for it, the time to make it, and the loop's use of it.
    """

    wait_s: float
    load_s: float
    compute_s: float
    size: int  # bytes
    n_samples: int
    read_s: float  # part of `load_s` spent waiting for bytes; 0 if the dataset does not measure it


@dataclass
class EpochTimings:
    """Timings of the batches since a loop began.

    Sums over all batches, the wait for the first batch, and the timings of the last 1000. With echo, the times of a
    batch cover all its repetitions. A batch counts once the next one is asked for.
    """

    n_batches: int = 0
    n_samples: int = 0
    wait_s: float = 0.0
    load_s: float = 0.0
    read_s: float = 0.0
    compute_s: float = 0.0
    size: int = 0  # bytes
    first_wait_s: float = 0.0  # also part of `wait_s`
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
