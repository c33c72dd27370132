"""Errors of other libraries become cachedfs errors that name the URL and contain no secret."""

import functools
import http.server
import json
import re
import traceback
import types
from typing import ClassVar

import aiohttp
import google.auth.exceptions
import pytest
import zarr
from fsspec.core import url_to_fs

from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    IsAFolder,
    ObjectExists,
    ObjectNotFound,
    OriginUnavailable,
    OriginUnreachable,
    SignInRefused,
)
from cachedfs.origins.origin_errors import (
    advice_of,
    error_of,
    mapped,
    object_of,
    translate,
    without_secrets,
)
from cachedfs.origins.retry import RetryableError, RetryPolicy
from tests.support import WebServer


@pytest.mark.parametrize(
    "secret",
    [
        "GET https://host/tokeninfo?access_token=SECRET&x=1", "refresh_token=SECRET", "Authorization: Bearer SECRET",
        "https://host/b/k?X-Goog-Signature=SECRET", "https://host/b/k?sig=SECRET'", "token 'ya29.SECRET' is bad",
        "client_secret=SECRET)", "password=SECRET",
    ],
)  # fmt: skip
def test_only_secrets_are_removed_from_messages(secret):
    assert "SECRET" not in without_secrets(secret)
    assert without_secrets(secret.replace("SECRET", "")) != secret
    assert (
        without_secrets("no/such/object?alt=media&generation=12") == "no/such/object?alt=media&generation=12"
    )


class HttpError(Exception):
    """An error of a library, with a status."""

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


RETENTION = "Object 'b/k' is subject to bucket's retention policy and cannot be deleted, overwritten or archived until 2031-09-20"
OTHER_TIME = "invalid_grant: Invalid JWT: Token must be a short-lived token"
ASKED = types.SimpleNamespace(real_url="http://host/k")
ERRORS = [
    (FileNotFoundError("x"), ObjectNotFound, "no object or folder has this name"),
    (NotADirectoryError("x"), ObjectNotFound, ""),
    (PermissionError("no"), AccessDenied, "access denied; check the credentials and what they are allowed to do"),
    (OSError("Forbidden: b/k"), AccessDenied, "access denied"),  # as gcsfs says it
    (OSError(f"Forbidden: https://host/b/o/k\n{RETENTION}"), AccessDenied, "a retention policy protects"),
    (FileExistsError("x"), ObjectExists, "has this name already"),
    (IsADirectoryError("x"), IsAFolder, "list it"),
    (ConnectionRefusedError("x"), OriginUnreachable, "cannot be reached"),
    (TimeoutError(), OriginUnavailable, "no usable answer"),
    (json.JSONDecodeError("no JSON", "<html>", 0), OriginUnavailable, "no usable answer"),
    (HttpError(401), AccessDenied, "access denied"),
    (HttpError(404), ObjectNotFound, ""),
    (HttpError(503), OriginUnavailable, ""),
    (HttpError(418), CachedFSError, "the origin failed"),
    (OSError(28, "No space left"), CachedFSError, "the origin failed"),
    (aiohttp.ServerDisconnectedError(), OriginUnavailable, ""),
    (aiohttp.TooManyRedirects(ASKED, ()), OriginUnavailable, ""),  # reading its `code` warns
    (google.auth.exceptions.RefreshError("x"), SignInRefused, "access denied"),
    (google.auth.exceptions.RefreshError(OTHER_TIME), SignInRefused, "the clock of this machine is wrong"),
    (google.auth.exceptions.TransportError("x"), OriginUnreachable, ""),
]  # fmt: skip


@pytest.mark.parametrize(("error", "kind", "says"), ERRORS)
def test_errors_become_cachedfs_errors(error, kind, says):
    ours = translate(error, "s3://b/k", "writing it")
    assert type(ours) is kind
    assert re.search(rf"s3://b/k: .*{says}.*\(writing it: ", str(ours), re.DOTALL)
    assert ours.errno == (error.errno if isinstance(error, OSError) and error.errno else kind.code)


@pytest.mark.parametrize("error", [NotImplementedError(), ValueError("x"), TypeError("x")])
def test_errors_about_the_call_are_not_converted(error):
    assert translate(error, "s3://b/k", "writing") is error


def test_errors_of_botocore_and_obstore_are_recognized_by_name():
    unsigned = pytest.importorskip("botocore.exceptions").NoCredentialsError()
    with pytest.raises(SignInRefused, match="s3://b/k: no credentials were found; set AWS_ACCESS_KEY_ID"):
        raise translate(unsigned, "s3://b/k", "reading it")
    of_obstore = pytest.importorskip("obstore.exceptions")
    for kind in (of_obstore.PermissionDeniedError, of_obstore.UnauthenticatedError):
        assert isinstance(translate(kind("x"), "u", "d"), AccessDenied)
    ours = translate(of_obstore.GenericError('S3 error\n\nDebug source:\nGeneric {"x"}'), "u", "d")
    assert isinstance(ours, OriginUnavailable)
    assert "Debug" not in str(ours)


def test_an_error_that_quotes_a_token_has_no_cause():
    with pytest.raises(OriginUnavailable) as caught, mapped("gs://b/k", "reading it"):
        raise ConnectionError("https://oauth2.googleapis.com/tokeninfo?access_token=SECRET refused")
    text = "".join(traceback.format_exception(caught.value))
    assert "gs://b/k" in text
    assert "SECRET" not in text
    with pytest.raises(AccessDenied) as caught, mapped("gs://b/k", "reading it"):
        raise PermissionError("not yours")
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (aiohttp.ClientResponseError(ASKED, (), status=401), AccessDenied),
        (aiohttp.ClientResponseError(ASKED, (), status=503), OriginUnavailable),
        (ConnectionRefusedError("refused"), OriginUnreachable), (TimeoutError("late"), OriginUnavailable),
        (aiohttp.ClientResponseError(ASKED, (), status=404), ObjectNotFound),
        (aiohttp.ClientResponseError(ASKED, (), status=410), ObjectNotFound),
        (KeyError("in the index of an archive"), ObjectNotFound), (FileNotFoundError("in a folder"), ObjectNotFound),
        (None, ObjectNotFound),
    ],
)  # fmt: skip
def test_an_error_is_an_absence_only_if_no_other_error_caused_it(cause, kind):
    absent = FileNotFoundError("http://host/k")
    absent.__cause__ = cause
    error = translate(absent, "http://host/k", "looking it up")
    assert type(error) is kind
    assert ("no object or folder has this name" in str(error)) == (kind is ObjectNotFound)


class Answers(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a folder, except those for which `refusal` has an answer."""

    refusal: ClassVar[tuple[str, int]] = "", 0

    def send_head(self):
        name, status = self.refusal
        if name and name in self.path:
            self.send_error(status)
            return None
        return super().send_head()


@pytest.mark.parametrize("trouble", [403, 429, 503, "gone"])
def test_a_failure_of_a_web_server_is_never_a_fill_value_of_an_array(
    tmp_path, own_cache, monkeypatch, trouble
):
    array = zarr.create_array(tmp_path / "a.zarr", shape=(8,), chunks=(2,), dtype="i4", fill_value=0)
    array[:6] = [1, 2, 3, 4, 5, 6]  # the last chunk is missing
    hasty = functools.partial(RetryPolicy, tries=2, base_s=0.0)
    monkeypatch.setattr("cachedfs.origins.fsspec_origin.RetryPolicy", hasty)
    with WebServer(tmp_path, Answers) as server:
        fs, path = url_to_fs(f"cachedfs::{server.url}/a.zarr")
        there = zarr.open_array(f"cachedfs::{path}", mode="r")
        assert there[0:2].tolist() == [1, 2]
        assert there[6:8].tolist() == [0, 0]
        if trouble == "gone":
            server.close()
        else:
            monkeypatch.setattr(Answers, "refusal", ("/c/", trouble))
        with pytest.raises(CachedFSError) as caught:
            there[2:6]
        assert not isinstance(caught.value, FileNotFoundError)
        assert there[0:2].tolist() == [1, 2]
        if trouble != "gone":
            # When one chunk fails, zarr does not wait for the others; their refusals must not affect later reads.
            fs.cat([f"{path}/c/1", f"{path}/c/2"], on_error="return")
            monkeypatch.setattr(Answers, "refusal", ("", 0))
            assert there[:].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_json_that_is_nested_too_deeply_is_a_broken_answer():
    deep = b"[" * 100_000
    assert error_of(deep) == ("[" * 500, set())
    with pytest.raises(RetryableError, match="not JSON"):
        object_of(deep)


HOLD = "Object 'b/k' is under active Temporary hold and cannot be deleted, overwritten or archived until hold is removed."
KMS = "Permission denied on Cloud KMS key. Please ensure that your Cloud Storage service account has been authorized to use it."
PERIMETER = "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: eYhDkf"
CONSTRAINT = "'projects/p' violates constraint 'constraints/gcp.restrictNonCmekServices'"
NO_RIGHT = "a@b.c does not have storage.objects.get access to the Google Cloud Storage object."


@pytest.mark.parametrize(
    ("text", "reasons", "advice"),
    [
        (RETENTION, {"forbidden"}, "a retention policy protects the object .* wait until"),
        ("", {"retentionPolicyNotMet"}, "a retention policy protects"),
        (HOLD, {"forbidden"}, "ask the owner to release the hold"),
        (KMS, {"forbidden"}, "service agent .* roles/cloudkms.cryptoKeyEncrypterDecrypter"),
        (PERIMETER, {"vpcServiceControls"}, "run this inside the perimeter, or ask the administrator"),
        (CONSTRAINT, {"conditionNotMet"}, "a policy of the organization forbids this"),
        (NO_RIGHT, {"forbidden"}, None),
    ],
)
def test_a_refusal_that_no_credentials_change_names_its_cause(text, reasons, advice):
    found = advice_of(text, reasons)
    assert (found is None) if advice is None else re.search(advice, str(found))
