"""The folder of the local copies of written files, and the files without a name in it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import BinaryIO, cast

from cachedfs.common.user_folders import why_unsafe

_NAME = "written"


def temporary_folder(given: str | None, cache_root: str | None) -> str | None:
    """Return the folder for temporary files: the `given` one, else one in the cache directory, where it is usable.

    None stands for Python's own. Raises OSError if no file can be made in the `given` folder.
    """
    if given:
        folder = os.path.abspath(os.path.expanduser(given))
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                f"{folder}: no temporary file can be made there: {reason}; give another folder with --temporary"
            ) from error
        return folder
    if cache_root is None:
        return None
    folder = os.path.join(cache_root, _NAME)
    with suppress(OSError):
        _make(folder)
        if why_unsafe(folder, os.lstat(folder), "") is None:
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    return None


def temporary_file(folder: str | None) -> BinaryIO:
    """Open a temporary file without a name in `folder`, which is made again if it was deleted, as with the cache.

    The file is gone once it is closed, also if the process is killed. None stands for Python's own folder.
    """
    if folder is not None:
        _make(folder)
    return cast("BinaryIO", tempfile.TemporaryFile(prefix="cachedfs-", dir=folder))


def _make(folder: str) -> None:
    """Create a folder and those above it where they are missing, for this user alone."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make(os.path.dirname(folder))
        os.mkdir(folder, 0o700)
