"""`SpooledFile`: a file open for writing that is kept on the local disk and sent whole, unless its writer fails."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cachedfs.errors import CachedFSError

_IN_MEMORY = 8 << 20  # bytes of a file being written that are in memory; the rest is on the disk


class DiscardableFile(io.IOBase):
    """A file open for writing that is discarded if its writer fails, and finished otherwise.

    `close` while an exception is handled that was raised after the file was opened discards it, and raises that exception
    again. Text wrappers and libraries close a file this way when their writer fails, and do not pass the exception on. The
    end of an iteration and `sys.exit(0)` are not failures. A failed write discards the file too: half of it is never
    finished, also if the caller ignores the error.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._trouble: OSError | None = None  # the error of a failed write
        self._handled = _handled_exceptions()  # while the file is opened

    def _finish(self) -> None:
        """Make what was written the content of the object."""
        raise NotImplementedError

    def _abandon(self, error: BaseException) -> None:
        """Discard what was written, because of `error`."""
        raise NotImplementedError

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        if self._trouble is not None:
            raise self._trouble
        try:
            yield
        except OSError as error:
            self._abandon(error)
            self._trouble = error
            raise

    def _failure(self) -> BaseException | None:
        """Return the failure that is being handled now, if it was raised after the file was opened."""
        error = sys.exc_info()[1]
        if error is None or not _is_failure(error) or any(error is known for known in self._handled):
            return None
        return error

    def close(self) -> None:
        """Finish the write; discard it after a failure of its writer, which is raised again."""
        if self.closed:
            return
        error = self._failure()
        try:
            if error is None and self._trouble is not None:
                raise self._trouble
            if error is None:
                self._finish()
            else:
                self._abandon(error)
                error.add_note(
                    f"{self._url}: its file was closed because of this exception, and what was written is lost. "
                    "To keep it, close the file outside of the except block."
                )
                raise error
        finally:
            # Also after a failure: else the garbage collector would send the bytes again.
            super().close()
            self._handled = ()  # break the reference cycle through the exceptions' frames

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *traceback: object
    ) -> None:
        if kind is None or not _is_failure(error or kind()):
            self.close()
        elif not self.closed:
            try:
                self._abandon(error or kind())
            finally:
                super().close()


def _handled_exceptions() -> tuple[BaseException, ...]:
    """Return the exceptions that are being handled now, the innermost first."""
    found: list[BaseException] = []
    error = sys.exc_info()[1]
    while error is not None and not any(error is known for known in found):
        found.append(error)
        error = error.__context__
    return tuple(found)


def _is_failure(error: BaseException) -> bool:
    """Return whether an exception means a failure; the end of an iteration and `sys.exit(0)` do not."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return not isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit))


def new_spool() -> Any:
    """Return a local file for what is written."""
    return tempfile.SpooledTemporaryFile(_IN_MEMORY)


@contextmanager
def kept_locally(url: str) -> Iterator[None]:
    """Explain an OSError of the local disk, which keeps written bytes until they are sent."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CachedFSError):
            raise
        ours = CachedFSError(
            f"{url}: data being written is stored in {tempfile.gettempdir()} until it is sent, and that failed "
            f"({error.strerror}); nothing is sent. TMPDIR names another folder"
        )
        ours.errno = error.errno
        raise ours from error


class SpooledFile(DiscardableFile, io.RawIOBase):
    """A file open for writing: kept locally, and sent at close, so a process that dies first changes nothing.

    Without `autocommit` it is sent by `commit`, at the end of a transaction.
    """

    # Nothing in here may fail: Python closes what it has half made, and closing sends.
    def __init__(
        self, url: str, mode: str, send: Callable[[Any], object], spool: Any, *, autocommit: bool
    ) -> None:
        """`send` makes the bytes of an open file the object's content; the file keeps what is in `spool` already."""
        super().__init__(url)
        self.mode, self.autocommit = mode, autocommit
        self._send, self._spool = send, spool

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True  # as h5py needs

    def seekable(self) -> bool:
        return self.mode != "ab"  # which writes at the end

    def readinto(self, buffer: Any, /) -> int:
        return int(self._spool.readinto(buffer))

    def truncate(self, size: int | None = None, /) -> int:
        return int(self._spool.truncate(size))

    def write(self, data: Any, /) -> int:
        with self._discarded_on_error(), kept_locally(self._url):
            return int(self._spool.write(data))

    def flush(self) -> None:
        super().flush()
        if not self._spool.closed:
            with self._discarded_on_error(), kept_locally(self._url):
                self._spool.flush()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if not self.seekable():
            raise io.UnsupportedOperation(f"{self._url}: what is appended is written at the end")
        return int(self._spool.seek(offset, whence))

    def tell(self) -> int:
        return int(self._spool.tell())

    def _finish(self) -> None:
        if self.autocommit:
            self.commit()

    def _abandon(self, error: BaseException) -> None:
        self.discard()

    def __del__(self) -> None:
        if not self.closed:  # not closed: nobody said that it was complete
            self.discard()
            super().close()

    def commit(self) -> None:
        """Send the written bytes, unless they were discarded: a transaction may still list the file."""
        if self._spool.closed:
            return
        try:
            with self._discarded_on_error(), kept_locally(self._url):
                self._spool.seek(0)  # first: a full local disk must not change the object
            self._send(self._spool)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # a full disk makes the final flush fail
            self._spool.close()
