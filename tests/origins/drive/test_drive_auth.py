"""Sign-in to Google Drive: PyDrive2, google-auth and oauth2client against a local token server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import io
import itertools
import json
import logging
import os
import socket
import ssl
import threading
import types
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.oauth2.credentials
import google.oauth2.service_account
import google_auth_httplib2
import googleapiclient.discovery
import httplib2
import pytest
from oauth2client.client import AccessTokenCredentials, OAuth2Credentials
from pydrive2.auth import GoogleAuth
from pydrive2.drive import GoogleDrive

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import held, transport
from cachedfs.origins.drive.auth import OPTIONS, DriveAuth, describe, sign_in
from cachedfs.origins.drive.transport import Unreachable, send
from cachedfs.origins.retry import RetryableError
from tests.origins.drive.certificates import certify

# oauth2client's own, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utc:DeprecationWarning")

SECRETS = ("SECRET", "REFRESH", "TOKEN-", "PRIVATE KEY")
CLIENT = "client-1.apps.googleusercontent.com"


def signed_in(**options: Any) -> GoogleAuth:
    return sign_in(options, connect_s=60.0, stall_s=60.0)


def has_no_secret(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Expect an error that contains the words, and no secret, in it or in its printed causes."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert has_no_secret(f"{error} {error!r}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class Google(http.server.ThreadingHTTPServer):
    """POST /token issues tokens; every other path requires the newest one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token_uri = f"{self.url}/token"
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.grants: list[dict[str, str]] = []
        self.asked: list[tuple[str, str, str | None]] = []
        self.refusal: tuple[int, dict[str, str]] | None = None
        self.expires_in = 3600
        self.valid: str | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that disconnect are part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Google

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != "/token":
            return self.answer_api()
        with self.server.lock:
            self.server.grants.append(dict(urllib.parse.parse_qsl(body.decode())))
            if self.server.refusal is not None:
                return self.reply(*self.server.refusal)
            self.server.valid = f"TOKEN-{next(self.server.numbers)}"
            return self.reply(200, {"access_token": self.server.valid, "expires_in": self.server.expires_in})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer_api()

    def do_GET(self) -> None:
        self.answer_api()

    def answer_api(self) -> None:
        sent = self.headers.get("authorization")
        with self.server.lock:
            self.server.asked.append((self.command, self.path, sent))
        if self.path == "/hang-up":
            self.close_connection = True
            return None
        if self.path == "/short":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
            self.close_connection = True
            return None
        if self.path == "/308":
            return self.reply(308, {}, {"Range": "bytes=0-9", "Location": self.server.url + "/elsewhere"})
        if self.path == "/moved":
            return self.reply(302, {}, {"Location": self.server.url + "/public"})
        if self.path == "/last":
            self.close_connection = True  # without saying so
            return self.reply(200, {})
        if self.path != "/public" and sent != f"Bearer {self.server.valid}":
            return self.reply(401, {"error": "invalid"})
        return self.reply(200, {"you": sent or "", "items": []})

    def reply(self, status: int, value: Any, headers: Any = None) -> None:
        body = json.dumps(value).encode()
        head = "".join(f"{name}: {text}\r\n" for name, text in (headers or {}).items())
        self.wfile.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body)


@pytest.fixture
def google_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    with Google() as server:
        # For an authorized user, google-auth always asks its own endpoint.
        monkeypatch.setattr(google.oauth2.credentials, "_GOOGLE_OAUTH2_TOKEN_ENDPOINT", server.token_uri)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def at_home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the credentials, caches and proxies of the machine that runs the tests."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture
def key(pem: str, google_server: Google) -> dict[str, str]:
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": pem,
        "client_email": "robot@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": google_server.token_uri,
    }


def ago(seconds: float) -> datetime:
    return datetime.now(UTC).replace(tzinfo=None, microsecond=0) - timedelta(seconds=seconds)


def saved_json(server: Google, *, expired_s: float = 60.0) -> str:
    """Return what PyDrive2 saves after a sign-in in the browser."""
    return OAuth2Credentials(
        "TOKEN-old",
        CLIENT,
        "SECRET",
        "REFRESH",
        ago(expired_s),
        server.token_uri,
        None,
        scopes=["https://www.googleapis.com/auth/drive"],
    ).to_json()


def authorized_user(server: Google, **more: Any) -> dict[str, Any]:
    return {
        "type": "authorized_user",
        "client_id": CLIENT,
        "client_secret": "SECRET",
        "refresh_token": "REFRESH",
        "token_uri": server.token_uri,
        **more,
    }


def user_credentials(server: Google, *, expired_s: float = 60.0) -> google.oauth2.credentials.Credentials:
    return google.oauth2.credentials.Credentials(
        "TOKEN-old",
        refresh_token="REFRESH",
        token_uri=server.token_uri,
        client_id=CLIENT,
        client_secret="SECRET",
        expiry=ago(expired_s),
    )


@contextlib.contextmanager
def drive_auth(gauth: GoogleAuth) -> Iterator[DriveAuth]:
    made = DriveAuth(gauth)
    yield made
    made.close()


async def sent_by(gauth: GoogleAuth) -> dict[str, str]:
    with drive_auth(gauth) as made:
        return await made.headers()


def saved_file(home: Any, text: str, profile: str = "default") -> Any:
    path = home / "cache" / "pydrive2fs" / CLIENT / f"{profile}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Slow:
    """Credentials of a library whose renewal fails once `go_on` is set."""

    can_renew = True

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s, self._n_asked = lasts_s, itertools.count(1)
        self.begun, self.go_on, self.all_wait = threading.Event(), threading.Event(), threading.Event()
        self.n_renewed = 0

    def lasts_s(self) -> float:
        if next(self._n_asked) >= 17:  # by eight threads twice, and by the one that renews
            self.all_wait.set()
        return self._lasts_s

    def headers(self) -> dict[str, str]:
        return {"authorization": "Bearer old"}

    def renew(self, http: Any) -> None:
        self.n_renewed += 1
        self.begun.set()
        assert self.go_on.wait(120)
        raise OSError("no answer")

    def scopes(self) -> list[str] | None:
        return None


def held_by(source: Slow) -> Any:
    return held.SharedCredentials(
        held.FoundToken(source, "the test", "sign in"), connect_s=60.0, stall_s=60.0
    )


def auth_by(source: Slow) -> GoogleAuth:
    gauth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
    gauth.credentials = held_by(source)
    return gauth


class TestServiceAccount:
    async def test_a_key_signs_in_in_every_form(
        self, key: dict[str, str], google_server: Google, tmp_path: Any
    ) -> None:
        path = tmp_path / "key.json"
        path.write_text(json.dumps(key))
        ways: list[dict[str, Any]] = [
            {"use_service_account": True, "client_json": json.dumps(key)},
            {"use_service_account": True, "client_json": key},
            {"use_service_account": True, "client_json_file_path": str(path)},
            {"client_json_file_path": path},
            {"token": key},
            {"token": json.dumps(key, indent=1) + "\n"},
            {"token": str(path)},
            {"token": path},
            {"token": "~/key.json"},
        ]
        for number, options in enumerate(ways, 1):
            gauth = signed_in(**options)
            assert describe(gauth) == "service account robot@p.iam.gserviceaccount.com"
            assert await sent_by(gauth) == {"authorization": f"Bearer TOKEN-{number}"}

    async def test_the_key_requests_the_drive_scope_and_the_delegated_user(
        self, key: dict[str, str], google_server: Google
    ) -> None:
        gauth = signed_in(use_service_account=True, client_json=key, client_user_email="ann@example.org")
        assert describe(gauth).endswith("for ann@example.org")
        await sent_by(gauth)
        claims = google_server.grants[0]["assertion"].split(".")[1]
        said = json.loads(base64.urlsafe_b64decode(claims + "=="))
        assert (said["scope"], said["sub"]) == ("https://www.googleapis.com/auth/drive", "ann@example.org")

    def test_no_request_is_sent_before_a_token_is_needed(
        self, key: dict[str, str], google_server: Google
    ) -> None:
        signed_in(token=key)
        assert google_server.grants == []

    def test_a_damaged_key_is_a_value_error_without_the_key(self, key: dict[str, str]) -> None:
        broken = {**key, "private_key": "-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----"}
        with refused(ValueError, "damaged"):
            signed_in(token=broken)
        with refused(ValueError, "damaged"):
            signed_in(token={"type": "service_account"})

    def test_an_invalid_service_account_key_is_refused(self, google_server: Google, tmp_path: Any) -> None:
        with refused(ValueError, "client_json", "service account"):
            signed_in(use_service_account=True, client_json=authorized_user(google_server))
        with refused(ValueError, "nowhere.json", "no such file"):
            signed_in(use_service_account=True, client_json_file_path="/nowhere.json")


class TestSavedSignIn:
    async def test_credentials_saved_by_pydrive2_are_found_renewed_and_saved_again(
        self, google_server: Google, tmp_path: Any
    ) -> None:
        path = saved_file(tmp_path, saved_json(google_server))
        gauth = signed_in(client_id=CLIENT, client_secret="SECRET")
        assert CLIENT in describe(gauth)
        assert has_no_secret(describe(gauth))
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}
        assert google_server.grants[0]["refresh_token"] == "REFRESH"
        saved = json.loads(path.read_text())
        assert (saved["access_token"], saved["refresh_token"]) == ("TOKEN-1", "REFRESH")
        assert path.stat().st_mode & 0o077 == 0
        assert os.listdir(path.parent) == ["default.json"]
        # The next process asks for nothing.
        assert await sent_by(signed_in(client_id=CLIENT)) == {"authorization": "Bearer TOKEN-1"}
        assert len(google_server.grants) == 1

    def test_the_folder_of_saved_credentials_is_that_of_pydrive2(
        self, google_server: Google, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = pytest.importorskip("pydrive2.fs.spec")
        saved_file(tmp_path, saved_json(google_server, expired_s=-3000), "work")
        monkeypatch.setenv("GDRIVE_NON_INTERACTIVE", "1")  # no browser: it finds them, or fails
        theirs = spec._client_auth(client_id=CLIENT, client_secret="SECRET", profile="work")
        assert theirs.credentials.access_token == "TOKEN-old"
        ours = signed_in(client_id=CLIENT, client_secret="SECRET", profile="work")
        assert "work.json" in describe(ours)

    async def test_a_token_renewed_by_another_process_is_used(
        self, google_server: Google, tmp_path: Any
    ) -> None:
        path = saved_file(tmp_path, saved_json(google_server))
        gauth = signed_in(client_id=CLIENT)
        newer = json.loads(saved_json(google_server, expired_s=-3000))
        path.write_text(json.dumps({**newer, "access_token": "TOKEN-theirs"}))
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-theirs"}
        assert google_server.grants == []

    async def test_a_credentials_folder_may_be_read_only(
        self, google_server: Google, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        saved_file(tmp_path, saved_json(google_server))

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(held.tempfile, "mkstemp", full)
        assert await sent_by(signed_in(client_id=CLIENT)) == {"authorization": "Bearer TOKEN-1"}
        assert "cannot be saved" in caplog.text
        assert has_no_secret(caplog.text)

    async def test_saved_credentials_as_json_or_file(self, google_server: Google, tmp_path: Any) -> None:
        path = tmp_path / "mine.json"
        path.write_text(saved_json(google_server))
        assert await sent_by(signed_in(client_json_file_path=str(path))) == {
            "authorization": "Bearer TOKEN-1"
        }
        assert json.loads(path.read_text())["access_token"] == "TOKEN-1"
        gauth = signed_in(client_json=saved_json(google_server))
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-2"}

    def test_without_saved_credentials_the_error_says_how_to_sign_in(self, tmp_path: Any) -> None:
        words = ("GDriveFileSystem('root'", CLIENT, "browser", str(tmp_path))
        with refused(AccessDenied, *words):
            signed_in(client_id=CLIENT, client_secret="SECRET")
        with refused(AccessDenied, "GDriveFileSystem", "other.json"):
            signed_in(client_json_file_path=str(tmp_path / "other.json"))

    async def test_a_revoked_sign_in_is_access_denied_and_says_what_to_do(
        self, google_server: Google, tmp_path: Any
    ) -> None:
        path = saved_file(tmp_path, saved_json(google_server))
        google_server.refusal = (
            400,
            {"error": "invalid_grant", "error_description": "Token has been expired or revoked."},
        )
        gauth = signed_in(client_id=CLIENT)
        with refused(AccessDenied, "invalid_grant", f"remove {path}", "GDriveFileSystem"):
            await sent_by(gauth)
        # After a new sign-in at the service, the refusal is forgotten.
        google_server.refusal = None
        assert await sent_by(signed_in(client_id=CLIENT)) == {"authorization": "Bearer TOKEN-1"}

    async def test_a_failing_token_endpoint_is_retried(self, google_server: Google, tmp_path: Any) -> None:
        saved_file(tmp_path, saved_json(google_server))
        google_server.refusal = (503, {"error": "backend"})
        gauth = signed_in(client_id=CLIENT)
        with refused(RetryableError):
            await sent_by(gauth)
        google_server.refusal = None
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}

    def test_client_secrets_are_not_credentials(self) -> None:
        with refused(ValueError, "client_id="):
            signed_in(client_json={"installed": {"client_id": CLIENT, "client_secret": "SECRET"}})


class TestGoogleAuthCredentials:
    async def test_credentials_objects(self, google_server: Google, key: dict[str, str]) -> None:
        gauth = signed_in(credentials=user_credentials(google_server))
        assert describe(gauth) == f"OAuth credentials of client {CLIENT}"
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}
        unscoped = google.oauth2.service_account.Credentials.from_service_account_info(key)
        gauth = signed_in(credentials=unscoped)
        assert describe(gauth) == "service account robot@p.iam.gserviceaccount.com"
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-2"}
        anonymous = signed_in(credentials=google.auth.credentials.AnonymousCredentials())
        assert await sent_by(anonymous) == {}

    async def test_the_quota_project_is_sent(self, google_server: Google) -> None:
        credentials = user_credentials(google_server).with_quota_project("payer")
        credentials.expiry = ago(60)  # google-auth drops it in the copy
        headers = await sent_by(signed_in(credentials=credentials))
        assert headers == {"authorization": "Bearer TOKEN-1", "x-goog-user-project": "payer"}

    def test_other_objects_are_refused(self) -> None:
        with refused(ValueError, "google-auth", "object"):
            signed_in(credentials=object())

    async def test_an_authorized_user_as_dictionary_and_file(
        self, google_server: Google, tmp_path: Any
    ) -> None:
        path = tmp_path / "user.json"
        path.write_text(json.dumps(authorized_user(google_server)))
        for number, token in enumerate((authorized_user(google_server), str(path)), 1):
            gauth = signed_in(token=token)
            assert CLIENT in describe(gauth)
            assert await sent_by(gauth) == {"authorization": f"Bearer TOKEN-{number}"}
        with refused(ValueError, "refresh_token"):
            signed_in(token={"type": "authorized_user", "client_secret": "SECRET"})

    @pytest.mark.parametrize("option", ["token", "client_json_file_path", "client_json"])
    async def test_a_user_saved_by_google_auth_is_an_authorized_user(
        self, google_server: Google, tmp_path: Any, option: str
    ) -> None:
        """The `token.json` of Google's examples, which does not state its type."""
        saved = user_credentials(google_server).to_json()
        assert "type" not in json.loads(saved)
        path = tmp_path / "token.json"
        path.write_text(saved)
        gauth = signed_in(**{option: saved if option == "client_json" else str(path)})
        assert describe(gauth) == f"authorized user of client {CLIENT}"
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}
        assert path.read_text() == saved

    @pytest.mark.parametrize("options", [{}, {"token": "google_default"}, {"token": "", "client_id": None}])
    async def test_a_colab_sign_in_lasts_longer_than_its_token(
        self, google_server: Google, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        """`authenticate_user` of google.colab sets what `google.auth.default` returns."""
        credentials = user_credentials(google_server, expired_s=-3000)

        def default(scopes: list[str]) -> Any:
            assert scopes == ["https://www.googleapis.com/auth/drive"]
            return credentials, None

        monkeypatch.setattr(google.auth, "default", default)
        gauth = signed_in(**options)
        assert describe(gauth).startswith("application default credentials")
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-old"}
        credentials.expiry = ago(1)  # an hour later
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}
        assert gauth.access_token_expired is False  # or PyDrive2 would open a browser

    async def test_the_file_named_in_the_environment_is_the_default(
        self, key: dict[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, google_server: Google
    ) -> None:
        path = tmp_path / "adc.json"
        path.write_text(json.dumps(key))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        gauth = signed_in()
        assert "robot@" in describe(gauth)
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}

    def test_without_any_credentials_the_error_names_three_solutions(self) -> None:
        with refused(
            AccessDenied,
            "GOOGLE_APPLICATION_CREDENTIALS",
            "authenticate_user()",
            "gcloud auth",
            "--client-id-file=client.json",  # the client of gcloud gets no Drive scope
            "service account",
        ):
            signed_in()

    async def test_revoked_credentials_are_access_denied(self, google_server: Google) -> None:
        google_server.refusal = (400, {"error": "invalid_grant", "refresh_token": "REFRESH"})
        with refused(AccessDenied, "invalid_grant", "sign in again", "gcloud"):
            await sent_by(signed_in(token=authorized_user(google_server)))


class TestToken:
    async def test_anonymous_sends_nothing(self, google_server: Google) -> None:
        gauth = signed_in(token="anon")
        assert describe(gauth) == "anonymous"
        with drive_auth(gauth) as made:
            assert await made.headers() == {}
            assert not await made.renew({})
            assert send(made.transport(), "GET", f"{google_server.url}/public").status == 200
            assert send(made.transport(), "GET", f"{google_server.url}/private").status == 401
        assert [sent for *_, sent in google_server.asked] == [None, None]

    async def test_a_bare_token_is_sent_and_cannot_be_renewed(self, google_server: Google) -> None:
        gauth = signed_in(token="TOKEN-bare/with/slashes")
        assert describe(gauth) == "access token"
        with drive_auth(gauth) as made:
            headers = await made.headers()
            assert headers == {"authorization": "Bearer TOKEN-bare/with/slashes"}
            assert not await made.renew(headers)
            assert send(made.transport(), "GET", f"{google_server.url}/private").status == 401
        assert len(google_server.asked) == 1

    @pytest.mark.parametrize("token", ["/no/such/key.json", "key.json", "~/key", "./key"])
    def test_a_file_that_is_missing_is_a_value_error(self, token: str) -> None:
        with refused(ValueError, os.path.expanduser(token), "no such file", "'anon'"):
            signed_in(token=token)

    def test_an_invalid_token_is_a_value_error(self, tmp_path: Any) -> None:
        (tmp_path / "text.json").write_text("SECRET")
        with refused(ValueError, "text.json", "not JSON"):
            signed_in(token=str(tmp_path / "text.json"))
        with refused(ValueError, "token=", "int"):
            signed_in(token=3)
        with refused(ValueError, "no access token"):
            signed_in(token="SECRET\nSECRET")
        with refused(ValueError, "type None"):
            signed_in(token={"private_key": "SECRET"})
        with refused(ValueError, "cannot be read"):
            signed_in(token=str(tmp_path) + "/")

    async def test_an_expired_token_that_cannot_be_renewed_is_access_denied(self) -> None:
        credentials = google.oauth2.credentials.Credentials("TOKEN-old", expiry=ago(60))
        with refused(AccessDenied, "expired"):
            await sent_by(signed_in(credentials=credentials))


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"token": "anon", "client_json": "{}"}, ["token, client_json"]),
            ({"google_auth": object(), "credentials": object()}, ["google_auth, credentials"]),
            ({"token": "anon", "client_id": "x", "profile": "p"}, ["token, client_id, profile"]),
            ({"client_json": "{}", "client_json_file_path": "x"}, ["client_json", "client_json_file_path"]),
            ({"use_service_account": True}, ["use_service_account", "client_json="]),
            ({"use_service_account": True, "client_json": "{}", "profile": "p"}, ["profile"]),
            ({"client_secret": "SECRET"}, ["client_id="]),
            ({"tokn": "TOKEN-1"}, ["tokn"]),
            ({"google_auth": object()}, ["GoogleAuth", "object"]),
            ({"client_json": "SECRET"}, ["client_json", "JSON"]),
        ],
    )
    def test_impossible_options_are_named(self, options: dict[str, Any], words: list[str]) -> None:
        with refused(ValueError, *words):
            signed_in(**options)

    def test_options_of_pydrive2_are_options_here(self) -> None:
        spec = pytest.importorskip("pydrive2.fs.spec")
        code = spec.GDriveFileSystem.__init__.__code__
        theirs = set(code.co_varnames[1 : code.co_argcount]) - {"path", "trash_only", "acknowledge_abuse"}
        assert theirs | {"token", "credentials"} == OPTIONS


class TestExistingGoogleAuth:
    def gauth(self, credentials: Any) -> GoogleAuth:
        made = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
        made.credentials = credentials
        return made

    async def test_an_existing_googleauth_is_used_and_not_changed(self, google_server: Google) -> None:
        credentials = OAuth2Credentials.from_json(saved_json(google_server))
        theirs = self.gauth(credentials)
        ours = signed_in(google_auth=theirs)
        assert describe(ours) == describe(theirs) == f"OAuth credentials of client {CLIENT}"
        assert await sent_by(ours) == {"authorization": "Bearer TOKEN-1"}
        assert theirs.credentials is credentials
        assert theirs.http_timeout is None
        assert credentials.access_token == "TOKEN-1"  # its own token is renewed, too

    async def test_google_auth_credentials_in_a_googleauth_work(self, google_server: Google) -> None:
        ours = signed_in(google_auth=self.gauth(user_credentials(google_server)))
        assert await sent_by(ours) == {"authorization": "Bearer TOKEN-1"}

    async def test_a_subclass_of_googleauth_creates_its_own_http_objects(self, google_server: Google) -> None:
        class Mine(GoogleAuth):  # type: ignore[misc]
            def Get_Http_Object(self) -> Any:
                mine = httplib2.Http(ca_certs="mine")
                return self.credentials.authorize(mine)

        theirs = Mine(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
        theirs.credentials = OAuth2Credentials.from_json(saved_json(google_server))
        with drive_auth(theirs) as made:
            assert made.transport().ca_certs == "mine"
            assert made.transport().timeout == 30.0

    async def test_credentials_of_another_class_sign_in_in_their_own_way(self, google_server: Google) -> None:
        class Adapter:
            access_token_expired, invalid, refresh_token = False, False, None

            def authorize(self, http: Any) -> Any:
                return google_auth_httplib2.AuthorizedHttp(user_credentials(google_server), http)

        ours = signed_in(google_auth=self.gauth(Adapter()))
        with drive_auth(ours) as made:
            assert send(made.transport(), "GET", f"{google_server.url}/private").status == 200
            assert made.transport().timeout == 30.0
            assert not await made.renew({})
            with refused(AccessDenied, "Adapter", "credentials="):
                await made.headers()

    async def test_a_bare_token_of_oauth2client(self) -> None:
        ours = signed_in(google_auth=self.gauth(AccessTokenCredentials("TOKEN-x", "agent")))
        with drive_auth(ours) as made:
            assert await made.headers() == {"authorization": "Bearer TOKEN-x"}
            assert not await made.renew(await made.headers())

    def test_a_googleauth_that_is_not_signed_in_is_access_denied(self) -> None:
        with refused(AccessDenied, "LocalWebserverAuth()"):
            signed_in(google_auth=self.gauth(None))

    def test_a_googleauth_with_saved_credentials_loads_them(
        self, google_server: Google, tmp_path: Any
    ) -> None:
        path = tmp_path / "saved.json"
        path.write_text(saved_json(google_server))
        settings = {
            "save_credentials": True,
            "save_credentials_backend": "file",
            "save_credentials_file": str(path),
        }
        theirs = GoogleAuth(settings={**GoogleAuth.DEFAULT_SETTINGS, **settings})
        assert CLIENT in describe(signed_in(google_auth=theirs))

    def test_pydrive2_itself_works_with_the_same_googleauth(self, google_server: Google) -> None:
        gauth = signed_in(token=authorized_user(google_server))
        endpoint = {"api_endpoint": google_server.url}
        gauth.service = googleapiclient.discovery.build(
            "drive", "v2", http=httplib2.Http(), client_options=endpoint
        )
        assert GoogleDrive(gauth).ListFile({"q": "trashed=false"}).GetList() == []
        assert [sent for *_, sent in google_server.asked] == ["Bearer TOKEN-1"]
        gauth.thread_local.http.close()
        gauth.service.close()


class TestRenewal:
    async def test_a_token_that_expires_soon_is_renewed_before_use(self, google_server: Google) -> None:
        gauth = signed_in(credentials=user_credentials(google_server, expired_s=-200))
        assert await sent_by(gauth) == {"authorization": "Bearer TOKEN-1"}

    async def test_an_expiring_token_is_used_if_it_cannot_be_renewed_yet(self, google_server: Google) -> None:
        google_server.refusal = (500, {"error": "backend"})
        credentials = OAuth2Credentials.from_json(saved_json(google_server, expired_s=-200))
        gauth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
        gauth.credentials = credentials
        with drive_auth(signed_in(google_auth=gauth)) as made:
            assert await made.headers() == {"authorization": "Bearer TOKEN-old"}
            assert await made.headers() == {"authorization": "Bearer TOKEN-old"}
            assert len(google_server.grants) == 1  # not for every request
            google_server.refusal = None
            credentials.token_expiry = ago(1)
            assert await made.headers() == {"authorization": "Bearer TOKEN-1"}

    async def test_a_short_lived_token_is_not_renewed_for_every_request(self, google_server: Google) -> None:
        google_server.expires_in = 120
        with drive_auth(signed_in(credentials=user_credentials(google_server))) as made:
            for _ in range(5):
                await made.headers()
        assert len(google_server.grants) <= 2

    @pytest.mark.parametrize("kind", ["google-auth", "oauth2client"])
    async def test_a_refused_token_is_renewed_once_for_all_callers(
        self, google_server: Google, kind: str
    ) -> None:
        options: dict[str, Any] = (
            {"credentials": user_credentials(google_server, expired_s=-3000)}
            if kind == "google-auth"
            else {"client_json": saved_json(google_server, expired_s=-3000)}
        )
        with drive_auth(signed_in(**options)) as made:
            stale = await made.headers()
            assert all(await asyncio.gather(*(made.renew(stale) for _ in range(10))))
            assert await made.headers() == {"authorization": "Bearer TOKEN-1"}
            assert await made.renew(stale)  # late: the token was replaced already
        assert len(google_server.grants) == 1

    async def test_callers_that_wait_for_the_same_renewal_share_its_failure(self) -> None:
        source = Slow(lasts_s=-1.0)
        with drive_auth(auth_by(source)) as made:
            for ask in (made.headers, lambda: made.renew({"authorization": "Bearer old"})):
                source.begun.clear()
                source.go_on.clear()
                waiting = [asyncio.create_task(ask()) for _ in range(8)]
                await asyncio.to_thread(source.begun.wait, 60)
                source.go_on.set()
                failures = await asyncio.gather(*waiting, return_exceptions=True)
                assert [str(failure) for failure in failures] == ["OSError: no answer"] * 8
        assert source.n_renewed == 2

    async def test_a_valid_token_is_used_while_another_caller_renews_it(self) -> None:
        class Hindered(Slow):
            """Blocks the thread that is to renew the token before it says so."""

            def lasts_s(self) -> float:
                if threading.current_thread() is not readers:
                    self.begun.set()
                    assert self.go_on.wait(120)
                return super().lasts_s()

        readers, source = threading.current_thread(), Hindered(lasts_s=200.0)
        with drive_auth(auth_by(source)) as made:
            asking = [asyncio.create_task(made.headers()) for _ in range(8)]
            assert await asyncio.to_thread(source.begun.wait, 60)
            assert sum(task.done() for task in asking) == 7
            source.go_on.set()
            assert await asyncio.gather(*asking) == [{"authorization": "Bearer old"}] * 8
        assert source.n_renewed == 1

    def test_threads_that_wait_for_the_same_renewal_share_its_failure(self) -> None:
        source = Slow(lasts_s=-1.0)
        credentials = held_by(source)

        def ask(_: int) -> str:
            with pytest.raises(RetryableError) as caught:
                credentials.fresh_headers(None)
            return str(caught.value)

        with ThreadPoolExecutor(8) as threads:
            failures = threads.map(ask, range(8))
            assert source.all_wait.wait(120)
            source.go_on.set()
            assert list(failures) == ["OSError: no answer"] * 8
        assert source.n_renewed == 1
        ask(0)  # a later caller tries again
        assert source.n_renewed == 2

    async def test_a_token_server_without_network_is_unreachable(self, google_server: Google) -> None:
        credentials = user_credentials(google_server)
        credentials._token_uri = f"http://127.0.0.1:{closed_port()}/token"
        with pytest.raises(RetryableError) as caught:
            await sent_by(signed_in(credentials=credentials))
        assert caught.value.trouble.is_unreachable

    @pytest.mark.parametrize(("kind", "expired_s"), [("google-auth", 60.0), ("oauth2client", -3000.0)])
    def test_eight_threads_renew_once(
        self, google_server: Google, kind: str, expired_s: float, tmp_path: Any
    ) -> None:
        """Expired by the clock, or refused with 401 by the service."""
        path = saved_file(tmp_path, saved_json(google_server, expired_s=expired_s))
        options: dict[str, Any] = (
            {"credentials": user_credentials(google_server, expired_s=expired_s)}
            if kind == "google-auth"
            else {"client_json_file_path": str(path)}
        )
        together = threading.Barrier(8)
        with drive_auth(signed_in(**options)) as made:

            def ask(_: int) -> tuple[int, Any]:
                mine = made.transport()
                assert made.transport() is mine
                together.wait()
                return send(mine, "GET", f"{google_server.url}/private").status, mine

            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, range(8)))
        assert [status for status, _ in answers] == [200] * 8
        assert len({id(mine) for _, mine in answers}) == 8
        assert len(google_server.grants) == 1


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def tls_server(tmp_path: Any) -> Iterator[tuple[str, str]]:
    """Return the URL of a server that answers hello over TLS, and its certificate file."""
    path = tmp_path / "server.pem"
    certify(path, "localhost")

    class Hello(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def finish_request(self, request: Any, client_address: Any) -> None:
            with contextlib.suppress(OSError), context.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    with Server(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"https://localhost:{server.server_port}/", str(path)
        server.shutdown()
        thread.join()


@pytest.fixture
def anon() -> Iterator[Any]:
    with drive_auth(sign_in({"token": "anon"}, connect_s=60.0, stall_s=60.0)) as made:
        yield made.transport()


@pytest.fixture
def hasty() -> Iterator[Any]:
    """Short time limits, for servers that never answer."""
    with drive_auth(sign_in({"token": "anon"}, connect_s=0.2, stall_s=0.2)) as made:
        yield made.transport()


class TestTransport:
    def test_a_closed_port_is_unreachable(self, anon: Any) -> None:
        with pytest.raises(RetryableError, match="cannot connect") as caught:
            send(anon, "GET", f"http://127.0.0.1:{closed_port()}/x")
        assert caught.value.trouble.is_unreachable
        assert isinstance(caught.value.__cause__, Unreachable)

    def test_an_unresolved_name_is_unreachable(self, anon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def unresolved(*_: Any, **__: Any) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unresolved)
        for scheme in ("http", "https"):
            with pytest.raises(RetryableError) as caught:
                send(anon, "POST", f"{scheme}://nowhere.invalid/x", b"body")
            assert caught.value.trouble.is_unreachable

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_a_connect_has_its_own_time_limit(
        self, anon: Any, monkeypatch: pytest.MonkeyPatch, scheme: str
    ) -> None:
        given = []

        def silent(address: Any, timeout: float, *_: Any, **__: Any) -> None:
            given.append(timeout)
            raise TimeoutError("timed out")

        monkeypatch.setattr(socket, "create_connection", silent)
        with drive_auth(sign_in({"token": "anon"}, connect_s=1.5, stall_s=30.0)) as made:
            http = made.transport()
            with pytest.raises(RetryableError) as caught:
                send(http, "GET", f"{scheme}://127.0.0.1:9/x")
            assert http.timeout == 30.0
        assert caught.value.trouble.is_unreachable
        assert given == [1.5]

    def test_a_request_that_is_canceled_while_connecting_leaves_no_socket(
        self, anon: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect, made = socket.create_connection, []

        def too_late(*given: Any, **options: Any) -> socket.socket:
            transport.abort(anon._http)  # finds no socket yet
            made.append(connect(*given, **options))
            return made[-1]

        monkeypatch.setattr(socket, "create_connection", too_late)
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            pytest.raises(RetryableError, match="canceled") as caught,
        ):
            send(anon, "GET", f"http://127.0.0.1:{silent.getsockname()[1]}/x")
        assert caught.value.trouble.is_unreachable
        assert [sock.fileno() for sock in made] == [-1]

    def test_a_tls_handshake_without_an_answer_is_unreachable(self, hasty: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RetryableError) as caught:
            send(hasty, "GET", f"https://127.0.0.1:{silent.getsockname()[1]}/x")
        assert caught.value.trouble.is_unreachable

    def test_a_service_that_accepts_and_stays_silent_is_not_unreachable(self, hasty: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RetryableError) as caught:
            send(hasty, "GET", f"http://127.0.0.1:{silent.getsockname()[1]}/x")
        assert not caught.value.trouble.is_unreachable
        assert "timed out" in caught.value.trouble.reason

    @pytest.mark.parametrize(("scheme", "kind"), [("http", "_Plain"), ("https", "_Secure")])
    def test_sending_a_body_may_take_longer_than_the_time_limit(
        self, monkeypatch: pytest.MonkeyPatch, scheme: str, kind: str
    ) -> None:
        class Uplink:
            """An uplink of 100 kB a second; as in Python, the limit is for all bytes of one `sendall`."""

            def settimeout(self, timeout: float) -> None:
                self.timeout = timeout

            def sendall(self, data: bytes) -> None:
                if len(data) / 100_000 > self.timeout:
                    raise TimeoutError("timed out")
                sent.extend(data)

            def close(self) -> None: ...

        def connect(connection: Any) -> None:
            connection.sock = Uplink()

        sent, body = bytearray(), os.urandom(8 << 20)
        monkeypatch.setattr(getattr(transport, kind), "_connect_directly", connect)
        connection = transport.connection_types(2.0)[scheme]("host", timeout=30.0)
        connection.request("PUT", "/", body=body)
        assert sent.endswith(b"\r\n\r\n" + body)
        connection.close()

    def test_tls_certificates_are_verified(self, tls_server: tuple[str, str]) -> None:
        url, its_certificate = tls_server
        with drive_auth(sign_in({"token": "anon"}, connect_s=50.0, stall_s=60.0)) as made:
            with pytest.raises(RetryableError, match="CERTIFICATE_VERIFY_FAILED") as caught:
                send(made.transport(), "GET", url)
            assert caught.value.trouble.is_final
            made.transport()._http.ca_certs = its_certificate
            for _ in range(2):
                assert send(made.transport(), "GET", url).body == b"hello"
            (connection,) = made.transport().connections.values()
            assert connection.sock.gettimeout() == 60.0

    def test_certificates_trusted_by_the_system_are_trusted(
        self, tls_server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url, its_certificate = tls_server
        monkeypatch.delenv("HTTPLIB2_CA_CERTS", raising=False)
        monkeypatch.setenv("SSL_CERT_FILE", its_certificate)
        with drive_auth(sign_in({"token": "anon"}, connect_s=30.0, stall_s=30.0)) as made:
            assert send(made.transport(), "GET", url).body == b"hello"
        monkeypatch.setenv("HTTPLIB2_CA_CERTS", httplib2.CA_CERTS)
        again = drive_auth(sign_in({"token": "anon"}, connect_s=30.0, stall_s=30.0))
        with again as made, pytest.raises(RetryableError, match="CERTIFICATE_VERIFY_FAILED"):
            send(made.transport(), "GET", url)

    def test_without_system_certificates_those_of_certifi_are_trusted(
        self, tls_server: tuple[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "none").mkdir()
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
        monkeypatch.setenv("SSL_CERT_FILE", tls_server[1])
        assert len(transport.trusted().get_ca_certs()) < 2  # only this certificate
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        assert len(transport.trusted().get_ca_certs()) > 50

    def test_a_server_without_tls_is_an_error(self, anon: Any, google_server: Google) -> None:
        with pytest.raises(RetryableError) as caught:
            send(anon, "GET", google_server.url.replace("http:", "https:"))
        assert not caught.value.trouble.is_unreachable

    @pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
    def test_status_308_is_not_followed_as_a_redirect(
        self, anon: Any, google_server: Google, method: str
    ) -> None:
        answer = send(anon, method, f"{google_server.url}/308", b"" if method == "GET" else b"part")
        assert answer.status == 308
        assert answer.headers["range"] == "bytes=0-9"
        assert len(google_server.asked) == 1

    def test_redirected_downloads_are_followed_without_the_token(self, google_server: Google) -> None:
        with drive_auth(signed_in(token="TOKEN-bare")) as made:
            response, body = made.transport().request(f"{google_server.url}/moved")
            assert (response.status, json.loads(body)) == (200, {"you": "", "items": []})
            with pytest.raises(RetryableError, match="redirected"):  # API requests are never redirected
                send(made.transport(), "GET", f"{google_server.url}/moved")

    def test_a_truncated_body_is_an_error(self, anon: Any, google_server: Google) -> None:
        with pytest.raises(RetryableError, match="IncompleteRead"):
            send(anon, "GET", f"{google_server.url}/short")
        assert send(anon, "GET", f"{google_server.url}/public").status == 200  # on another connection

    def test_a_post_is_never_sent_twice(self, anon: Any, google_server: Google) -> None:
        with pytest.raises(RetryableError, match="without an answer"):
            send(anon, "POST", f"{google_server.url}/hang-up", b"{}")
        assert len(google_server.asked) == 1

    def test_a_connection_closed_by_the_service_is_replaced_before_use(
        self, anon: Any, google_server: Google
    ) -> None:
        assert send(anon, "POST", f"{google_server.url}/last", b"{}").status == 200
        (connection,) = anon.connections.values()
        for _ in range(500):
            if transport._is_stale(connection.sock):
                break
            threading.Event().wait(0.01)
        assert send(anon, "POST", f"{google_server.url}/public", b"{}").status == 200
        assert len(google_server.asked) == 2

    def test_a_file_body_is_sent_again_from_its_start_position(self, google_server: Google) -> None:
        body = io.BytesIO(b"--part")
        body.seek(2)
        gauth = signed_in(credentials=user_credentials(google_server, expired_s=-3000))
        with drive_auth(gauth) as made:
            headers = {"content-length": "4"}
            assert send(made.transport(), "PUT", f"{google_server.url}/private", body, headers).status == 200
        assert [sent for *_, sent in google_server.asked] == ["Bearer TOKEN-old", "Bearer TOKEN-1"]

    def test_errors_of_foreign_credentials_become_cachedfs_errors(self) -> None:
        class Refusing:
            def __init__(self, error: Exception) -> None:
                self.error = error

            def request(self, *_: Any, **__: Any) -> Any:
                raise self.error

        gone = google.auth.exceptions.RefreshError("invalid_grant", {"refresh_token": "REFRESH"})
        with refused(AccessDenied, "invalid_grant", "sign in again"):
            send(Refusing(gone), "GET", "https://x/")
        away = google.auth.exceptions.TransportError("no route")
        with pytest.raises(RetryableError) as caught:
            send(Refusing(away), "GET", "https://x/")
        assert caught.value.trouble.is_unreachable
        for status, is_final in ((404, True), (403, True), (429, False), (500, False)):
            answer = types.SimpleNamespace(status=status, data=b"SECRET")
            cause = google.auth.exceptions.TransportError("the metadata server says", answer)
            wrapped = google.auth.exceptions.RefreshError(cause)
            wrapped.__cause__ = cause
            with refused(AccessDenied if is_final else RetryableError, "the metadata server says"):
                send(Refusing(wrapped), "GET", "https://x/")
        with pytest.raises(RetryableError, match="a mistake"):
            send(Refusing(ValueError("a mistake")), "GET", "https://x/")

    def test_a_forked_child_creates_its_own_http_objects(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with drive_auth(signed_in(token="anon")) as made:
            before = made.transport()
            monkeypatch.setattr(os, "getpid", lambda: -1)
            assert made.transport() is not before

    def test_nothing_secret_is_logged(self, google_server: Google, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, logger="cachedfs")
        gauth = signed_in(token=authorized_user(google_server))
        with drive_auth(gauth) as made:
            send(made.transport(), "GET", f"{google_server.url}/private")
            assert has_no_secret(repr(made) + repr(gauth.credentials) + repr(made.transport()))
        assert has_no_secret(caplog.text)
