"""Sign-in to Google Drive: PyDrive2, google-auth and oauth2client, and a token server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import pathlib
import types
import urllib.parse
from datetime import UTC, datetime, timedelta

import google.auth
import google.auth.compute_engine
import google.auth.credentials
import google.auth.transport.requests
import google.oauth2.credentials
import google.oauth2.service_account
import pytest
from oauth2client.client import AccessTokenCredentials, OAuth2Credentials
from oauth2client.service_account import ServiceAccountCredentials
from pydrive2.auth import GoogleAuth
from pydrive2.drive import GoogleDrive

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import account_key, accounts, auth
from cachedfs.origins.drive.api import GOOGLE
from cachedfs.origins.drive.auth import DriveAuth, sign_in
from cachedfs.origins.drive.credentials import SCOPE, SIGN_IN
from tests.origins.drive.conftest import PATIENT

# oauth2client's own, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utc:DeprecationWarning")

SECRETS = ("SECRET", "REFRESH", "TOKEN-", "PRIVATE KEY")
CLIENT = "client-1.apps.googleusercontent.com"
A_USER = {"refresh_token": "REFRESH", "client_id": CLIENT, "client_secret": "SECRET"}
USER = google.oauth2.credentials.Credentials
SERVICE = google.oauth2.service_account.Credentials


def signed_in(**options):
    return sign_in(options)


def has_no_secret(text):
    return not any(secret in text for secret in SECRETS)


@contextlib.contextmanager
def refused(kind, *words):
    """Expect an error that contains the words, and no secret, in it or in its printed causes."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)
    error = caught.value
    while error is not None:
        assert has_no_secret(f"{error} {error!r}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class TokenServer:
    """Google's token server, in place of google-auth's HTTP."""

    token_uri = "https://oauth2.example.org/token"

    def __init__(self):
        self.grants, self.refusal = [], None

    def answer(self, url, method="GET", body=None, **_):
        self.grants.append(dict(urllib.parse.parse_qsl(body.decode())))
        token = {"access_token": f"TOKEN-{len(self.grants)}", "expires_in": 3600}
        status, value = self.refusal or (200, token)
        return types.SimpleNamespace(status=status, headers={}, data=json.dumps(value).encode())


@pytest.fixture
def google_server(monkeypatch):
    server = TokenServer()
    monkeypatch.setattr(google.auth.transport.requests.Request, "__call__", server.answer)
    return server


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Remove the credentials, caches and proxies of the machine that runs the tests."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setattr("google.auth.compute_engine._metadata.is_on_gce", lambda request: False)
    # A folder may have the name of one that an earlier test used.
    monkeypatch.setattr(accounts, "_defaults", {})


@pytest.fixture
def key(pem, google_server):
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": pem,
        "client_email": "robot@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": google_server.token_uri,
    }


def ago(seconds):
    return datetime.now(UTC).replace(tzinfo=None, microsecond=0) - timedelta(seconds=seconds)


def saved_json(server, *, expired_s=60.0):
    """Return what PyDrive2 saves after a sign-in in the browser."""
    return OAuth2Credentials(
        "TOKEN-old", CLIENT, "SECRET", "REFRESH", ago(expired_s), server.token_uri, None, scopes=[SCOPE]
    ).to_json()


async def sent_by(found):
    return await DriveAuth(found, PATIENT).headers()


def saved_file(home, text, profile="default"):
    path = home / "cache" / "pydrive2fs" / CLIENT / f"{profile}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def gauth(credentials, **settings):
    made = GoogleAuth(settings={**GoogleAuth.DEFAULT_SETTINGS, **settings})
    made.credentials = credentials
    return made


class Forms:
    """All forms of each kind of credentials."""

    def __init__(self, server, key, home):
        self.server, self.key, self.home = server, key, home
        self.saved_user = {"type": "authorized_user", "token_uri": server.token_uri, **A_USER}
        self.live = USER("TOKEN-old", token_uri=server.token_uri, expiry=ago(60), **A_USER)

    def file(self, content, name="file.json"):
        text = content if isinstance(content, str) else json.dumps(content)
        (self.home / name).write_text(text)
        return str(self.home / name)

    def service_account(self):
        key, path = self.key, self.file(self.key)
        yield from ({"token": key}, {"token": json.dumps(key, indent=1) + "\n"}, {"token": path})
        yield from ({"token": pathlib.Path(path)}, {"token": "~/file.json"})
        yield from ({"client_json": key}, {"client_json": json.dumps(key), "use_service_account": True})
        yield {"client_json_file_path": "~/file.json", "use_service_account": True}
        yield {"credentials": SERVICE.from_service_account_info(key)}
        live = ServiceAccountCredentials.from_json_keyfile_dict(key, [SCOPE])
        yield from ({"credentials": live}, {"google_auth": gauth(live)})
        accounts.save("robot", key)
        yield from ({"account": "robot"}, {})

    def delegation(self):
        user = {"client_user_email": "ann@example.org"}
        yield from ({"token": self.file(self.key), **user}, {"client_json": self.key, **user})
        live = SERVICE.from_service_account_info(self.key)
        yield {"credentials": live.with_subject("ann@example.org")}
        old = ServiceAccountCredentials.from_json_keyfile_dict(self.key, [])
        yield {"credentials": old.create_delegated("ann@example.org")}
        accounts.save("robot", self.key)
        yield from ({"account": "robot", **user}, user)

    def user(self):
        yield from ({"token": self.saved_user}, {"token": self.file(self.saved_user)})
        # The `token.json` of Google's examples, which does not state its type.
        saved = self.live.to_json()
        assert "type" not in json.loads(saved)
        yield from ({"token": self.file(saved, "token.json")}, {"client_json": saved})
        yield {"client_json_file_path": str(self.home / "token.json")}

    def user_object(self):
        yield from ({"credentials": self.live}, {"google_auth": gauth(self.live)})
        old = OAuth2Credentials.from_json(saved_json(self.server))
        yield from ({"credentials": old}, {"google_auth": GoogleDrive(gauth(old))})
        path = self.file(saved_json(self.server), "saved.json")
        backend = {"save_credentials_backend": "file", "save_credentials_file": path}
        yield {"google_auth": gauth(None, save_credentials=True, **backend)}
        lines = (f"{name}: {value}\n" for name, value in {"save_credentials": True, **backend}.items())
        yield {"google_auth": pathlib.Path(self.file("".join(lines), "settings.yaml"))}

    def saved_by_pydrive2(self):
        text = saved_json(self.server)
        saved_file(self.home, text, "work")
        saved_file(self.home, text)
        yield from ({"client_id": CLIENT}, {"client_id": CLIENT, "profile": "work"}, {"client_json": text})
        yield from ({"client_json_file_path": self.file(text), "client_id": CLIENT}, {"token": text})

    def account(self):
        accounts.save("me", {**self.saved_user, "account": "me@example.org"})
        yield from ({}, {"account": "me"}, {"account": "me", "token": None, "client_id": ""})

    def default(self):
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = self.file(self.key)
        yield from ({}, {"token": "google_default"})

    def access_token(self):
        yield from ({"token": "TOKEN-x/y"}, {"token": " TOKEN-x/y\n"})

    def anonymous(self):
        yield from ({"token": "anon"}, {"credentials": google.auth.credentials.AnonymousCredentials()})


ROBOT = "robot@p.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    ("form", "kind", "name", "owner"),
    [
        ("service_account", SERVICE, f"service account {ROBOT}", ROBOT),
        ("delegation", SERVICE, f"service account {ROBOT}", f"{ROBOT} for ann@example.org"),
        ("user", USER, f"authorized user of client {CLIENT}", "the secret REFRESH"),
        ("user_object", USER, f"OAuth credentials of client {CLIENT}", "the secret REFRESH"),
        ("saved_by_pydrive2", USER, f"saved OAuth credentials of client {CLIENT}", "the secret REFRESH"),
        ("account", USER, "account me", "me@example.org"),
        ("default", SERVICE, f"application default credentials (service account {ROBOT})", ROBOT),
        ("access_token", USER, "access token", "the secret TOKEN-x/y"),
        ("anonymous", type(None), "anonymous", "anon"),
    ],
)
def test_each_form_names_credentials_and_an_account(
    google_server, key, tmp_path, form, kind, name, owner,
    monkeypatch,
):  # fmt: skip
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    for options in getattr(Forms(google_server, key, tmp_path), form)():
        found = signed_in(**options)
        assert type(found.credentials) is kind
        assert found.name.startswith(name)
        assert has_no_secret(found.name + found.remedy)
        seen = account_key.account_key(options, GOOGLE, may_ask=False)
        secret = f"{GOOGLE} {owner.removeprefix('the secret ')}"
        digest = account_key._digest(secret if owner.startswith("the secret ") else owner)
        assert seen == (owner if owner == "anon" else f"auth-{digest}"), options
    assert google_server.grants == []  # no token before it is needed


async def test_the_key_requests_the_drive_scope_and_the_delegated_user(key, google_server):
    found = signed_in(use_service_account=True, client_json=key, client_user_email="ann@example.org")
    assert found.name.endswith("for ann@example.org")
    await sent_by(found)
    claims = google_server.grants[0]["assertion"].split(".")[1]
    said = json.loads(base64.urlsafe_b64decode(claims + "=="))
    assert (said["scope"], said["sub"]) == ("https://www.googleapis.com/auth/drive", "ann@example.org")


async def test_credentials_saved_by_pydrive2_are_found_renewed_and_saved_again(google_server, tmp_path):
    path = saved_file(tmp_path, saved_json(google_server))
    found = signed_in(client_id=CLIENT, client_secret="SECRET")
    assert CLIENT in found.name
    assert has_no_secret(found.name)
    assert await sent_by(found) == {"authorization": "Bearer TOKEN-1"}
    assert google_server.grants[0]["refresh_token"] == "REFRESH"
    saved = json.loads(path.read_text())
    assert (saved["access_token"], saved["refresh_token"]) == ("TOKEN-1", "REFRESH")
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == ["default.json"]
    # The next process asks for nothing.
    assert await sent_by(signed_in(client_id=CLIENT)) == {"authorization": "Bearer TOKEN-1"}
    assert len(google_server.grants) == 1


def test_the_folder_of_saved_credentials_is_that_of_pydrive2(google_server, tmp_path, monkeypatch):
    spec = pytest.importorskip("pydrive2.fs.spec")
    saved_file(tmp_path, saved_json(google_server, expired_s=-3000), "work")
    monkeypatch.setenv("GDRIVE_NON_INTERACTIVE", "1")  # no browser: it finds them, or fails
    theirs = spec._client_auth(client_id=CLIENT, client_secret="SECRET", profile="work")
    assert theirs.credentials.access_token == "TOKEN-old"
    ours = signed_in(client_id=CLIENT, client_secret="SECRET", profile="work")
    assert "work.json" in ours.name


async def test_a_token_renewed_by_another_process_is_used(google_server, tmp_path):
    path = saved_file(tmp_path, saved_json(google_server))
    found = signed_in(client_id=CLIENT)
    newer = json.loads(saved_json(google_server, expired_s=-3000))
    path.write_text(json.dumps({**newer, "access_token": "TOKEN-theirs"}))
    assert await sent_by(found) == {"authorization": "Bearer TOKEN-theirs"}
    assert google_server.grants == []


async def test_a_credentials_folder_may_be_read_only(google_server, tmp_path, monkeypatch, caplog):
    saved_file(tmp_path, saved_json(google_server))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(auth, "write_private", full)
    assert await sent_by(signed_in(client_id=CLIENT)) == {"authorization": "Bearer TOKEN-1"}
    assert "cannot be saved" in caplog.text
    assert has_no_secret(caplog.text)


def test_without_saved_credentials_the_error_says_how_to_sign_in(tmp_path):
    words = ("GDriveFileSystem('root'", CLIENT, "browser", str(tmp_path))
    with refused(AccessDenied, *words):
        signed_in(client_id=CLIENT, client_secret="SECRET")
    with refused(AccessDenied, "GDriveFileSystem", "other.json"):
        signed_in(client_json_file_path=str(tmp_path / "other.json"))


async def test_a_revoked_sign_in_is_access_denied_and_says_what_to_do(google_server, tmp_path):
    path = saved_file(tmp_path, saved_json(google_server))
    google_server.refusal = 400, {"error": "invalid_grant", "error_description": "Token has been revoked."}
    found = signed_in(client_id=CLIENT)
    with refused(AccessDenied, "invalid_grant", f"remove {path}", "GDriveFileSystem"):
        await sent_by(found)
    # After a new sign-in at the service, the refusal is forgotten.
    google_server.refusal = None
    assert await sent_by(signed_in(client_id=CLIENT)) == {"authorization": "Bearer TOKEN-2"}


class ColabMachine(TokenServer):
    """The metadata server of a Colab machine after `authenticate_user`: the tokens of its account last an hour."""

    def answer(self, url, method="GET", body=None, **_):
        said = {"email": "me@example.com", "scopes": [SCOPE]}
        if "/token" in url:
            self.grants.append(url)
            said = {"access_token": f"TOKEN-{len(self.grants)}", "expires_in": 3599}
        headers = {"content-type": "application/json"}
        return types.SimpleNamespace(status=200, headers=headers, data=json.dumps(said).encode())


async def test_a_colab_sign_in_lasts_longer_than_its_token(monkeypatch):
    machine = ColabMachine()
    monkeypatch.setattr(google.auth.transport.requests.Request, "__call__", machine.answer)
    for name, value in (("is_on_gce", True), ("get_project_id", "p")):
        monkeypatch.setattr(
            f"google.auth.compute_engine._metadata.{name}", lambda request, value=value: value
        )
    found = signed_in()
    assert found.name.startswith("application default credentials")
    made = DriveAuth(found, PATIENT)
    assert await made.headers() == {"authorization": "Bearer TOKEN-1"}
    found.credentials.expiry = ago(1)  # an hour later
    sent = await asyncio.gather(*(made.headers() for _ in range(10)))
    assert sent == [{"authorization": "Bearer TOKEN-2"}] * 10
    assert len(machine.grants) == 2


async def test_an_expired_token_that_cannot_be_renewed_is_access_denied():
    credentials = USER("TOKEN-old", expiry=ago(60))
    with refused(AccessDenied, "expired"):
        await sent_by(signed_in(credentials=credentials))


DAMAGED = "-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----"
SECRETLESS = {"type": "authorized_user", "client_secret": "SECRET"}
OAUTH_CLIENT = {"installed": {"client_id": CLIENT, "client_secret": "SECRET"}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": "anon", "client_json": "{}"}, ["token, client_json", "keep one"]),
        ({"google_auth": object(), "credentials": object()}, ["credentials, google_auth"]),
        ({"use_service_account": True}, ["use_service_account", "client_json="]),
        ({"client_secret": "SECRET"}, ["client_id="]),
        ({"google_auth": "/none.yaml"}, ["none.yaml", "no such"]),
        ({"google_auth": object()}, ["GoogleAuth", "object"]),
        ({"credentials": object()}, ["google-auth", "object"]),
        ({"client_json": "SECRET"}, ["client_json", "JSON"]),
        ({"client_json": OAUTH_CLIENT}, ["client_id="]),
        ({"use_service_account": True, "client_json_file_path": "/no.json"}, ["no.json", "no such file"]),
        ({"token": "TOKEN-1", "client_user_email": "a@example.org"}, ["client_user_email", "service"]),
        ({"client_json": A_USER, "client_user_email": "a@example.org"}, ["the key of a service account"]),
        ({"token": {"type": "service_account", "private_key": DAMAGED}}, ["damaged"]),
        ({"token": SECRETLESS}, ["refresh_token"]),
        ({"token": {"private_key": "SECRET"}}, ["type None"]),
        ({"token": 3}, ["token=", "int"]),
        ({"token": "SECRET\nSECRET"}, ["no access token"]),
        ({"token": "/no/such/key.json"}, ["/no/such/key.json", "no such file", "'anon'"]),
        ({"token": "./key"}, ["./key", "no such file"]),
        ({"token": "/"}, ["cannot be read"]),
    ],
)
def test_impossible_options_are_named(options, words):
    with refused(ValueError, *words):
        signed_in(**options)


def test_options_of_pydrive2_are_options_here():
    spec = pytest.importorskip("pydrive2.fs.spec")
    code = spec.GDriveFileSystem.__init__.__code__
    theirs = set(code.co_varnames[1 : code.co_argcount]) - {"path", "trash_only", "acknowledge_abuse"}
    assert theirs | {"account", "token", "credentials", "api_key"} == set(SIGN_IN)


async def test_a_refused_token_is_renewed_once_for_all_callers(google_server):
    made = DriveAuth(signed_in(client_json=saved_json(google_server, expired_s=-3000)), PATIENT)
    stale = await made.headers()
    assert all(await asyncio.gather(*(made.renew(stale) for _ in range(10))))
    assert await made.headers() == {"authorization": "Bearer TOKEN-1"}
    assert await made.renew(stale)  # late: the token was replaced already
    assert len(google_server.grants) == 1


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"token": "anon"}, {}),
        ({"token": "TOKEN-x/y"}, {"authorization": "Bearer TOKEN-x/y"}),
        (
            {"credentials": AccessTokenCredentials("TOKEN-x", "agent")},
            {"authorization": "Bearer TOKEN-x"},
        ),
    ],
)
async def test_what_is_sent_and_cannot_be_renewed(options, headers):
    made = DriveAuth(signed_in(**options), PATIENT)
    assert await made.headers() == headers
    assert not await made.renew(headers)
