"""How many requests are in flight at one origin: those that somebody waits for, and beside them those that nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["SPECULATIVE_FACTOR", "RequestSlots", "is_speculative", "speculative"]

SPECULATIVE_FACTOR = 2  # times `concurrency`, for what is sent ahead

_is_ahead = ContextVar("cachedfs_is_ahead", default=False)


def is_speculative() -> bool:
    """Return whether what runs here was begun before anybody waited for it."""
    return _is_ahead.get()


@contextmanager
def speculative() -> Iterator[None]:
    """Nobody waits for the requests that are begun in here, nor for those of the tasks that are."""
    token = _is_ahead.set(True)
    try:
        yield
    finally:
        _is_ahead.reset(token)


class RequestSlots:
    """Permits of two kinds. Who sends ahead takes none that another might wait for.

    `concurrency` of them for those who wait. Twice as many for what is sent ahead: what somebody waits for by now keeps
    its permit, and as many again are sent while nobody does.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.most = (1 + SPECULATIVE_FACTOR) * concurrency
        self._waited_for = asyncio.Semaphore(concurrency)
        self._ahead = asyncio.Semaphore(SPECULATIVE_FACTOR * concurrency)

    @property
    def mine(self) -> asyncio.Semaphore:
        """The permits of whoever asks: to be entered for as long as the answer is being read."""
        return self._ahead if is_speculative() else self._waited_for
