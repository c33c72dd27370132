"""What a caller declared that it will read: items, taken one by one as a plan gets to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from fsspec.utils import stringify_path

__all__ = ["PrefetchItem", "PrefetchItems", "items_of"]

AHEAD = 256  # items that are taken from an iterator before the plan gets to them
MOST = 1 << 18  # while the plan looks what is used when, or where its reader is
_FORMS = "expected a path or URL, (path, start, stop), or an iterable of them"


class PrefetchItem(NamedTuple):
    """One thing to fetch, as it was written: an object, a folder or a pattern; with a range, one of an object."""

    text: str
    range: tuple[int | None, int | None] | None = None


class PrefetchItems(Protocol):
    """Items in their order. On the runtime's loop."""

    @property
    def n_left(self) -> int | None:
        """How many are still to be taken; None while more may come, or an error."""
        ...

    def take(self) -> PrefetchItem | None:
        """Return the next one; None when there is none now. Raises what its iterator raised, and for what is no item."""
        ...

    def peek(self, i: int) -> PrefetchItem | None:
        """Return the one after the next `i`, if it is there already; None for what is no item, too: `take` will raise."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


def items_of(given: Any, *, changed: Callable[[], object]) -> PrefetchItems:
    """Return the items that a caller gave. `changed` is called, from another thread, when there may be more, or no more.

    Raises TypeError for what can be none.
    """
    if isinstance(given, str | os.PathLike) or _is_range(given):
        return _Listed([given])
    if isinstance(given, list | tuple):
        return _Listed(given)
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


def _seen(given: Any) -> PrefetchItem | None:
    """Return an item that is only looked at: what comes before one that is none is to be fetched."""
    with contextlib.suppress(TypeError):
        return _item(given)
    return None


class _Listed:
    """The items of a list, which stays the caller's."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = given
        self._next = 0

    @property
    def n_left(self) -> int | None:
        return len(self._given) - self._next

    def take(self) -> PrefetchItem | None:
        if self._next >= len(self._given):
            return None
        self._next += 1
        return _item(self._given[self._next - 1])

    def peek(self, i: int) -> PrefetchItem | None:
        at = self._next + i
        return _seen(self._given[at]) if at < len(self._given) else None

    def close(self) -> None:
        self._given, self._next = (), 0


class _Iterated:
    """The items of an iterator, taken by a thread of its own, as it may block; some of them before the plan needs them."""

    def __init__(self, given: Iterable[Any], changed: Callable[[], object]) -> None:
        self._changed = changed
        # Entered itself: an interrupt of who asks how far a plan is, inside a Condition's `with`, would leave it taken.
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._there: deque[Any] = deque()
        self._most = AHEAD
        self._is_over = self._is_closed = False
        self._error: BaseException | None = None
        thread = threading.Thread(target=self._run, args=(given,), name="cachedfs-items", daemon=True)
        thread.start()

    @property
    def n_left(self) -> int | None:
        # Without the lock, which a thread of the parent may have held when this process was forked: `_is_over` comes last.
        return len(self._there) if self._is_over and self._error is None else None

    def take(self) -> PrefetchItem | None:
        with self._lock:
            self._most = AHEAD
            if not self._there:
                if self._error is not None:
                    raise self._error
                return None
            self._turn.notify()
            return _item(self._there.popleft())

    def peek(self, i: int) -> PrefetchItem | None:
        with self._lock:
            if i < len(self._there):
                return _seen(self._there[i])
            self._most = max(self._most, min(i + AHEAD, MOST))
            self._turn.notify()
            return None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._there.clear()
            self._turn.notify()

    # In the thread.

    def _run(self, given: Iterable[Any]) -> None:
        error: BaseException | None = None
        try:
            self._take_all(given)
        except BaseException as raised:  # a SystemExit, too: a plan that is not told waits for ever
            error = _told_apart(raised)
        with self._lock:
            self._error, self._is_over = error, True
        self._changed()

    def _take_all(self, given: Iterable[Any]) -> None:
        for value in given:
            if not self._give(value):
                return

    def _give(self, value: Any) -> bool:
        """Keep an item for the plan, when it has few; False when it wants no more."""
        with self._lock:
            self._turn.wait_for(lambda: len(self._there) < self._most or self._is_closed)
            if self._is_closed:
                return False
            self._there.append(value)
            is_first = len(self._there) == 1
        if is_first:
            self._changed()
        return True


def _told_apart(error: BaseException) -> BaseException:
    """Return what a plan raises for an error of its iterator: its own cancellation is another thing than one in there."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    cancelled = RuntimeError("the iterator of what to prefetch was cancelled")
    cancelled.__cause__ = error
    return cancelled
