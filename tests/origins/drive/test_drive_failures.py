"""What the errors of Drive and of its sign-in say to do: one row for each answer of Google."""

import json
import re

import pytest

from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
    QuotaExceeded,
    SignInRefused,
)
from cachedfs.origins.drive.credentials import SignIn, find
from cachedfs.origins.drive.failures import failure, token_remedy
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.retry import RetryableError
from cachedfs.sim.messages import Refusal

FILES = "https://www.googleapis.com/drive/v3/files"
SCOPES = ("Request had insufficient authentication scopes.", "insufficientPermissions")
ABUSE = ("This file has been identified as malware or spam.", "cannotDownloadAbusiveFile")


def meaning(status, body, url=f"{FILES}/1", **request):
    sent = HTTPRequest(url=url, **{"params": {}, "subject": "drive://x", "doing": "doing it", **request})
    return failure(sent, status, {}, body, SignIn("user", None, "me", "REMEDY", for_scope="GET THE SCOPE"))


def asked(text, reason, status=403, **request):
    """Return what a refusal with this text and reason means."""
    return meaning(status, Refusal(status, text, reason).to_json().encode(), **request)


@pytest.mark.parametrize(
    ("text", "reason", "request_", "kind", "says"),
    [
        (*SCOPES, {}, AccessDenied, r"token of the account that signs in .me. does not cover the scope \S+/auth/drive.readonly .*: GET THE SCOPE$"),
        (*SCOPES, {"method": "PATCH"}, AccessDenied, r"does not cover the scope \S+/auth/drive \(.*: GET THE SCOPE$"),
        (*SCOPES, {"url": f"{FILES}/generateIds"}, AccessDenied, r"does not cover the scope \S+/auth/drive \("),
        ("The user has not granted the app", "appNotAuthorizedToFile", {}, AccessDenied, "scope.*GET THE SCOPE$"),
        ("It has not been used in project 1", "accessNotConfigured", {}, AccessDenied, "Drive API is off.*apis/library/drive"),
        ("The drive.googleapis.com API requires a quota project", "accessNotConfigured", {}, AccessDenied, "set-quota-project"),
        ("Requests to this API method are blocked.", "forbidden", {}, AccessDenied, "key is limited.*apis/credentials$"),
        ("The domain administrators have disabled it", "domainPolicy", {}, AccessDenied, "ask the administrator"),
        ("No permission", "insufficientFilePermissions", {}, AccessDenied, "check that the item is shared with it"),
        ("No permission", "insufficientFilePermissions", {"method": "PATCH"}, AccessDenied, "signs in .me., which may not change this.*edit$"),
        ("No permission", "insufficientParentPermissions", {"method": "POST"}, AccessDenied, "may not change this"),
        ("It cannot be downloaded", "cannotDownloadFile", {}, AccessDenied, "owner has switched off downloading"),
        ("It cannot be copied", "cannotCopyFile", {"method": "POST"}, AccessDenied, "owner has switched off copying"),
        (*ABUSE, {}, AccessDenied, 'owner can read it with drive={"acknowledge_abuse": True}'),
        (*ABUSE, {"params": {"acknowledgeAbuse": "true"}}, AccessDenied, "to its owner alone, also with acknowledge_abuse .*: sign in as"),
        ("no", "downloadQuotaExceeded", {}, QuotaExceeded, "24 hours.*copy of the file"),
        ("no", "quotaExceeded", {}, QuotaExceeded, "storage of this account is full"),
        ("no", "fileNotDownloadable", {}, NotDownloadable, "no bytes"),
        ("no", "authError", {"status": 401}, SignInRefused, "the token of the account that signs in .*: REMEDY$"),
        ("no", "notFound", {"status": 404}, ObjectNotFound, "ask the owner to share it"),
        ("no", "teapot", {"status": 418}, CachedFSError, "not understood"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_helps(text, reason, request_, kind, says):
    found = asked(text, reason, **request_)
    assert isinstance(found, kind)
    assert str(found).startswith("drive://x: ")
    assert f"(doing it: {request_.get('status', 403)}: {text})" in str(found)
    assert re.search(says, str(found))


@pytest.mark.parametrize("body", [b"<html>no</html>", b'{"error": {}}', b"notFound"])
@pytest.mark.parametrize(
    ("status", "pinned", "kind"),
    [
        (404, False, ObjectNotFound),
        (404, True, ObjectChanged),
        (409, False, FileExistsError),
        (401, True, AccessDenied),
        (403, False, AccessDenied),
        (400, False, ValueError),
        (503, True, RetryableError),
    ],
)
def test_every_status_maps_to_an_error_or_a_retry(status, pinned, kind, body):
    said = meaning(status, Refusal(status, "no").to_json().encode(), is_pinned=pinned)
    assert isinstance(said, kind)
    if not isinstance(said, RetryableError):
        assert str(said).startswith("drive://x: ")
    # From a proxy, only a 401 is believed.
    not_drives = meaning(status, body, is_pinned=pinned)
    assert isinstance(not_drives, AccessDenied if status == 401 else RetryableError)
    assert "<html>" not in str(not_drives)


CLOCK = "Token must be a short-lived token (60 minutes) and in a reasonable timeframe. Check your iat and exp values"


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (f"invalid_grant: Invalid JWT: {CLOCK} in the JWT claim.", "the clock of this machine is wrong"),
        ("invalid_grant: Invalid grant: account not found", "service account was deleted"),
        ("invalid_grant: Invalid email or User ID", "client_user_email="),
        ("unauthorized_client: Client is unauthorized to retrieve access tokens using this method", "administrator"),
        ("invalid_client: The provided client secret is invalid.", "--client FILE"),
        ("admin_policy_enforced", "administrator"),
        ("invalid_grant: Token has been expired or revoked.", "REMEDY"),
    ],
)  # fmt: skip
def test_a_refused_token_says_what_helps(said, says):
    assert says in token_remedy(said, "REMEDY")


USER = {"refresh_token": "r", "client_id": "c", "client_secret": "s"}
KEY = {"type": "service_account", "client_email": "robot@example.com"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token": "ya29.a"}, "pass a token with this scope"),
        ({"token": KEY}, 'remove "scopes" from the JSON'),
        ({"token": USER}, "gcloud auth application-default login .*--scopes=https://www.googleapis.com/auth/drive,"),
        ({"client_json": json.dumps({**USER, "access_token": "a"})}, "PyDrive2 asks for"),
        ({"account": "work"}, "cachedfs login drive --account work` .*without --read-only"),
        ({"account": "robot"}, "cachedfs login drive --service-account FILE --account robot"),
    ],
)  # fmt: skip
def test_credentials_without_the_scope_say_how_to_get_it(options, says, monkeypatch):
    saved = {"work": USER, "robot": KEY}
    monkeypatch.setattr("cachedfs.origins.drive.accounts.load", saved.__getitem__)
    assert re.search(says, find(options).for_scope)
