"""Open files of Google Drive: one version being read, or written bytes kept locally until they are sent."""

from __future__ import annotations

import io
import tempfile
from threading import get_ident
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.spec import AbstractBufferedFile

from cachedfs.common.shared_file import SharedFile, at_own_seek
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import CachedFSError
from cachedfs.origins.drive.upload import UploadContent
from cachedfs.origins.origin_errors import failure_since, handled_exceptions, is_failure

__all__ = ["DriveFile", "WrittenDriveFile", "not_kept"]


class DriveFile(SharedFile, AbstractBufferedFile):
    """A file of Drive open for reading, in the version it had when it was opened. Threads may share it."""

    _seek, _tell = AbstractBufferedFile.seek, AbstractBufferedFile.tell
    _read = at_own_seek(AbstractBufferedFile.read)

    def __init__(
        self,
        fs: AsyncFileSystem,
        path: str,
        info: ObjectInfo,
        block_size: int,
        whole: bytes | None = None,
        **options: Any,
    ) -> None:
        self._info, self._whole = info, whole
        size = info.size if whole is None else len(whole)
        super().__init__(fs, path, "rb", block_size, size=size, **options)

    @property
    def details(self) -> dict[str, Any]:
        """The metadata from when the file was opened."""
        return self._info.as_info()

    def read(self, length: int = -1) -> bytes:
        return self._read(length)  # type: ignore[no-any-return]

    def readuntil(self, char: bytes = b"\n", blocks: int | None = None) -> bytes:
        with self._lock:
            data: bytes = super().readuntil(char, blocks)
            self._seeks.pop(get_ident(), None)  # its seeks are part of the read
            return data

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._whole is not None:
            return self._whole[start:end]
        return sync(self.fs.loop, self.fs._bytes, self.path, Range(start, end), self._info)  # type: ignore[no-any-return]


class WrittenDriveFile(io.RawIOBase):
    """A file open for writing: kept locally and sent at close, so a process that dies first changes nothing."""

    # Nothing in here may fail: Python closes what it has half made, and closing sends.
    def __init__(
        self, fs: AsyncFileSystem, path: str, mode: str, spool: Any, *, onto: str | None, autocommit: bool
    ) -> None:
        self.fs, self.path, self.mode, self.autocommit = fs, path, mode, autocommit
        self._spool, self._onto = spool, onto
        self._trouble: CachedFSError | None = None
        self._is_given_up = False
        self._handled = handled_exceptions()  # while the file is opened

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self._trouble is not None:
            raise self._trouble
        try:
            return int(self._spool.write(data))
        except OSError as error:
            self._spool.close()
            self._trouble = not_kept(self.path, error)
            raise self._trouble from error

    def tell(self) -> int:
        return int(self._spool.tell())

    def close(self) -> None:
        """Send what was written, unless a transaction will do it.

        A call while an exception is handled that was raised after the file was opened sends nothing and raises that
        exception again: a text wrapper closes its binary file this way when its writer fails.
        """
        if self.closed:
            return
        error = failure_since(self._handled)
        self._handled = ()  # they hold the frames that hold this file
        try:
            if error is not None:
                self.discard()
                raise error
            if self.autocommit:
                self.commit()
        finally:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *traceback: object
    ) -> None:
        if kind is not None and is_failure(error or kind()):
            self.discard()  # half a file is nobody's file
            super().close()
        self.close()

    def __del__(self) -> None:
        if not self.closed:  # dropped without a close: nobody said that it was complete
            self.discard()
            super().close()

    def commit(self) -> None:
        """Make the written bytes the file's content.

        Does nothing for a file that was discarded, which a transaction may still list.
        """
        if self._is_given_up:
            return
        if self._trouble is not None:
            raise self._trouble  # half a file is nobody's file
        try:
            sync(
                self.fs.loop,
                self.fs.writer.write,
                self.path,
                UploadContent(self._spool),
                exclusive=self.mode == "xb",
                onto=self._onto,
            )
        finally:
            self._spool.close()

    def discard(self) -> None:
        """Drop what was written."""
        self._is_given_up = True
        self._spool.close()


def not_kept(path: str, error: OSError) -> CachedFSError:
    """Return the error for bytes that cannot be kept locally until they are sent."""
    ours = CachedFSError(
        f"drive://{path}: data being written is stored in {tempfile.gettempdir()} until it is sent, and that failed "
        f"({error.strerror}); nothing is sent. TMPDIR names another folder"
    )
    ours.errno = error.errno
    return ours
