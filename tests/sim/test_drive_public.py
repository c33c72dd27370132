"""Callers without an account: API keys, anonymous requests and public downloads of the simulated Drive."""

import html.parser
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest

from cachedfs.sim import DriveServer, Quota

pytest.importorskip("googleapiclient")
pytest.importorskip("httplib2")

from tests.sim.test_drive import FOLDER, V2, V3, ask, ask_json

BOTH = pytest.mark.parametrize("files", [V2, V3])


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


@BOTH
def test_anonymous_requests_are_refused_for_lack_of_an_identity(server: DriveServer, files: str) -> None:
    at = f"{files}/{server.put('f', b'x')}"
    server.publish(server.find("f")[0]["id"])  # even then
    for target in (files, at, f"{files}/nothing", files.removesuffix("files") + "about?fields=user"):
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


@BOTH
@pytest.mark.parametrize("with_key", [False, True])
def test_only_an_account_may_write(server: DriveServer, files: str, with_key: bool) -> None:
    item_id, key = server.put("f", b"x"), server.api_key()
    server.publish(item_id)
    headers = {"x_goog_api_key": key} if with_key else {}
    upload = f"/upload{files}?uploadType=media"
    for method, target in [("POST", files), ("PATCH", f"{files}/{item_id}"), ("POST", upload)]:
        error = error_of(server, target, method, **headers)
        assert (error["code"], error["status"]) == (401, "UNAUTHENTICATED")
        assert error["message"].startswith("Request is missing required authentication credential.")
        [row] = error["errors"]
        assert (row["reason"], row["location"], row["message"]) == (
            "required",
            "Authorization",
            "Login Required.",
        )
    assert ask(server, f"{files}/{item_id}", "DELETE", **headers)[0] == 401
    assert server.get("f") == b"x"


# API keys


@BOTH
def test_an_invalid_key_is_a_bad_request(server: DriveServer, files: str) -> None:
    error = error_of(server, f"{files}?key=AIzaWrong")
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["errors"][0]["reason"] == "badRequest"
    assert error["errors"][0]["message"] == "API key not valid. Please pass a valid API key."
    assert error["details"][0]["reason"] == "API_KEY_INVALID"


@BOTH
def test_a_key_sees_what_is_public(server: DriveServer, files: str) -> None:
    public, key = server.folder("open"), server.api_key()
    below, single, secret = (
        server.put("open/sub/f", b"below"),
        server.put("g", b"single"),
        server.put("h", b"no"),
    )
    server.publish(public)
    server.publish(single)
    rows = "items" if files == V2 else "files"

    def listed(q: str) -> set[str]:
        return {row["id"] for row in ask_json(server, files, q=q, key=key)[rows]}

    sub = server.folder("open/sub")
    assert listed(f"'{public}' in parents") == {sub}
    assert listed(f"'{sub}' in parents and trashed=false") == {below}
    assert listed("trashed=false") == set()  # no account, no files of its own
    assert ask(server, f"{files}/{below}?alt=media&key={key}", range="bytes=1-2")[2] == b"el"
    assert ask(server, f"{files}/{single}?alt=media", x_goog_api_key=key)[2] == b"single"
    root = server.item("root")["id"]
    for hidden in (secret, root):
        assert ask_json(server, f"{files}/{hidden}", key=key)["reason"] == "notFound"
        assert ask_json(server, f"{files}/{hidden}", key=key, alt="media")["reason"] == "notFound"
    assert ask_json(server, files, q=f"'{root}' in parents", key=key)["reason"] == "notFound"
    assert (
        ask(server, f"{files}/{secret}?key={key}", authorization="Bearer t")[0] == 200
    )  # the account's rights
    server.trash(public)
    assert ask_json(server, f"{files}/{below}", key=key)["reason"] == "notFound"
    server.trash(public, False)
    server.publish(public, False)
    assert ask_json(server, f"{files}/{below}", key=key)["reason"] == "notFound"
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
    mine = ask(server, f"{V3}/{item_id}/permissions", authorization="Bearer t")[2]
    assert [row["type"] for row in json.loads(mine)["permissions"]] == ["user", "anyone"]


def test_a_batch_may_have_a_key(server: DriveServer) -> None:
    public, secret, key = server.put("f", b"x"), server.put("g", b"x"), server.api_key()
    server.publish(public)
    calls = [f"GET {V3}/{id}" for id in (public, secret)] + [f"DELETE {V3}/{public}"]
    parts = "".join(f"--b\r\nContent-Type: application/http\r\n\r\n{call}\r\n\r\n\r\n" for call in calls)
    kind, body = "multipart/mixed; boundary=b", f"{parts}--b--".encode()
    _, _, text = ask(server, "/batch/drive/v3", "POST", body, content_type=kind, x_goog_api_key=key)
    assert re.findall(rb"HTTP/1.1 (\d+)", text) == [b"200", b"404", b"401"]
    assert ask(server, "/batch/drive/v3", "POST", body, content_type=kind)[0] == 401


def test_a_public_item_may_need_a_resource_key(server: DriveServer) -> None:
    item_id, key = server.put("f", b"x"), server.api_key()
    server.publish(item_id)
    server.edit(item_id, resourceKey="rk")
    at = f"{V3}/{item_id}?alt=media&key={key}"
    assert ask(server, at)[0] == 404
    assert ask(server, at, x_goog_drive_resource_keys=f"{item_id}/rk")[2] == b"x"


def test_a_key_has_quotas_too(server: DriveServer) -> None:
    item_id, key = server.put("f", b"x" * 10), server.api_key()
    server.publish(item_id)
    server.quota(Quota(file_bytes=10.0))
    at = f"{V3}/{item_id}?alt=media&key={key}"
    assert ask(server, at)[0] == 200
    assert error_of(server, at)["errors"][0]["reason"] == "downloadQuotaExceeded"
    server.quota(Quota(units_per_user=200, units_per_project=1e6))
    assert [ask(server, at)[0] for _ in range(2)] == [200, 403]


# Public downloads


class Form(html.parser.HTMLParser):
    """The first form of a page."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.action, self.id, self.hidden = "", "", dict[str, str]()
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        found = dict(attributes)
        if tag == "form":
            self.action, self.id = found["action"], found["id"]
        if tag == "input" and found["type"] == "hidden":
            self.hidden[found["name"]] = found["value"]


def follow(server: DriveServer, item_id: str, **more: str) -> str:
    """Return where the public address of a file redirects to."""
    query = urlencode({"id": item_id, "export": "download", **more})
    status, headers, _ = ask(server, f"/uc?{query}")
    assert (status, headers["Content-Type"]) == (303, "application/binary")
    return str(headers["Location"]).removeprefix(server.endpoint_url)


def test_a_public_file_is_downloaded_without_an_account(server: DriveServer) -> None:
    name = 'grün "x"/1.bin'
    item_id = server.add(name, b"0123456789", mimeType="x/y", modifiedDate="2020-06-01T00:00:00.123Z")
    server.publish(item_id)
    link = json.loads(ask(server, f"{V3}/{item_id}?fields=webContentLink", authorization="Bearer t")[2])
    assert link["webContentLink"].startswith(server.endpoint_url + "/uc?")
    at = follow(server, item_id, confirm="t")
    assert at == f"/download?id={item_id}&export=download"
    status, headers, data = ask(server, at)
    assert (status, data, headers["Content-Type"], headers["Content-Length"]) == (
        200,
        b"0123456789",
        "x/y",
        "10",
    )
    assert headers["Content-Disposition"] == (
        f"attachment; filename=\"gr_n _x_/1.bin\"; filename*=UTF-8''{quote(name, safe='')}"
    )
    assert (headers["Accept-Ranges"], headers["Last-Modified"]) == ("bytes", "Mon, 01 Jun 2020 00:00:00 GMT")
    status, headers, data = ask(server, at, range="bytes=7-")
    assert (status, headers["Content-Range"], data) == (206, "bytes 7-9/10", b"789")
    status, headers, _ = ask(server, at, range="bytes=10-")
    assert (status, headers["Content-Range"], headers["Content-Type"][:9]) == (416, "bytes */10", "text/html")
    assert [(entry.kind, entry.key) for entry in server.requests[-4:]] == [
        ("redirect", item_id),
        *[("media", item_id)] * 3,
    ]
    assert server.requests[-1].units == 0


def test_a_large_file_is_sent_once_its_lack_of_a_virus_scan_is_confirmed(server: DriveServer) -> None:
    small, item_id = server.put("s", b"x" * 10), server.put("<b>", b"x" * 11)
    server.edit(item_id, resourceKey="rk")
    for id in (small, item_id):
        server.publish(id)
    server.scan_limit(10)
    assert ask(server, follow(server, small))[2] == b"x" * 10
    at = follow(server, item_id, resourcekey="rk")
    for given in ({}, {"range": "bytes=0-0"}):
        status, headers, page = ask(server, at, **given)
        assert (status, headers["Content-Type"][:9], "Content-Disposition" in headers) == (
            200,
            "text/html",
            False,
        )
        assert b"<title>Google Drive - Virus scan warning</title>" in page
        assert b"&lt;b&gt;" in page
    form = Form(page)
    assert (form.id, form.action) == ("download-form", server.endpoint_url + "/download")
    assert form.hidden.keys() == {"id", "export", "confirm", "uuid", "resourcekey"}
    assert (form.hidden["id"], form.hidden["confirm"], form.hidden["resourcekey"]) == (item_id, "t", "rk")
    status, headers, data = ask(server, f"/download?{urlencode(form.hidden)}", range="bytes=10-20")
    assert (status, headers["Content-Range"], data) == (206, "bytes 10-10/11", b"x")


def test_a_file_that_is_not_public_asks_to_sign_in(server: DriveServer) -> None:
    hidden, keyed, document = server.put("f", b"x"), server.put("g", b"x"), server.document("d", "text")
    server.publish(keyed)
    server.edit(keyed, resourceKey="rk")
    for at in (follow(server, hidden), follow(server, keyed), f"/document/d/{document}/export?format=txt"):
        status, headers, _ = ask(server, at, authorization="Bearer t")  # tokens are for the API
        target = urlsplit(headers["Location"])
        assert (status, target.netloc, target.path) == (302, "accounts.google.com", "/ServiceLogin")
        assert parse_qs(target.query)["continue"] == [server.endpoint_url + at]


def test_downloads_that_fail_are_pages(server: DriveServer) -> None:
    item_id, folder, document = server.put("f", b"x" * 10), server.folder("d"), server.document("doc", "text")
    for id in (item_id, folder, document):
        server.publish(id)

    def get(item_id: str) -> tuple[int, str]:
        status, headers, page = ask(server, follow(server, item_id))
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        return status, page.decode()

    server.quota(Quota(file_bytes=10.0))
    assert ask(server, follow(server, item_id))[0] == 200
    status, page = get(item_id)
    assert (status, "<title>Google Drive - Quota exceeded</title>" in page) == (200, True)
    assert (
        '<p class="uc-error-subcaption">Too many users have viewed or downloaded this file recently.' in page
    )
    server.edit(item_id, abusive=True)
    assert get(item_id)[0] == 200
    assert "Only the owner is allowed to download infected files." in get(item_id)[1]
    server.edit(item_id, abusive=None, capabilities={"canDownload": False})
    assert get(item_id)[0] == 403
    server.trash(item_id)
    assert [get(id)[0] for id in (item_id, "nothing", folder, document)] == [404, 404, 500, 500]


def test_a_public_document_is_exported(server: DriveServer) -> None:
    sheet = "application/vnd.google-apps.spreadsheet"
    ids = server.document("doc", "text"), server.document("sheet", "a,b", mime=sheet)
    for id in ids:
        server.publish(id)
    at = f"/document/d/{ids[0]}/export?format="
    status, headers, data = ask(server, at + "txt", range="bytes=0-1")
    assert (status, headers["Content-Type"], data) == (200, "text/plain", b"\xef\xbb\xbftext")
    assert headers["Content-Disposition"] == "attachment; filename=\"doc.txt\"; filename*=UTF-8''doc.txt"
    assert ask(server, at + "docx")[2] == b"text"
    assert ask(server, f"/spreadsheets/d/{ids[1]}/export?format=csv")[2] == b"a,b"
    assert ask(server, at + "csv")[0] == 400
    assert ask(server, f"/spreadsheets/d/{ids[0]}/export?format=csv")[0] == 404
    assert server.count("export", ids[0]) == 4


def test_a_server_without_sign_in_treats_keys_alike() -> None:
    with DriveServer() as server:
        item_id, folder, key = server.put("f", b"x"), server.folder("d"), server.api_key()
        assert (
            ask_json(server, V3, "POST", {"name": "new", "mimeType": FOLDER})["name"] == "new"
        )  # as an account
        assert ask_json(server, f"{V3}/{item_id}", key=key)["reason"] == "notFound"
        server.publish(folder)
        assert ask_json(server, f"{V3}/{folder}", key=key)["id"] == folder
        assert ask(server, f"{V3}/{folder}?key=wrong")[0] == 400
