"""What the errors of Drive and of its sign-in say to do: one row for each answer of Google."""

import json
import re

import pytest

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive.credentials import SignIn, find
from cachedfs.origins.drive.failures import failure, token_remedy
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.retry import RetryableError
from cachedfs.sim.messages import Refusal

FILES = "https://www.googleapis.com/drive/v3/files"
SCOPES = ("Request had insufficient authentication scopes.", "insufficientPermissions")
RATE = ("User Rate Limit Exceeded", "userRateLimitExceeded")
ABUSE = ("This file has been identified as malware or spam.", "cannotDownloadAbusiveFile")


def asked(text, reason, url=f"{FILES}/1", **request):
    """Return what a 403 with this text and reason means."""
    sent = HTTPRequest(url=url, **{"params": {}, "subject": "drive://x", "doing": "doing it", **request})
    body = Refusal(403, text, reason).to_json().encode()
    return failure(sent, 403, {}, body, SignIn("user", None, "me", "REMEDY", for_scope="GET THE SCOPE"))


@pytest.mark.parametrize(
    ("text", "reason", "request_", "says"),
    [
        (*SCOPES, {}, r"token of the account that signs in .me. does not cover the scope \S+/auth/drive.readonly .*: GET THE SCOPE$"),
        (*SCOPES, {"method": "PATCH"}, r"does not cover the scope \S+/auth/drive \(.*: GET THE SCOPE$"),
        (*SCOPES, {"url": f"{FILES}/generateIds"}, r"does not cover the scope \S+/auth/drive \("),
        ("The user has not granted the app", "appNotAuthorizedToFile", {}, "scope.*GET THE SCOPE$"),
        ("It has not been used in project 1", "accessNotConfigured", {}, "Drive API is off.*apis/library/drive"),
        ("The drive.googleapis.com API requires a quota project", "accessNotConfigured", {}, "set-quota-project"),
        ("Requests to this API method are blocked.", "forbidden", {}, "key is limited.*apis/credentials$"),
        ("The domain administrators have disabled it", "domainPolicy", {}, "ask the administrator"),
        ("No permission", "insufficientFilePermissions", {}, "check that the item is shared with it"),
        ("No permission", "insufficientFilePermissions", {"method": "PATCH"}, "signs in .me., which may not change this.*edit$"),
        ("No permission", "insufficientParentPermissions", {"method": "POST"}, "may not change this"),
        ("It cannot be downloaded", "cannotDownloadFile", {}, "owner has switched off downloading"),
        ("It cannot be copied", "cannotCopyFile", {"method": "POST"}, "owner has switched off copying"),
        (*ABUSE, {}, 'owner can read it with drive={"acknowledge_abuse": True}'),
        (*ABUSE, {"params": {"acknowledgeAbuse": "true"}}, "to its owner alone, also with acknowledge_abuse .*: sign in as"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_helps(text, reason, request_, says):
    found = asked(text, reason, **request_)
    assert isinstance(found, AccessDenied)
    assert str(found).startswith("drive://x: ")
    assert f"(doing it: 403: {text})" in str(found)
    assert re.search(says, str(found))


@pytest.mark.parametrize(
    ("url", "is_by_day"),
    [
        (f"{FILES}/1", False),
        (f"{FILES}/1/copy", True),
        ("https://www.googleapis.com/upload/drive/v3/files", True),
    ],
)
def test_too_many_copies_may_be_too_many_for_a_day(url, is_by_day):
    found = asked(*RATE, url=url)
    assert isinstance(found, RetryableError)
    assert ("wait until tomorrow" in found.remedy) is is_by_day


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
