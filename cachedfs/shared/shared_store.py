"""The interface of the places that hold a shared cache, and the files in them.

All of it blocks, perhaps for ever: on a network file system whose server does not answer. So it is called in threads that
nobody has to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from cachedfs.cache.block_file import PAGE, wrong_page
from cachedfs.cache.disk import Buffer
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import TAIL_SIZE, Piece, PieceIndex, PlacedPiece, index_size, parsed_index

logger = logging.getLogger("cachedfs.shared")

BASE = "cachedfs-shared-1"  # the folder of the files; its name has the format: other formats never see these files
LEFT_ALONE_S = 30.0  # for this time, a store is left alone that did not answer within its `answers_s`
# Until when, and why, by place. A forked process takes it over.
_LEFT_ALONE: dict[str, tuple[float, str]] = {}
_PROBE = 16 << 10  # bytes read from the end of a file: the whole index, unless it is one of many pieces


class KeptFile(NamedTuple):
    """A file of a shared cache, by its name below `BASE`, and when it was last used or written."""

    name: str
    size: int
    used_at: float
    written_at: float


class StoredFile(ABC):
    """A file of a shared cache, open for reading. Methods raise DamagedFile and OSError."""

    size: int
    modified_at: float
    probe = _PROBE

    @abstractmethod
    def part(self, start: int, stop: int) -> bytes:
        """Return these bytes of the file, all of them."""

    def index(self) -> PieceIndex:
        """Return what is in the file."""
        return self.end().index()

    def end(self) -> FilePart:
        """Return the end of the file, with the whole index."""
        start = max(0, self.size - self.probe)
        end = self.part(start, self.size)
        size = index_size(end[-TAIL_SIZE:], self.size)
        if size > len(end):
            start = self.size - size
            end = self.part(start, self.size)
        return FilePart(end, start, self.size, self.modified_at)

    def whole(self) -> FilePart:
        """Return the file, in memory."""
        return FilePart(self.part(0, self.size), 0, self.size, self.modified_at)

    def find(self, placed: PlacedPiece) -> tuple[Piece, int]:
        """Return a piece that the index, or the name of the file, says to be here, and its offset."""
        if placed.offset is not None:
            return placed.piece, placed.offset
        for piece, offset in self.index().pieces:
            if (piece.key, piece.start, piece.stop) == placed.piece.place:
                return piece, offset
        raise DamagedFile("it is not what its name says")

    def read(self, piece: Piece, offset: int, start: int, stop: int) -> bytes:
        """Return bytes `[start, stop)` of the object that a piece is of, checked."""
        first, begin, end = pages_of(piece, start, stop)
        data = self.part(offset + begin - piece.start, offset + end - piece.start)
        checksums = piece.checksums[first : -(-(stop - piece.start) // PAGE)]
        if (page := wrong_page(memoryview(data), checksums)) is not None:
            raise DamagedFile(f"page {first + page} of a piece is damaged")
        return data[start - begin : stop - begin]


def pages_of(piece: Piece, start: int, stop: int) -> tuple[int, int, int]:
    """Return the first of the pages that have bytes `[start, stop)` of an object, and their bytes in the object."""
    first, last = (start - piece.start) // PAGE, -(-(stop - piece.start) // PAGE)
    return first, piece.start + first * PAGE, min(piece.start + last * PAGE, piece.stop)


def read_exactly(fd: int, start: int, size: int) -> bytes:
    """Return bytes of a file. Raises DamagedFile at its end."""
    data = os.pread(fd, size, start)
    if len(data) != size:
        raise DamagedFile("it is shorter than it says")
    return data


class FilePart(StoredFile):
    """The bytes of a file from `offset` on, in memory."""

    def __init__(self, data: bytes, offset: int, size: int, modified_at: float) -> None:
        self._data, self._offset, self.size, self.modified_at = data, offset, size, modified_at

    def part(self, start: int, stop: int) -> bytes:
        assert self._offset <= start <= stop <= self._offset + len(self._data)
        return self._data[start - self._offset : stop - self._offset]

    def index(self) -> PieceIndex:
        size = index_size(self._data[-TAIL_SIZE:], self.size)
        return parsed_index(self._data[-size:], self.size)


class SharedPlace:
    """A place behind a local cache, at the URL (or the local path) `url`, and whether it can be used now.

    Nothing here raises or blocks. `trouble` says why it is not used, or not written. `times_itself`: its methods raise
    TimeoutError after `answers_s` without a byte, once it `is_ready`. `lists_all`: a listing of everything costs little
    more than one of a subfolder. `counts_requests`: files with many objects are read as a whole, to send fewer requests.
    `chunk`: bytes to read at once. `is_local`: it is on a disk of this machine, and read without a limit of time.
    """

    answers_s = 2.0
    times_itself = lists_all = counts_requests = is_local = False
    is_ready = True
    chunk = 2 << 20
    pauses_s = (0.05, 0.25)  # the first and the longest between two looks at what another node fetches

    def __init__(self, url: str, *, is_read_only: bool) -> None:
        self.url, self.is_read_only, self.path = url, is_read_only, f"{url}/{BASE}"
        self.trouble = _LEFT_ALONE[url][1] if self.is_off else ""
        self._warned: set[str] = set()
        self._calls: dict[int, float] = {}  # when each thread made a call that has not ended (monotonic)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Mark a call of the store: `wait_for` counts its time, and no other time of a thread."""
        thread = threading.get_ident()
        self._calls[thread] = time.monotonic()
        try:
            yield
        finally:
            self._calls.pop(thread, None)

    async def wait_for(self, future: asyncio.Future[Any], longest_s: float = math.inf) -> bool:
        """Wait for a thread, and return whether it has ended; leave the store alone if it does not answer a call."""
        if self.times_itself and longest_s == math.inf:
            return bool(await asyncio.wait([future]))
        now = time.monotonic()
        until = now + longest_s
        while not (future.done() or self.is_off) and now < until:
            left_s = min(list(self._calls.values()), default=now) + self.answers_s - now
            if left_s <= 0:
                if not self.times_itself:
                    self.did_not_answer()
                break
            await asyncio.wait([future], timeout=min(left_s, until - now))
            now = time.monotonic()
        return future.done()

    def has_leases(self, size: int) -> bool:
        """Return whether nodes wait for each other where an object has this size."""
        return True

    @property
    def is_off(self) -> bool:
        """True while it is left alone."""
        return self.url in _LEFT_ALONE and time.monotonic() < _LEFT_ALONE[self.url][0]

    def leave_alone(self, problem: str) -> None:
        trouble = f"the shared cache {self.url} is not used: {problem}"
        _LEFT_ALONE[self.url] = time.monotonic() + LEFT_ALONE_S, trouble
        self.warn("away", trouble)

    def did_not_answer(self) -> None:
        self.leave_alone(f"it did not answer within {self.answers_s:.0f} s")

    def warn(self, kind: str, trouble: str) -> None:
        """Log the first trouble of a kind as a warning."""
        self.trouble = trouble
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", trouble)

    def answered(self) -> None:
        """Note that it can be used."""
        self.trouble = self.trouble if self.is_read_only else ""

    def close_file(self, name: str) -> None:
        """Close a file that is kept open."""

    def close_deleted(self) -> None:
        """Close files that are kept open and were removed, to free their disk space."""

    def check_room(self) -> None:
        """Raise OSError if nothing more may be written, although the store would accept it."""

    def close(self) -> None:
        pass


class ReadableStore(Protocol):
    """A place that holds a shared cache. Methods raise OSError."""

    def files(self) -> Iterable[KeptFile]:
        """Yield the files with data; none if there is no shared cache."""
        ...

    def open(self, name: str) -> StoredFile:
        """Open a file. Raises FileNotFoundError, and DamagedFile for what is no file."""
        ...


class SharedStore(ReadableStore, Protocol):
    """A place that holds a shared cache, and can be written."""

    def write(
        self, name: str, data: Sequence[Buffer], index: Callable[[], bytes], *, replaces: bool = False
    ) -> None:
        """Put a file with `data` and the result of `index` at a name, unless it is there. Raises DamagedFile.

        `index` is called last: it tells ages, which count from the time of the file.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file; who has it open reads on. Do nothing if it does not exist."""
        ...
