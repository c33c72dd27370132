"""OAuth of the simulated Google, as developers.google.com/identity/protocols/oauth2/native-app describes it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from cachedfs.sim import DriveServer
from tests.sim.browser import allow, fetch
from tests.sim.test_drive import ask

FULL = "https://www.googleapis.com/auth/drive"
VERIFIER = "v" * 43
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode().rstrip("=")
BACK = "http://127.0.0.1:9/"


@pytest.fixture(scope="module")
def server() -> Iterator[DriveServer]:
    with DriveServer("off") as server:
        yield server


def page(server: DriveServer, **changed: str) -> str:
    """Return the address of the consent page."""
    client = server.client_json()["installed"]
    asked = {"client_id": client["client_id"], "redirect_uri": BACK, "response_type": "code", "scope": FULL}
    asked |= {
        "state": "s1",
        "access_type": "offline",
        "code_challenge": CHALLENGE,
        "code_challenge_method": "S256",
    }
    return f"{client['auth_uri']}?{urlencode(asked | changed)}"


def answer(server: DriveServer, decision: str = "allow", **changed: str) -> dict[str, str]:
    address = allow(page(server, **changed), decision)
    assert address.startswith(BACK)
    return {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}


def tokens(server: DriveServer, status: int = 200, **form: str) -> dict[str, Any]:
    client = server.client_json()["installed"]
    known = {"client_id": client["client_id"], "client_secret": client["client_secret"]}
    got, _, text = fetch(client["token_uri"], known | form)
    assert got == status, text
    reply: dict[str, Any] = json.loads(text)
    return reply


def exchanged(server: DriveServer, code: str, status: int = 200, /, **changed: str) -> dict[str, Any]:
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": BACK, "code_verifier": VERIFIER}
    return tokens(server, status, **form | changed)


def status_of(server: DriveServer, token: str, method: str = "GET") -> int:
    sent: int = ask(server, "/drive/v3/files", method, b"{}", authorization=f"Bearer {token}")[0]
    return sent


def test_a_code_becomes_tokens_once(server: DriveServer) -> None:
    found = answer(server)
    assert found["state"] == "s1"
    reply = exchanged(server, found["code"])
    assert (reply["token_type"], reply["expires_in"], reply["scope"]) == ("Bearer", 3599, FULL)
    assert status_of(server, reply["access_token"]) == 200
    again = tokens(server, grant_type="refresh_token", refresh_token=reply["refresh_token"])
    assert again["scope"] == FULL
    assert "refresh_token" not in again
    assert exchanged(server, found["code"], 400)["error"] == "invalid_grant"
    assert "refresh_token" not in exchanged(server, answer(server, access_type="online")["code"])


@pytest.mark.parametrize(
    ("changed", "status", "error"),
    [
        ({"code_verifier": "w" * 43}, 400, "invalid_grant"),
        ({"code_verifier": ""}, 400, "invalid_grant"),
        ({"redirect_uri": "http://127.0.0.1:10/"}, 400, "redirect_uri_mismatch"),
        ({"client_secret": "other"}, 401, "invalid_client"),
        ({"client_id": "other"}, 401, "invalid_client"),
        ({"code": "4/other"}, 400, "invalid_grant"),
        ({"grant_type": "password"}, 400, "unsupported_grant_type"),
    ],
)
def test_an_exchange_must_repeat_the_request(
    server: DriveServer, changed: dict[str, str], status: int, error: str
) -> None:
    code = answer(server)["code"]
    assert exchanged(server, code, status, **changed)["error"] == error
