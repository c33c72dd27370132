"""Atomic writes of local files: write a temporary file, then rename it.

No other process ever sees a partial file. Devices and pipes cannot be replaced and are written directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fsspec.utils import isfilelike

from cachedfs.errors import CachedFSError


def write_private(path: str, text: str) -> None:
    """Replace a small text file, readable by its owner only; its folder must exist."""
    number, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=".part")  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must leave no secret behind
        _remove(temporary)
        raise


class PartFile:
    """A local file open for writing beside its place, where it is put when it is closed.

    `discard`, or an exception in its `with` block, removes it.
    """

    def __init__(
        self, path: str, temporary: str, open_: Callable[[str], Any], mode: int | None, *, is_new: bool
    ) -> None:
        """Open `temporary` with `open_`; `is_new`: there may be no other file at `path` in the end.

        An OSError names `path`, the only one that the user knows.
        """
        self._path, self._temporary, self._is_new = path, temporary, is_new
        try:
            self._file = open_(temporary)
            if mode is not None:  # before the first byte, so that private data is never readable by others
                os.chmod(temporary, mode & 0o777)
        except OSError as error:
            _remove(temporary)
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error

    @classmethod
    def opened(cls, path: str, open_: Callable[[str], Any], *, is_new: bool) -> Any:
        """Return a file open for writing; `open_` opens a path. What cannot be replaced is opened directly."""
        mode = _mode(path)
        temporary = None if is_new and os.path.lexists(path) else _temporary(path, mode)
        if temporary is None or (mode is not None and not os.access(path, os.W_OK)):
            return open_(path)
        return cls(path, temporary, open_, mode, is_new=is_new)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        """Put the file in its place; remove it if that fails."""
        if self._file.closed:
            return
        try:
            self._file.close()
            if self._is_new:
                _put_in_new_place(self._temporary, self._path)
            else:
                os.replace(self._temporary, os.path.realpath(self._path))
        except BaseException:  # an interrupt too must not leave a partial file behind
            _remove(self._temporary)
            raise

    def discard(self) -> None:
        """Remove the file, and leave its place as it was."""
        with contextlib.suppress(OSError):  # a full disk makes the final flush fail
            self._file.close()
        _remove(self._temporary)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


async def filled(target: Any, fill: Callable[[Any], Awaitable[None]]) -> None:
    """Let `fill` write to `target`, an open file or a local path.

    A file at a path appears only when it is complete. `fill` gets an open binary file. Symbolic links are followed,
    missing parent folders are created, and a replaced file's mode is kept. A device, a pipe, and a file in a folder
    without write permission are written directly. An OSError from the local disk names `target`.
    """
    if isfilelike(target):
        await fill(target)
        return
    path = os.fspath(target)
    mode = _mode(path)
    temporary = _temporary(path, mode)
    try:
        if temporary is None:
            await _fill_in_place(path, fill)
        else:
            os.makedirs(os.path.dirname(temporary), exist_ok=True)
            # Not in a thread: after a cancellation the thread could still create the file, too late to remove it.
            with PartFile(path, temporary, partial(open, mode="wb"), mode, is_new=False) as file:
                await fill(file)
    except OSError as error:
        # The error names the temporary file, or none if the disk is full; the user knows only `path`.
        if isinstance(error, CachedFSError) or not error.errno or error.filename not in (None, temporary):
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from error


async def _fill_in_place(path: str, fill: Callable[[Any], Awaitable[None]]) -> None:
    # In threads: opening a pipe blocks until it has a reader, and flushing blocks while it is full.
    with await asyncio.to_thread(open, path, "wb") as file:
        await fill(file)
        await asyncio.to_thread(file.flush)


def _mode(path: str) -> int | None:
    """Return the type and permissions (`st_mode`) of the file at `path`; None if there is none."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _temporary(path: str, mode: int | None) -> str | None:
    """Return a path for a temporary file; None if `path` must be written directly."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.basename(path):  # the path ends in "/": opening it raises the right error
        return None
    if mode is not None and not (stat.S_ISREG(mode) and os.access(folder, os.W_OK | os.X_OK)):
        return None
    # Short and independent of the file's own name, which may have the maximum length already.
    return os.path.join(folder, f".{uuid.uuid4().hex[:8]}.part")


def _put_in_new_place(temporary: str, path: str) -> None:
    """Put a file where there is none; raise FileExistsError if there is one now."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a filesystem without links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.replace(temporary, path)
    else:
        os.unlink(temporary)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # the file or its folder may not exist
        os.unlink(path)
