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


# API keys


def test_a_key_sees_what_is_public(server: DriveServer) -> None:
    public, key = server.folder("open"), server.api_key()
    below, secret = server.put("open/sub/f", b"below"), server.put("h", b"no")
    sub, root = server.folder("open/sub"), server.item("root")["id"]
    server.publish(public)

    def listed(q: str) -> set[str]:
        return {row["id"] for row in ask_json(server, V3, q=q, key=key)["files"]}

    assert listed(f"'{public}' in parents") == {sub}
    assert listed(f"'{sub}' in parents and trashed=false") == {below}
    assert listed("trashed=false") == set()  # no account, no files of its own
    assert ask(server, f"{V3}/{below}?alt=media&key={key}", range="bytes=1-2")[2] == b"el"
    assert ask(server, f"{V3}/{below}?alt=media", x_goog_api_key=key)[2] == b"below"
    for hidden in (secret, root):
        for query in ({}, {"alt": "media"}):
            assert ask_json(server, f"{V3}/{hidden}", key=key, **query)["reason"] == "notFound"
    assert ask_json(server, V3, q=f"'{root}' in parents", key=key)["reason"] == "notFound"
    assert ask(server, f"{V3}/{secret}?key={key}", authorization="Bearer t")[0] == 200  # the account's rights
    for headers in ({}, {"x_goog_api_key": key}):  # only an account may write
        assert error_of(server, f"{V3}/{below}", "PATCH", **headers)["status"] == "UNAUTHENTICATED"
    server.publish(public, False)
    assert ask_json(server, f"{V3}/{below}", key=key)["reason"] == "notFound"


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
