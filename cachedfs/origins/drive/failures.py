"""Error responses of the Drive API v3: which ones are retried, and the exceptions of the others, without I/O.

Written from developers.google.com/workspace/drive/api/guides/handle-errors, and from recorded answers.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    QuotaExceeded,
    RequestRejected,
    SignInRefused,
)
from cachedfs.origins.drive.credentials import GCLOUD_LOGIN, SCOPE
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.origin_errors import OTHER_TIME, WRONG_CLOCK, Errors, error_of, refusal, retryable
from cachedfs.origins.retry import RetryableError

_CONSOLE = "https://console.cloud.google.com/apis"
_NOT_DRIVE = (
    "See whether a proxy or the sign-in page of a network answers in its place, and check endpoint_url"
)


class DriveOutOfSight(AccessDenied):
    """The account is not a member of the shared drive; items of it that were shared with the account still exist."""


class DriveAnonymous(AccessDenied):
    """Google refuses requests without an account or an API key, even for public files."""


class DriveAbusiveFile(AccessDenied):
    """Google takes the file for malware; its owner may read it all the same."""


def failure(
    request: HTTPRequest,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    account: str = "the account that signs in",
    remedy: str = "sign in again or pass another",
    for_scope: str = "sign in again with this scope",
) -> Exception:
    """Return what an error response means: a reason to retry, or the exception to raise.

    `account` is who signed in, `remedy` what to do when the token is refused, and `for_scope` what to do to get one with
    a missing scope.

    An error is Drive's own only if it has a reason: a 404 without one says nothing about the file. A 401 counts from
    any server, because it never means that something is absent.
    """
    url, doing = request.subject, request.purpose
    text, reasons = error_of(body)
    said = f"{status}: {text}" if text else str(status)
    if (failed := retryable(status, reasons, said, headers)) is not None:
        is_counted_by_day = "/upload/" in request.url or request.url.endswith("/copy")
        if failed.is_rate and is_counted_by_day:
            failed.remedy = _BY_DAY
        return failed
    if 300 <= status < 400:
        return RetryableError(f"the answer is not Drive's: it redirects ({said})", remedy=_NOT_DRIVE)
    if status != 401 and not reasons:
        return RetryableError(f"the answer is not Drive's ({said})", remedy=_NOT_DRIVE)
    what = f"{doing}: {said}"
    if status == 404 and "notFound at driveId" in reasons:
        return DriveOutOfSight(
            f"{url}: this account is no member of the shared drive ({what}). Ask for that, or have a folder of it "
            f"shared with {account}: it is under drive://Shared with me then"
        )
    if status == 404 and "notFound" in reasons:
        if request.is_pinned:
            return ObjectChanged(
                f"{url}: the file was removed while it was read, or hidden from you ({doing}); open it again"
            )
        return ObjectNotFound(
            f"{url}: not found ({what}). Check the name; Drive says the same of what this account may not see: ask the "
            f"owner to share it with {account}; the file of a link with resourcekey= in it is drive://id:ID,resourcekey=KEY"
        )
    if status == 400 and "API key not valid" in text:
        return SignInRefused(f"{url}: Google does not accept the API key ({what}): {remedy}")
    if status == 401:
        return SignInRefused(
            f"{url}: access denied; the token of {account} is not accepted ({what}): {remedy}"
        )
    if status == 403:
        return _permanent_error(request, reasons, said, account, remedy, for_scope)
    return refusal(request, status, said, _ERRORS)


def _permanent_error(
    request: HTTPRequest, reasons: set[str], said: str, account: str, remedy: str, for_scope: str
) -> CachedFSError:
    """Return the error for a 403 that does not pass with time."""
    url, what = request.subject, f"{request.purpose}: {said}"
    is_read = request.method == "GET" and not request.url.endswith("/generateIds")
    if "cannotDownloadAbusiveFile" in reasons and "acknowledgeAbuse" in request.params:
        return AccessDenied(
            f"{url}: Google takes this file for malware or spam, and gives it to its owner alone, also with acknowledge_abuse "
            f"({what}): sign in as its owner in place of {account}, or ask the owner for another copy"
        )
    if "quota project" in what:
        return AccessDenied(
            f"{url}: access denied to {account}: Google wants to know the project of its requests ({what}): sign in with an "
            f"OAuth client of your own, `{GCLOUD_LOGIN}`, or run `gcloud auth application-default set-quota-project PROJECT`"
        )
    if known := [found for reason, found in _REFUSED.items() if reason in reasons]:
        return refusal(request, 403, said, {None: known[0]})
    if "forbidden" in reasons and any(text in what for text in _ANONYMOUS):
        return DriveAnonymous(f"{url}: Google answers no anonymous requests ({what}): {remedy}")
    if ("insufficientPermissions" in reasons and "scopes" in what) or "appNotAuthorizedToFile" in reasons:
        return AccessDenied(
            f"{url}: access denied; the token of {account} does not cover the scope {SCOPE}{'.readonly' if is_read else ''} "
            f"({what}): {for_scope}"
        )
    if any(text in what for text in _KEY_LIMITS):
        return AccessDenied(
            f"{url}: access denied to {account}: the key is limited to other services or addresses ({what}): change that at "
            f"{_CONSOLE}/credentials"
        )
    if not is_read and reasons & _NO_CHANGE:
        return AccessDenied(
            f"{url}: access denied to {account}, which may not change this ({what}): ask its owner for the right to edit"
        )
    return AccessDenied(
        f"{url}: access denied to {account}; check that the item is shared with it, and that the credentials cover "
        f"the scope https://www.googleapis.com/auth/drive ({what})"
    )


_ERRORS: Errors = {
    400: (RequestRejected, "Drive did not accept the request"),
    409: (ObjectExists, "exists already"),
    None: (CachedFSError, "Drive answered in a way that is not understood"),
}
_KEY_LIMITS = ("are blocked", "IP address restriction")
_NO_CHANGE = {"insufficientFilePermissions", "insufficientParentPermissions"}
_BY_DAY = (
    "Too many requests: lower concurrency=, or wait a minute. Google says the same when an account has copied or uploaded "
    "as much as it may in a day (at most 750 GB): if it does not pass, wait until tomorrow"
)
_ANONYMOUS = ("unregistered callers", "missing a valid API key", "Unauthenticated")
_FULL = "the storage of this account is full: empty the trash, or get more"
_DOWNLOADS = (
    "the download quota of this file is used up, for up to 24 hours. Cached data can still be read; a copy of the file in "
    "your own Drive has its own quota"
)
_NO_BYTES = "this has no bytes to download; export it from Drive as a file"
# Reasons of a 403; where an error has several, the first one here counts.
_REFUSED: dict[str, tuple[type[CachedFSError], str]] = {
    "downloadQuotaExceeded": (QuotaExceeded, _DOWNLOADS),
    "quotaExceeded at quota.download": (QuotaExceeded, _DOWNLOADS),
    "dailyLimitExceeded": (
        QuotaExceeded,
        "the project's requests of this day are used up; it ends at midnight, Pacific time",
    ),
    "accessNotConfigured": (
        AccessDenied,
        f"the Drive API is off in the project of the credentials: enable it at {_CONSOLE}/library/drive.googleapis.com",
    ),
    "domainPolicy": (
        AccessDenied,
        "the administrator of the account's domain does not allow this: ask the administrator to allow apps at Drive",
    ),
    "dailyLimitExceededUnreg": (QuotaExceeded, "Google allows no anonymous requests: sign in"),
    "sharingRateLimitExceeded": (QuotaExceeded, "the limit of sharing is reached; it ends within 24 hours"),
    "quotaExceeded": (QuotaExceeded, _FULL),
    "storageQuotaExceeded": (QuotaExceeded, _FULL),
    "teamDriveFileLimitExceeded": (QuotaExceeded, "the shared drive holds as many items as it may"),
    "numChildrenInNonRootLimitExceeded": (
        QuotaExceeded,
        "the folder holds 500,000 items, as many as it may: use several, or pack",
    ),
    "myDriveHierarchyDepthLimitExceeded": (QuotaExceeded, "a folder may be 100 levels deep, and no more"),
    "activeItemCreationLimitExceeded": (QuotaExceeded, "the account has created as many items as it may"),
    "uploadLimitExceeded": (QuotaExceeded, "750 GB were uploaded within a day, as much as Drive takes"),
    "cannotDownloadAbusiveFile": (
        DriveAbusiveFile,
        'Google takes this file for malware or spam. Its owner can read it with drive={"acknowledge_abuse": True}',
    ),
    "cannotDownloadFile": (AccessDenied, "its owner has switched off downloading for this account"),
    "cannotCopyFile": (
        AccessDenied,
        "its owner has switched off copying, or it is of a kind that cannot be copied: ask the owner",
    ),
    "exportSizeLimitExceeded": (
        NotDownloadable,
        "Google does not export it, as it would be more than 10 MB; download it from its menu in Drive, and put it into Drive",
    ),
    "fileNotDownloadable": (NotDownloadable, _NO_BYTES),
    "fileNotExportable": (NotDownloadable, _NO_BYTES),
}


# Refused tokens
_NEW_CLIENT = "the OAuth client was deleted, or its secret was changed: sign in with another (`cachedfs login drive --client FILE`)"
# What the token server says, in lower case, and what to do.
_TOKEN_REMEDIES = {
    OTHER_TIME: WRONG_CLOCK,
    "account not found": "the service account was deleted: use the key of another one",
    "invalid email or user id": "client_user_email= names no user: check the address",
    "client is unauthorized to retrieve": (
        "the service account may not act for users: an administrator of their domain allows that for its client id and the "
        f"scope {SCOPE}, at https://admin.google.com/ac/owl/domainwidedelegation"
    ),
    "deleted_client": _NEW_CLIENT,
    "invalid_client": _NEW_CLIENT,
    "admin_policy_enforced": "the administrator of the account's domain does not allow this app: ask for that",
}


def token_remedy(said: str, remedy: str) -> str:
    """Return what to do when the token server refuses a token with these words; `remedy` where they are not known."""
    return next((known for text, known in _TOKEN_REMEDIES.items() if text in said.lower()), remedy)
