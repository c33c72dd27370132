"""Mount a folder of a filesystem, and unmount it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.operations import MountOperations

__all__ = ["check_folder", "serve", "unmount"]

_KEPT_S = 1.0  # for which the kernel keeps names and attributes; less if `max_age` is
_ENDED = 8  # what libfuse returns after a signal


def check_folder(folder: str) -> None:
    """Raise OSError unless a local folder is there, on which nothing is mounted."""
    try:
        os.stat(folder)
        is_dead = False
    except OSError as error:
        is_dead = error.errno == errno.ENOTCONN  # a mount whose process is gone
    if is_dead or os.path.ismount(folder):
        raise FileExistsError(f"{folder}: something is mounted there; cachedfs unmount {folder}")
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{folder}: there is no such folder; make it first")


def serve(
    fs: CachedFileSystem,
    root: str,
    folder: str,
    *,
    is_writable: bool = False,
    allow_other: bool = False,
    uid: int | None = None,
    gid: int | None = None,
) -> None:
    """Mount `root` at a local folder, and serve it until it is unmounted or this process gets SIGTERM or SIGINT.

    Raises ImportError without mfusepy or libfuse, and OSError if the system refuses the mount.
    """
    try:
        from mfusepy import FUSE
    except ImportError as error:
        raise ImportError(f"mounting needs mfusepy: pip install 'cachedfs[mount]' ({error})") from error
    except OSError as error:
        raise ImportError(f"mounting needs libfuse: apt-get install fuse3, or macFUSE ({error})") from error
    kept_s = min(_KEPT_S, fs.config.lifetime_s)
    try:
        FUSE(
            MountOperations(fs, root, is_writable=is_writable, uid=uid, gid=gid),
            folder,
            raw_fi=True,
            foreground=True,
            ro=not is_writable,
            allow_other=allow_other,
            default_permissions=True,
            auto_unmount=sys.platform == "linux",  # also if this process is killed
            hard_remove=True,  # or libfuse renames an open file in place of deleting it
            attr_timeout=kept_s,
            entry_timeout=kept_s,
            fsname=fs.unstrip_protocol(root).replace(",", "\\,"),
            subtype="cachedfs",
        )
    except RuntimeError as error:
        if error.args != (_ENDED,):
            raise OSError(
                f"{folder}: the system refused the mount; the reason is in the line above"
            ) from error


def unmount(folder: str) -> None:
    """Unmount a folder. Raises OSError with the message of the system's command, such as for files that are open."""
    command = ["umount"] if sys.platform == "darwin" else [shutil.which("fusermount3") or "fusermount", "-u"]
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"{command[0]}: exit status {done.returncode}")
