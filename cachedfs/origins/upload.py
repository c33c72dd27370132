"""The bytes of an upload, and the check of the version that it replaces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from cachedfs.common.types import ANY_VERSION, AnyVersion, ObjectInfo
from cachedfs.errors import CachedFSError, ObjectChanged, ObjectExists
from cachedfs.origins.evidence import is_same_evidence

_READ = 1 << 20  # bytes read at a time for a checksum


# The version that is replaced
def check_version(url: str, expected: ObjectInfo | AnyVersion | None, found: ObjectInfo | None) -> None:
    """Raise ObjectExists or ObjectChanged unless `found` is the version to be replaced (None: no object)."""
    if expected is ANY_VERSION:
        return
    if expected is None:
        if found is not None and found.kind == "file":  # an object store may have a folder of the same name
            raise version_conflict(url, expected, found)
        return
    if found is None or not is_same_evidence(found.fingerprint, expected.fingerprint):
        raise version_conflict(url, expected, found)
    if (found.kind, found.size, found.id) != (expected.kind, expected.size, expected.id):
        raise version_conflict(url, expected, found)


def version_conflict(
    url: str, expected: ObjectInfo | None, found: ObjectInfo | None, *, is_known: bool = True
) -> CachedFSError:
    """Return the error for a write to an object that has another version than `expected` (None: to a new one).

    `is_known`: whether `found` tells what is there now.
    """
    if expected is None:
        there = f" (version {found.fingerprint})" if found is not None and found.fingerprint else ""
        return ObjectExists(f"{url}: exists already{there}, and was to be new; nothing was written")
    if found is not None:
        how = f"was replaced: its version is {found.fingerprint} and not {expected.fingerprint}"
    elif is_known:
        how = f"was removed: version {expected.fingerprint} was to be replaced"
    else:
        how = f"was replaced or removed: its version is no longer {expected.fingerprint}"
    return ObjectChanged(
        f"{url}: the object {how}; nothing was written: open it again, or write to another name"
    )


# The bytes
class UploadContent:
    """The bytes of an open file, from its start to its end; the caller closes the file.

    `sent` receives the number of bytes that the service has; it decreases if the service lacks some again.
    """

    def __init__(self, file: BinaryIO, sent: Callable[[int], object] = lambda n_bytes: None) -> None:
        self._file, self.sent = file, sent
        self.size = file.seek(0, 2)

    def piece(self, start: int, stop: int) -> bytes:
        """Return the bytes `[start:stop]`; blocks on the disk."""
        self._file.seek(start)
        return self._file.read(stop - start)

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes; blocks on the disk."""
        for start in range(0, self.size, _READ):
            yield self.piece(start, min(start + _READ, self.size))

    def md5(self) -> str:
        """Return the MD5 of all bytes as Drive writes it; blocks on the disk."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]
