"""Mount a folder of a filesystem, and unmount it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.operations import MountOperations

__all__ = ["check_folder", "serve", "unmount"]

_KEPT_S = 1.0  # for which the kernel keeps names and attributes; less if `max_age` is
_ENDED = 8  # what libfuse returns after a signal


def check_folder(folder: str) -> None:
    """Raise OSError unless there is an empty local folder on which nothing is mounted.

    Unmounts what is left of a mount whose process was killed.
    """
    if _is_dead(folder):
        with contextlib.suppress(OSError):  # libfuse may be doing it, too
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
    on_mounted: Callable[[], object] = lambda: None,
) -> None:
    """Mount `root` at a local folder, and serve it until it is unmounted or this process gets SIGTERM or SIGINT.

    Raises ImportError without mfusepy or libfuse, and OSError if the system refuses the mount.
    """
    try:
        from mfusepy import FUSE, fuse_get_context
    except ImportError as error:
        raise ImportError(f"mounting needs mfusepy: pip install 'cachedfs[mount]' ({error})") from error
    except OSError as error:
        raise ImportError(f"mounting needs libfuse: apt-get install fuse3, or macFUSE ({error})") from error
    kept_s = min(_KEPT_S, fs.config.lifetime_s)
    operations = MountOperations(
        fs,
        root,
        is_writable=is_writable,
        uid=uid,
        gid=gid,
        caller=lambda: _process_of(fuse_get_context()[2]),
        on_mounted=on_mounted,
    )
    try:
        FUSE(
            operations,
            folder,
            raw_fi=True,
            foreground=True,
            ro=not is_writable,
            allow_other=allow_other,
            default_permissions=True,
            # If this process is killed, libfuse may look before the kernel has ended the mount, and then leaves it: see
            # `check_folder`.
            auto_unmount=sys.platform == "linux",
            hard_remove=True,  # or libfuse renames an open file in place of deleting it
            attr_timeout=kept_s,
            entry_timeout=kept_s,
            fsname=fs.unstrip_protocol(root).replace(",", "\\,"),
            subtype="cachedfs",
        )
    except RuntimeError as error:
        if error.args != (_ENDED,):
            raise OSError(
                f"{folder}: the system refused the mount, and said why above; FUSE must be installed, and /dev/fuse writable"
            ) from error
    finally:
        operations.end()


def _process_of(thread: int) -> int:
    """Return the process of a thread: Linux names the thread that makes a call."""
    with contextlib.suppress(OSError), open(f"/proc/{thread}/status") as file:
        return int(next(line for line in file if line.startswith("Tgid:")).split()[1])
    return thread


def unmount(folder: str) -> None:
    """Unmount a folder. Raises OSError with the message of the system's command, such as for files that are open."""
    if not _is_mounted(folder):
        raise OSError(f"{folder}: nothing is mounted there")
    command = ["umount"] if sys.platform == "darwin" else [shutil.which("fusermount3") or "fusermount", "-u"]
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"{command[0]}: exit status {done.returncode}"
        raise OSError(f"{reason}. If it is busy, end the programs that use it: lsof {folder}")
