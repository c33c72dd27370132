"""Items of a prefetch plan: the objects, folders, patterns and ranges that a caller will read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fsspec.utils import stringify_path

__all__ = ["PrefetchItem", "PrefetchItems", "items_of"]

AHEAD = 256  # items taken from an iterator before the plan needs them
_FORMS = "expected a path or URL, (path, start, stop), or an iterable of them"


class PrefetchItem(NamedTuple):
    """One item: the path or URL of an object, folder or pattern; or a byte range of an object."""

    text: str
    range: tuple[int | None, int | None] | None = None


def items_of(given: Any, *, changed: Callable[[], object]) -> PrefetchItems:
    """Return the items that a caller passed as `given`.

    `changed` is called from another thread when there may be more items, or when there are no more. Raises
    TypeError if `given` is neither an item nor an iterable.
    """
    if isinstance(given, str | os.PathLike) or _is_range(given):
        return PrefetchItems([given])
    if isinstance(given, list | tuple):
        return PrefetchItems(given)
    if isinstance(given, Iterable) and not isinstance(given, bytes):
        return _Iterated(given, changed)
    raise TypeError(f"cannot prefetch {type(given).__name__}: {_FORMS}")


def _is_range(given: Any) -> bool:
    if not isinstance(given, tuple) or len(given) != 3 or not isinstance(given[0], str | os.PathLike):
        return False
    return all(bound is None or _is_int(bound) for bound in given[1:])


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _item(given: Any) -> PrefetchItem:
    if isinstance(given, str | os.PathLike):
        return PrefetchItem(stringify_path(given))
    if isinstance(given, list):
        given = tuple(given)
    if not _is_range(given):
        raise TypeError(f"cannot prefetch {given!r}: {_FORMS}")
    path, *bounds = given
    start, stop = (None if bound is None else int(bound) for bound in bounds)
    return PrefetchItem(stringify_path(path), (start, stop))


class PrefetchItems:
    """The items of a plan, in order, from a list or tuple, which is not copied. Event loop thread only."""

    def __init__(self, given: Sequence[Any] = ()) -> None:
        self._given = given
        self._next = 0

    @property
    def n_left(self) -> int | None:
        """Number of items left to take; None while more items, or an error, may come."""
        return len(self._given) - self._next

    def take(self) -> PrefetchItem | None:
        """Return the next item; None when none is available now.

        Raises the error of the caller's iterator, and TypeError for an invalid item.
        """
        if self._next >= len(self._given):
            return None
        self._next += 1
        return _item(self._given[self._next - 1])

    def close(self) -> None:
        """Take no more items."""
        self._given, self._next = (), 0


class _Iterated(PrefetchItems):
    """The items of an iterator. A thread takes them, some in advance, since the iterator may block."""

    def __init__(self, given: Iterable[Any], changed: Callable[[], object]) -> None:
        super().__init__()
        self._changed = changed
        # Used directly: an interrupt inside the `with` of a Condition could leave the lock taken.
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._there: deque[Any] = deque()
        self._is_over = self._is_closed = False
        self._error: BaseException | None = None
        thread = threading.Thread(target=self._run, args=(given,), name="cachedfs-items", daemon=True)
        thread.start()

    @property
    def n_left(self) -> int | None:
        # Without the lock: in a forked child, a thread of the parent may hold it forever. `_is_over` is set
        # last.
        return len(self._there) if self._is_over and self._error is None else None

    def take(self) -> PrefetchItem | None:
        with self._lock:
            if not self._there:
                if self._error is not None:
                    raise self._error
                return None
            self._turn.notify()
            return _item(self._there.popleft())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._there.clear()
            self._turn.notify()

    # Run in the iterator's thread.

    def _run(self, given: Iterable[Any]) -> None:
        error: BaseException | None = None
        try:
            self._take_all(given)
        except BaseException as raised:  # also SystemExit: without the error, the plan waits forever
            error = _told_apart(raised)
        with self._lock:
            self._error, self._is_over = error, True
        self._changed()

    def _take_all(self, given: Iterable[Any]) -> None:
        for value in given:
            if not self._give(value):
                return

    def _give(self, value: Any) -> bool:
        """Hand an item to the plan once it has room; return False when the plan is closed."""
        with self._lock:
            self._turn.wait_for(lambda: len(self._there) < AHEAD or self._is_closed)
            if self._is_closed:
                return False
            self._there.append(value)
            is_first = len(self._there) == 1
        if is_first:
            self._changed()
        return True


def _told_apart(error: BaseException) -> BaseException:
    """Wrap a CancelledError of the iterator, which would look like a cancellation of the plan."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    cancelled = RuntimeError("the iterator of what to prefetch was cancelled")
    cancelled.__cause__ = error
    return cancelled
