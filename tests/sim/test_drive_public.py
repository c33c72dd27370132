"""Callers without an account: API keys, anonymous requests and public downloads of the simulated Drive."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

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


def test_anonymous_requests_are_refused_for_lack_of_an_identity(server: DriveServer) -> None:
    at = f"{V3}/{server.put('f', b'x')}"
    server.publish(server.find("f")[0]["id"])  # even then
    for target in (V3, at, f"{V3}/nothing", "/drive/v3/about?fields=user"):
        error = error_of(server, target)
        assert (error["code"], error["status"]) == (403, "PERMISSION_DENIED")
        assert error["message"].startswith(
            "Method doesn't allow unregistered callers (callers without established"
        )
        [row] = error["errors"]
        assert (row["domain"], row["reason"], row["message"]) == ("global", "forbidden", error["message"])
    error = error_of(server, f"{at}?alt=media")
    assert (error["code"], error["message"]) == (403, "The request is missing a valid API key.")
    assert (error["errors"][0]["reason"], "status" in error) == ("forbidden", False)
    assert {entry.units for entry in server.requests} == {0}


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


# Public downloads


def download(item_id: str, **more: str) -> str:
    """Return the public address of a file."""
    return f"/download?{urlencode({'id': item_id, 'export': 'download', **more})}"


def test_a_public_file_is_downloaded_without_an_account(server: DriveServer) -> None:
    name = 'grün "x"/1.bin'
    item_id = server.add(name, b"0123456789", mimeType="x/y", modifiedTime="2020-06-01T00:00:00.123Z")
    server.publish(item_id)
    at = download(item_id, confirm="t")
    status, headers, data = ask(server, at)
    assert (status, data) == (200, b"0123456789")
    assert (headers["Content-Type"], headers["Content-Length"]) == ("x/y", "10")
    assert headers["Content-Disposition"] == (
        f"attachment; filename=\"gr_n _x_/1.bin\"; filename*=UTF-8''{quote(name, safe='')}"
    )
    assert (headers["Accept-Ranges"], headers["Last-Modified"]) == ("bytes", "Mon, 01 Jun 2020 00:00:00 GMT")
    status, headers, data = ask(server, at, range="bytes=7-")
    assert (status, headers["Content-Range"], data) == (206, "bytes 7-9/10", b"789")
    status, headers, _ = ask(server, at, range="bytes=10-")
    assert (status, headers["Content-Range"], headers["Content-Type"][:9]) == (416, "bytes */10", "text/html")
    assert [(entry.kind, entry.key) for entry in server.requests] == [("media", item_id)] * 3
    assert server.requests[-1].units == 0


def test_a_large_file_is_sent_once_its_lack_of_a_virus_scan_is_confirmed(server: DriveServer) -> None:
    small, item_id = server.put("s", b"x" * 10), server.put("<b>", b"x" * 11)
    for id in (small, item_id):
        server.publish(id)
    server.scan_limit(10)
    assert ask(server, download(small))[2] == b"x" * 10
    for given in ({}, {"range": "bytes=0-0"}):
        status, headers, page = ask(server, download(item_id), **given)
        assert (status, headers["Content-Type"][:9], headers["Content-Disposition"]) == (
            200,
            "text/html",
            None,
        )
        assert b"<title>Google Drive - Virus scan warning</title>" in page
        assert b"&lt;b&gt;" in page
    status, headers, data = ask(server, download(item_id, confirm="t"), range="bytes=10-20")
    assert (status, headers["Content-Range"], data) == (206, "bytes 10-10/11", b"x")


def test_a_file_that_is_not_public_asks_to_sign_in(server: DriveServer) -> None:
    hidden, keyed = server.put("f", b"x"), server.put("g", b"x")
    server.publish(keyed)
    server.edit(keyed, resourceKey="rk")
    for at in (download(hidden), download(keyed)):
        status, headers, _ = ask(server, at, authorization="Bearer t")  # tokens are for the API
        target = urlsplit(headers["Location"])
        assert (status, target.netloc, target.path) == (302, "accounts.google.com", "/ServiceLogin")
        assert parse_qs(target.query)["continue"] == [server.endpoint_url + at]
    assert ask(server, download(keyed, resourcekey="rk"))[2] == b"x"


# The public page of a folder


def folder_page(item_id: str, **more: str) -> str:
    """Return the address of the page of a public folder."""
    return f"/embeddedfolderview?{urlencode({'id': item_id, **more})}"


def test_a_public_folder_has_a_page_with_names_and_links(server: DriveServer) -> None:
    ids = [server.put("d/a<b", b"x"), server.folder("d/sub"), server.document("d/doc", "text")]
    server.trash(server.put("d/old", b"x"))
    server.publish(folder := server.folder("d"))
    status, headers, page = ask(server, folder_page(folder))
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    text = page.decode()
    assert "<title>d</title>" in text
    assert re.findall('flip-entry-title">([^<]*)<', text) == ["sub", "a&lt;b", "doc"]
    assert re.findall('<a href="([^"]*)"', text) == [
        f"https://drive.google.com/drive/folders/{ids[1]}",
        f"https://drive.google.com/file/d/{ids[0]}/view?usp=drive_web",
        f"https://docs.google.com/document/d/{ids[2]}/edit?usp=drive_web",
    ]
    server.page_limit(1)
    assert ask(server, folder_page(folder))[2].count(b'class="flip-entry"') == 1
    assert [(entry.kind, entry.key, entry.units) for entry in server.requests] == [("page", folder, 0)] * 2
