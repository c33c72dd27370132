"""Saved sign-ins: their files, the default one, and what `drive://` does with them."""

import json
import os
import stat

import pytest

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import accounts
from cachedfs.origins.drive.auth import DriveAuth, sign_in
from cachedfs.origins.registry import identity_of
from cachedfs.origins.retry import RetryPolicy


def user(**more):
    info = {
        "type": "authorized_user",
        "client_id": "c",
        "client_secret": "SECRET",
        "refresh_token": "REFRESH",
    }
    return {**info, "token_uri": "http://127.0.0.1:9/token", "account": "me@example.com", **more}


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def key(**options):
    return identity_of("drive", options, may_ask=False)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "config" / "cachedfs" / "drive"


def test_only_the_owner_may_read_a_saved_account(folder):
    path = accounts.save("me@example.com", user())
    assert path == folder / "me@example.com.json"
    assert (mode(path), mode(folder)) == (0o600, 0o700)
    path.chmod(0o644)
    accounts.save("me@example.com", user(refresh_token="REFRESH-2"))  # replaces the file
    assert (mode(path), accounts.load("me@example.com")["refresh_token"]) == (0o600, "REFRESH-2")
    assert sorted(os.listdir(folder)) == ["default", "me@example.com.json"]


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a\nb", "x" * 101])
def test_a_name_must_be_plain(name):
    for use in (accounts.path_of, accounts.load, accounts.set_default, accounts.remove):
        with pytest.raises(ValueError, match="account '"):
            use(name)
    with pytest.raises(ValueError, match="account '"):
        accounts.save(name, user())


def test_the_first_account_is_the_default_until_another_is_chosen():
    assert (accounts.names(), accounts.default_name()) == ([], None)
    for name in ("b", "a"):
        accounts.save(name, user())
    assert (accounts.names(), accounts.default_name()) == (["a", "b"], "b")
    accounts.set_default("a")
    assert accounts.default_name() == "a"
    accounts.save("c", user())
    accounts.remove("a")
    with pytest.raises(AccessDenied, match=r"b, c are saved.*accounts --default NAME"):
        accounts.default_name()
    accounts.remove("b")
    assert accounts.default_name() == "c"


def test_a_process_keeps_its_default_account(folder):
    for name in ("a", "b"):
        accounts.save(name, user(account=f"{name}@example.com"))
    before = key()
    (folder / "default").write_text("b")  # another process chooses
    assert (accounts.default_name(), key()) == ("a", before)


@pytest.mark.parametrize("content", ["{", '{"type": []}', json.dumps(user(refresh_token=""))])
def test_a_damaged_file_is_named_and_not_quoted(content):
    accounts.save("a", user()).write_text(content)
    with pytest.raises(AccessDenied, match=r"a\.json is damaged: .*login drive --account a") as caught:
        accounts.load("a")
    assert "SECRET" not in f"{caught.value!r} {caught.value.__cause__}"


async def headers_of(signed_in):
    return await DriveAuth(signed_in, RetryPolicy()).headers()


async def test_a_sign_in_of_somebody_else_is_neither_used_nor_overwritten(server):
    client = server.client_json()["installed"]
    accounts.save("a", user(account="one@example.com", refresh_token="RT-1", **client))
    running = sign_in({})
    other = user(account="two@example.com", refresh_token="RT-2", token="TOKEN-2", **client)
    accounts.save("a", {**other, "expiry": "2099-01-01T00:00:00Z"})
    assert (await headers_of(running))["authorization"] != "Bearer TOKEN-2"
    assert accounts.load("a")["refresh_token"] == "RT-2"
    assert accounts.load("a")["token"] == "TOKEN-2"
    # The same account signed in again: its new refresh token is used, as the old one may be revoked.
    running.credentials.token = None
    accounts.save("a", user(account="one@example.com", refresh_token="RT-3", **client))
    await headers_of(running)
    assert running.credentials.refresh_token == "RT-3"


def test_two_accounts_never_share_a_cache():
    for name, address in (("a", "a@example.com"), ("b", "b@example.com"), ("a2", "a@example.com")):
        accounts.save(name, user(account=address))
    assert key() == key(account="a") == key(account="a2")
    keys = [key(), key(account="b"), key(token="anon"), key(account="missing"), key(token="google_default")]
    assert len(set(keys)) == len(keys)
    accounts.remove("a")
    assert key() == key(account="missing")  # none is chosen: nothing is read before one is


def test_a_user_without_a_home_has_no_account_and_can_save_none(no_home):
    assert (accounts.names(), accounts.default_name()) == ([], None)
    for use in (accounts.path_of, accounts.load, accounts.remove, lambda name: accounts.save(name, user())):
        with pytest.raises(AccessDenied, match="set HOME or XDG_CONFIG_HOME"):
            use("a")
    with pytest.raises(AccessDenied, match="no home folder"):
        sign_in({"client_id": "c"})
    assert os.listdir(no_home) == []
