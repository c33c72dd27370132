"""A mixin for file objects shared by threads: each thread reads where it called `seek` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any, TypeVar, cast

__all__ = ["SharedFile", "at_own_seek"]

_Read = TypeVar("_Read", bound=Callable[..., Any])
_SIZE = -1  # marks a seek(0, 2), which queries the size, in place of a position


class SharedFile:
    """Mixin for files shared by threads: each thread reads where it called `seek` itself.

    A thread that has not called `seek` since its last read continues where the last thread left the file. If that was
    another thread, the file was handed over, and the read drops the pending seeks of all threads. `seek(0, 2)` is taken
    as a query of the size: a later read does not return to the end if another thread moved the file in between.

    A class with this mixin sets `_seek` and `_tell` to the methods of its other base, and wraps its read methods in
    `at_own_seek`. Threads are identified by `get_ident`, because a C++ thread loses a `threading.local` between calls.
    """

    _seek: Callable[..., int]
    _tell: Callable[..., int]
    size: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = RLock()  # reentrant, because methods call each other
        self._last_thread: int | None = None  # the thread that moved the file last
        self._sought: int | None = None  # where it left the file, if `_seek` was not called for that yet
        self._seeks: dict[int, int] = {}  # target of each thread's last seek, until its next read
        super().__init__(*args, **kwargs)

    def seek(self, loc: int, whence: int = 0) -> int:
        """Move to `loc`, relative to `whence`, and return the position.

        This thread's next read starts there.
        """
        with self._lock:
            if whence == 1:
                loc, whence = self.tell() + loc, 0
            position, thread = self._seek(loc, whence), get_ident()
            self._sought, self._last_thread = None, thread
            self._seeks[thread] = _SIZE if whence == 2 and not loc else position
            return position

    def tell(self) -> int:
        """Return the position at which this thread's next read starts."""
        with self._lock:
            now = self._tell()  # raises ValueError if the file is closed
            position = self._seeks.get(get_ident(), self._sought)
            return now if position is None else int(self.size) if position == _SIZE else position

    def _go_to_start(self, thread: int) -> None:
        """Move to where the next read of `thread` starts: to its last seek, or where the last thread left the file.

        Requires the lock.
        """
        position: int | None = self._seeks.get(thread, _SIZE)
        if position == _SIZE:
            position = self._sought
            if thread != self._last_thread:
                self._seeks.clear()
        if position is not None:
            self._seek(position)
        self._sought, self._last_thread = None, thread


def at_own_seek(read: _Read) -> _Read:
    """Wrap a read method: it starts at its thread's last seek and holds the file's lock.

    The method takes at most one argument.
    """

    @functools.wraps(read)
    def reading(self: SharedFile, size: Any = -1, /) -> Any:
        with self._lock:
            thread = get_ident()
            # Usually, it reads on.
            if self._seeks or self._sought is not None or thread != self._last_thread:
                self._go_to_start(thread)
            data = read(self, size)
            if self._seeks:
                # Kept after an error, so that a retry reads at the same position.
                self._seeks.pop(thread, None)
            return data

    reading.__doc__ = f"As `{read.__qualname__}`, from where the calling thread sought."
    return cast("_Read", reading)
