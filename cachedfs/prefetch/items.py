"""Items of a prefetch plan: the objects, folders, patterns and ranges that a caller will read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fsspec.utils import stringify_path

AHEAD = 256  # items taken from an iterator before the plan needs them
_FORMS = "expected a path or URL, (path, start, stop), or an iterable of them"


class PrefetchItem(NamedTuple):
    """One item: the path or URL of an object, folder or pattern; or a byte range of an object."""

    text: str
    range: tuple[int | None, int | None] | None = None


class PrefetchItems:
    """The items of a plan, in order. A thread takes those of an iterator in advance, since it may block.

    `changed` is called from that thread when there may be more items, or when there are no more. Raises TypeError if
    `given` is neither an item nor an iterable. No lock: in a forked child, a thread of the parent may hold it forever.
    """

    def __init__(self, given: Any, changed: Callable[[], object]) -> None:
        self._there: deque[Any] = deque()
        self._room = threading.Semaphore(AHEAD)
        self._error: BaseException | None = None
        self._is_over, self._is_closed = True, False
        if isinstance(given, str | os.PathLike) or _is_range(given):
            self._there.append(given)
        elif isinstance(given, list | tuple):
            self._there.extend(given)
        elif isinstance(given, Iterable) and not isinstance(given, bytes):
            self._is_over = False
            name, args = "cachedfs-items", (given, changed)
            threading.Thread(target=self._take_from, args=args, name=name, daemon=True).start()
        else:
            raise TypeError(f"cannot prefetch {type(given).__name__}: {_FORMS}")

    @property
    def n_left(self) -> int | None:
        """Number of items left to take; None while more items, or an error, may come."""
        return len(self._there) if self._is_over and self._error is None else None

    def take(self) -> PrefetchItem | None:
        """Return the next item; None when none is available now.

        Raises the error of the caller's iterator, and TypeError for an invalid item.
        """
        if self._there:
            self._room.release()
            return _item(self._there.popleft())
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """Take no more items."""
        self._is_closed = True
        self._there.clear()
        self._room.release()

    def _take_from(self, given: Iterable[Any], changed: Callable[[], object]) -> None:
        try:
            for value in given:
                self._room.acquire()
                if self._is_closed:
                    return
                self._there.append(value)
                if len(self._there) == 1:
                    changed()
        except asyncio.CancelledError as error:  # which would look like a cancellation of the plan
            self._error = RuntimeError("the iterator of what to prefetch was cancelled")
            self._error.__cause__ = error
        except BaseException as error:  # also SystemExit: without the error, the plan waits forever
            self._error = error
        self._is_over = True
        changed()


def _is_range(given: Any) -> bool:
    if not isinstance(given, tuple) or len(given) != 3 or not isinstance(given[0], str | os.PathLike):
        return False
    return all(bound is None or _is_int(bound) for bound in given[1:])


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _item(given: Any) -> PrefetchItem:
    if isinstance(given, str | os.PathLike):
        return PrefetchItem(stringify_path(given))
    if not _is_range(given := tuple(given) if isinstance(given, list) else given):
        raise TypeError(f"cannot prefetch {given!r}: {_FORMS}")
    path, *bounds = given
    start, stop = (None if bound is None else int(bound) for bound in bounds)
    return PrefetchItem(stringify_path(path), (start, stop))
