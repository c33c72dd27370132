"""The exceptions of cachedfs.

Each is a `CachedFSError`, and also the builtin exception that fits, such as `FileNotFoundError` or `PermissionError`.
Each has `errno` set, and a message with the URL, the failed operation and what to do. Exceptions can be pickled, so one
raised in a worker process reaches its parent unchanged.
"""

from __future__ import annotations

import errno as _errno
import re
from typing import Any, TypeVar

__all__ = [
    "AccessDenied",
    "CacheError",
    "CachedFSError",
    "ChecksumMismatch",
    "IsAFolder",
    "NoSuchBucket",
    "NotDownloadable",
    "ObjectChanged",
    "ObjectExists",
    "ObjectNotFound",
    "OriginUnavailable",
    "OriginUnreachable",
    "QuotaExceeded",
    "RequestRejected",
    "SignInRefused",
]


_E = TypeVar("_E", bound=BaseException)
_USER = r"(?<=://)[^\s/?#@'\"]*@"
# Protocols whose paths may contain "?" and "#".
NAMED_PROTOCOLS = ("gs", "gcs", "drive", "file", "memory", "s3", "s3a", "abfs", "az")
_QUERY = "(" + "".join(f"(?<!{each})" for each in NAMED_PROTOCOLS) + r"://[^\s?#'\"]*)[?#]\S*[^\s'\":;,.)]"


def public_text(text: str) -> str:
    """Return a message with its URLs stripped of what may be secret; a removed query or fragment shows as "?..."."""
    return re.sub(_QUERY, r"\1?...", re.sub(_USER, "", text)) if "://" in text else text


def without_frames(error: _E) -> _E:
    """Remove the tracebacks of an error that is kept, and of its causes: their frames keep all that was being read."""
    found: list[BaseException] = [error]
    for each in found:  # grows
        each.__traceback__ = None
        more = (each.__cause__, each.__context__)
        found += [other for other in more if other is not None and all(other is not one for one in found)]
    return error


class CachedFSError(OSError):
    """Base class of all errors that cachedfs raises for an origin or an object. `errno` is set.

    The message shows URLs without user name, password and query, which may be secret.
    """

    code = _errno.EIO

    def __init__(self, message: str) -> None:
        super().__init__(self.code, public_text(message))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)

    @property
    def message(self) -> str:
        """The error message: the URL, the failed operation and what to do."""
        return str(self.args[1])

    def __str__(self) -> str:
        return self.message


class ObjectNotFound(CachedFSError, FileNotFoundError):
    """The object does not exist (ENOENT). Raised only for a real 404 answer of the origin."""

    code = _errno.ENOENT


class NoSuchBucket(ObjectNotFound):
    """The bucket does not exist (ENOENT).

    Listings raise it; a missing folder would be an empty listing.
    """


class IsAFolder(CachedFSError, IsADirectoryError):
    """A folder was opened or read like an object (EISDIR)."""

    code = _errno.EISDIR


class AccessDenied(CachedFSError, PermissionError):
    """The origin rejected the credentials (401) or denied permission (403). `errno` is EACCES."""

    code = _errno.EACCES


class SignInRefused(AccessDenied):
    """Sign-in failed: the credentials were rejected or have no token.

    The object itself may be accessible to others.
    """


class NotDownloadable(CachedFSError):
    """The object has no bytes to download, like a native Google Drive document (ENOTSUP)."""

    code = _errno.ENOTSUP


class RequestRejected(CachedFSError, ValueError):
    """The origin rejected the request as invalid (400), such as a name that it does not allow. `errno` is EINVAL."""

    code = _errno.EINVAL


class ObjectExists(CachedFSError, FileExistsError):
    """An object or folder has this name already, and was to be new (EEXIST)."""

    code = _errno.EEXIST


class ObjectChanged(CachedFSError):
    """The object was replaced at the origin (ESTALE): while a version was being read, or before it was written over."""

    code = _errno.ESTALE


class OriginUnavailable(CachedFSError):
    """The origin gave no usable response after retries, or `offline` forbids the request.

    With `offline`, it is raised for data that is not cached. `errno` is EHOSTUNREACH.
    """

    code = _errno.EHOSTUNREACH


class OriginUnreachable(OriginUnavailable):
    """The origin could not be reached.

    The connection was refused or not made within 2 s, the host name was not found, or the certificate is not trusted.
    """


class ChecksumMismatch(OriginUnavailable):
    """The downloaded object does not have the checksum that the origin states.

    None of it stays in the cache.
    """


class QuotaExceeded(CachedFSError):
    """A quota of the origin is used up (EDQUOT). The message says which one and for how long."""

    code = _errno.EDQUOT


class CacheError(CachedFSError):
    """An operation of the local cache failed (EIO). Reads never raise it."""

    code = _errno.EIO


class BadBlock(Exception):
    """A file of the cache is not the block that its name promises; the message says why. Internal."""


ABSENT = (FileNotFoundError, NotADirectoryError)  # the errors that mean "no such file or folder"
OriginAway, WrongBytes = OriginUnreachable, ChecksumMismatch  # their names before 0.1.0, until 0.2.0
