"""Mount a folder of a filesystem, and unmount it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.fuse_session import FuseSession, fusermount
from cachedfs.mount.operations import MountOperations

_ENDING = signal.SIGTERM, signal.SIGINT


def check_folder(folder: str) -> None:
    """Raise OSError unless there is an empty local folder on which nothing is mounted.

    Unmounts what is left of a mount whose process was killed.
    """
    if _is_dead(folder):
        with contextlib.suppress(OSError):  # fusermount3 may be doing it, too
            unmount(folder)
    if _is_mounted(folder):
        raise FileExistsError(f"{folder}: something is mounted there; cachedfs unmount {folder}")
    if not os.path.isdir(folder):
        is_there = os.path.exists(folder)
        raise NotADirectoryError(
            f"{folder}: {'this is a file' if is_there else 'there is no such folder; make it first'}"
        )
    if os.listdir(folder):
        raise OSError(
            f"{folder}: the folder is not empty, and a mount would hide what is in it; take an empty one"
        )


def _is_mounted(folder: str) -> bool:
    return os.path.ismount(folder) or _is_dead(folder)


def _is_dead(folder: str) -> bool:
    """Return whether a mount is there whose process is gone."""
    try:
        os.stat(folder)
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def serve(
    fs: CachedFileSystem,
    root: str,
    folder: str,
    *,
    is_writable: bool = False,
    allow_other: bool = False,
    uid: int | None = None,
    gid: int | None = None,
    temporary: str | None = None,
    on_mounted: Callable[[], object] = lambda: None,
) -> None:
    """Mount `root` at a local folder, and serve it until it is unmounted or this process gets SIGTERM or SIGINT.

    Raises ImportError without FUSE, and OSError if the system refuses the mount.
    """
    if sys.platform != "linux":
        raise ImportError(
            "mounting needs Linux, also in a virtual machine, Docker or WSL 2; on other systems read by URL"
        )
    operations = MountOperations(fs, root, is_writable=is_writable, uid=uid, gid=gid, temporary=temporary)
    name = fs.unstrip_protocol(root).replace("\\", "\\\\").replace(",", "\\,")
    options = ["rw" if is_writable else "ro", "default_permissions", f"fsname={name}", "subtype=cachedfs"]
    session = FuseSession(operations, folder, [*options, *(["allow_other"] if allow_other else [])])
    before = [(number, signal.signal(number, lambda *_: None)) for number in _ENDING]
    woken = signal.set_wakeup_fd(session.fileno(), warn_on_full_buffer=False)
    try:
        session.serve(on_mounted)
    finally:
        signal.set_wakeup_fd(woken)
        session.close()
        for number, handler in before:
            signal.signal(number, handler)
        operations.written.report_unsent()


def unmount(folder: str) -> None:
    """Unmount a folder. Raises OSError with the message of the system's command, such as for files that are open."""
    if not _is_mounted(folder):
        raise OSError(f"{folder}: nothing is mounted there")
    done = subprocess.run([fusermount(), "-u", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"fusermount: exit status {done.returncode}"
        raise OSError(f"{reason}. If it is busy, end the programs that use it: lsof {folder}")
