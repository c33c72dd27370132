"""Folders for a user's files, also for a user without a home folder or with a read-only one."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def found_folder(find: Callable[[], str]) -> str | None:
    """Return a folder of platformdirs, such as `platformdirs.user_cache_dir`; None for a user without a home.

    Such users are the numeric user ids of containers and services: no HOME, and no entry in the password file.
    """
    try:
        path = find()
    except RuntimeError:
        return None
    return path if os.path.isabs(path) else None  # older versions return "~/..." as it is


def why_unwritable(path: str) -> str | None:
    """Create a folder where missing; return the reason if this user cannot create files in it, else None."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None if is_writable(path) else "it is read-only"


def is_writable(folder: str) -> bool:
    """Return whether this user can create files in `folder`."""
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def why_unsafe(folder: str, status: os.stat_result, instead: str) -> str | None:
    """Return why another user may control `folder`, whose `os.lstat` is `status`, and what to do; None if none may.

    `instead` is what to do if the folder cannot be mended, such as "give another cache_dir".
    """
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder (a symlink, or a file): remove it, or {instead}"
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to user {status.st_uid}: {instead}"
    if status.st_mode & _OTHERS_WRITE:
        return f"{folder} can be written by others: chmod 700 it, or {instead}"
    return None


def writable_folder(find: Callable[[], str]) -> str:
    """Return a folder of platformdirs, created if missing; where it cannot be written, one in the temporary folder.

    That one is private: mode 0700, named by the user id. Raises OSError if it belongs to another user or is a symlink.
    """
    path = found_folder(find)
    if path is not None and why_unwritable(path) is None:
        return path
    private = _private_folder()
    try:
        os.mkdir(private, 0o700)
    except FileExistsError:
        if (reason := why_unsafe(private, os.lstat(private), "set HOME or TMPDIR")) is not None:
            raise PermissionError(reason) from None
    return private


def existing_folders(find: Callable[[], str]) -> list[str]:
    """Return the folders that `writable_folder` returns now or returned before, where they exist."""
    folders = [] if (path := found_folder(find)) is None else [path]
    private = _private_folder()
    if os.path.lexists(private) and why_unsafe(private, os.lstat(private), "") is None:
        folders.append(private)
    return [folder for folder in folders if os.path.isdir(folder)]


def _private_folder() -> str:
    return os.path.join(tempfile.gettempdir(), f"cachedfs-{os.geteuid()}")
