"""Limits on the requests in flight at one origin: one for waiting callers, one for speculative requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["SPECULATIVE_FACTOR", "RequestSlots", "is_speculative", "speculative"]

SPECULATIVE_FACTOR = 2  # times `concurrency`, for speculative requests

_is_ahead = ContextVar("cachedfs_is_ahead", default=False)


def is_speculative() -> bool:
    """Return whether the running task was started before any caller waited for its result."""
    return _is_ahead.get()


@contextmanager
def speculative() -> Iterator[None]:
    """Make all requests started in this block speculative, also those of tasks started in it."""
    token = _is_ahead.set(True)
    try:
        yield
    finally:
        _is_ahead.reset(token)


class RequestSlots:
    """Two semaphores: speculative requests never take a slot that a waiting caller needs.

    There are `concurrency` slots for waiting callers, and twice as many for speculative requests. A speculative request
    keeps its slot when a caller starts to wait for it; then there is still room for `concurrency` others.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.most = (1 + SPECULATIVE_FACTOR) * concurrency
        self._waited_for = asyncio.Semaphore(concurrency)
        self._ahead = asyncio.Semaphore(SPECULATIVE_FACTOR * concurrency)

    @property
    def mine(self) -> asyncio.Semaphore:
        """The semaphore for the running task, to be held while the answer is being read."""
        return self._ahead if is_speculative() else self._waited_for
