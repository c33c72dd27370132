"""`CachedFile`: an `io.BufferedReader` over blocks.

Threads may share it: each one reads at the position that it sought itself.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from operator import index
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fsspec.spec import AbstractFileSystem

from cachedfs.common.types import ObjectInfo
from cachedfs.core.open_file import BUFFER_SIZE, RawFile
from cachedfs.errors import ObjectChanged, OriginUnavailable, public_text
from cachedfs.origins.registry import is_whole

if TYPE_CHECKING:
    from cachedfs.core.download import Download
    from cachedfs.core.objects import Entry
    from cachedfs.core.reader import Reader

_Read = TypeVar("_Read", bound=Callable[..., Any])
_SIZE = -1  # marks a seek(0, 2), which queries the size, in place of a position


def _at_own_seek(read: _Read) -> _Read:
    """Wrap a read method: it starts at its thread's last seek and holds the file's lock.

    The method takes at most one argument.
    """

    @functools.wraps(read)
    def reading(self: CachedFile, size: Any = -1, /) -> Any:
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


class CachedFile(io.BufferedReader):
    """A readable, seekable binary file over one version of an object, as `fs.open` returns it.

    It behaves like a builtin file opened with "rb": `read`, `readinto`, `seek`, `tell` and iteration over lines. It
    reads only the version it was opened on: once the object was replaced, reading a block that is not cached raises
    `ObjectChanged`.

    Threads may share the file: a read starts where its own thread last sought, whatever other threads do in between. A
    thread that has not called `seek` since its last read continues where the last thread left the file. If that was
    another thread, the file was handed over, and the read drops the pending seeks of all threads. `seek(0, 2)` is taken
    as a query of the size: a later read does not return to the end if another thread moved the file in between.

    Pickling keeps the path and the position. Unpickling raises `ObjectChanged` if the object was replaced. The file has
    the attributes that libraries expect of an fsspec file: `fs`, `path`, `size`, `loc`, `blocksize`, `info()`.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        reader: Reader,
        entry: Entry,
        download: Download | None,
    ) -> None:
        raw = RawFile(reader, entry, download)
        super().__init__(raw, buffer_size=BUFFER_SIZE)
        # Threads are identified by `get_ident`, because a C++ thread loses a `threading.local` between calls.
        self._lock = RLock()  # reentrant, because methods call each other
        self._last_thread: int | None = None  # the thread that moved the file last
        self._sought: int | None = None  # where it left the file, if `_seek` was not called for that yet
        self._seeks: dict[int, int] = {}  # target of each thread's last seek, until its next read
        self._at = raw.at
        self.fs = fs
        self.path = path
        self.size = raw.size
        self.blocksize = reader.objects.config.block_size

    _seek, _tell = io.BufferedReader.seek, io.BufferedReader.tell

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to `offset`, relative to `whence`, and return the position. This thread's next read starts there."""
        if whence or (position := index(offset)) < 0 or self.closed:
            return self._seek_from(offset, whence)
        self._sought, self._last_thread = position, (thread := get_ident())
        self._seeks[thread] = position
        return position

    def _seek_from(self, offset: int, whence: int) -> int:
        with self._lock:
            if whence == 1:
                offset, whence = self.tell() + offset, 0
            position, thread = self._seek(offset, whence), get_ident()
            self._sought, self._last_thread = None, thread
            self._seeks[thread] = _SIZE if whence == 2 and not offset else position
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

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes; all up to the end if it is None or negative, as fsspec's files do."""
        if size is None or size < 0:
            return self._read(-1)
        thread = get_ident()
        # The first read after a seek does not go through the buffer.
        if (position := self._seeks.get(thread, -1)) < 0 or (data := self._at(position, size)) is None:
            return self._read(size)
        self._seeks.pop(thread, None)
        self._sought, self._last_thread = position + size, thread
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer`; return the number of bytes, which is less at the end of the file only."""
        into = memoryview(buffer).cast("B")
        if len(into) > BUFFER_SIZE or get_ident() not in self._seeks:
            return self._readinto(into)
        data = self.read(len(into))
        into[: len(data)] = data
        return len(data)

    _read, _readinto = _at_own_seek(io.BufferedReader.read), _at_own_seek(io.BufferedReader.readinto)
    read1 = _at_own_seek(io.BufferedReader.read1)
    readinto1 = _at_own_seek(io.BufferedReader.readinto1)
    readline = _at_own_seek(io.BufferedReader.readline)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines from this thread's position on; what is buffered without a lock for each of them."""
        while line := self.readline():
            yield line
            with self._lock:
                if self._seeks or self._sought is not None:
                    continue
                position, buffered = self._tell(), super().peek()
            for line in io.BytesIO(buffered[: buffered.rfind(b"\n") + 1]):
                self._sought = position = position + len(line)
                yield line
                if self._sought is not position:  # the caller, or another thread, has moved the file
                    break

    def peek(self, size: int = 0, /) -> bytes:
        """Return bytes from the start of this thread's next read, without moving the position."""
        with self._lock:
            self._go_to_start(get_ident())
            return super().peek(size)

    @property
    def loc(self) -> int:
        """Offset of the next byte to read."""
        return self.tell()

    @property
    def full_name(self) -> str:
        """The URL that opens this object again."""
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def details(self) -> dict[str, Any]:
        """The same as `info()`, under fsspec's name."""
        return self.info()

    def info(self) -> dict[str, Any]:
        """Return what `fs.info` returns, for the version this file reads.

        If the object was replaced or cannot be looked up now, return the metadata from when the file was opened.
        """
        info = self._object()
        if not is_whole(self.fs._objects.identity, info):
            with contextlib.suppress(FileNotFoundError, OriginUnavailable):  # then keep `info`
                now = self.fs._described(self.path)
                info = now if now.fingerprint == info.fingerprint else info
        return info.as_info()

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:  # io's own raises from Python 3.12 on
        return _reopen, (self.fs, self.path, self.tell(), self._object().fingerprint)

    def __repr__(self) -> str:
        return f"<CachedFile {public_text(self.full_name)!r}>"

    def _object(self) -> ObjectInfo:
        info: ObjectInfo = self.raw.info  # type: ignore[attr-defined]  # our RawFile
        return info


def _reopen(fs: AbstractFileSystem, path: str, position: int, fingerprint: str | None) -> CachedFile:
    """Return a file at the same position of the same version; raise ObjectChanged if it was replaced."""
    file: CachedFile = fs.open(path, "rb")
    now = file._object().fingerprint
    if now != fingerprint:
        file.close()
        raise ObjectChanged(
            f"{fs.unstrip_protocol(path)}: the object was replaced since the file was pickled; open it again"
        )
    file.seek(position)
    return file
