"""An object being written: the origin's own file, whose change every process sees."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from cachedfs.common.urls import GCS_PROTOCOLS
from cachedfs.errors import CachedFSError, CacheError, OriginUnavailable
from cachedfs.origins.origin_errors import failure_since, handled_exceptions, is_failure, mapped

__all__ = ["WrittenFile"]

logger = logging.getLogger("cachedfs.filesystem")

_NEW = ("wb", "xb")  # modes that write the whole object
_PIECE = 8 << 20  # bytes of what was held back that are in memory at once
_MAGIC = {  # suffix of a name -> pandas' name of the format, and how its bytes begin
    ".gz": ("gzip", b"\x1f\x8b"),
    ".bz2": ("bz2", b"BZh"),
    ".xz": ("xz", b"\xfd7zXZ\x00"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
    ".zip": ("zip", b"PK"),
}
_warned: set[str] = set()  # the URL that this process has warned of: one is enough


class WrittenFile(io.IOBase):
    """An object being written: the inner filesystem's own file, whose change all processes see when it is closed."""

    def __init__(
        self, fs: AbstractFileSystem, path: str, mode: str, *, autocommit: bool = True, **options: Any
    ) -> None:
        self.fs = fs
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self._is_begun = mode not in _NEW
        self._handled = handled_exceptions()  # while the file is opened
        if "a" in mode and fs.target_protocol in GCS_PROTOCOLS:
            # gcsfs would write a new object with the new bytes alone.
            raise ValueError(
                f"{fs.unstrip_protocol(path)}: objects of Google Cloud Storage cannot be appended to (mode {mode!r}); "
                "write another object, or read this one and write it anew"
            )
        if "+" in mode and fs.target_protocol in GCS_PROTOCOLS:
            raise ValueError(
                f"{fs.unstrip_protocol(path)}: an object is read or written, not both at once (mode {mode!r}): "
                "read it with 'rb', write it anew with 'wb'"
            )
        if not autocommit and mode in _NEW:
            self._inner: Any = _Held(lambda: fs.origin_fs._open(path, mode=mode, **options))
            return
        with self._told("opening it for writing"):
            self._inner = fs.origin_fs._open(path, mode=mode, autocommit=autocommit, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return bool(self._inner.readable())

    def seekable(self) -> bool:
        return bool(self._inner.seekable())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._inner.seek(offset, whence))

    def write(self, data: Any, /) -> int:
        if not self._is_begun:
            self._is_begun = True
            if isinstance(data, bytes | bytearray):
                _warn_if_not_compressed(self.fs.unstrip_protocol(self.path), bytes(data[:6]))
        with self._told("writing it"):
            return int(self._inner.write(data))

    def read(self, size: int = -1, /) -> bytes:
        return bytes(self._inner.read(size))

    def tell(self) -> int:
        return int(self._inner.tell())

    def flush(self, force: bool = False) -> None:
        # Also called for one that was never made completely, when it is collected.
        if not self.closed and "_inner" in self.__dict__ and not self._inner.closed:
            self._inner.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *traceback: object
    ) -> None:
        if kind is None or not is_failure(error or kind()):
            self.close()
        elif not self.closed:
            try:
                self._give_up(error or kind())
            finally:
                super().close()

    def close(self) -> None:
        """Finish the write; the object is there, and seen by every process of the machine, when this returns.

        Called while an exception is handled that was raised after the file was opened, it gives up what was written and
        raises that exception again: text files and libraries close a file so when its writer fails, and do not pass the
        exception on. What ends an iteration, and `sys.exit(0)`, are no failures.
        """
        if self.closed:
            return
        error = failure_since(self._handled)
        try:
            if error is not None and self.mode in _NEW:
                self._give_up(error)
                error.add_note(
                    f"{self.fs.unstrip_protocol(self.path)}: its file was closed because of this exception, and what was "
                    "written is lost. To keep it, close the file outside of the except block."
                )
                raise error
            if "_inner" in self.__dict__:
                self._changing(self._inner.close)
        finally:
            # Over, also where it failed: else the bytes would be sent again when this file is collected.
            super().close()
            self._handled = ()  # they hold the frames that hold this file

    def __del__(self) -> None:
        # Nobody hears an exception that leaves here.
        error = failure_since(self.__dict__.get("_handled", ()))
        self.__exit__(None if error is None else type(error), error)

    def _give_up(self, error: BaseException) -> None:
        """Close the inner file because of `error`: the object stays what it was, where its filesystem can do that."""
        inner = self.__dict__.get("_inner")
        if inner is None or inner.closed:
            return
        if isinstance(inner, AbstractBufferedFile) and self.mode in _NEW:
            inner.closed = True  # its own close would publish
            with contextlib.suppress(Exception):  # an upload that nobody ends is forgotten by the service
                self._changing(inner.discard)
        else:
            self._changing(lambda: inner.__exit__(type(error), error, error.__traceback__))

    def commit(self) -> None:
        """Make what was written in a transaction the object's content."""
        self._changing(self._inner.commit)

    def discard(self) -> None:
        """Forget what was written in a transaction."""
        self._changing(self._inner.discard)

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turn what the inner file raises into the errors of cachedfs."""
        url = self.fs.unstrip_protocol(self.path)
        try:
            with mapped(url, doing):
                yield
        except KeyError as error:  # gcsfs takes every 200 for the answer that it waits for
            raise OriginUnavailable(
                f"{url}: no usable answer from the origin ({doing}: it lacks {error}); check the network, or try again later"
            ) from error

    def _changing(self, act: Callable[[], object]) -> None:
        # Marks move before and after, so that no answer given meanwhile counts.
        self.fs.invalidate_cache(self.path)
        try:
            with self._told("writing it"):
                act()
        except FileExistsError as error:
            url = self.fs.unstrip_protocol(self.path)
            raise FileExistsError(
                errno.EEXIST, f"{url} exists already, and mode {self.mode!r} replaces nothing"
            ) from error
        finally:
            if "+" in self.mode or "a" in self.mode:
                # Edited in place: some filesystems (memory://) then tell of no change, so the old blocks must not stay.
                with contextlib.suppress(CacheError):  # nothing can be stored: then nothing old is there
                    self.fs.evict(self.path)
            self.fs.invalidate_cache(self.path)


def _warn_if_not_compressed(url: str, begin: bytes) -> None:
    """Warn once of an object that its name says is compressed, and whose first bytes are not: pandas sees no suffix behind `::`."""
    name, magic = _MAGIC.get(posixpath.splitext(url)[1].lower(), ("", begin))
    if not _warned and not magic.startswith(begin[: len(magic)]):
        _warned.add(url)
        short = url.replace("cachedfs::gs://", "cgs://").replace("cachedfs::drive://", "cdrive://")
        logger.warning(
            "%s: what is written is not compressed, though the name says so. pandas does not see the suffix of a URL with '::': "
            "give it %scompression=%r",
            url,
            "" if short == url else f"{short}, or ",
            name,
        )


class _Held:
    """What a transaction holds back: a file without a name, whose bytes the origin gets at `commit`, and not before.

    Not all inner filesystems have files that wait, or wait where only one of their files was told to.
    """

    def __init__(self, opened: Callable[[], Any]) -> None:
        self._opened = opened
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - until the transaction ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        with self._whole():
            return self._file.write(data)

    def flush(self) -> None:
        with self._whole():
            self._file.flush()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Give up where something cannot be held: half a file is nobody's file, also where that error is passed over."""
        try:
            yield
        except OSError as error:
            self.discard()
            told = CachedFSError(
                f"what a transaction writes could not be kept in {tempfile.gettempdir()} until it ends: {error}; free space "
                "there, or set TMPDIR to another disk"
            )
            told.errno = error.errno
            raise told from error

    def __exit__(self, *exc_info: object) -> None:
        self.discard()  # who wrote it broke off: it is not whole

    def close(self) -> None:
        pass

    def commit(self) -> None:
        if self._file.closed:
            return
        self.flush()  # first: what finds no room here has touched nothing there
        with self._file as held, self._opened() as file:
            held.seek(0)
            shutil.copyfileobj(held, file, _PIECE)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # it has no room for what it still has to write
            self._file.close()
