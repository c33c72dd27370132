"""An open object: an io.BufferedReader that threads may share, over a raw reader of blocks."""

from __future__ import annotations

import contextlib
import io
from threading import get_ident
from typing import Any

from fsspec.spec import AbstractFileSystem

from cachedfs.common.shared_file import SharedFile, at_own_seek
from cachedfs.common.types import ObjectInfo
from cachedfs.errors import ObjectChanged, OriginUnavailable
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.origins.registry import is_whole
from cachedfs.read.raw_reader import BUFFER_SIZE, RawReader
from cachedfs.read.reader import Reader

__all__ = ["CachedFile"]


class CachedFile(SharedFile, io.BufferedReader):
    """A readable, seekable binary file over one version of one object.

    What `fs.open` gives: `read`, `readinto`, `seek`, `tell`, iteration over lines, as a builtin file opened with "rb".
    It stays with the version it opened: a block that is not here after the object was replaced is `ObjectChanged`.
    Threads may share it: a read begins where its own thread sought last, whatever the others do in between.
    Pickles by path and position. Carries what libraries look for on a fsspec file: `fs`, `path`, `size`, `loc`,
    `blocksize`, `info()`.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        reader: Reader,
        known: MetadataEntry,
        inflight: InflightRequest | None,
    ) -> None:
        raw = RawReader(reader, known, inflight)
        super().__init__(raw, buffer_size=BUFFER_SIZE)
        self.fs = fs
        self.path = path
        self.size = raw.size
        self.blocksize = reader.source.config.block_size

    _seek, _tell = io.BufferedReader.seek, io.BufferedReader.tell
    read = at_own_seek(io.BufferedReader.read)
    read1 = at_own_seek(io.BufferedReader.read1)
    readinto = at_own_seek(io.BufferedReader.readinto)
    readinto1 = at_own_seek(io.BufferedReader.readinto1)
    readline = at_own_seek(io.BufferedReader.readline)  # iteration calls it too

    def peek(self, size: int = 0, /) -> bytes:
        """Return bytes that the next read of this thread begins with, without moving."""
        with self._lock:
            if (thread := get_ident()) != self._mover:
                self._take_over(thread)
            return super().peek(size)

    @property
    def loc(self) -> int:
        """Offset of the next byte that will be read."""
        return self.tell()

    @property
    def full_name(self) -> str:
        """The URL that opens this object again."""
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def details(self) -> dict[str, Any]:
        """What `info` returns, by fsspec's name for it."""
        return self.info()

    def info(self) -> dict[str, Any]:
        """Return what `fs.info` says of the version that this handle reads; what is known of it where it was replaced."""
        info = self._object()
        if not is_whole(self.fs._source.identity, info):
            with contextlib.suppress(
                FileNotFoundError, OriginUnavailable
            ):  # this handle still has its version
                now = self.fs._described(self.path)
                info = now if now.fingerprint == info.fingerprint else info
        return info.as_info()

    def getbuffer(self) -> memoryview:
        """Raise UnsupportedOperation: the object is not in memory."""
        raise io.UnsupportedOperation(f"{self.full_name}: not in memory; read() it")

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:  # io's own refuses, from Python 3.12 on
        return _reopen, (self.fs, self.path, self.tell(), self._object().fingerprint)

    def __repr__(self) -> str:
        return f"<CachedFile {self.full_name!r}>"

    def _object(self) -> ObjectInfo:
        info: ObjectInfo = self.raw.info  # type: ignore[attr-defined]  # our RawReader
        return info


def _reopen(fs: AbstractFileSystem, path: str, position: int, fingerprint: str | None) -> CachedFile:
    """Return a handle at the same place of the same version; ObjectChanged when that was replaced meanwhile."""
    file: CachedFile = fs.open(path, "rb")
    now = file._object().fingerprint
    if now != fingerprint:
        file.close()
        raise ObjectChanged(
            f"{fs.unstrip_protocol(path)}: replaced since the handle was pickled; open it again"
        )
    file.seek(position)
    return file
