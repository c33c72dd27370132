"""Error responses of the Drive API v3: which ones are retried, and the exceptions of the others, without I/O.

Written from developers.google.com/workspace/drive/api/guides/handle-errors, and from recorded answers.
"""

from __future__ import annotations

import re
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
from cachedfs.origins.drive.credentials import GCLOUD_LOGIN, SCOPE, SignIn
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.origin_errors import OTHER_TIME, WRONG_CLOCK, ErrorRow, error_of, refusal, retryable
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
    request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes, who: SignIn
) -> Exception:
    """Return what an error response to `who` means: a reason to retry, or the exception to raise.

    An error is Drive's own only if it has a reason: a 404 without one says nothing about the file. A 401 counts from
    any server, because it never means that something is absent.
    """
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
    account = f"the account that signs in ({who.name})" if who.name else "the account that signs in"
    names = {"account": account, "remedy": who.remedy, "for_scope": who.for_scope or who.remedy}
    scope = SCOPE if _is_change(request) else f"{SCOPE}.readonly"
    return refusal(request, status, said, _ERRORS, text, reasons, scope=scope, **names)


def _is_change(request: HTTPRequest) -> bool:
    return request.method != "GET" or request.url.endswith("/generateIds")


_BY_DAY = (
    "Too many requests: lower concurrency=, or wait a minute. Google says the same when an account has copied or uploaded "
    "as much as it may in a day (at most 750 GB): if it does not pass, wait until tomorrow"
)
_NO_SCOPE = "access denied; the token of {account} does not cover the scope {scope}", ": {for_scope}"
# The first one that fits counts.
_ERRORS = (
    ErrorRow(
        404, "notFound at driveId", DriveOutOfSight, "this account is no member of the shared drive",
        ". Ask for that, or have a folder of it shared with {account}: it is under drive://Shared with me then",
    ),
    ErrorRow(
        404, "notFound", ObjectChanged, "the file was removed while it was read, or hidden from you", "; open it again",
        when=lambda request: request.is_pinned,
    ),
    ErrorRow(
        404, "notFound", ObjectNotFound, "not found",
        ". Check the name; Drive says the same of what this account may not see: ask the owner to share it with {account}; "
        "the file of a link with resourcekey= in it is drive://id:ID,resourcekey=KEY",
    ),
    ErrorRow(400, "", SignInRefused, "Google does not accept the API key", ": {remedy}", text="API key not valid"),
    ErrorRow(401, "", SignInRefused, "access denied; the token of {account} is not accepted", ": {remedy}"),
    ErrorRow(
        403, "cannotDownloadAbusiveFile", AccessDenied,
        "Google takes this file for malware or spam, and gives it to its owner alone, also with acknowledge_abuse",
        ": sign in as its owner in place of {account}, or ask the owner for another copy",
        when=lambda request: "acknowledgeAbuse" in request.params,
    ),
    ErrorRow(
        403, "", AccessDenied,
        "access denied to {account}: Google wants to know the project of its requests",
        f": sign in with an OAuth client of your own, `{GCLOUD_LOGIN}`, or run `gcloud auth application-default "
        "set-quota-project PROJECT`",
        text="quota project",
    ),
    ErrorRow(
        403, "downloadQuotaExceeded|quotaExceeded at quota.download", QuotaExceeded,
        "the download quota of this file is used up, for up to 24 hours. Cached data can still be read; a copy of the file in "
        "your own Drive has its own quota",
    ),
    ErrorRow(
        403, "dailyLimitExceeded", QuotaExceeded,
        "the project's requests of this day are used up; it ends at midnight, Pacific time",
    ),
    ErrorRow(
        403, "accessNotConfigured", AccessDenied,
        f"the Drive API is off in the project of the credentials: enable it at {_CONSOLE}/library/drive.googleapis.com",
    ),
    ErrorRow(
        403, "domainPolicy", AccessDenied,
        "the administrator of the account's domain does not allow this: ask the administrator to allow apps at Drive",
    ),
    ErrorRow(403, "dailyLimitExceededUnreg", QuotaExceeded, "Google allows no anonymous requests: sign in"),
    ErrorRow(
        403, "quotaExceeded|storageQuotaExceeded", QuotaExceeded,
        "the storage of this account is full: empty the trash, or get more",
    ),
    ErrorRow(
        403, "teamDriveFileLimitExceeded", QuotaExceeded, "the shared drive holds as many items as it may"
    ),
    ErrorRow(
        403, "numChildrenInNonRootLimitExceeded", QuotaExceeded,
        "the folder holds 500,000 items, as many as it may: use several, or pack",
    ),
    ErrorRow(403, "myDriveHierarchyDepthLimitExceeded", QuotaExceeded, "a folder may be 100 levels deep, and no more"),
    ErrorRow(403, "activeItemCreationLimitExceeded", QuotaExceeded, "the account has created as many items as it may"),
    ErrorRow(403, "uploadLimitExceeded", QuotaExceeded, "750 GB were uploaded within a day, as much as Drive takes"),
    ErrorRow(
        403, "cannotDownloadAbusiveFile", DriveAbusiveFile,
        'Google takes this file for malware or spam. Its owner can read it with drive={{"acknowledge_abuse": True}}',
    ),
    ErrorRow(403, "cannotDownloadFile", AccessDenied, "its owner has switched off downloading for this account"),
    ErrorRow(
        403, "cannotCopyFile", AccessDenied,
        "its owner has switched off copying, or it is of a kind that cannot be copied: ask the owner",
    ),
    ErrorRow(
        403, "exportSizeLimitExceeded", NotDownloadable,
        "Google does not export it, as it would be more than 10 MB; download it from its menu in Drive, and put it into Drive",
    ),
    ErrorRow(
        403, "fileNotDownloadable|fileNotExportable", NotDownloadable,
        "this has no bytes to download; export it from Drive as a file",
    ),
    ErrorRow(
        403, "forbidden", DriveAnonymous, "Google answers no anonymous requests", ": {remedy}",
        text="unregistered callers|missing a valid API key|Unauthenticated",
    ),
    ErrorRow(403, "insufficientPermissions", AccessDenied, *_NO_SCOPE, text="scopes"),
    ErrorRow(403, "appNotAuthorizedToFile", AccessDenied, *_NO_SCOPE),
    ErrorRow(
        403, "", AccessDenied,
        "access denied to {account}: the key is limited to other services or addresses",
        f": change that at {_CONSOLE}/credentials",
        text="are blocked|IP address restriction",
    ),
    ErrorRow(
        403, "insufficientFilePermissions|insufficientParentPermissions", AccessDenied,
        "access denied to {account}, which may not change this", ": ask its owner for the right to edit", when=_is_change,
    ),
    ErrorRow(
        403, "", AccessDenied,
        "access denied to {account}; check that the item is shared with it, and that the credentials cover the scope "
        f"{SCOPE}",
    ),
    ErrorRow(400, "", RequestRejected, "Drive did not accept the request"),
    ErrorRow(409, "", ObjectExists, "exists already"),
    ErrorRow(None, "", CachedFSError, "Drive answered in a way that is not understood"),
)  # fmt: skip


# Pages in place of public files
_ACCOUNT = "sign in (`cachedfs login drive`), or give an API key, drive={{'api_key': '...'}}"
_TITLE = re.compile("<title>(?:Google Drive - )?([^<]*)</title>", re.IGNORECASE)
# Their text is the status, and the page.
_PAGES = (
    ErrorRow(
        None, "", AccessDenied,
        "this file is not public", f": ask its owner to share it with 'Anyone with the link', or {_ACCOUNT}",
        text="^30[23] |<title>(Google Drive - )?Sign in",
    ),
    ErrorRow(404, "", ObjectNotFound, "there is no such file, or it is not public", "; check the id"),
    ErrorRow(
        None, "", QuotaExceeded,
        "too many users have viewed or downloaded this file recently; Google allows more within 24 hours",
        f". A copy of it in a Drive of your own has its own quota: {_ACCOUNT}",
        text="<title>[^<]*Quota exceeded|Too many users have viewed",
    ),
    ErrorRow(
        500, "", NotDownloadable, "without an account only files and folders can be read, no documents", f": {_ACCOUNT}"
    ),
    ErrorRow(
        None, "", AccessDenied, "Google does not give this file to everybody", f": {_ACCOUNT}",
        text="^403 |<title>[^<]*nfected",
    ),
    ErrorRow(None, "", CachedFSError, "Google answered with a page in place of the file", f": {_ACCOUNT}"),
)  # fmt: skip


def page_failure(request: HTTPRequest, status: int, body: bytes) -> CachedFSError:
    """Return what a page for people means that answers a request for a public file."""
    text = body.decode("utf-8", "replace")
    title = found[1].strip() if (found := _TITLE.search(text)) else f"status {status}"
    return refusal(request, status, title, _PAGES, f"{status} {text}")


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
