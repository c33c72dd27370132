"""OAuth of the simulated Google, as developers.google.com/identity/protocols/oauth2/native-app describes it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from cachedfs.sim import DriveServer
from tests.sim.browser import allow, ask, fetch

FULL = "https://www.googleapis.com/auth/drive"
VERIFIER = "v" * 43
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode().rstrip("=")
BACK = "http://127.0.0.1:9/"


@pytest.fixture(scope="module")
def server() -> Iterator[DriveServer]:
    with DriveServer("off") as server:
        yield server


def answer(server: DriveServer, access_type: str = "offline") -> dict[str, str]:
    """Return what the consent page sends a browser back with."""
    client = server.client_json()["installed"]
    asked = {"client_id": client["client_id"], "redirect_uri": BACK, "response_type": "code", "scope": FULL}
    asked |= {"state": "s1", "access_type": access_type}
    asked |= {"code_challenge": CHALLENGE, "code_challenge_method": "S256"}
    address = allow(f"{client['auth_uri']}?{urlencode(asked)}")
    assert address.startswith(BACK)
    return dict(parse_qsl(urlsplit(address).query))


def exchanged(server: DriveServer, code: str, status: int = 200, /, **changed: str) -> dict[str, Any]:
    """Return what the server answers to a code, with this status."""
    client = server.client_json()["installed"]
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": BACK, "code_verifier": VERIFIER}
    form |= {name: client[name] for name in ("client_id", "client_secret")}
    got, _, text = fetch(client["token_uri"], form | changed)
    assert got == status, text
    reply: dict[str, Any] = json.loads(text)
    return reply


def test_a_code_becomes_tokens_once(server: DriveServer) -> None:
    found = answer(server)
    assert found["state"] == "s1"
    reply = exchanged(server, found["code"])
    assert (reply["token_type"], reply["expires_in"], reply["scope"]) == ("Bearer", 3599, FULL)
    assert ask(server, "/drive/v3/files", authorization=f"Bearer {reply['access_token']}")[0] == 200
    again = exchanged(server, "", grant_type="refresh_token", refresh_token=reply["refresh_token"])
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
