"""Turn error responses and exceptions of libraries into retry reasons and the errors of cachedfs."""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cachedfs.common.logging import has_secrets, without_secrets
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    IsAFolder,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    OriginUnavailable,
    OriginUnreachable,
    RequestRejected,
    SignInRefused,
)
from cachedfs.origins.base import int_of
from cachedfs.origins.retry import RetryableError, foreign, retry_after_s

if TYPE_CHECKING:
    from cachedfs.origins.http_request import HTTPRequest

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_TOO_MANY = "Too many requests: lower concurrency=, or wait a minute; others may use the same quota"
_LONGEST_TEXT = 2048  # characters of a library's message, which may quote a whole answer
OTHER_TIME = "short-lived token"  # in Google's refusal of a service account whose machine has another time
WRONG_CLOCK = "the clock of this machine is wrong: set it (on Linux: `timedatectl set-ntp true`)"
_IMPOSSIBLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ErrorRow(NamedTuple):
    """A row of a service's table: the error for an answer that no retry changes, and that matches all other fields."""

    status: int | None  # None: any
    reason: str  # one of these, with "|" between them; "": any
    kind: type[CachedFSError]
    why: str
    then: str = ""  # follows the answer of the service
    text: str = ""  # a pattern
    when: Callable[[HTTPRequest], bool] | None = None

    def means(self, request: HTTPRequest, status: int, text: str, reasons: Collection[str]) -> bool:
        is_such = self.status in (None, status) and (
            not self.reason or any(reason in reasons for reason in self.reason.split("|"))
        )
        return is_such and bool(re.search(self.text, text)) and (self.when is None or self.when(request))


_DEFAULT = ErrorRow(None, "", CachedFSError, "the service gave an unexpected answer")


def refusal(
    request: HTTPRequest,
    status: int,
    said: str,
    table: Sequence[ErrorRow],
    text: str = "",
    reasons: Collection[str] = (),
    **names: str,
) -> CachedFSError:
    """Return the error of the first row that fits, or else the default; its texts are formatted with `names`.

    A pinned object that is missing was removed: it was there when its version was looked up.
    """
    row = next((row for row in table if row.means(request, status, text, reasons)), _DEFAULT)
    kind, why, then = row.kind, row.why.format(**names), row.then.format(**names)
    if kind is ObjectNotFound and request.is_pinned:
        kind, why = ObjectChanged, "the object was removed while it was read; open it again"
    return kind(f"{request.subject}: {why} ({request.purpose}: {said}){then}")


def retryable(
    status: int, reasons: Collection[str], said: str, headers: Mapping[str, str]
) -> RetryableError | None:
    """Return the error of a response after which another attempt may help; None for any other."""
    is_rate = status == 429 or (status == 403 and not _RATE_REASONS.isdisjoint(reasons))
    if status not in _RETRIED and status <= 504 and not is_rate:
        return None
    wait_s = retry_after_s(headers.get("retry-after"), datetime.now(UTC))
    failed = RetryableError(f"the service answered {said}", retry_after_s=wait_s, is_rate=is_rate)
    if is_rate:
        failed.remedy = _TOO_MANY
    return failed


def error_of(body: bytes) -> tuple[str, set[str]]:
    """Return Google's message and reasons from an error body: JSON, or short text (for media).

    A reason with a location appears twice: by itself, and as "reason at location".
    """
    text = body.decode("utf-8", "replace").strip()
    try:
        error = json.loads(text)["error"]
        items = error.get("errors", ())
        reasons = {str(item.get("reason")) for item in items}
        places = {f"{item.get('reason')} at {item['location']}" for item in items if item.get("location")}
        return str(error.get("message", "")), reasons | places
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ("" if text.startswith("<") else text[:500]), set()


def token_server_away(error: Exception) -> Exception | None:
    """Return google-auth's error if the token server is unreachable or failing, else None.

    It may be the cause of `error`: for a metadata server, google-auth reports any network problem as a refusal.
    """
    from google.auth.exceptions import TransportError

    failure = next((each for each in (error, error.__cause__) if isinstance(each, TransportError)), None)
    # A metadata server may also answer that it has no credentials for this account.
    status = getattr(failure.args[1] if failure and len(failure.args) > 1 else None, "status", None)
    is_answer = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    return None if is_answer else failure


def object_of(text: bytes) -> dict[str, Any]:
    """Return the JSON object in an answer; raise RetryableError for anything else.

    Anything else comes from a server in between, such as a proxy.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RetryableError("the answer is not JSON") from error
    if not isinstance(found, dict):
        raise RetryableError("the answer is JSON, but not an object")
    return found


@contextmanager
def well_formed(said: str = "the answer lacks what the service always sends") -> Iterator[None]:
    """Raise RetryableError in place of the errors that parsing an impossible answer raises."""
    try:
        yield
    except _IMPOSSIBLE as error:
        if isinstance(error, OSError):  # some are ValueErrors too
            raise
        raise foreign(f"{said} ({_text(error)})") from error


def text_of(value: Any) -> str:
    """Return a JSON value that has to be a text, with valid characters only."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    value.encode()
    return value


def size_of(value: Any) -> int:
    """Return a JSON value that has to be a size: a number, or its digits as a text."""
    size = int_of(str(value))
    if size is None:
        raise ValueError(f"{str(value)[:40]!r} in place of a size")
    return size


_BY_TYPE: tuple[tuple[tuple[type[BaseException], ...], type[CachedFSError]], ...] = (
    ((FileNotFoundError, NotADirectoryError), ObjectNotFound),
    ((FileExistsError,), ObjectExists),
    ((PermissionError,), AccessDenied),
    ((IsADirectoryError,), IsAFolder),
    ((ConnectionError, socket.gaierror), OriginUnreachable),
    ((TimeoutError, json.JSONDecodeError), OriginUnavailable),  # an unusable answer
    ((LookupError, ArithmeticError, RecursionError), CachedFSError),  # a library expected another answer
)
# Names of base classes in aiohttp, requests, google-auth, obstore and botocore; the most specific first.
_BY_NAME: tuple[tuple[frozenset[str], type[CachedFSError]], ...] = (
    (frozenset({"ClientConnectorError", "TransportError"}), OriginUnreachable),
    (frozenset({"EndpointConnectionError", "ConnectTimeoutError"}), OriginUnreachable),
    (frozenset({"ClientConnectionError", "ClientPayloadError"}), OriginUnavailable),
    (frozenset({"RequestException", "ClientError", "HttpError"}), OriginUnavailable),
    (frozenset({"GoogleAuthError", "NoCredentialsError", "PartialCredentialsError"}), SignInRefused),
    (frozenset({"PermissionDeniedError", "UnauthenticatedError"}), AccessDenied),
    (frozenset({"GenericError", "JoinError", "BotoCoreError", "ResponseParserError"}), OriginUnavailable),
)
_BY_STATUS: dict[int, type[CachedFSError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: ObjectNotFound,
    407: AccessDenied,
    408: OriginUnavailable,
    410: ObjectNotFound,
    429: OriginUnavailable,
}
_ADVICE: dict[type[CachedFSError], str] = {
    ObjectNotFound: "no object or folder has this name",
    ObjectExists: "an object or folder has this name already",
    IsAFolder: "this is a folder; list it, or name an object in it",
    AccessDenied: "access denied; check the credentials and what they are allowed to do",
    SignInRefused: "access denied; check the credentials and what they are allowed to do",
    OriginUnreachable: "the origin cannot be reached; check the network and the endpoint",
    OriginUnavailable: "no usable answer from the origin; check the network, or try again later",
}
# What Google's text of a 403 says, in lower case, and what to do: no credentials would help.
_POLICIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("retention policy", "object retention", "retentionpolicynotmet"),
        (
            "a retention policy protects the object from being replaced, moved or deleted; write to another name, or wait until "
            "the time that the service states"
        ),
    ),
    (
        ("active temporary hold", "active event-based hold", "objectunderactivehold"),
        (
            "a hold protects the object from being replaced, moved or deleted; write to another name, or ask the owner to "
            "release the hold"
        ),
    ),
    (
        ("cloud kms", "cloudkms."),
        (
            "the key of Cloud KMS that encrypts the object cannot be used; ask the owner to give the Cloud Storage service agent "
            "of the bucket's project roles/cloudkms.cryptoKeyEncrypterDecrypter on the key, and to see that the key is enabled"
        ),
    ),
    (
        ("vpcservicecontrols", "prohibited by organization's policy", "security_policy_violated"),
        (
            "VPC Service Controls of the organization forbid access from this network or account; run this inside the perimeter, "
            "or ask the administrator for an ingress rule, with the identifier that the service states"
        ),
    ),
    (
        ("violates constraint", "constraints/"),
        "a policy of the organization forbids this; ask its administrator, with the constraint that the service states",
    ),
)
# For botocore's NoCredentialsError.
_NO_CREDENTIALS = (
    "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass "
    's3={"key": ..., "secret": ...}, or s3={"anon": True} for public data'
)


def advice_of(text: str, reasons: Collection[str] = ()) -> str | None:
    """Return what to do where a policy forbids a request, so that no other credentials help; else None.

    `text` and `reasons` are those of the answer.
    """
    said = " ".join((text, *reasons)).lower()
    return next((advice for signs, advice in _POLICIES if any(sign in said for sign in signs)), None)


@contextmanager
def mapped(url: str, doing: str, *, is_read: bool = False) -> Iterator[None]:
    """Turn exceptions of libraries into errors of cachedfs that name `url` and the operation.

    `is_read`: the operation has no arguments of the caller's own. So every exception is about the answer.
    """
    try:
        yield
    except Exception as error:  # of any kind: one that is not known is raised as it is
        raise_mapped(error, url, doing, is_read=is_read)


def raise_mapped(error: Exception, url: str, doing: str, *, is_read: bool = False) -> NoReturn:
    """Raise the error of cachedfs for `error`, as `mapped` does."""
    translated = translate(error, url, doing)
    is_impossible = isinstance(error, _IMPOSSIBLE) and not isinstance(error, OSError)
    # gcsfs takes any answer of 412 for a file that exists.
    if is_read and (isinstance(translated, ObjectExists) or (translated is error and is_impossible)):
        translated = CachedFSError(f"{url}: the origin failed ({doing}: {_text(error)})")
    if translated is error:
        raise error
    # A traceback prints the causes too: leave them out if a message contains a secret.
    raise translated from (None if has_secrets(error) else error)


def translate(error: Exception, url: str, doing: str) -> Exception:
    """Return the error of cachedfs for `error`, or `error` itself where that is clear enough.

    NotImplementedError, ValueError and other errors about the call itself are returned as they are.
    """
    if isinstance(error, CachedFSError) or getattr(error, "errno", None) == errno.ENOTEMPTY:
        return error
    cause = _real_error(error)
    kind = _kind_of(cause)
    if kind is None:
        return error
    is_unsigned = type(cause).__name__ == "NoCredentialsError"
    advice = _NO_CREDENTIALS if is_unsigned else _ADVICE.get(kind, "the origin failed")
    if kind is SignInRefused and OTHER_TIME in str(cause):
        advice = WRONG_CLOCK
    elif kind is AccessDenied:
        advice = advice_of(_text(cause)) or advice
    translated = kind(f"{url}: {advice} ({doing}: {_text(cause)})")
    if kind is CachedFSError and isinstance(error, OSError) and error.errno:
        translated.errno = error.errno
    return translated


def _real_error(error: Exception) -> Exception:
    """Return the cause of a FileNotFoundError if the cause is another failure, else `error` itself.

    fsspec's HTTP filesystem raises FileNotFoundError for a 503 and for an unreachable server. Zarr takes a missing
    object for an empty chunk, and would return zeros in place of data.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    cause = _real_error(cause)
    kind = _kind_of(cause)
    is_refusal = kind is CachedFSError and _status_of(cause) is not None
    return (
        cause
        if is_refusal or kind in (AccessDenied, SignInRefused, OriginUnreachable, OriginUnavailable)
        else error
    )


def _kind_of(error: Exception) -> type[CachedFSError] | None:
    for types, kind in _BY_TYPE:
        if isinstance(error, types):
            return kind
    # The answer was not HTTP: aiohttp raises that with a status 400 that no service sent.
    if any(base.__name__ == "HttpProcessingError" for base in type(error.__cause__).__mro__):
        return OriginUnavailable
    status = _status_of(error)
    if status is None and isinstance(error.__cause__, Exception):  # s3fs raises an OSError for any status
        status = _status_of(error.__cause__)
    if status is not None:
        return _BY_STATUS.get(status, OriginUnavailable if status >= 500 else CachedFSError)
    if isinstance(error, ValueError) and str(error).startswith("Bad Request: "):  # as gcsfs says it
        return RequestRejected
    names = {base.__name__ for base in type(error).__mro__}
    for known, kind in _BY_NAME:
        if names & known:
            return kind
    if not isinstance(error, OSError):
        return None
    # gcsfs raises a 403 as an OSError with this text.
    return AccessDenied if str(error).startswith("Forbidden") else CachedFSError


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status that an exception of any library carries, else None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return int_of(str(response.get("ResponseMetadata", {}).get("HTTPStatusCode")))
    # aiohttp's errors have `code` too, but reading it gives a deprecation warning.
    own = "status" if hasattr(error, "status") else "code"
    for holder, name in ((error, own), (response, "status_code")):
        value = getattr(holder, name, None)
        if (status := int_of(str(value))) is not None and 400 <= status < 600:
            return status
    return None


def _text(error: Exception) -> str:
    text = str(error).partition("\n\nDebug source:")[0]  # obstore repeats all as a structure of Rust
    name, text = type(error).__name__, without_secrets(text)[:_LONGEST_TEXT]
    return f"{name}: {text}" if text else name
