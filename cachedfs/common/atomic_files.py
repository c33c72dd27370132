"""Local files that are there when they are complete, and not before: a reader never meets half of one.

Only what cannot be replaced, a device or a pipe, is written into as the bytes come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fsspec.utils import isfilelike

from cachedfs.errors import CachedFSError

__all__ = ["filled"]


async def filled(target: Any, fill: Callable[[Any], Awaitable[None]]) -> None:
    """Have `fill` write into `target`: into an open file as it is, at a path into a file that then takes the name.

    A link is followed, and the file that is replaced leaves its mode. A device or a pipe is written into, and so is a
    file in a folder that we cannot write in. The folders on the way to it are made. An OSError of the local disk names
    `target`.
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
            await _fill_anew(path, temporary, mode, fill)
    except OSError as error:
        # Nobody knows the temporary name, and a full disk says none at all.
        if isinstance(error, CachedFSError) or not error.errno or error.filename not in (None, temporary):
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from error


async def _fill_anew(
    path: str, temporary: str, mode: int | None, fill: Callable[[Any], Awaitable[None]]
) -> None:
    os.makedirs(os.path.dirname(temporary), exist_ok=True)
    try:
        # Not in a thread: one that is cancelled would make the file all the same, when it is too late to remove it.
        with open(temporary, "wb") as file:  # noqa: ASYNC230
            if mode is not None:  # before the first byte: what was private is so all the time
                os.chmod(temporary, mode & 0o777)
            await fill(file)
        _put_in_place(temporary, path)
    except BaseException:  # an interrupt or a cancellation too leaves no half file behind
        _remove(temporary)
        raise


async def _fill_in_place(path: str, fill: Callable[[Any], Awaitable[None]]) -> None:
    # In threads: a pipe is open when somebody reads it, and takes the last bytes when there is room.
    with await asyncio.to_thread(open, path, "wb") as file:
        await fill(file)
        await asyncio.to_thread(file.flush)


def _mode(path: str) -> int | None:
    """Return what is at `path`, and who may do what with it; None: nothing is there."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _temporary(path: str, mode: int | None) -> str | None:
    """Return a name for a file that can take the place of what is at `path`; None: that is to be written into."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.basename(path):  # a folder's name, which no file can have: to open it says so
        return None
    if mode is not None and not (stat.S_ISREG(mode) and os.access(folder, os.W_OK | os.X_OK)):
        return None
    return os.path.join(
        folder, f".{uuid.uuid4().hex[:8]}.part"
    )  # short: the name itself may be as long as can be


def _put_in_place(temporary: str, path: str) -> None:
    os.replace(temporary, os.path.realpath(path))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # what is not there, or was in no folder
        os.unlink(path)
