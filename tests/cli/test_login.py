"""The commands `login`, `logout` and `accounts`, with a browser and the simulated Google."""

import contextlib
import json
import os
import re
import stat
import sys
import webbrowser
from pathlib import Path
from unittest import mock

import fsspec
import pytest

from cachedfs.cli import arguments, login
from cachedfs.errors import AccessDenied
from cachedfs.origins import drive
from cachedfs.origins.drive import accounts, browser_login
from cachedfs.sim import DriveServer, Fault
from tests.cli.helpers import in_terminal, run
from tests.origins.drive.certificates import private_key
from tests.sim.browser import allow, fetch, opening
from tests.support import until

SECRETS = re.compile(r"GOCSPX-sim|1//sim|ya29\.|PRIVATE KEY|4/0sim")
ME = "me@example.com"


@pytest.fixture
def server(monkeypatch):
    """A simulated Drive that answers only who has signed in to it; `drive` is configured to use it."""
    with DriveServer("off") as server:
        server.put("data/a.txt", b"a")
        server.require_token()
        monkeypatch.setitem(fsspec.config.conf, "drive", {"endpoint_url": server.endpoint_url})
        yield server


@pytest.fixture
def client(server, tmp_path):
    """The JSON file of an OAuth client, as downloaded."""
    path = tmp_path / "client secret.json"
    path.write_text(json.dumps(server.client_json()))
    return str(path)


def done(*arguments, status=0):
    """Run a command whose output has no secret; return the output."""
    result = run(*arguments, status=status)
    assert not SECRETS.search(result.output)
    return result.stdout + result.stderr


@contextlib.contextmanager
def answering(*answers):
    """Answer the questions of a sign-in at a terminal; yield what was shown. A callable gets the address to open."""
    left, shown = list(answers), []

    def say(line, err=False):
        shown.append(line)

    def reply(question, **options):
        answer = left.pop(0)
        return (
            answer(re.findall(r"http://\S+/auth\?\S+", "\n".join(shown))[-1]) if callable(answer) else answer
        )

    with (
        mock.patch.object(login, "is_terminal", return_value=True),
        mock.patch.object(login, "say", side_effect=say),
        mock.patch.object(arguments, "say", side_effect=say),
        mock.patch.object(login.typer, "prompt", side_effect=reply),
    ):
        yield shown
    assert left == []


def signed_in(client, *arguments):
    with opening():
        return done("login", "drive", "--client", client, *arguments)


def names_in_my_drive(**options):
    return fsspec.filesystem("drive", skip_instance_cache=True, **options).ls("My Drive", detail=False)


# Signing in


def test_the_wizard_leads_from_nothing_to_a_working_drive(server, client):
    with opening() as opened:
        screen = in_terminal("login", "drive", typed=f"'{client}'\n")
    for page in ("projectcreate", "apis/library/drive", "auth/overview", "auth/audience", "auth/clients"):
        assert f"https://console.cloud.google.com/{page}" in screen
    assert re.findall(r"^(\d)\. ", screen, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "".join(screen.split()).count(opened[0]) == 1  # to be opened by hand
    assert f"Signed in as Sim User <{ME}>, for reading and writing; 0 bytes used of 16.1 GB." in screen
    assert not SECRETS.search(screen)
    assert stat.S_IMODE(os.stat(accounts.path_of(ME)).st_mode) == 0o600
    server.expire_tokens()
    assert 'cachedfs ls "drive://My Drive"' in screen
    assert run("ls", "drive://My Drive").stdout == "drive://My Drive/data/\n"


def test_without_a_browser_the_address_is_pasted(server, client):
    answers = (client, "https://example.com/", lambda url: f"  {allow(url)} ")
    with answering(*answers) as shown:
        run("login", "drive", "--no-browser")
    assert any("this is not the address" in line for line in shown)
    assert names_in_my_drive() == ["My Drive/data"]
    with mock.patch.object(webbrowser, "get", side_effect=webbrowser.Error), answering(allow):
        run("login", "drive", "--client", client)


def test_a_browser_in_the_terminal_is_none(monkeypatch):
    with mock.patch.object(webbrowser, "get", return_value=webbrowser.GenericBrowser("lynx")):
        monkeypatch.delenv("BROWSER", raising=False)
        assert not login.has_browser()
        monkeypatch.setenv("BROWSER", "lynx")
        assert login.has_browser()


def test_json_is_one_document(client):
    with opening():
        found = json.loads(run("login", "drive", "--client", client, "--json").stdout)
    assert (found["name"], found["kind"], found["scope"], found["default"]) == (ME, "user", "drive", True)
    assert (found["display_name"], found["used"], found["limit"]) == ("Sim User", 0, 15 << 30)
    assert found["file"] == str(accounts.path_of(ME))


def test_a_second_sign_in_needs_no_client_and_replaces_the_first(client):
    signed_in(client)
    first = accounts.load(ME)["refresh_token"]
    os.remove(client)
    with opening() as opened:
        text = done("login", "drive", "--read-only", "--account", ME)
    assert f"With the OAuth client of account {ME}" in text
    assert f"login_hint={ME.replace('@', '%40')}" in opened[0]
    assert accounts.load(ME)["refresh_token"] != first
    assert accounts.names() == [ME]


def test_a_read_only_sign_in_cannot_write(client):
    assert "for reading only" in signed_in(client, "--read-only")
    fs = fsspec.filesystem("drive", skip_instance_cache=True)
    assert fs.cat_file("My Drive/data/a.txt") == b"a"
    with pytest.raises(AccessDenied, match="insufficient authentication scopes"):
        fs.pipe_file("My Drive/data/b.txt", b"b")


def test_a_service_account_is_saved_under_its_name(server, tmp_path):
    key = {"type": "service_account", "client_email": "robot@p.example", "private_key": private_key()[1]}
    path = tmp_path / "key.json"
    path.write_text(json.dumps({**key, "token_uri": f"{server.endpoint_url}/token"}))
    text = done("login", "drive", "--service-account", str(path), "--account", "robot")
    assert "Share files and folders with robot@p.example" in text
    assert names_in_my_drive() == ["My Drive/data"]
    assert "the key works until you delete it" in done("logout")
    assert accounts.names() == []


# What can go wrong


def refusal(*arguments):
    """Return the error of a sign-in that saves nothing."""
    text = done("login", "drive", *arguments, status=1)
    assert accounts.names() == []
    return text


def test_a_browser_in_the_foreground_is_answered_too(client):
    pages = []

    def opened(url):  # returns when its window is closed, as with BROWSER=firefox
        pages.append(fetch(allow(url))[2])

    with mock.patch.object(webbrowser, "get", return_value=mock.Mock(open=opened)):
        done("login", "drive", "--client", client)
    until(lambda: pages)
    assert "You may close this page" in pages[0]


@pytest.mark.parametrize(
    ("button", "words"),
    [
        ("deny", "access was not allowed: sign in again and choose Allow"),
        (None, "publish the app at https://console.cloud.google.com/auth/audience"),  # the window is closed
    ],
)
def test_access_that_is_not_allowed_is_an_error(client, monkeypatch, button, words):
    if button is None:
        monkeypatch.setattr(browser_login, "WAIT_S", 0.01)
    with opening(button):
        assert words in refusal("--client", client)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([lambda url: allow(url.replace("state=", "state=x"))], "another sign-in"),
        (["a", "b", "c"], "contains code="),
    ],
)
def test_a_wrong_address_is_refused(client, answers, words):
    with answering(*answers):
        assert words in refusal("--client", client, "--no-browser")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(kind="token", status=401, body='{"error": "invalid_client", "error_description": "Unauthorized"}'), "Unauthorized"),
        (Fault(kind="token", status=400, body='{"error": "redirect_uri_mismatch"}'), "refused the sign-in (redirect_uri"),
        (Fault(kind="token", status=200, body='{"access_token": "ya29.x", "expires_in": 9}'), "no refresh token: remove"),
        (Fault(kind="token", status=200, body='{"access_token": "ya29.x", "scope": "openid"}'), "leave all boxes checked"),
        (Fault(kind="token", close_before=True), "Google cannot be reached"),
        (Fault(kind="about", status=403, reason="accessNotConfigured"), "Drive API is off in the project of the credentials: enable it at https://"),
        (Fault(kind="about", status=403, reason="forbidden"), "Google Drive: access denied to"),
        (Fault(kind="about", status=503, html=True), "sign in again later"),
        (Fault(kind="about", close_before=True), "Google cannot be reached"),
    ],
)  # fmt: skip
def test_what_google_refuses_says_what_to_do(server, client, fault, words):
    server.fail(fault)
    with opening():
        assert words in refusal("--client", client)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"web": {"client_id": "c"}}', "of the type Web application: make one of the type Desktop app"),
        ('{"type": "service_account"}', "pass it as --service-account"),
        ('{"installed": {"client_id": "c"}}', "not the JSON of an OAuth client"),
        ("{", "not a JSON file of Google's console"),
        (None, "No such file or directory"),
    ],
)
def test_another_file_than_that_of_a_client_is_an_error(tmp_path, content, words):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    text = refusal("--client", str(path))
    assert words in text
    assert str(path) in text


def test_without_a_terminal_nothing_is_asked(client):
    assert "not the key of a service account" in refusal("--service-account", client)
    assert "run `cachedfs login drive` in a terminal" in refusal()
    assert "run it in a terminal" in refusal("--no-browser", "--client", client)
    with mock.patch.object(webbrowser, "get", side_effect=webbrowser.Error):
        assert "there is no browser here" in refusal("--client", client)


def test_a_missing_extra_is_named(client):
    with mock.patch.dict(sys.modules, {"google_auth_oauthlib.flow": None}):
        sys.modules.pop("cachedfs.origins.drive.browser_login", None)
        with mock.patch.object(drive, "browser_login", create=True):
            del drive.browser_login
            assert 'pip install "cachedfs[drive]"' in refusal("--client", client)


@pytest.mark.parametrize("line", ["login", "login gcs", "login drive --service-account k --no-browser"])
def test_wrong_usage(line):
    run(*line.split(), status=2)


def test_a_bad_account_name_is_refused_before_the_browser_opens(client):
    with opening() as opened:
        assert "account '../a'" in refusal("--client", client, "--account", "../a")
    assert opened == []


@pytest.mark.parametrize(
    "typed", ["{}", " '{}' ", '"{}"', "file://{}", "{escaped}"], ids=["plain", "'", '"', "file", "backslash"]
)
def test_a_path_may_be_typed_or_dragged_into_the_terminal(tmp_path, monkeypatch, typed):
    path = tmp_path / "client secret (1).json"
    path.touch()
    escaped = re.sub(r"([ ()])", r"\\\1", str(path))
    assert login.typed_path(typed.format(path, escaped=escaped)) == str(path)
    monkeypatch.setenv("HOME", "/home/me")
    assert login.typed_path("~/it's.json") == "/home/me/it's.json"


def test_the_newest_download_is_offered(tmp_path, monkeypatch, client):
    (tmp_path / "Downloads").mkdir()
    for name, at in (("client_secret_1.json", 1), ("client_secret_2.json", 2), ("other.json", 3)):
        path = tmp_path / "Downloads" / name
        path.write_bytes(Path(client).read_bytes())
        os.utime(path, (at, at))
    monkeypatch.setenv("HOME", str(tmp_path))
    with opening():
        screen = in_terminal("login", "drive", typed="\n")
    assert f"[{tmp_path}/Downloads/client_secret_2.json" in screen.replace("\n", "")


# Several accounts, and their end


def test_accounts_are_listed_and_one_is_chosen(client):
    assert "`cachedfs login drive` signs in" in done("accounts")
    signed_in(client, "--account", "home")
    text = signed_in(client, "--account", "work", "--read-only")
    assert 'cachedfs ls -o account=work "drive://My Drive"' in text
    assert "`cachedfs accounts --default work`" in text
    assert run("ls", "-o", "account=work", "drive://My Drive").stdout == "drive://My Drive/data/\n"
    rows = [line.split() for line in done("accounts").splitlines()]
    assert rows[2:] == [["home", ME, "user", "drive", "default"], ["work", ME, "user", "drive.readonly"]]
    found = json.loads(run("accounts", "--default", "work", "--json").stdout)
    assert [row["default"] for row in found] == [False, True]
    assert "no account 'x' is saved (saved are home, work)" in done("accounts", "--default", "x", status=1)


def test_without_a_default_account_another_can_sign_in(client):
    for name in ("a", "b", "c"):
        signed_in(client, "--account", name)
    done("logout", "a")
    assert "none is the default" in done("logout", status=1)
    with opening():
        assert "`cachedfs accounts --default d`" in done("login", "drive", "--account", "d")
    assert "default" not in done("accounts")


def test_logout_revokes_and_removes(server, client):
    signed_in(client)
    info = accounts.load(ME)
    assert f"Signed out {ME}: Google revoked the token" in done("logout")
    assert (accounts.names(), server.count("revoke")) == ([], 1)
    with pytest.raises(AccessDenied):
        names_in_my_drive(token=info["token"])
    assert "no account is saved" in done("logout", status=1)
    assert "no account 'x' is saved" in done("logout", "x", status=1)
    accounts.save(ME, info)
    assert "Google revoked the token" in done("logout"), "also one that was revoked before"


def test_logout_leaves_another_account_of_the_same_grant_alone(server, client):
    signed_in(client, "--account", "one")
    signed_in(client, "--account", "two")
    assert "account two is the same sign-in" in done("logout", "one")
    assert server.count("revoke") == 0
    assert names_in_my_drive() == ["My Drive/data"]
    assert json.loads(run("logout", "--json").stdout)["revoked"] is True


@pytest.mark.parametrize("fault", [Fault(kind="revoke", status=503), Fault(kind="revoke", close_before=True)])
def test_logout_says_what_google_did_not_do(server, client, fault):
    signed_in(client)
    server.fail(fault)
    assert "remove the app at https://myaccount.google.com/connections" in done("logout")
    assert accounts.names() == []


def test_a_damaged_account_is_listed_and_can_be_removed(client):
    signed_in(client)
    accounts.path_of(ME).write_text("{")
    assert "damaged" in done("accounts")
    assert "the file was damaged" in done("logout", ME)
    assert accounts.names() == []


def test_a_revoked_sign_in_says_what_to_type(server, client):
    signed_in(client)
    server.expire_tokens()
    server.refuse_tokens()
    with pytest.raises(AccessDenied, match=f"account {ME}.*cachedfs login drive --account {ME}"):
        names_in_my_drive()
