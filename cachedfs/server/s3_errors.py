"""Errors of the S3 API, and which error of the filesystem is which."""

from __future__ import annotations

from collections.abc import Mapping

from cachedfs.errors import (
    NoSuchBucket,
    NotDownloadable,
    ObjectChanged,
    OriginUnavailable,
    QuotaExceeded,
    RequestRejected,
)

_STATUSES = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidObjectState": 403,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidURI": 400,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NotImplemented": 501,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}
# The first that fits. A version that is gone is asked for again by the client, as is what cannot be reached.
_OF_FILESYSTEM: tuple[tuple[type[BaseException], str], ...] = (
    (NoSuchBucket, "NoSuchBucket"),
    (FileNotFoundError, "NoSuchKey"),
    (NotADirectoryError, "NoSuchKey"),
    (IsADirectoryError, "NoSuchKey"),
    (PermissionError, "AccessDenied"),
    (NotDownloadable, "InvalidObjectState"),
    (QuotaExceeded, "SlowDown"),
    (ObjectChanged, "ServiceUnavailable"),
    (OriginUnavailable, "ServiceUnavailable"),
    (RequestRejected, "InvalidArgument"),
)


class S3Error(Exception):
    """An answer with one of S3's error codes; `headers` are sent with it, `details` are elements of its XML."""

    def __init__(
        self, code: str, message: str, *, status: int = 0, headers: Mapping[str, str] = {}, **details: object
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status or _STATUSES[code]
        self.headers, self.details = headers, details


def s3_error_of(error: Exception) -> S3Error:
    """Return the answer to a request that failed with this error; 404 only for a real absence."""
    if isinstance(error, S3Error):
        return error
    code = next((code for kind, code in _OF_FILESYSTEM if isinstance(error, kind)), "InternalError")
    return S3Error(code, str(error) or type(error).__name__)
