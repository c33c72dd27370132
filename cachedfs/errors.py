"""The errors of cachedfs: few, builtin-compatible, one message each, with errno set.

Every error is the builtin class that callers already catch (`FileNotFoundError`, `PermissionError`, ...)
and a `CachedFSError`. The message names the URL, what was tried and what to do. They pickle: an error
raised in a worker process arrives in its parent as itself.
"""

from __future__ import annotations

import errno as _errno
from typing import Any

__all__ = [
    "AccessDenied",
    "CacheError",
    "CachedFSError",
    "IsAFolder",
    "NoSuchBucket",
    "NotDownloadable",
    "ObjectChanged",
    "ObjectNotFound",
    "OriginUnreachable",
    "OriginUnavailable",
    "QuotaExceeded",
    "SignInRefused",
    "ChecksumMismatch",
]


class CachedFSError(OSError):
    """Base of all errors that cachedfs raises for an origin or an object; `errno` is set."""

    code = _errno.EIO

    def __init__(self, message: str) -> None:
        super().__init__(self.code, message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)

    @property
    def message(self) -> str:
        """The one sentence that says which URL, what was tried and what to do."""
        return str(self.args[1])

    def __str__(self) -> str:
        return self.message


class ObjectNotFound(CachedFSError, FileNotFoundError):
    """The origin answered that no object has this name. Raised for a true 404 only."""

    code = _errno.ENOENT


class NoSuchBucket(ObjectNotFound):
    """A listing said so: of a folder that is missing it would have been empty."""


class IsAFolder(CachedFSError, IsADirectoryError):
    """A folder was opened or read as if it were an object."""

    code = _errno.EISDIR


class AccessDenied(CachedFSError, PermissionError):
    """The origin refused the credentials (401) or the permission (403)."""

    code = _errno.EACCES


class SignInRefused(AccessDenied):
    """The account itself was refused, or has no token: what was asked for need not be out of its reach, nor anything else."""


class NotDownloadable(CachedFSError):
    """The object has no bytes to read: a native document of Google Drive (ENOTSUP)."""

    code = _errno.ENOTSUP


class ObjectChanged(CachedFSError):
    """The object was replaced at the origin while a version of it was being read (ESTALE)."""

    code = _errno.ESTALE


class OriginUnavailable(CachedFSError):
    """No usable answer from the origin, after retries; or `offline` is set and the cache has no answer."""

    code = _errno.EHOSTUNREACH


class OriginUnreachable(OriginUnavailable):
    """The origin could not be reached at all: refused, unresolved, not connected within 2 s, or in its place somebody untrusted."""


class ChecksumMismatch(OriginUnavailable):
    """All of an object came, and it has not the checksum that the origin states; nothing of it is kept."""


class QuotaExceeded(CachedFSError):
    """The origin's quota is used up; the message says which and for how long (EDQUOT)."""

    code = _errno.EDQUOT


class CacheError(CachedFSError):
    """The local cache could not do something. Internal: a read never raises it."""

    code = _errno.EIO
