"""The simulated Google Drive, used by PyDrive2 and the Google API client."""

import dataclasses
import gzip
import http.client
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from cachedfs.sim import DriveServer, Fault, Profile, Quota
from cachedfs.sim.drive.fields import FIELDS
from cachedfs.sim.drive.query import parse_mask, parse_query, project
from cachedfs.sim.network import PROFILES, Delay, Network
from cachedfs.sim.quota import QUOTAS, Meter
from tests.sim.discovery import problems_of_reply

discovery = pytest.importorskip("googleapiclient.discovery")
httplib2 = pytest.importorskip("httplib2")

FOLDER = "application/vnd.google-apps.folder"
SHORTCUT = "application/vnd.google-apps.shortcut"
DOCUMENT = "application/vnd.google-apps.document"
CHUNK = 256 << 10
V2, V3 = "/drive/v2/files", "/drive/v3/files"
UPLOAD, CHANGES = "/upload/drive/v3/files", "/drive/v3/changes"
BOTH = {"supportsAllDrives": "true", "includeItemsFromAllDrives": "true"}


@pytest.fixture
def server() -> Iterator[DriveServer]:
    with DriveServer() as running:
        yield running


Reply = tuple[int, Any, bytes]


def ask(
    server: DriveServer, target: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> Reply:
    """Send one request with a bare client; return status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=60)
    try:
        connection.request(method, target, body, {k.replace("_", "-"): v for k, v in headers.items()})
        reply = connection.getresponse()
        data = reply.read()
        verb = headers.get("x_http_method_override", method)
        judge(verb, target, reply.status, reply.headers, data)
        return reply.status, reply.headers, data
    finally:
        connection.close()


def judge(verb: str, target: str, status: int, headers: Any, body: bytes) -> None:
    """Fail unless a reply matches the discovery documents; every reply in this file is checked here."""
    if headers.get("Content-Encoding", headers.get("content-encoding")) == "gzip":
        body = gzip.decompress(body)
    kind = headers.get("Content-Type") or headers.get("content-type") or ""
    assert problems_of_reply(verb, target, status, kind, body) == []


def ask_json(server: DriveServer, path: str, method: str = "GET", body: Any = None, **query: Any) -> Any:
    """Return the JSON of a reply, with its status as `status` if it is an error."""
    target = f"{path}?{urlencode(query)}" if query else path
    data = None if body is None else json.dumps(body).encode()
    status, _, text = ask(server, target, method, data, content_type="application/json")
    value = json.loads(text) if text else {}
    return value if status < 400 else {"status": status, **value["error"]["errors"][0]}


def names(server: DriveServer, q: str, **query: Any) -> list[str]:
    reply = ask_json(server, V3, q=q, **query)
    return sorted(item["name"] for item in reply["files"])


class Rewriting(httplib2.Http):
    """An http object that sends requests for Google to the simulation."""

    endpoint_url = token = ""

    def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
        parts = urlsplit(uri)
        if self.token:
            kwargs["headers"] = {**(kwargs.get("headers") or {}), "authorization": f"Bearer {self.token}"}
        if parts.netloc.endswith(".googleapis.com"):
            uri = self.endpoint_url + uri[uri.index(parts.netloc) + len(parts.netloc) :]
        response, body = super().request(uri, *args, **kwargs)
        verb = args[0] if args else kwargs.get("method", "GET")
        override = (kwargs.get("headers") or {}).get("x-http-method-override")
        judge(override or verb, uri.removeprefix(self.endpoint_url), response.status, dict(response), body)
        return response, body


class Credentials:
    """The credentials that PyDrive2 needs; their http objects send requests to the simulation."""

    access_token_expired, invalid, refresh_token = False, False, None

    def __init__(self, server: DriveServer) -> None:
        self.endpoint_url = server.endpoint_url
        self._made: list[Rewriting] = []

    def authorize(self, _: Any) -> Rewriting:
        http = Rewriting()
        self._made.append(http)
        http.redirect_codes = http.redirect_codes - {308}  # a 308 is not a redirect in this API
        http.endpoint_url = self.endpoint_url
        return http

    def close(self) -> None:
        """Close what PyDrive2 leaves open."""
        for made in self._made:
            made.close()


def build(server: DriveServer, version: str) -> Any:
    http = Credentials(server).authorize(None)
    return discovery.build("drive", version, http=http, static_discovery=True)


@pytest.fixture
def v3(server: DriveServer) -> Any:
    with build(server, "v3") as service:
        yield service


@pytest.fixture
def auth(server: DriveServer) -> Any:
    pydrive2 = pytest.importorskip("pydrive2.auth")
    config = dict.fromkeys(pydrive2.GoogleAuth.CLIENT_CONFIGS_LIST, "x")
    auth = pydrive2.GoogleAuth(settings={"client_config_backend": "settings", "client_config": config})
    auth.credentials = Credentials(server)
    yield auth
    auth.credentials.close()


@pytest.fixture
def pyfs(auth: Any) -> Any:
    """PyDrive2's own filesystem, rooted in My Drive."""
    spec = pytest.importorskip("pydrive2.fs.spec")
    return spec.GDriveFileSystem("root", google_auth=auth, skip_instance_cache=True)


@pytest.fixture
def gfs(server: DriveServer) -> Any:
    """gdrive-fsspec's filesystem, with its public service replaced by the simulation."""
    core = pytest.importorskip("gdrive_fsspec.core")
    fs = core.GoogleDriveFileSystem(token="anon", skip_instance_cache=True)
    fs.srv.close()
    fs.srv = build(server, "v3")
    fs.files = fs.srv.files()
    yield fs
    fs.srv.close()


# PyDrive2


def test_pydrive2_lists_and_reads(server: DriveServer, pyfs: Any) -> None:
    server.put("d/a.txt", b"1")
    server.put("d/sub/b.txt", b"22")
    server.put("empty", b"")
    assert sorted(pyfs.ls("root/d")) == ["root/d/a.txt", "root/d/sub/"]
    assert sorted(pyfs.find("root/d")) == ["root/d/a.txt", "root/d/sub/b.txt"]
    info = pyfs.info("root/d/a.txt")
    assert (info["size"], info["type"]) == (1, "file")
    assert info["checksum"] == "c4ca4238a0b923820dcc509a6f75849b"
    with pytest.raises(FileNotFoundError):
        pyfs.info("root/d/A.txt")
    for name, data in (("d/sub/b.txt", b"22"), ("empty", b"")):
        with pyfs.open(f"root/{name}", "rb") as f:
            assert f.read() == data


def test_pydrive2_works_on_a_shared_drive(server: DriveServer, auth: Any) -> None:
    spec = pytest.importorskip("pydrive2.fs.spec")
    drive_id = server.share_drive("team")
    server.put("d/a", b"x", parent=drive_id)
    fs = spec.GDriveFileSystem(drive_id, google_auth=auth, skip_instance_cache=True)
    assert fs.ls(f"{drive_id}/d") == [f"{drive_id}/d/a"]
    assert server.requests[-1].query["driveId"] == drive_id


def test_pydrive2_retries_after_the_rate_limit(server: DriveServer, pyfs: Any) -> None:
    server.put("a", b"x")
    server.fail(Fault(kind="list", status=403, reason="userRateLimitExceeded"))
    assert pyfs.ls("root") == ["root/a"]
    assert [entry.status for entry in server.requests] == [403, 200]


def test_version_2_only_reads(server: DriveServer) -> None:
    item_id = server.put("title", b"x")
    at, fields = f"{V2}/{item_id}", "id,title,fileSize,parents(id),labels"
    shown = {"id": item_id, "title": "title", "fileSize": "1", "labels": {"trashed": False}}
    item = ask_json(server, at, fields=fields)
    assert item.pop("parents") == [{"kind": "drive#parentReference", "id": server.item("root")["id"]}]
    assert item == shown
    page = ask_json(server, V2, q="title='title'", maxResults=1, fields=f"items({fields})")
    assert [row["title"] for row in page["items"]] == ["title"]
    form = {"content_type": "application/x-www-form-urlencoded", "x_http_method_override": "GET"}
    status, _, text = ask(server, V2, "POST", urlencode({"q": "title='title'"}).encode(), **form)
    assert (status, json.loads(text)["items"][0]["id"]) == (200, item_id)
    assert ask_json(server, at, fields="name,kinds")["reason"] == "invalidParameter"
    assert ask_json(server, at, alt="media", revisionId="r")["status"] == 501
    assert ask(server, at, "POST", b"{}", x_http_method_override="PATCH")[0] == 501
    for method, path in (("POST", V2), ("PUT", at), ("DELETE", at), ("GET", "/drive/v2/about")):
        assert ask(server, path, method, b"{}")[0] == 404


# google-api-python-client


def test_googleapiclient_lists_in_pages_with_fields(server: DriveServer, v3: Any) -> None:
    folder, found, token = server.folder("d"), list[str](), ""
    server.fill(folder, 25)
    query = {"q": f"'{folder}' in parents", "fields": "nextPageToken,files(name)", "pageSize": 10}
    for _ in range(3):
        page = v3.files().list(**query, **({"pageToken": token} if token else {})).execute()
        assert all(row.keys() == {"name"} for row in page["files"])
        found += [row["name"] for row in page["files"]]
        token = page.get("nextPageToken", "")
    assert sorted(found) == [f"f{i:06d}" for i in range(25)]
    assert (token, server.count("list", folder)) == ("", 3)


def test_googleapiclient_downloads_in_chunks(server: DriveServer, v3: Any) -> None:
    from googleapiclient.http import MediaIoBaseDownload

    data, out = os.urandom(10_000), io.BytesIO()
    request = v3.files().get_media(fileId=server.put("f", data))
    downloader = MediaIoBaseDownload(out, request, chunksize=3000)
    assert [downloader.next_chunk()[1] for _ in range(4)] == [False, False, False, True]
    assert out.getvalue() == data
    assert [(entry.status, entry.bytes_sent) for entry in server.requests] == [(206, 3000)] * 3 + [
        (206, 1000)
    ]


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK + 5])
def test_googleapiclient_uploads_resumably(server: DriveServer, v3: Any, size: int) -> None:
    from googleapiclient.http import MediaIoBaseUpload

    data = os.urandom(size)

    def media(data: bytes) -> Any:
        return MediaIoBaseUpload(io.BytesIO(data), "x/y", chunksize=CHUNK, resumable=True)

    made = v3.files().create(body={"name": "up.bin"}, media_body=media(data)).execute()
    assert (server.get("up.bin"), server.item(made["id"])["mimeType"]) == (data, "x/y")
    server.reset()
    v3.files().update(fileId=made["id"], body={}, media_body=media(data[::-1])).execute()
    assert server.get("up.bin") == data[::-1]
    assert server.count("upload", made["id"]) == 1 + max(1, -(-size // CHUNK))


def test_googleapiclient_uploads_in_one_request(server: DriveServer, v3: Any) -> None:
    from googleapiclient.http import MediaIoBaseUpload

    media = MediaIoBaseUpload(io.BytesIO(b"a\r\n\r\nb\r\n"), "x/y")
    v3.files().create(body={"name": "multi"}, media_body=media).execute()
    assert server.get("multi") == b"a\r\n\r\nb\r\n"
    assert server.count("upload") == 1


def test_copies_moves_and_revisions(server: DriveServer, v3: Any) -> None:
    item_id, folder, old = server.put("f", b"one"), server.folder("d"), server.find("f")[0]
    server.put("f", b"two")
    revisions = v3.revisions().list(fileId=item_id).execute()["revisions"]
    assert [row["size"] for row in revisions] == ["3", "3"]
    assert revisions[0]["id"] == old["headRevisionId"]
    at = f"{V3}/{item_id}"
    assert ask(server, f"{at}?alt=media&revisionId={old['headRevisionId']}")[2] == b"two"  # no such parameter
    copy = v3.files().copy(fileId=item_id, body={"parents": [folder]}).execute()
    assert server.get("d/Copy of f") == b"two"
    v3.files().update(fileId=copy["id"], addParents="root", removeParents=folder).execute()
    assert server.get("Copy of f") == b"two"
    assert server.find("d/Copy of f") == []
    assert ask(server, f"{at}/revisions/{revisions[1]['id']}", "DELETE")[0] == 204
    assert server.get("f") == b"one"
    assert server.find("f")[0]["headRevisionId"] == revisions[0]["id"]
    error = ask_json(server, f"{at}/revisions/{revisions[0]['id']}", "DELETE")
    assert (error["status"], error["reason"]) == (403, "cannotDeleteOnlyRevision")


def test_items_without_media_are_created(server: DriveServer) -> None:
    folder = ask_json(server, V3, "POST", {"name": "d", "mimeType": FOLDER}, fields="*")
    assert not {"size", "md5Checksum", "headRevisionId"} & folder.keys()
    body = {"name": "s", "mimeType": SHORTCUT, "shortcutDetails": {"targetId": folder["id"]}}
    made = ask_json(server, V3, "POST", body, fields="*")
    assert made["shortcutDetails"] == {"targetId": folder["id"], "targetMimeType": FOLDER}
    assert "size" not in made
    empty = ask_json(server, V3, "POST", {"name": "e"}, fields="size")
    assert (empty["size"], server.get("e")) == ("0", b"")


# gdrive-fsspec


def test_gdrive_fsspec_lists_and_reads_ranges(server: DriveServer, gfs: Any) -> None:
    data = bytes(range(256)) * 40
    server.put("d/f", data)
    server.put("d/g", b"g")
    server.put("a", b"a")
    assert gfs.ls("") == ["a", "d"]
    assert gfs.info("d/f")["size"] == len(data)
    gfs.invalidate_cache()
    assert gfs.ls("d") == ["d/f", "d/g"]
    assert gfs.cat("d/f") == data
    assert gfs.cat_file("d/f", 10, 20) == data[10:20]
    with gfs.open("d/f", "rb", block_size=100) as f:
        f.seek(5000)
        assert f.read(50) == data[5000:5050]
        f.seek(3)
        assert f.read(4) == data[3:7]
    assert {entry.status for entry in server.requests if entry.kind == "media"} == {206}


# Changes


def start(server: DriveServer, **query: Any) -> str:
    return str(ask_json(server, f"{CHANGES}/startPageToken", **query)["startPageToken"])


def changes(server: DriveServer, token: str, **query: Any) -> Any:
    return ask_json(server, CHANGES, pageToken=token, **query)


def seen(server: DriveServer, token: str, **query: Any) -> list[tuple[str, bool]]:
    """Return the ids of changed items, and whether they are reported as removed."""
    return [(row["fileId"], row["removed"]) for row in changes(server, token, **query)["changes"]]


def test_changes_are_listed_once_each_in_pages(server: DriveServer) -> None:
    first = start(server)
    kept, gone = server.put("kept", b"1"), server.put("gone", b"2")
    server.put("kept", b"22")
    server.remove(gone)
    page = changes(server, first, pageSize=1, fields="*")
    [row] = page["changes"]
    assert (row["fileId"], row["removed"], row["file"]["size"]) == (kept, False, "2")
    page = changes(server, page["nextPageToken"])
    [row] = page["changes"]
    assert (row["fileId"], row["removed"], "file" in row) == (gone, True, False)
    after = page["newStartPageToken"]
    assert seen(server, after) == []
    page = changes(server, first, fields="newStartPageToken,changes(fileId,removed)")
    assert page["changes"] == [{"fileId": kept, "removed": False}, {"fileId": gone, "removed": True}]
    assert page["newStartPageToken"] == after


def test_a_removed_or_trashed_folder_is_one_change(server: DriveServer) -> None:
    item_id, folder = server.put("d/f", b"x"), server.folder("d")
    first = start(server)
    ask_json(server, f"{V3}/{folder}", "PATCH", {"trashed": True})
    [row] = changes(server, first, fields="*")["changes"]
    assert (row["fileId"], row["file"]["trashed"]) == (folder, True)
    assert ask(server, f"{V3}/{folder}", "DELETE")[0] == 204
    assert seen(server, first) == [(folder, True)]
    assert ask_json(server, f"{V3}/{item_id}")["status"] == 404
    for wrong in ("x", "0", "1000"):
        assert changes(server, wrong)["location"] == "pageToken"
    assert ask_json(server, CHANGES)["reason"] == "required"
    assert changes(server, first, includeRemoved="false")["status"] == 501


def test_a_change_is_in_the_feed_after_a_delay_and_never_lost(
    server: DriveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("seen", b"1")
    first = start(server)
    server.delay_changes(math.inf)
    late, later = server.put("late", b"2"), server.put("later", b"3")
    assert start(server) <= first
    assert seen(server, first) == []
    server.put("late", b"4")
    server.delay_changes(0)
    assert seen(server, first) == [(later, False), (late, False)]  # once each
    now = [0.0]
    monkeypatch.setattr(Network, "now", lambda _: now[0])
    with DriveServer() as another:
        another.delay_changes(100)  # simulated seconds
        item_id = another.put("f", b"x")
        assert seen(another, "1") == []
        now[0] = 101
        assert seen(another, "1")[-1] == (item_id, False)


def test_a_rejected_feed_token_is_a_bad_request(server: DriveServer) -> None:
    first = start(server)
    server.put("f", b"x")
    server.expire_changes()
    error = changes(server, first)
    assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "pageToken")
    first, item_id = start(server), server.put("g", b"x")
    [row] = changes(server, first)["changes"]
    assert (row["fileId"], row["file"].keys()) == (item_id, {"kind", "id", "name", "mimeType"})


def test_a_shared_drive_has_its_own_feed(server: DriveServer) -> None:
    drive_id = server.share_drive("team")
    of_drive = {"driveId": drive_id, "supportsAllDrives": "true"}
    first = start(server, **of_drive)
    mine, theirs = server.put("mine", b""), server.put("theirs", b"", parent=drive_id)
    assert seen(server, first) == [(mine, False)]
    assert seen(server, first, **BOTH) == [(mine, False), (theirs, False)]
    assert seen(server, first, **BOTH, driveId=drive_id) == [(theirs, False)]
    at = f"{CHANGES}/startPageToken"
    assert ask_json(server, at, driveId=drive_id)["status"] == 400
    assert ask_json(server, at, driveId="x", supportsAllDrives="true")["status"] == 404


def test_items_moved_into_a_folder_that_is_removed_are_reported_as_removed(server: DriveServer) -> None:
    item_id, stays, folder = server.put("a/f", b""), server.put("b/g", b""), server.folder("b")
    first = start(server)
    server.edit(item_id, parents=[folder])
    server.remove(folder)
    assert seen(server, first) == [(item_id, True), (folder, True)]
    assert stays not in dict(seen(server, first))


def test_items_leaving_a_shared_drive_are_removed_only_in_its_feed(server: DriveServer) -> None:
    drive_id = server.share_drive("team")
    item_id = server.put("f", b"", parent=drive_id)
    first = start(server)
    server.edit(item_id, parents=["root"])
    assert seen(server, first, **BOTH, driveId=drive_id) == [(item_id, True)]
    assert seen(server, first, **BOTH) == [(item_id, False)]


# Writes


def test_updates(server: DriveServer) -> None:
    item_id, folder = server.put("f", b"x"), server.folder("d")
    body = {"name": "g", "properties": {"k": "v"}, "starred": True}
    ask_json(server, f"{V3}/{item_id}?addParents={folder}&removeParents=root", "PATCH", body)
    item = server.item(item_id)
    assert (item["name"], item["starred"], item["properties"]) == ("g", True, {"k": "v"})
    assert server.get("d/g") == b"x"
    ask_json(server, f"{V3}/{item_id}", "PATCH", {"trashed": True})
    assert server.item(item_id)["trashed"] is True
    error = ask_json(server, f"{V3}/{item_id}", "PATCH", {"parents": ["root"]})
    assert (error["status"], error["reason"]) == (403, "fieldNotWritable")


def test_a_rename_bumps_the_version_but_not_the_revision(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    before = server.item(item_id)
    ask_json(server, f"{V3}/{item_id}", "PATCH", {"name": "g"})
    after = server.item(item_id)
    assert int(after["version"]) > int(before["version"])
    assert after["modifiedTime"] > before["modifiedTime"]
    assert after["headRevisionId"] == before["headRevisionId"]


def test_a_given_modification_time_is_kept(server: DriveServer, v3: Any) -> None:
    from googleapiclient.http import MediaIoBaseUpload

    def media(data: bytes, resumable: bool = False) -> Any:
        return MediaIoBaseUpload(io.BytesIO(data), "x/y", resumable=resumable)

    def at(year: int) -> dict[str, str]:
        return {"modifiedTime": f"{year}-02-03T04:05:06.789Z"}

    files, shown = v3.files(), {"fields": "id,modifiedTime"}
    made = files.create(body={"name": "f", **at(2001)}, media_body=media(b"1"), **shown).execute()
    item_id, found = made["id"], [made]
    for year, more in [
        (2002, {}),
        (2003, {"media_body": media(b"2")}),
        (2004, {"media_body": media(b"3", True)}),
    ]:
        found.append(files.update(fileId=item_id, body=at(year), **more, **shown).execute())
    assert found == [{"id": item_id, **at(year)} for year in (2001, 2002, 2003, 2004)]
    assert files.update(fileId=item_id, body={"name": "g"}, **shown).execute()["modifiedTime"] > "2020"
    copied = files.copy(fileId=item_id, body=at(2005), **shown).execute()
    assert copied["modifiedTime"] == at(2005)["modifiedTime"]


def test_an_item_with_a_generated_id_is_created_once(server: DriveServer) -> None:
    ids = ask_json(server, f"{V3}/generateIds", count=3)["ids"]
    assert len(set(ids)) == 3
    assert ask_json(server, V3, "POST", {"id": ids[0], "name": "once"})["id"] == ids[0]
    error = ask_json(server, V3, "POST", {"id": ids[0], "name": "once"})
    assert (error["status"], error["reason"]) == (409, "fileIdInUse")
    assert ask_json(server, V3, "POST", {"id": "mine", "name": "once"})["status"] == 400
    assert len(server.find("once")) == 1
    assert ask_json(server, V3, "POST", {"id": ids[1], "name": "folder", "mimeType": FOLDER})["id"] == ids[1]
    assert ask_json(server, f"{V3}/generateIds", count=1001)["status"] == 400


def test_a_document_has_no_generated_id(server: DriveServer) -> None:
    [id] = ask_json(server, f"{V3}/generateIds", count=1)["ids"]
    document = server.document("doc", "text")
    for at, body in (
        (V3, {"name": "new", "mimeType": DOCUMENT}),
        (f"{V3}/{document}/copy", {"name": "copy"}),
    ):
        error = ask_json(server, at, "POST", {"id": id, **body})
        assert (error["status"], error["reason"]) == (400, "generatedIdNotSupported")
    assert server.find("new") == server.find("copy") == []
    ask_json(server, f"{V3}/{document}/copy", "POST", {"name": "copy"})
    assert len(server.find("copy")) == 1


def test_operations_that_drive_does_not_allow_are_refused(server: DriveServer) -> None:
    a, b, item_id = server.folder("a"), server.folder("a/b"), server.put("f", b"x")
    assert ask_json(server, V3, "POST", {"parents": [a, b]})["location"] == "parents"
    at = f"{V3}/{item_id}"
    assert ask_json(server, f"{at}?addParents={a},{b}", "PATCH", {})["reason"] == "multipleParentsNotAllowed"
    assert ask_json(server, f"{V3}/{a}?addParents={item_id}", "PATCH", {})["reason"] == "parentNotAFolder"
    assert ask_json(server, f"{V3}/{a}?addParents={b}", "PATCH", {})["status"] == 400
    assert ask_json(server, f"{V3}/root", "DELETE")["status"] == 403
    server.edit(a, capabilities={"canAddChildren": False})
    assert ask_json(server, V3, "POST", {"parents": [a]})["reason"] == "insufficientFilePermissions"
    assert ask_json(server, f"{V3}/{b}/copy", "POST", {})["reason"] == "cannotCopyFile"
    assert ask(server, f"{UPLOAD}/{b}?uploadType=resumable", "PATCH", b"{}")[0] == 403


def test_capabilities_are_enforced(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    at, revision = f"{V3}/{item_id}", server.item(item_id)["headRevisionId"]
    names = ("canDownload", "canReadRevisions", "canEdit", "canDelete", "canCopy")
    server.edit(item_id, capabilities=dict.fromkeys(names, False))
    assert ask_json(server, at, alt="media")["reason"] == "cannotDownloadFile"
    assert ask_json(server, f"{at}/revisions/{revision}", alt="media")["status"] == 403
    assert ask_json(server, at + "/revisions")["status"] == 403
    assert ask_json(server, at, "PATCH", {"name": "g"})["reason"] == "insufficientFilePermissions"
    assert ask_json(server, at, "DELETE")["status"] == 403
    assert ask_json(server, at + "/copy", "POST", {})["reason"] == "cannotCopyFile"
    assert server.item(item_id)["capabilities"]["canShare"] is True


def test_a_limited_folder_is_seen_and_answers_with_an_empty_list(server: DriveServer) -> None:
    inner, shared = server.put("d/sub/f", b"x"), server.put("d/sub/shared", b"x")
    folder = server.folder("d")
    server.share(shared)
    server.limit(folder)
    found = ask_json(server, f"{V3}/{folder}", fields="*")
    assert (found["inheritedPermissionsDisabled"], found["capabilities"]["canListChildren"]) == (True, False)
    assert names(server, "'root' in parents") == ["d"]
    for query in (f"'{folder}' in parents", f"'{folder}' in parents and name = 'sub'", "name = 'f'"):
        assert names(server, query) == []
    assert ask_json(server, f"{V3}/{inner}")["status"] == 404
    assert ask_json(server, f"{V3}/{shared}")["name"] == "shared"
    assert ask_json(server, V3, "POST", {"name": "new", "parents": [folder]})["status"] == 403
    server.limit(folder, limited=False)
    assert names(server, f"'{folder}' in parents") == ["sub"]


# Listings


def test_names_are_searched_without_regard_to_case(server: DriveServer) -> None:
    server.put("Name", b"1")
    server.put("NAME", b"2")
    server.put("Name.txt", b"3")
    assert names(server, "name='name' and 'root' in parents") == ["NAME", "Name"]
    assert names(server, "name='name'") == ["NAME", "Name"]


def test_names_may_contain_quotes_backslashes_and_slashes(server: DriveServer) -> None:
    for name in ("it's", "a\\b", "a/b", "..", "ü 'x' \\", "line\nbreak"):
        item_id = server.add(name, b"x")
        escaped = name.replace("\\", "\\\\").replace("'", "\\'")
        [found] = ask_json(server, V3, q=f"'root' in parents and name='{escaped}'")["files"]
        assert (found["id"], found["name"]) == (item_id, name)


@pytest.mark.parametrize("name", ["'", "''", "'a'"])
def test_a_name_in_single_quotes_is_listed_and_not_found_by_its_name(server: DriveServer, name: str) -> None:
    item_id = server.add(name, b"x")
    [found] = ask_json(server, V3, q="'root' in parents")["files"]
    assert (found["id"], found["name"]) == (item_id, name)
    escaped = name.replace("'", "\\'")
    assert ask_json(server, V3, q=f"'root' in parents and name='{escaped}'")["files"] == []


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ("trashed=false", ["d", "f", "g", "theirs"]),
        ("trashed = true or name = 'g'", ["g", "t"]),
        ("not (name='f' or name='g') and trashed=false", ["d", "theirs"]),
        ("not trashed = true and not 'root' in parents", ["theirs"]),
        ("('root' in parents) and name='f'", ["f"]),
        ("sharedWithMe", ["theirs"]),
        ("sharedWithMe=true", ["theirs"]),
    ],
)
def test_queries_follow_the_grammar(server: DriveServer, q: str, expected: list[str]) -> None:
    server.folder("d")
    for name in "fg":
        server.put(name, b"")
    server.trash(server.put("t", b""))
    server.shared_with_me("theirs", b"")
    assert names(server, q) == expected


@pytest.mark.parametrize("q", ["name", "name=", "title='x'", "(name='x'", "(name='x' name='y')", "name='x' and", "'x' in owners", "name < 'x'", "x='y'", "name='x' name='y'", "trashed='x'"])  # fmt: skip
def test_invalid_queries_are_refused(server: DriveServer, q: str) -> None:
    error = ask_json(server, V3, q=q)
    assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "q")
    assert (error["domain"], error["locationType"]) == ("global", "parameter")
    assert server.count("list") == 1


def test_a_query_tells_where_its_matches_are() -> None:
    query = parse_query("('a' in parents or 'b' in parents) and name='T' and trashed=false")
    assert (query.parents, query.name) == (("a", "b"), "t")
    assert parse_query("not 'a' in parents or name='x'").parents is None


def test_a_missing_folder_is_not_found(server: DriveServer) -> None:
    error = ask_json(server, V3, q="'nothing' in parents")
    assert (error["status"], error["reason"], error["location"]) == (404, "notFound", "fileId")


def test_pages_may_be_short_or_empty(server: DriveServer) -> None:
    folder, sizes, more = server.folder("d"), list[int](), dict[str, str]()
    server.fill(folder, 5)
    server.short_pages(2)
    for _ in range(6):
        page = ask_json(server, V3, q=f"'{folder}' in parents", **more)
        sizes.append(len(page["files"]))
        more = {"pageToken": page.get("nextPageToken", "")}
    assert (sizes, more) == ([0, 2, 0, 2, 0, 1], {"pageToken": ""})


def test_a_rejected_page_token_is_a_bad_request(server: DriveServer) -> None:
    folder = server.folder("d")
    server.fill(folder, 5)
    q = f"'{folder}' in parents"
    token = ask_json(server, V3, q=q, pageSize=2)["nextPageToken"]
    pages = [ask_json(server, V3, q=q, pageSize=2, pageToken=token)["files"] for _ in range(2)]
    assert pages[0] == pages[1]
    for wrong in ({"q": q, "pageToken": "x"}, {"q": "trashed=false", "pageToken": token}):
        error = ask_json(server, V3, **wrong)
        assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "pageToken")


def test_an_item_deleted_between_two_pages_is_not_on_the_second(server: DriveServer) -> None:
    ids = [server.put(f"f{i}", b"") for i in range(4)]
    page = ask_json(server, V3, q="'root' in parents", pageSize=2)
    server.remove(ids[2])
    rest = ask_json(server, V3, q="'root' in parents", pageSize=2, pageToken=page["nextPageToken"])
    assert [item["id"] for item in rest["files"]] == [ids[3]]


def test_listings_are_ordered_on_request(server: DriveServer) -> None:
    for name in ("b", "A", "c"):
        server.put(name, b"")
    found = ask_json(server, V3, q="'root' in parents", orderBy="name")["files"]
    assert [item["name"] for item in found] == ["A", "b", "c"]
    assert ask_json(server, V3, orderBy="title")["location"] == "orderBy"


def test_a_page_has_100_items_by_default_and_at_most_1000(server: DriveServer) -> None:
    folder = server.folder("d")
    server.fill(folder, 1200, prefix="x", size=3)
    q = f"'{folder}' in parents"
    assert len(ask_json(server, V3, q=q)["files"]) == 100
    assert len(ask_json(server, V3, q=q, pageSize=5000)["files"]) == 1000
    assert ask_json(server, V3, q=q, pageSize=0)["status"] == 400
    assert server.get("d/x001199") == b"x00"


# Fields


def test_fields_are_those_of_the_discovery_document() -> None:
    documents = Path(discovery.__file__).parent / "discovery_cache" / "documents"
    schema = json.loads((documents / "drive.v3.json").read_text())["schemas"]["File"]
    assert set(FIELDS) == schema["properties"].keys()


def test_all_fields_of_all_kinds_of_items_can_be_read(server: DriveServer) -> None:
    document, drive_id = server.document("doc", "text"), server.share_drive("team")
    target = server.put("d/f", b"xyz")
    server.shortcut("s", target)
    server.edit(target, capabilities={"canDownload": False}, resourceKey=None, description="d")
    server.put("t", b"", parent=drive_id)
    rows = ask_json(server, V3, fields="*", **BOTH)["files"]  # each is checked, see `judge`
    assert {row["name"] for row in rows} == {"doc", "d", "f", "s", "t"}
    item = ask_json(server, f"{V3}/{target}", fields="*")
    assert (item["name"], item["size"], item["trashed"], item["description"]) == ("f", "3", False, "d")
    assert item["parents"] == [server.folder("d")]
    assert ask_json(server, f"{V3}/{target}").keys() == {"kind", "id", "name", "mimeType"}
    assert ask(server, f"{V3}/{document}/export?mimeType=text/html")[2] == b"text"
    drives = ask_json(server, "/drive/v3/drives")["drives"]
    assert drives == [{"kind": "drive#drive", "id": drive_id, "name": "team"}]
    assert ask_json(server, "/drive/v3/about", fields="user")["user"]["displayName"] == "Sim User"
    assert ask_json(server, "/drive/v3/about")["location"] == "fields"


def test_listings_changes_and_lookups_show_the_same_fields(server: DriveServer) -> None:
    drive_id, first = server.share_drive("team"), start(server)
    target = server.put("d/f", b"xyz")
    server.edit(target, capabilities={"canDownload": False})
    shortcut, theirs = server.shortcut("s", target), server.put("t", b"", parent=drive_id)
    server.trash(theirs)
    fields = "id,parents,trashed,size,shortcutDetails,capabilities(canDownload),driveId"
    folder, root = server.folder("d"), server.item("root")["id"]
    can, cannot = {"canDownload": True}, {"canDownload": False}
    details = {"targetId": target, "targetMimeType": "application/octet-stream"}
    expected: list[dict[str, Any]] = [
        {"id": folder, "parents": [root], "trashed": False, "capabilities": can},
        {"id": target, "parents": [folder], "trashed": False, "size": "3", "capabilities": cannot},
        {"id": shortcut, "parents": [root], "trashed": False, "shortcutDetails": details, "capabilities": can},
        {"id": theirs, "parents": [drive_id], "trashed": True, "size": "0", "capabilities": can}
        | {"driveId": drive_id},
    ]  # fmt: skip
    assert ask_json(server, V3, fields=f"files({fields})", **BOTH) == {"files": expected}
    page = changes(server, first, fields=f"changes(removed,file({fields}))", **BOTH)
    assert [row["removed"] for row in page["changes"]] == [False] * 4
    assert sorted((row["file"] for row in page["changes"]), key=str) == sorted(expected, key=str)
    for item in expected:
        assert ask_json(server, f"{V3}/{item['id']}", fields=fields, supportsAllDrives="true") == item


def test_a_fields_mask_keeps_what_it_names(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    assert ask_json(server, V3, fields="kind") == {"kind": "drive#fileList"}
    assert ask_json(server, V3, fields="files(id, name)") == {"files": [{"id": item_id, "name": "f"}]}
    for wrong in ("files(title)", "files(id", "files(", "id)", "a/b"):
        error = ask_json(server, V3, fields=wrong)
        assert (error["status"], error["reason"]) == (400, "invalidParameter")
    mask = parse_mask("a(c,d(e)),f")
    assert mask == {"a": {"c": {}, "d": {"e": {}}}, "f": {}}
    assert project({"a": [{"b": 1, "d": {"e": 2, "x": 3}}], "g": 4}, mask) == {"a": [{"d": {"e": 2}}]}


# Items


def test_folders_shortcuts_and_documents_have_no_content(server: DriveServer) -> None:
    target = server.put("f", b"x", mimeType="text/x")
    server.edit(target, resourceKey="rk")
    shortcut, dangling = server.shortcut("s", target), server.shortcut("dangling", "nowhere")
    details = {"targetId": target, "targetMimeType": "text/x", "targetResourceKey": "rk"}
    assert server.item(shortcut)["shortcutDetails"] == details
    assert server.item(dangling)["shortcutDetails"] == {"targetId": "nowhere"}
    for item_id in (shortcut, server.document("doc", "text"), server.folder("d")):
        assert not {"size", "md5Checksum", "headRevisionId"} & server.item(item_id).keys()
        error = ask_json(server, f"{V3}/{item_id}", alt="media")
        assert (error["status"], error["reason"]) == (403, "fileNotDownloadable")


def test_an_export_ignores_ranges_and_has_a_limit(server: DriveServer) -> None:
    document = server.document("doc", "text")
    at = f"{V3}/{document}/export"
    status, headers, body = ask(server, f"{at}?mimeType=text/html", range="bytes=0-1")
    assert (status, body, headers["Content-Type"]) == (200, b"text", "text/html")
    assert ask(server, f"{at}?mimeType=text/plain")[2] == "\ufefftext".encode()
    assert ask_json(server, at, mimeType="image/png")["status"] == 400
    big, blob = server.document("big", "x" * (10 << 20) + "x"), server.put("f", b"x")
    for id, reason in ((big, "exportSizeLimitExceeded"), (blob, "fileNotExportable")):
        assert ask_json(server, f"{V3}/{id}/export", mimeType="text/plain")["reason"] == reason


def test_duplicates_are_two_items(server: DriveServer) -> None:
    first, second = server.put("f", b"1"), server.put("f", b"2", new=True)
    assert [item["id"] for item in server.find("f")] == [second, first]
    assert server.put("f", b"3") == second
    assert server.get("f") == b"3"
    server.trash(second)
    assert server.get("f") == b"1"
    assert len(server.find("f")) == 2


def test_children_of_a_trashed_folder_are_trashed(server: DriveServer) -> None:
    item_id, folder = server.put("d/sub/f", b"x"), server.folder("d")
    server.trash(folder)
    assert server.item(item_id)["trashed"] is True
    assert names(server, "trashed=false") == []
    assert names(server, "trashed=true") == ["d", "f", "sub"]
    assert server.find("d/sub/f") == []
    server.trash(folder, False)
    assert server.get("d/sub/f") == b"x"


def test_an_item_may_be_in_two_folders(server: DriveServer) -> None:
    a, b = server.folder("a"), server.folder("b")
    item_id = server.put("a/f", b"x")
    server.edit(item_id, parents=[a, b])
    assert (server.get("a/f"), server.get("b/f")) == (b"x", b"x")
    assert names(server, f"'{a}' in parents or '{b}' in parents") == ["f"]
    server.trash(a)
    assert server.item(item_id)["trashed"] is False
    server.remove(a)
    assert server.item(item_id)["parents"] == [b]


def test_items_of_a_shared_drive_are_visible_only_on_request(server: DriveServer) -> None:
    drive_id = server.share_drive("team")
    item_id = server.put("d/f", b"x", parent=drive_id)
    folder = server.folder("d", parent=drive_id)
    assert server.get("d/f", parent=drive_id) == b"x"
    assert names(server, "trashed=false") == []
    assert names(server, "trashed=false", **BOTH) == ["d", "f"]
    assert names(server, f"'{folder}' in parents", **BOTH, corpora="drive", driveId=drive_id) == ["f"]
    assert ask_json(server, V3, q=f"'{folder}' in parents")["status"] == 404
    assert ask_json(server, V3, corpora="drive", driveId=drive_id)["status"] == 400
    assert ask_json(server, V3, corpora="drive", driveId="x", **BOTH)["status"] == 404
    for query in ({}, {"alt": "media"}):
        assert ask_json(server, f"{V3}/{item_id}", **query)["reason"] == "notFound"
        assert ask(server, f"{V3}/{item_id}?{urlencode({**query, 'supportsAllDrives': 'true'})}")[0] == 200
    mine = server.put("mine/g", b"x")
    server.edit(server.folder("mine"), parents=[drive_id])  # takes its children along
    assert server.item(mine)["driveId"] == drive_id


def test_a_non_member_sees_shared_items_of_a_shared_drive_only(server: DriveServer) -> None:
    drive_id = server.share_drive("theirs", member=False)
    item_id = server.put("shared/f", b"x", parent=drive_id)
    hidden = server.put("hidden", b"y", parent=drive_id)
    folder = server.folder("shared", parent=drive_id)
    assert ask_json(server, f"{V3}/{folder}", **BOTH)["reason"] == "notFound"
    server.share(folder)
    shown = ask_json(server, f"{V3}/{folder}", fields="*", **BOTH)
    assert (shown["driveId"], "parents" in shown) == (drive_id, False)
    assert ask_json(server, f"{V3}/{item_id}", fields="parents", **BOTH) == {"parents": [folder]}
    for id in (hidden, drive_id):
        assert ask_json(server, f"{V3}/{id}", **BOTH)["reason"] == "notFound"
    assert names(server, "trashed=false", **BOTH) == ["f", "shared"]
    assert names(server, "sharedWithMe=true", **BOTH) == ["shared"]
    assert names(server, f"'{folder}' in parents", **BOTH) == ["f"]
    assert ask_json(server, "/drive/v3/drives")["drives"] == []
    for address, query in ((V3, {"corpora": "drive"}), (CHANGES, {"pageToken": "1"})):
        refused = ask_json(server, address, **BOTH, **query, driveId=drive_id)
        assert (refused["status"], refused["reason"], refused["location"]) == (404, "notFound", "driveId")
    assert dict(seen(server, "1", **BOTH)).keys() == {item_id, folder}


def test_a_resource_key_gives_access_to_an_item(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    server.edit(item_id, resourceKey="rk")
    for key, status in (("", 404), (f"{item_id}/no", 404), (f"a/b,{item_id}/rk", 200)):
        assert ask(server, f"{V3}/{item_id}?alt=media", x_goog_drive_resource_keys=key)[0] == status
    assert ask_json(server, V3)["files"][0]["resourceKey"] == "rk"


@pytest.mark.parametrize("revision", [False, True])
def test_abuse_must_be_acknowledged_for_flagged_files_and_for_no_others(
    server: DriveServer, revision: bool
) -> None:
    item_id = server.put("f", b"x")
    at = f"{V3}/{item_id}" + (f"/revisions/{server.item(item_id)['headRevisionId']}" if revision else "")

    def refusal(**more: str) -> tuple[str, str | None]:
        error = ask_json(server, at, alt="media", **more)
        assert error["status"] == 403
        return error["reason"], error.get("location")

    acknowledged, where = {"acknowledgeAbuse": "true"}, "acknowledgeAbuse"
    assert refusal(**acknowledged) == ("invalidAbuseAcknowledgment", where)
    assert ask(server, f"{at}?alt=media&acknowledgeAbuse=false")[2] == b"x"
    server.edit(item_id, abusive=True)
    assert refusal() == ("cannotDownloadAbusiveFile", None)
    assert ask(server, f"{at}?alt=media&acknowledgeAbuse=true")[2] == b"x"
    error = ask_json(server, f"{V3}/{item_id}", acknowledgeAbuse="true")  # only in downloads
    assert (error["status"], error["reason"]) == (403, "invalidAbuseAcknowledgment")
    server.share(item_id)  # now it is somebody else's
    assert refusal(**acknowledged) == ("cannotDownloadAbusiveFile", where)


def test_edit_removes_a_field_set_to_none(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    server.edit(item_id, md5Checksum=None, description="d", name="g")
    item = server.item(item_id)
    assert (item.get("md5Checksum"), item["description"], item["name"]) == (None, "d", "g")
    assert server.get("g") == b"x"


def test_items_shared_by_others_are_in_no_folder(server: DriveServer) -> None:
    item_id, folder = server.shared_with_me("f", b"x"), server.shared_with_me("d")
    server.put("in", b"y", parent=folder)
    item = server.item(item_id)
    assert (item.get("parents"), item["ownedByMe"], item["shared"]) == (None, False, True)
    assert names(server, "'root' in parents") == []
    assert names(server, f"'{folder}' in parents") == ["in"]
    assert ask(server, f"{V3}/{item_id}?alt=media")[2] == b"x"


# Bytes


def test_ranges(server: DriveServer) -> None:
    item_id = server.put("f", b"0123456789", mimeType="text/x")
    at = f"{V3}/{item_id}?alt=media"
    status, headers, data = ask(server, at, range="bytes=7-")
    assert (status, headers["Content-Range"], data) == (206, "bytes 7-9/10", b"789")
    assert (headers["Content-Type"], ask(server, at)[2]) == ("text/x", b"0123456789")
    status, headers, data = ask(server, at, range="bytes=10-")
    assert (status, headers["Content-Range"]) == (416, "bytes */10")
    assert json.loads(data)["error"]["errors"][0]["reason"] == "requestedRangeNotSatisfiable"
    assert [(entry.kind, entry.key) for entry in server.requests] == [("media", item_id)] * 3


def test_every_range_of_an_empty_file_is_refused(server: DriveServer) -> None:
    item_id = server.put("f", b"")
    for given in ("bytes=0-104857599", "bytes=0-", "bytes=-1"):
        status, headers, _ = ask(server, f"{V3}/{item_id}?alt=media", range=given)
        assert (status, headers["Content-Range"]) == (416, "bytes */0")
    assert ask(server, f"{V3}/{item_id}?alt=media")[::2] == (200, b"")


def test_ranges_of_a_revision(server: DriveServer) -> None:
    drive_id = server.share_drive("team")  # the method has no parameter supportsAllDrives, and needs none
    item_id = server.put("f", b"0123456789", parent=drive_id)
    at = f"{V3}/{item_id}/revisions/{server.item(item_id)['headRevisionId']}?alt=media"
    server.put("f", b"other", parent=drive_id)
    status, headers, data = ask(server, at, range="bytes=2-4")
    assert (status, headers["Content-Range"], data) == (206, "bytes 2-4/10", b"234")
    assert server.count("media", item_id) == 1
    assert ask_json(server, f"{V3}/{item_id}/revisions/x", alt="media")["location"] == "revisionId"
    server.quota(Quota(file_bytes=5.0))
    ask(server, at, range="bytes=0-4")
    assert ask_json(server, at)["reason"] == "downloadQuotaExceeded"


def test_a_reply_is_of_the_revision_at_its_start() -> None:
    with DriveServer(Profile(stream_rate=1e6), time_scale=20) as server:
        item_id = server.put("f", b"a" * 300_000)
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=60)
        connection.request("GET", f"{V3}/{item_id}?alt=media")
        reply = connection.getresponse()
        first = reply.read(10)
        server.put("f", b"b" * 300_000)
        assert set(first + reply.read()) == {ord("a")}
        connection.close()
        assert ask(server, f"{V3}/{item_id}?alt=media", range="bytes=0-0")[2] == b"b"


def test_json_is_compressed_for_clients_that_request_gzip_twice(server: DriveServer) -> None:
    at = f"{V3}/{server.put('f', b'x' * 1000)}"
    both = {"accept_encoding": "gzip, deflate", "user_agent": "me (gzip)"}
    for target, status in ((at, 200), (V3, 200), (f"{V3}/nothing", 404)):
        got, headers, text = ask(server, target, **both)
        assert (got, headers["Content-Encoding"]) == (status, "gzip")
        assert json.loads(gzip.decompress(text)) == json.loads(ask(server, target)[2])
    for headers in ({"accept_encoding": "gzip"}, {"user_agent": "me (gzip)"}):
        assert ask(server, at, **headers)[1]["Content-Encoding"] is None
    stored = server.put("j", b"x" * 1000, mimeType="application/json; charset=UTF-8")
    assert ask(server, f"{V3}/{stored}?alt=media", **both)[2] == b"x" * 1000


# Resumable uploads


def begin(server: DriveServer, body: Any, item_id: str = "") -> str:
    """Return the path of a new resumable upload."""
    at = f"{UPLOAD}{'/' if item_id else ''}{item_id}?uploadType=resumable"
    data = json.dumps(body).encode()
    status, headers, _ = ask(server, at, "PATCH" if item_id else "POST", data, x_upload_content_type="x/y")
    assert status == 200
    return str(headers["Location"]).removeprefix(server.endpoint_url)


def test_a_resumable_upload_reports_the_bytes_received(server: DriveServer) -> None:
    at, data = begin(server, {"name": "f"}), os.urandom(2 * CHUNK + 10)
    size = len(data)
    assert ask(server, at, "PUT", b"", content_range=f"bytes */{size}")[:1] == (308,)
    first = f"bytes 0-{CHUNK - 1}/{size}"
    status, headers, _ = ask(server, at, "PUT", data[:CHUNK], content_range=first)
    assert (status, headers["Range"]) == (308, f"bytes=0-{CHUNK - 1}")
    odd = f"bytes {CHUNK}-{CHUNK + 9}/{size}"
    assert ask(server, at, "PUT", data[CHUNK : CHUNK + 10], content_range=odd)[0] == 400
    gap = f"bytes {2 * CHUNK}-{size - 1}/{size}"
    assert ask(server, at, "PUT", data[2 * CHUNK :], content_range=gap)[1]["Range"] == headers["Range"]
    for wrong in ("bytes x", "bytes 0-5/3", "bytes 0-1/2"):
        assert ask(server, at, "PUT", b"abc", content_range=wrong)[0] == 400
    server.accept_only(100)
    rest = f"bytes {CHUNK}-{size - 1}/{size}"
    status, headers, _ = ask(server, at, "PUT", data[CHUNK:], content_range=rest)
    assert (status, headers["Range"]) == (308, f"bytes=0-{CHUNK + 99}")
    assert server.find("f") == []
    left = f"bytes {CHUNK + 100}-{size - 1}/{size}"
    status, _, text = ask(server, at, "PUT", data[CHUNK + 100 :], content_range=left)
    made = json.loads(text)
    assert (status, made["mimeType"], server.get("f")) == (200, "x/y", data)
    again = ask(server, at, "PUT", b"", content_range=f"bytes */{size}")
    assert (again[0], json.loads(again[2])["id"]) == (200, made["id"])
    assert server.count("upload", made["id"]) == len(server.requests)


def test_a_cancelled_upload_is_not_found(server: DriveServer) -> None:
    at = begin(server, {"name": "f"})
    assert ask(server, at, "DELETE")[0] == 499
    assert ask(server, at, "PUT", b"x")[0] == 404
    assert server.find("f") == []


def test_an_upload_replaces_the_content_and_keeps_the_id(server: DriveServer) -> None:
    item_id = server.put("f", b"old", mimeType="text/x")
    before = server.item(item_id)
    ask(server, begin(server, {}, item_id), "PUT", b"new")
    [after] = server.find("f")
    assert (server.get("f"), after["md5Checksum"]) == (b"new", "22af645d1859cb5ca6da0c484f1f37ea")
    assert after["headRevisionId"] != before["headRevisionId"]
    assert after["id"] == item_id


# Budgets, errors, tokens


def test_a_rate_limit_allows_its_rate_and_no_more() -> None:
    meter = Meter(Quota(creates_per_s=3.0))
    assert [meter.create("u", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [meter.create("u", at) for at in (0.4, 0.4, 0.7)] == [True, False, True]
    assert [meter.create("u", 100.0) for _ in range(4)] == [True, True, True, False]
    assert meter.create("another", 100.0)
    assert all(Meter(Quota()).create("u", 0.0) for _ in range(1000))


def test_a_quota_in_units_is_per_user_and_per_project() -> None:
    meter = Meter(QUOTAS["units"])  # 325,000 units a minute for a user, 1,000,000 for a project

    def downloads(user: str, at: float) -> int:
        return sum(meter.charge(user, "p", 200, at) is None for _ in range(2000))

    assert [downloads(user, 0.0) for user in "abcd"] == [1625, 1625, 1625, 125]
    assert meter.charge("a", "p", 5, 59.0) == "user"
    assert meter.charge("d", "p", 200, 59.0) == "project"
    assert meter.charge("d", "another", 200, 59.0) is None
    assert downloads("a", 61.0) == 1625


def test_a_quota_in_requests_is_per_user_and_per_project() -> None:
    meter = Meter(QUOTAS["requests"])  # 12,000 a minute
    assert {meter.charge("a", "p", 200, 0.0) for _ in range(12_000)} == {None}
    assert meter.charge("a", "p", 200, 0.0) == "user"
    assert meter.charge("b", "p", 5, 0.0) == "project"
    assert meter.charge("b", "p", 5, 61.0) is None


@pytest.mark.parametrize(
    ("minute", "refused"),
    [("sliding", [False, True, True, False, True]), ("fixed", [False, True, False, True, True])],
)
def test_a_minute_is_any_60_seconds_or_one_of_the_clock(minute: Any, refused: list[bool]) -> None:
    meter = Meter(Quota(requests_per_user=1, minute=minute))
    times = [50.0, 59.0, 61.0, 111.0, 119.0]
    assert [meter.charge("a", "p", 5, at) == "user" for at in times] == refused


def test_profiles_have_the_published_quotas() -> None:
    assert PROFILES["drive-typical"].quota == QUOTAS["requests"]
    assert PROFILES["drive-bad"].quota == QUOTAS["units"]
    assert PROFILES["gcs-region"].quota == PROFILES["off"].quota == Quota()
    with pytest.raises(ValueError, match="known: none, units, requests"):
        DriveServer(quota="old")


def test_the_log_contains_the_cost_of_each_request(server: DriveServer) -> None:
    item_id, document = server.put("f", b"x"), server.document("d", "text")
    at, costs = f"{V3}/{item_id}", list[int]()
    begun = begin(server, {"name": "up"})
    for method, target, body in [
        ("GET", at, None), ("GET", V3, None), ("GET", f"{at}?alt=media", None),
        ("GET", f"{V3}/{document}/export?mimeType=text/html", None), ("PATCH", at, b"{}"), ("PUT", begun, b"x"),
        ("GET", "/drive/v3/changes", None), ("GET", "/drive/v3/changes/startPageToken", None),
        ("POST", f"{at}/copy", b"{}"), ("GET", "/drive/v3/about", None), ("GET", f"{V3}/nothing", None),
        ("POST", "/token", b"grant_type=refresh_token&refresh_token=r"),
    ]:  # fmt: skip
        ask(server, target, method, body)
        costs.append(server.requests[-1].units)
    assert costs == [5, 100, 200, 200, 50, 5, 100, 5, 50, 5, 5, 0]
    assert server.requests[0].units == 50


@pytest.mark.parametrize(("status", "reason"), [(403, "userRateLimitExceeded"), (429, "rateLimitExceeded")])
def test_the_quota_of_a_user_is_shared_by_all_tokens(status: int, reason: str) -> None:
    quota = Quota(units_per_user=200, units_per_project=1e6, status=status)
    with DriveServer(quota=quota) as server:
        server.account("c", "another")
        at = f"{V3}/{server.put('f', b'x')}?alt=media"
        assert ask(server, at, authorization="Bearer a")[0] == 200
        got, _, text = ask(server, at, authorization="Bearer b")
        error = json.loads(text)["error"]
        assert (got, error["code"], error["errors"][0]["reason"]) == (status, status, reason)
        assert error["errors"][0]["domain"] == "usageLimits"
        assert ask(server, at, authorization="Bearer c")[0] == 200
        assert [entry.units for entry in server.requests] == [200, 0, 200]
        server.quota(Quota(units_per_project=200))
        assert ask(server, at, authorization="Bearer c")[0] == 200
        status, _, text = ask(server, at, authorization="Bearer a")
        assert (status, json.loads(text)["error"]["errors"][0]["reason"]) == (403, "rateLimitExceeded")
        assert ask(server, at, x_goog_user_project="other")[0] == 200


def test_a_quota_uses_simulated_time() -> None:
    with DriveServer(quota=Quota(requests_per_user=1.0), time_scale=1e6) as server:
        # A minute takes 60 microseconds, and no request over a socket is faster.
        assert {ask(server, V3)[0] for _ in range(5)} == {200}


def test_too_many_creates_are_refused_and_create_nothing() -> None:
    with DriveServer(quota=Quota(creates_per_s=1e-6)) as server:
        body = {"name": "d", "mimeType": FOLDER}
        replies = [ask_json(server, V3, "POST", body) for _ in range(3)]
        assert [reply.get("reason") for reply in replies] == [None, *["userRateLimitExceeded"] * 2]
        assert len(server.find("d")) == 1
        at = "/upload/drive/v3/files?uploadType=resumable"
        assert ask(server, at, "POST", b"{}")[0] == 403
        item_id = server.put("f", b"x")
        assert ask_json(server, f"{V3}/{item_id}/copy", "POST", {})["status"] == 403
        assert ask_json(server, f"{V3}/{item_id}", "PATCH", {"name": "g"})["name"] == "g"


def test_requested_and_not_sent_bytes_count_for_the_quota_of_a_file() -> None:
    with DriveServer(quota=Quota(file_bytes=100.0)) as server:
        ids = [server.put(name, b"x" * 60) for name in "abc"]

        def get(item_id: str, given: str = "") -> Any:
            headers = {"range": given} if given else {}
            status, _, text = ask(server, f"{V3}/{item_id}?alt=media", **headers)
            return status if status < 400 else json.loads(text)["error"]["errors"][0]["reason"]

        assert [get(ids[0], "bytes=59-"), get(ids[0], "bytes=0-39")] == [206, 206]  # 60 and 40
        assert get(ids[0], "bytes=0-0") == "downloadQuotaExceeded"
        assert [get(ids[1]), get(ids[1], "bytes=-1"), get(ids[1], "bytes=0-38")] == [200, 206, 206]
        gets = [get(ids[2], given) for given in ("", "bytes=0-", "bytes=0-9")]
        assert gets == [200, "downloadQuotaExceeded", 206]


def test_errors_of_the_profile_are_those_of_drive() -> None:
    with DriveServer(Profile(error_rate=1.0)) as server:
        at = f"{V3}/{server.put('f', b'x')}"
        replies = [ask(server, at) for _ in range(60)]
    pages = [text for status, _, text in replies if status == 502]
    assert pages
    assert all(page.startswith(b"<!DOCTYPE html>") for page in pages)
    errors = [
        (status, json.loads(text)["error"]["errors"][0]) for status, _, text in replies if status != 502
    ]
    assert {(status, error["reason"]) for status, error in errors} == {
        (403, "userRateLimitExceeded"),
        (403, "rateLimitExceeded"),
        (429, "rateLimitExceeded"),
        (500, "backendError"),
        (503, "backendError"),
    }


def test_errors_and_stalls_of_a_profile_have_its_rate_and_clock() -> None:
    profile = dataclasses.replace(PROFILES["drive-bad"], quota=Quota(), stall_rate=0.5, error_rate=0.25)
    with DriveServer(profile, seed=5, time_scale=5e3) as server:
        at = f"{V3}/{server.put('f', b'x')}?alt=media"
        data = [body for status, _, body in (ask(server, at) for _ in range(100)) if status == 200]
        log = server.requests
    assert set(data) == {b"x"}
    assert len(data) == pytest.approx(75, abs=15)
    stalled = [entry for entry in log if entry.stalled]
    assert len(stalled) == pytest.approx(50, abs=17)
    assert all(entry.ended_s and entry.ended_s - entry.started_s >= 30 for entry in stalled)
    assert (PROFILES["drive-bad"].error_rate, PROFILES["drive-bad"].stall_rate) == (0.02, 0.005)
    assert (PROFILES["drive-typical"].error_rate, PROFILES["drive-typical"].stall_rate) == (0.002, 0.0002)


def test_a_forbidden_item_is_refused(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    server.forbid(item_id)
    assert ask_json(server, f"{V3}/{item_id}")["reason"] == "insufficientFilePermissions"
    server.forbid(item_id, False)
    assert ask(server, f"{V3}/{item_id}")[0] == 200


def test_tokens_are_issued_expire_and_are_refused(server: DriveServer) -> None:
    from google.auth.exceptions import RefreshError
    from google.auth.transport.requests import Request
    from google.oauth2.credentials import Credentials as UserCredentials

    server.require_token("listed")
    assert ask(server, V3, authorization="Bearer other")[0] == 401
    assert ask(server, V3, authorization="Bearer listed")[0] == 200
    uri = server.endpoint_url + "/token"
    credentials = UserCredentials(None, refresh_token="r", token_uri=uri, client_id="i", client_secret="s")
    credentials.refresh(Request())
    issued = {"authorization": f"Bearer {credentials.token}"}
    assert ask(server, V3, **issued)[0] == 200
    server.expire_tokens()
    status, headers, text = ask(server, V3, **issued)
    assert (status, headers["WWW-Authenticate"][:6]) == (401, "Bearer")
    error = json.loads(text)["error"]["errors"][0]
    assert (error["reason"], error["location"]) == ("authError", "Authorization")
    credentials.refresh(Request())
    assert ask(server, V3, authorization=f"Bearer {credentials.token}")[0] == 200
    server.refuse_tokens()
    with pytest.raises(RefreshError, match="invalid_grant"):
        credentials.refresh(Request())
    assert server.count("token") == 3
    assert ask(server, "/token", "POST", b"grant_type=x")[0] == 400


def test_a_service_account_gets_a_token(server: DriveServer) -> None:
    form = urlencode({"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": "a.b.c"})
    status, _, text = ask(server, "/token", "POST", form.encode())
    reply = json.loads(text)
    assert (status, reply["token_type"], reply["expires_in"]) == (200, "Bearer", 3599)
    server.require_token()
    assert ask(server, V3, authorization=f"Bearer {reply['access_token']}")[0] == 200


def test_a_listing_costs_its_base_and_its_items() -> None:
    with DriveServer(Profile(listing=Delay(1.0), list_item_s=0.5), time_scale=100) as server:
        server.fill("root", 3)
        ask(server, V3)
        [entry] = server.requests
        assert entry.ended_s is not None
        assert entry.ended_s - entry.started_s >= 2.5


def test_unknown_addresses_are_not_found(server: DriveServer) -> None:
    for path in ("/drive/v4/files", "/drive/v3/nothing", "/other", "/upload/drive/v3/about?uploadType=media"):
        assert ask(server, path, "POST", b"")[0] == 404
    assert ask(server, "/upload/drive/v3/files?uploadType=odd", "POST", b"")[0] == 400
    assert ask(server, V3, "POST", b"{")[0] == 400


# Ways to run


def test_a_folder_on_disk_is_served_as_my_drive(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f.txt").write_bytes(b"from disk")
    with DriveServer(folder=tmp_path) as server:
        [item] = server.find("d/f.txt")
        assert (item["mimeType"], item["size"]) == ("text/plain", "9")
        assert item["md5Checksum"] == "a7974a806f69abbefd10af6fedcef207"
        assert ask(server, f"{V3}/{item['id']}?alt=media", range="bytes=5-6")[2] == b"di"
        assert server.put("d/f.txt", b"changed") == item["id"]
        assert server.get("d/f.txt") == b"changed"
        old = ask(server, f"{V3}/{item['id']}/revisions/{item['headRevisionId']}?alt=media")
        assert old[2] == b"from disk"
    assert (tmp_path / "d" / "f.txt").read_bytes() == b"from disk"


def test_a_child_process_serves_and_accepts_commands(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"disk")
    with DriveServer("drive-typical", seed=3, time_scale=100, folder=tmp_path, process=True) as server:
        assert server.get("f") == b"disk"
        name = "ü/'\n"
        item_id = server.add(name, b"\x00\xff")
        assert ask(server, f"{V3}/{item_id}?alt=media")[2] == b"\x00\xff"
        assert [entry.key for entry in server.requests] == [item_id]
        server.put("a/b", b"")
        assert (server.get("a/b"), len(server.find("a/b"))) == (b"", 1)
        server.edit(item_id, trashed=True)
        server.fill(server.folder("d"), 3)
        assert server.item(item_id)["trashed"] is True
        server.remove(item_id)
        with pytest.raises(RuntimeError, match="item failed"):
            server.item(item_id)


def test_the_command_serves_a_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"disk")
    command = [sys.executable, "-m", "cachedfs.sim", "drive", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        netloc = urlsplit(process.stdout.readline().strip()).netloc
        connection = http.client.HTTPConnection(netloc, timeout=60)
        connection.request("GET", V3 + "?fields=files(size)")
        assert json.load(connection.getresponse())["files"][0]["size"] == "4"
        connection.close()
        process.terminate()
        assert process.wait(120) == 0
