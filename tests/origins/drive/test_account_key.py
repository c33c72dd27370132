"""The account in cache keys: one account shares its cache, two never do."""

import asyncio
import json
import threading
from pathlib import Path

import fsspec
import google.oauth2.credentials
import pytest
from pydrive2.auth import GoogleAuth

from cachedfs.errors import AccessDenied, OriginUnavailable
from cachedfs.origins.drive import account_key
from cachedfs.origins.registry import identity_of


@pytest.fixture(autouse=True)
def nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(account_key, "_keys", {})


def of(server=None, *, may_ask=True, **options):
    endpoint = {} if server is None else {"endpoint_url": server.endpoint_url}
    return identity_of("drive", {**endpoint, **options}, may_ask=may_ask).rpartition("|")[2]


def test_other_credentials_are_asked_for_their_account_once(server):
    for token, user in (("TOKEN-1", "alice"), ("TOKEN-2", "alice"), ("TOKEN-3", "bob")):
        server.account(token, user)
    server.reset()
    first = of(server, token="TOKEN-1")
    assert first == of(server, token="TOKEN-1") == of(server, token="TOKEN-2")
    assert first == of(server, credentials=google.oauth2.credentials.Credentials("TOKEN-1"))
    assert of(server, token="TOKEN-3") not in (first, of(server, token="anon"))
    assert server.count("about") == 3
    account_key._keys.clear()  # as in another process
    assert of(server, token="TOKEN-1", may_ask=False) == first
    assert server.count("about") == 3
    assert "TOKEN" not in Path(account_key._key_file()).read_text() + first


def test_default_credentials_of_an_unknown_kind_have_a_key_of_their_own(tmp_path):
    path = tmp_path / "gcloud" / "application_default_credentials.json"
    path.parent.mkdir()
    keys = [of(may_ask=False)]
    for audience in ("a", "b"):
        path.write_text(json.dumps({"type": "external_account", "audience": audience}))
        keys.append(of(may_ask=False))
    assert keys[0] == "auth"
    assert len(set(keys)) == 3


@pytest.mark.parametrize("options", [{"account": "me"}, {"client_id": "c"}, {"google_auth": "/none.yaml"}])
def test_credentials_that_are_not_there_have_no_account(options):
    assert of(**options) == "none"


def test_without_an_answer_each_credential_has_its_own_cache(server):
    server.require_token("another")
    refused = of(server, token="TOKEN-1")
    assert refused != of(server, token="TOKEN-2")
    server.require_no_token()
    account_key._keys.clear()
    assert of(server, token="TOKEN-1") != refused


class Hidden(google.oauth2.credentials.Credentials):
    """Credentials that have no token before they are refreshed, and nothing else that tells the account."""

    def refresh(self, request):
        self.token = "TOKEN-1"


def test_credentials_that_show_nothing_are_asked_for_their_account(server, own_cache, folder, root):
    server.account("TOKEN-1", "alice")
    server.put(f"{folder}/a", b"of alice")
    drive = {"credentials": Hidden(None), "endpoint_url": server.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", drive=drive)
    assert fs.cat_file(f"{root}/a") == b"of alice"
    assert fs._objects.identity.endswith("|user-alice")
    first, second = (of(credentials=Hidden(None), may_ask=False) for _ in range(2))
    assert first != second


def test_offline_does_not_ask_for_the_account(server, own_cache, root):
    drive = {"token": "TOKEN-1", "endpoint_url": server.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", offline=True, drive=drive)
    with pytest.raises(OriginUnavailable):
        fs.cat_file(f"{root}/a")
    assert server.count() == 0


def test_a_late_sign_in_has_the_cache_of_its_account_at_once(server, own_cache, folder, root):
    server.account("TOKEN-1", "alice")
    server.put(f"{folder}/a", b"of alice")
    gauth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
    drive = {"google_auth": gauth, "endpoint_url": server.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", drive=drive)
    with pytest.raises(AccessDenied, match="it has no credentials"):
        fs.cat_file(f"{root}/a")
    gauth.credentials = google.oauth2.credentials.Credentials("TOKEN-1")
    assert fs.cat_file(f"{root}/a") == b"of alice"
    assert fs._objects.origin(root).identity.endswith("|user-alice")


async def test_the_account_is_asked_for_once_and_not_in_the_event_loop(
    server, own_cache, folder, root, monkeypatch
):
    server.account("TOKEN-1", "alice")
    server.put(f"{folder}/a", b"of alice")
    asked, runs = account_key._user_of, threading.Event()
    users = []

    def ask(*sign_in):
        users.append(asked(*sign_in) if runs.wait(60) else None)
        return users[-1]

    monkeypatch.setattr(account_key, "_user_of", ask)
    drive = {"token": "TOKEN-1", "endpoint_url": server.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", asynchronous=True, drive=drive)
    reads = [asyncio.ensure_future(fs._cat_file(f"{root}/a")) for _ in range(3)]
    reads.append(asyncio.ensure_future(fs._find(root)))
    asyncio.get_running_loop().call_soon(runs.set)  # after the first step of each
    assert await asyncio.gather(*reads) == [b"of alice"] * 3 + [[f"{root}/a"]]
    assert len(users) == 1
    assert fs._objects.identity.endswith("|user-alice")


def test_a_sign_in_that_changes_under_a_program_is_refused(server, own_cache, folder, root, tmp_path):
    path, server_key = (
        tmp_path / "token.json",
        {"type": "authorized_user", "client_id": "c", "client_secret": "s"},
    )
    path.write_text(json.dumps({**server_key, "refresh_token": "R-1", "account": "one"}))
    drive = {"token": str(path), "endpoint_url": server.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", drive=drive)
    assert fs._objects.identity
    path.write_text(json.dumps({**server_key, "refresh_token": "R-2", "account": "two"}))
    with pytest.raises(AccessDenied, match="another account signed in"):
        fs.cat_file(f"{root}/a")


def test_the_cache_of_one_account_is_not_served_to_another(server, own_cache, folder, root):
    def fs(token):
        drive = {"token": token, "endpoint_url": server.endpoint_url}
        return fsspec.filesystem("cachedfs", target_protocol="drive", max_age="immutable", drive=drive)

    server.put(f"{folder}/private", b"of alice")
    server.account("TOKEN-1", "alice")
    server.account("TOKEN-2", "bob")
    assert fs("TOKEN-1").cat_file(f"{root}/private") == b"of alice"
    id = server.find(f"{folder}/private")[0]["id"]
    server.remove(id)  # as if bob saw another Drive
    assert fs("TOKEN-1").cat_file(f"{root}/private") == b"of alice"
    with pytest.raises(FileNotFoundError):
        fs("TOKEN-2").cat_file(f"{root}/private")


def test_the_account_is_remembered_also_without_a_home(server, no_home):
    server.account("TOKEN-1", "alice")
    first = of(server, token="TOKEN-1")
    account_key._keys.clear()  # as in another process
    assert of(server, token="TOKEN-1", may_ask=False) == first
    (private,) = no_home.iterdir()
    assert [each.name for each in private.iterdir()] == ["drive-accounts.json"]
