"""How long a thread waited for bytes: what making a batch took apart from that is decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["reading", "reading_s"]


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
