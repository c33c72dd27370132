"""Callers without an account at the simulated Drive: API keys and anonymous requests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cachedfs.sim import DriveServer

pytest.importorskip("googleapiclient")
pytest.importorskip("httplib2")

from tests.sim.test_drive import V3, ask, ask_json


@pytest.fixture
def server() -> Iterator[DriveServer]:
    with DriveServer() as running:
        running.require_token("t")
        yield running


def error_of(server: DriveServer, target: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    """Return the error of a reply."""
    _, _, text = ask(server, target, method, b"{}" if method != "GET" else None, **headers)
    error: dict[str, Any] = json.loads(text)["error"]
    return error


# Anonymous requests


@pytest.mark.parametrize("with_key", [False, True])
def test_only_an_account_may_write(server: DriveServer, with_key: bool) -> None:
    item_id, key = server.put("f", b"x"), server.api_key()
    server.publish(item_id)
    headers = {"x_goog_api_key": key} if with_key else {}
    upload = f"/upload{V3}?uploadType=resumable"
    for method, target in [("POST", V3), ("PATCH", f"{V3}/{item_id}"), ("POST", upload)]:
        error = error_of(server, target, method, **headers)
        assert (error["code"], error["status"]) == (401, "UNAUTHENTICATED")
        assert error["message"].startswith("Request is missing required authentication credential.")
        [row] = error["errors"]
        assert (row["reason"], row["location"], row["message"]) == (
            "required",
            "Authorization",
            "Login Required.",
        )
    assert ask(server, f"{V3}/{item_id}", "DELETE", **headers)[0] == 401
    assert server.get("f") == b"x"


# API keys


def test_a_key_sees_what_is_public(server: DriveServer) -> None:
    public, key = server.folder("open"), server.api_key()
    below, single, secret = (
        server.put("open/sub/f", b"below"),
        server.put("g", b"single"),
        server.put("h", b"no"),
    )
    server.publish(public)
    server.publish(single)

    def listed(q: str) -> set[str]:
        return {row["id"] for row in ask_json(server, V3, q=q, key=key)["files"]}

    sub = server.folder("open/sub")
    assert listed(f"'{public}' in parents") == {sub}
    assert listed(f"'{sub}' in parents and trashed=false") == {below}
    assert listed("trashed=false") == set()  # no account, no files of its own
    assert ask(server, f"{V3}/{below}?alt=media&key={key}", range="bytes=1-2")[2] == b"el"
    assert ask(server, f"{V3}/{single}?alt=media", x_goog_api_key=key)[2] == b"single"
    root = server.item("root")["id"]
    for hidden in (secret, root):
        assert ask_json(server, f"{V3}/{hidden}", key=key)["reason"] == "notFound"
        assert ask_json(server, f"{V3}/{hidden}", key=key, alt="media")["reason"] == "notFound"
    assert ask_json(server, V3, q=f"'{root}' in parents", key=key)["reason"] == "notFound"
    assert ask(server, f"{V3}/{secret}?key={key}", authorization="Bearer t")[0] == 200  # the account's rights
    server.trash(public)
    assert ask_json(server, f"{V3}/{below}", key=key)["reason"] == "notFound"
    server.trash(public, False)
    server.publish(public, False)
    assert ask_json(server, f"{V3}/{below}", key=key)["reason"] == "notFound"
    assert server.item(single)["shared"] is True
    assert server.requests[-1].kind == "get"


def test_a_key_is_a_reader_without_an_account(server: DriveServer) -> None:
    item_id, key = server.put("f", b"x"), server.api_key()
    server.publish(item_id)
    shown = ask_json(server, f"{V3}/{item_id}", fields="*", key=key)
    can = {name for name, is_able in shown["capabilities"].items() if is_able}
    assert (can, shown["ownedByMe"], shown["owners"][0]["me"]) == ({"canDownload"}, False, False)
    assert not {"parents", "permissions"} & shown.keys()  # its folder is not public
    for at in (f"{V3}/{item_id}/revisions", f"{V3}/{item_id}/revisions/{shown['headRevisionId']}?alt=media"):
        assert (
            error_of(server, at, x_goog_api_key=key)["errors"][0]["reason"] == "insufficientFilePermissions"
        )
    for path in ("/drive/v3/changes/startPageToken", "/drive/v3/about", "/drive/v3/drives"):
        assert ask_json(server, path, fields="*", key=key)["reason"] == "required"
