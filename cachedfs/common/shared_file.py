"""Files that several threads use: each reads where it sought itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any, TypeVar, cast

__all__ = ["SharedFile", "at_own_seek"]

_Read = TypeVar("_Read", bound=Callable[..., Any])
_SIZE = -1  # in the place of a position: the thread asked for the size


class SharedFile:
    """Mixin for readable files: a read begins where its own thread sought, whatever other threads do in between.

    A thread that has not sought since it last read goes on where the last thread left the file. The file was passed on
    then, so seeks that no read of their thread has followed are dropped. `seek(0, 2)` asks for the size: it moves the file,
    but a thread that finds it moved by another thread does not go back to the end.

    A class with this mixin sets `_seek` and `_tell` to the methods of its other base, and wraps those that read in
    `at_own_seek`. Threads are told apart by `get_ident`: a C++ thread loses a `threading.local` between two calls.
    """

    _seek: Callable[..., int]
    _tell: Callable[..., int]
    size: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = RLock()  # a signal handler may use the file that it interrupts
        self._mover: int | None = None  # the thread that moved the file last
        self._sought: dict[int, int] = {}  # by thread: where its last seek went, until it reads
        super().__init__(*args, **kwargs)

    def seek(self, loc: int, whence: int = 0) -> int:
        """Move to `loc`. The next read of this thread begins there."""
        with self._lock:
            if (thread := get_ident()) != self._mover and whence == 1:
                loc, whence = self.tell() + loc, 0
            position = self._seek(loc, whence)
            self._mover = thread
            self._sought[thread] = _SIZE if whence == 2 and not loc else position
            return position

    def tell(self) -> int:
        """Return where the next read of this thread begins."""
        with self._lock:
            now = self._tell()  # raises where the file is closed
            if (thread := get_ident()) == self._mover or thread not in self._sought:
                return now
            position = self._sought[thread]
            return int(self.size) if position == _SIZE else position

    def _take_over(self, thread: int) -> None:
        """Go where `thread` sought, or stay where another thread left the file. The lock is held."""
        position = self._sought.get(thread, _SIZE)
        if position == _SIZE:
            self._sought.clear()
        else:
            self._seek(position)
        self._mover = thread


def at_own_seek(read: _Read) -> _Read:
    """Wrap a method that reads, of at most one argument: it begins where its thread sought, and no other moves the file meanwhile."""

    @functools.wraps(read)
    def reading(self: SharedFile, size: Any = -1, /) -> Any:
        with self._lock:
            if (thread := get_ident()) != self._mover:
                self._take_over(thread)
            data = read(self, size)
            self._sought.pop(thread, None)  # not after an error: the next try reads there too
            return data

    reading.__doc__ = f"As `{read.__qualname__}`, from where the calling thread sought."
    return cast("_Read", reading)
