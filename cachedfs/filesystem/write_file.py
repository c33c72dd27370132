"""`WrittenFile`: a file open for writing, over the inner filesystem's own file."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from cachedfs.common.atomic_files import PartFile
from cachedfs.common.urls import GCS_PROTOCOLS, LOCAL_PROTOCOLS
from cachedfs.errors import CacheError, ObjectExists, OriginUnavailable
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.spooled_file import DiscardableFile, SpooledFile, new_spool

logger = logging.getLogger("cachedfs.filesystem")

_NEW = ("wb", "xb")  # modes that write a whole new object
_PIECE = 8 << 20  # bytes copied at a time when a held-back file is sent
_MAGIC = {  # suffix -> pandas' name of the format, and the first bytes of such a file
    ".gz": ("gzip", b"\x1f\x8b"),
    ".bz2": ("bz2", b"BZh"),
    ".xz": ("xz", b"\xfd7zXZ\x00"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
    ".zip": ("zip", b"PK"),
}
_warned: set[str] = set()  # at most one URL: a process warns once


class WrittenFile(DiscardableFile):
    """A file open for writing: wraps the inner filesystem's own file.

    When it is closed, every process of the machine sees the change.
    """

    def __init__(
        self, fs: AbstractFileSystem, path: str, mode: str, *, autocommit: bool = True, **options: Any
    ) -> None:
        super().__init__(fs.unstrip_protocol(path))
        self.fs = fs
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self._is_begun = mode not in _NEW
        if "a" in mode and fs.target_protocol in GCS_PROTOCOLS:
            # gcsfs would replace the object by the new bytes alone.
            raise ValueError(
                f"{self._url}: objects of Google Cloud Storage cannot be appended to (mode {mode!r}); "
                "write another object, or read this one and write it anew"
            )
        if "+" in mode and fs.target_protocol in GCS_PROTOCOLS:
            raise ValueError(
                f"{self._url}: an object is read or written, not both at once (mode {mode!r}): "
                "read it with 'rb', write it anew with 'wb'"
            )
        with self._mapped_errors("opening it for writing"):
            self._inner: Any = _opened(fs, path, mode, autocommit=autocommit, **options)

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
                _warn_if_not_compressed(self._url, bytes(data[:6]))
        with self._writing():
            return int(self._inner.write(data))

    def read(self, size: int = -1, /) -> bytes:
        return bytes(self._inner.read(size))

    def tell(self) -> int:
        return int(self._inner.tell())

    def flush(self, force: bool = False) -> None:
        # Also called by the garbage collector for a file whose `__init__` failed.
        if not self.closed and "_inner" in self.__dict__ and not self._inner.closed:
            with self._writing():
                self._inner.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        is_new = self.mode in _NEW
        with (
            self._discarded_on_error() if is_new else contextlib.nullcontext(),
            self._mapped_errors("writing it"),
        ):
            yield

    def _finish(self) -> None:
        if "_inner" in self.__dict__:
            self._changing(self._inner.close)

    def _failure(self) -> BaseException | None:
        # A file that is changed in place has the bytes already.
        return super()._failure() if self.mode in _NEW else None

    def __del__(self) -> None:
        # Python ignores an exception raised here, so discard after a failure and do not raise it again.
        error = super()._failure()
        self.__exit__(None if error is None else type(error), error)

    def _abandon(self, error: BaseException) -> None:
        """Close the inner file because of `error`; leave the object unchanged where its filesystem can."""
        inner = self.__dict__.get("_inner")
        if inner is None or inner.closed:
            return
        if isinstance(inner, AbstractBufferedFile) and self.mode in _NEW:
            inner.closed = True  # its own `close` would finish the upload
            with contextlib.suppress(Exception):  # the service drops an unfinished upload
                self._changing(inner.discard)
        else:
            self._changing(lambda: inner.__exit__(type(error), error, error.__traceback__))

    def commit(self) -> None:
        """Make the bytes written in a transaction the object's content."""
        self._changing(self._inner.commit)

    def discard(self) -> None:
        """Remove the bytes written in a transaction."""
        self._changing(self._inner.discard)

    @contextlib.contextmanager
    def _mapped_errors(self, doing: str) -> Iterator[None]:
        """Turn exceptions of the inner file into errors of cachedfs."""
        try:
            with mapped(self._url, doing):
                yield
        except KeyError as error:  # gcsfs takes any 200 for the expected answer
            raise OriginUnavailable(
                f"{self._url}: no usable answer from the origin ({doing}: it lacks {error}); check the network, or try again later"
            ) from error

    def _changing(self, act: Callable[[], object]) -> None:
        # Move the change counters before and after, so that metadata fetched meanwhile does not count.
        self.fs.invalidate_cache(self.path)
        try:
            with self._mapped_errors("writing it"):
                act()
        except FileExistsError as error:
            raise ObjectExists(
                f"{self._url}: exists already, and mode {self.mode!r} does not replace objects"
            ) from error
        finally:
            if "+" in self.mode or "a" in self.mode:
                # Some filesystems (memory://) keep the fingerprint when a file is edited in place: evict the old blocks.
                with contextlib.suppress(CacheError):  # no cache, so no old blocks
                    self.fs.evict(self.path)
            self.fs.invalidate_cache(self.path)


def _warn_if_not_compressed(url: str, begin: bytes) -> None:
    """Warn once if the name says compressed and the first bytes do not.

    pandas does not see the suffix of a URL with `::`.
    """
    name, magic = _MAGIC.get(posixpath.splitext(url)[1].lower(), ("", begin))
    if not _warned and not magic.startswith(begin[: len(magic)]):
        _warned.add(url)
        short = url.replace("cachedfs::gs://", "cgs://").replace("cachedfs::drive://", "cdrive://")
        logger.warning(
            "%s: the data written is not compressed, although the name says so. pandas does not see the suffix of a URL with '::': "
            "give it %scompression=%r",
            url,
            "" if short == url else f"{short}, or ",
            name,
        )


def _opened(fs: AbstractFileSystem, path: str, mode: str, *, autocommit: bool, **options: Any) -> Any:
    """Return the inner filesystem's file, or one in its place that a failed writer can discard.

    Object stores drop an unfinished upload. Local files and those of memory:// are changed from the first byte on.
    """
    inner, protocol = fs.origin_fs, fs.target_protocol
    if mode not in _NEW:
        return inner._open(path, mode=mode, autocommit=autocommit, **options)

    def opened() -> Any:
        if protocol not in LOCAL_PROTOCOLS:
            return inner._open(path, mode=mode, **options)
        is_new = "x" in mode
        return PartFile.opened(path, lambda name: inner._open(name, mode=mode, **options), is_new=is_new)

    if autocommit and protocol != "memory":
        return opened()

    def send(data: Any) -> None:
        with opened() as file:
            shutil.copyfileobj(data, file, _PIECE)

    # Some inner filesystems cannot delay a file, or cannot delay a single one of their files.
    return SpooledFile(fs.unstrip_protocol(path), mode, send, new_spool(), autocommit=autocommit)
