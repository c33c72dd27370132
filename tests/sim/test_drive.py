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
from urllib.parse import quote, urlencode, urlsplit

import pytest

from cachedfs.sim import DriveServer, Fault, Profile, Quota
from cachedfs.sim.drive.query import parse_mask, parse_query, project
from cachedfs.sim.drive.show import V2_FIELDS, V3_FIELDS
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


def titles(server: DriveServer, q: str, **query: Any) -> list[str]:
    reply = ask_json(server, V2, q=q, **query)
    return sorted(item["title"] for item in reply["items"])


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
def v2(server: DriveServer) -> Any:
    with build(server, "v2") as service:
        yield service


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
def drive(auth: Any) -> Any:
    return pytest.importorskip("pydrive2.drive").GoogleDrive(auth)


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


# PyDrive2: files


def test_pydrive2_lists_a_folder(server: DriveServer, drive: Any) -> None:
    folder = server.folder("d")
    server.put("d/a.txt", b"1")
    server.put("d/b.txt", b"22")
    server.folder("d/sub")
    found = drive.ListFile({"q": f"'{folder}' in parents and trashed=false"}).GetList()
    assert {f["title"]: f.get("fileSize") for f in found} == {"a.txt": "1", "b.txt": "2", "sub": None}
    assert {f["parents"][0]["id"] for f in found} == {folder}
    assert server.count("list", folder) == 1


def test_pydrive2_uploads_and_reads_back(server: DriveServer, drive: Any) -> None:
    made = drive.CreateFile({"title": "hello.txt"})
    made.SetContentString("grüße")
    made.Upload()
    assert server.get("hello.txt") == "grüße".encode()
    again = drive.CreateFile({"id": made["id"]})
    assert again.GetContentString() == "grüße"
    assert b"".join(again.GetContentIOBuffer(chunksize=3)) == "grüße".encode()
    again.FetchMetadata()
    assert (again["mimeType"], again["fileSize"]) == ("text/plain", "7")
    revision = again["headRevisionId"]
    again.SetContentString("new")
    again.Upload()
    assert again["headRevisionId"] != revision
    assert server.get("hello.txt") == b"new"
    assert len(again.GetRevisions()) == 2
    assert again.GetPermissions()[0]["role"] == "owner"


def test_pydrive2_renames_copies_trashes_and_deletes(server: DriveServer, drive: Any) -> None:
    file = drive.CreateFile({"id": server.put("a", b"x")})
    file["title"] = "b"
    file.Upload()
    assert server.get("b") == b"x"
    folder = drive.CreateFile({"id": server.folder("d")})
    copy = file.Copy(folder, "c")
    assert (server.get("d/c"), copy["title"]) == (b"x", "c")
    assert file.Copy()["title"] == "Copy of b"
    file.Trash()
    assert server.find("b")[0]["labels"]["trashed"] is True
    file.UnTrash()
    assert server.find("b")[0]["labels"]["trashed"] is False
    file.Delete()
    assert server.find("b") == []


def test_pydrive2_exports_a_native_document(server: DriveServer, drive: Any) -> None:
    document = drive.CreateFile({"id": server.document("doc", "text")})
    assert document.GetContentString(mimetype="text/plain") == "\ufefftext"
    again = drive.CreateFile({"id": document["id"]})
    assert again.GetContentString(mimetype="text/plain", remove_bom=True) == "text"
    assert b"".join(document.GetContentIOBuffer(mimetype="text/html")) == b"text"


def test_pydrive2_sends_resource_keys(server: DriveServer, drive: Any) -> None:
    item_id = server.put("f", b"x")
    server.edit(item_id, resourceKey="rk")
    [file] = drive.ListFile({"q": "title='f'"}).GetList()
    assert b"".join(file.GetContentIOBuffer()) == b"x"
    errors = pytest.importorskip("pydrive2.files")
    with pytest.raises(errors.ApiRequestError, match="File not found"):
        drive.CreateFile({"id": item_id}).FetchMetadata()


def test_pydrive2_sees_about_and_errors(server: DriveServer, drive: Any) -> None:
    errors = pytest.importorskip("pydrive2.files")
    assert drive.GetAbout()["user"]["emailAddress"] == "me@example.com"
    with pytest.raises(errors.ApiRequestError) as caught:
        drive.CreateFile({"id": "nothing"}).FetchMetadata()
    assert (caught.value.error["code"], caught.value.GetField("reason")) == (404, "notFound")


# PyDrive2: its filesystem


def test_pydrive2_filesystem_lists_and_finds(server: DriveServer, pyfs: Any) -> None:
    server.put("d/a.txt", b"1")
    server.put("d/sub/b.txt", b"22")
    assert sorted(pyfs.ls("root/d")) == ["root/d/a.txt", "root/d/sub/"]
    assert sorted(pyfs.find("root/d")) == ["root/d/a.txt", "root/d/sub/b.txt"]
    info = pyfs.info("root/d/a.txt")
    assert (info["size"], info["type"]) == (1, "file")
    assert info["checksum"] == "c4ca4238a0b923820dcc509a6f75849b"
    with pytest.raises(FileNotFoundError):
        pyfs.info("root/d/A.txt")


def test_pydrive2_filesystem_reads_and_writes(server: DriveServer, pyfs: Any) -> None:
    data = os.urandom(300_000)
    server.folder("d")
    with pyfs.open("root/d/new", "wb") as f:
        f.write(data)
    assert server.get("d/new") == data
    with pyfs.open("root/d/new", "rb") as f:
        assert f.read() == data
    pyfs.cp_file("root/d/new", "root/d/copy")
    assert server.get("d/copy") == data
    pyfs.mv("root/d/copy", "root/moved")
    assert (server.get("moved"), server.find("d/copy")) == (data, [])
    pyfs.rm_file("root/d/new")
    assert server.find("d/new")[0]["labels"]["trashed"] is True


def test_pydrive2_filesystem_opens_an_empty_file(server: DriveServer, pyfs: Any) -> None:
    server.put("empty", b"")
    with pyfs.open("root/empty", "rb") as f:
        assert f.read() == b""


def test_pydrive2_filesystem_works_on_a_shared_drive(server: DriveServer, auth: Any) -> None:
    spec = pytest.importorskip("pydrive2.fs.spec")
    drive_id = server.share_drive("team")
    server.put("d/a", b"x", parent=drive_id)
    fs = spec.GDriveFileSystem(drive_id, google_auth=auth, skip_instance_cache=True)
    assert fs.ls(f"{drive_id}/d") == [f"{drive_id}/d/a"]
    assert server.requests[-1].query["driveId"] == drive_id


def test_pydrive2_filesystem_retries_after_the_rate_limit(server: DriveServer, pyfs: Any) -> None:
    server.put("a", b"x")
    server.fail(Fault(kind="list", status=403, reason="userRateLimitExceeded"))
    assert pyfs.ls("root") == ["root/a"]
    assert [entry.status for entry in server.requests] == [403, 200]


# google-api-python-client


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_googleapiclient_lists_in_pages_with_fields(server: DriveServer, version: str) -> None:
    server.fill(server.folder("d"), 25)
    is_v3, found, token = version == "v3", list[str](), None
    key, title = ("files", "name") if is_v3 else ("items", "title")
    with build(server, version) as service:
        folder = server.folder("d")
        while True:
            page = service.files().list(
                q=f"'{folder}' in parents", fields=f"nextPageToken,{key}({title})", pageToken=token,
                **{"pageSize" if is_v3 else "maxResults": 10},
            ).execute()  # fmt: skip
            assert all(row.keys() == {title} for row in page[key])
            found += [row[title] for row in page[key]]
            token = page.get("nextPageToken")
            if not token:
                break
    assert sorted(found) == [f"f{i:06d}" for i in range(25)]
    assert server.count("list", folder) == 3


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_googleapiclient_downloads_in_chunks(server: DriveServer, version: str) -> None:
    from googleapiclient.http import MediaIoBaseDownload

    data, out = os.urandom(10_000), io.BytesIO()
    item_id = server.put("f", data)
    with build(server, version) as service:
        request = service.files().get_media(fileId=item_id)
        downloader, done = MediaIoBaseDownload(out, request, chunksize=3000), False
        while not done:
            _, done = downloader.next_chunk()
    assert out.getvalue() == data
    assert [entry.bytes_sent for entry in server.requests if entry.kind == "media"] == [
        3000,
        3000,
        3000,
        1000,
    ]
    assert {entry.status for entry in server.requests} == {206}


@pytest.mark.parametrize("version", ["v2", "v3"])
@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK + 5])
def test_googleapiclient_uploads_resumably(
    server: DriveServer, version: str, size: int, tmp_path: Path
) -> None:
    from googleapiclient.http import MediaFileUpload, MediaIoBaseUpload

    data = os.urandom(size)
    with build(server, version) as service:
        create = service.files().create if version == "v3" else service.files().insert
        body = {"name" if version == "v3" else "title": "up.bin"}
        media = MediaIoBaseUpload(io.BytesIO(data), "x/y", chunksize=CHUNK, resumable=True)
        made = create(body=body, media_body=media).execute()
        assert (server.get("up.bin"), server.item(made["id"])["mimeType"]) == (data, "x/y")
        server.reset()
        (tmp_path / "up").write_bytes(data[::-1])
        media = MediaFileUpload(str(tmp_path / "up"), "x/y", chunksize=CHUNK, resumable=True)
        service.files().update(fileId=made["id"], body={}, media_body=media).execute()
    assert server.get("up.bin") == data[::-1]
    assert server.count("upload", made["id"]) == 1 + max(1, -(-size // CHUNK))


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_googleapiclient_uploads_in_one_request(server: DriveServer, version: str) -> None:
    from googleapiclient.http import MediaIoBaseUpload

    with build(server, version) as service:
        create = service.files().create if version == "v3" else service.files().insert
        body = {"name" if version == "v3" else "title": "multi"}
        create(body=body, media_body=MediaIoBaseUpload(io.BytesIO(b"a\r\n\r\nb\r\n"), "x/y")).execute()
    assert server.get("multi") == b"a\r\n\r\nb\r\n"
    assert server.count("upload") == 1


def test_googleapiclient_v2_copies_moves_and_sees_revisions(server: DriveServer, v2: Any) -> None:
    from googleapiclient.errors import HttpError

    item_id, folder, old = server.put("f", b"one"), server.folder("d"), server.find("f")[0]
    server.put("f", b"two")
    revisions = v2.revisions().list(fileId=item_id).execute()["items"]
    assert [row["fileSize"] for row in revisions] == ["3", "3"]
    assert revisions[0]["id"] == old["headRevisionId"]
    assert v2.revisions().get(fileId=item_id, revisionId=revisions[0]["id"]).execute()["md5Checksum"]
    assert v2.files().get_media(fileId=item_id, revisionId=revisions[0]["id"]).execute() == b"one"
    assert v2.files().get_media(fileId=item_id).execute() == b"two"
    with build(server, "v3") as v3:
        assert v3.revisions().get_media(fileId=item_id, revisionId=revisions[0]["id"]).execute() == b"one"
    in_v3 = ask(server, f"{V3}/{item_id}?alt=media&revisionId={revisions[0]['id']}")
    assert in_v3[2] == b"two"  # no such parameter, so it is ignored
    copy = v2.files().copy(fileId=item_id, body={"parents": [{"id": folder}]}).execute()
    assert server.get("d/Copy of f") == b"two"
    v2.files().patch(fileId=copy["id"], addParents="root", removeParents=folder).execute()
    assert server.get("Copy of f") == b"two"
    assert server.find("d/Copy of f") == []
    v2.revisions().delete(fileId=item_id, revisionId=revisions[1]["id"]).execute()
    assert server.get("f") == b"one"
    assert server.find("f")[0]["headRevisionId"] == revisions[0]["id"]
    with pytest.raises(HttpError, match="last revision"):
        v2.revisions().delete(fileId=item_id, revisionId=revisions[0]["id"]).execute()


def test_googleapiclient_v2_makes_folders_and_shortcuts(server: DriveServer, v2: Any) -> None:
    folder = v2.files().insert(body={"title": "d", "mimeType": FOLDER}).execute()
    assert not {"fileSize", "md5Checksum", "downloadUrl", "headRevisionId"} & folder.keys()
    body = {"title": "s", "mimeType": SHORTCUT, "shortcutDetails": {"targetId": folder["id"]}}
    made = v2.files().insert(body=body).execute()
    assert made["shortcutDetails"] == {"targetId": folder["id"], "targetMimeType": FOLDER}
    assert "fileSize" not in made
    empty = v2.files().insert(body={"title": "e"}).execute()
    assert (empty["fileSize"], server.get("e")) == ("0", b"")


def test_googleapiclient_follows_changes(server: DriveServer, v2: Any, v3: Any) -> None:
    first = v2.changes().getStartPageToken().execute()["startPageToken"]
    kept, gone = server.put("kept", b"1"), server.put("gone", b"2")
    server.put("kept", b"22")
    server.remove(gone)
    page = v2.changes().list(pageToken=first, maxResults=1).execute()
    assert [(row["fileId"], row["deleted"]) for row in page["items"]] == [(kept, False)]
    assert page["items"][0]["file"]["fileSize"] == "2"
    page = v2.changes().list(pageToken=page["nextPageToken"]).execute()
    [row] = page["items"]
    assert (row["fileId"], row["deleted"], "file" in row) == (gone, True, False)
    after = page["newStartPageToken"]
    assert v3.changes().list(pageToken=after).execute()["changes"] == []
    page = v3.changes().list(pageToken=first, fields="newStartPageToken,changes(fileId,removed)").execute()
    assert page["changes"] == [{"fileId": kept, "removed": False}, {"fileId": gone, "removed": True}]
    assert page["newStartPageToken"] == after


def test_a_removed_or_trashed_folder_is_one_change(server: DriveServer, v2: Any) -> None:
    item_id, folder = server.put("d/f", b"x"), server.folder("d")
    first = v2.changes().getStartPageToken().execute()["startPageToken"]
    v2.files().trash(fileId=folder).execute()
    [row] = v2.changes().list(pageToken=first).execute()["items"]
    assert (row["fileId"], row["file"]["labels"]["trashed"]) == (folder, True)
    v2.files().delete(fileId=folder).execute()
    [row] = v2.changes().list(pageToken=first).execute()["items"]
    assert (row["fileId"], row["deleted"]) == (folder, True)
    assert v2.changes().list(pageToken=first, includeDeleted=False).execute()["items"] == []
    assert ask_json(server, f"{V2}/{item_id}")["status"] == 404
    for wrong in ("x", "0", "1000"):
        assert ask_json(server, "/drive/v2/changes", pageToken=wrong)["location"] == "pageToken"
    assert ask_json(server, "/drive/v3/changes")["reason"] == "required"


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_change_is_in_the_feed_after_a_delay_and_never_lost(server: DriveServer, version: str) -> None:
    with build(server, version) as service:

        def news(token: str) -> tuple[list[str], str]:
            page = service.changes().list(pageToken=token).execute()
            rows = page["changes" if version == "v3" else "items"]
            return [row["fileId"] for row in rows], page["newStartPageToken"]

        seen = server.put("seen", b"1")
        first = service.changes().getStartPageToken().execute()["startPageToken"]
        server.delay_changes(math.inf)
        late, later = server.put("late", b"2"), server.put("later", b"3")
        assert service.changes().getStartPageToken().execute()["startPageToken"] <= first
        assert news(first) == ([], first)
        server.put("late", b"4")
        server.delay_changes(0)
        found, after = news(first)
        assert found == [later, late]  # once each
        server.remove(seen)
        assert news(after)[0] == [seen]


def test_the_delay_of_the_feed_is_in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(Network, "now", lambda _: now[0])
    with DriveServer() as server:
        server.delay_changes(100)
        item_id = server.put("f", b"x")
        assert ask_json(server, "/drive/v2/changes")["items"] == []
        now[0] = 101
        assert ask_json(server, "/drive/v2/changes")["items"][-1]["fileId"] == item_id


def test_a_rejected_feed_token_is_a_bad_request(server: DriveServer, v3: Any) -> None:
    first = v3.changes().getStartPageToken().execute()["startPageToken"]
    server.put("f", b"x")
    server.expire_changes()
    error = ask_json(server, "/drive/v3/changes", pageToken=first)
    assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "pageToken")
    first = v3.changes().getStartPageToken().execute()["startPageToken"]
    item_id = server.put("g", b"x")
    [row] = v3.changes().list(pageToken=first).execute()["changes"]
    assert (row["fileId"], row["file"].keys()) == (item_id, {"kind", "id", "name", "mimeType"})


def test_a_shared_drive_has_its_own_feed(server: DriveServer, v2: Any) -> None:
    drive_id = server.share_drive("team")
    of_drive = {"driveId": drive_id, "supportsAllDrives": True}
    first = v2.changes().getStartPageToken(**of_drive).execute()["startPageToken"]
    mine, theirs = server.put("mine", b""), server.put("theirs", b"", parent=drive_id)

    def seen(**query: Any) -> list[str]:
        return [row["fileId"] for row in v2.changes().list(pageToken=first, **query).execute()["items"]]

    both = {"supportsAllDrives": True, "includeItemsFromAllDrives": True}
    assert (seen(), seen(**both)) == ([mine], [mine, theirs])
    assert seen(**of_drive, includeItemsFromAllDrives=True) == [theirs]
    at = "/drive/v2/changes/startPageToken"
    assert ask_json(server, at, driveId=drive_id)["status"] == 400
    assert ask_json(server, at, driveId="x", supportsAllDrives="true")["status"] == 404


def test_items_moved_into_a_folder_that_is_removed_are_reported_as_removed(
    server: DriveServer, v2: Any
) -> None:
    item_id, stays, folder = server.put("a/f", b""), server.put("b/g", b""), server.folder("b")
    first = v2.changes().getStartPageToken().execute()["startPageToken"]
    server.edit(item_id, parents=[folder])
    server.remove(folder)
    rows = v2.changes().list(pageToken=first).execute()["items"]
    assert [(row["fileId"], row["deleted"]) for row in rows] == [(item_id, True), (folder, True)]
    assert stays not in [row["fileId"] for row in rows]


def test_items_leaving_a_shared_drive_are_removed_only_in_its_feed(server: DriveServer, v2: Any) -> None:
    drive_id = server.share_drive("team")
    item_id = server.put("f", b"", parent=drive_id)
    first = v2.changes().getStartPageToken().execute()["startPageToken"]
    server.edit(item_id, parents=["root"])

    def seen(**query: Any) -> list[tuple[str, bool]]:
        both = {"supportsAllDrives": True, "includeItemsFromAllDrives": True}
        rows = v2.changes().list(pageToken=first, **both, **query).execute()["items"]
        return [(row["fileId"], row["deleted"]) for row in rows]

    assert seen(driveId=drive_id) == [(item_id, True)]
    assert seen() == [(item_id, False)]


def test_googleapiclient_v3_updates(server: DriveServer, v3: Any) -> None:
    item_id, folder, date = server.put("f", b"x"), server.folder("d"), "2001-02-03T04:05:06.789Z"
    body = {"name": "g", "modifiedTime": date, "properties": {"k": "v"}, "starred": True}
    v3.files().update(fileId=item_id, addParents=folder, removeParents="root", body=body).execute()
    item = server.item(item_id)
    assert (item["title"], item["modifiedDate"], item["labels"]["starred"]) == ("g", date, True)
    assert v3.files().get(fileId=item_id, fields="properties").execute() == {"properties": {"k": "v"}}
    assert server.get("d/g") == b"x"
    v3.files().update(fileId=item_id, body={"trashed": True}).execute()
    assert server.item(item_id)["explicitlyTrashed"] is True
    error = ask_json(server, f"{V3}/{item_id}", "PATCH", {"parents": ["root"]})
    assert (error["status"], error["reason"]) == (403, "fieldNotWritable")


def test_googleapiclient_creates_once_with_a_generated_id(server: DriveServer, v2: Any) -> None:
    from googleapiclient.errors import HttpError

    ids = v2.files().generateIds(maxResults=3).execute()["ids"]
    assert len(set(ids)) == 3
    v2.files().insert(body={"id": ids[0], "title": "once"}).execute()
    with pytest.raises(HttpError) as caught:
        v2.files().insert(body={"id": ids[0], "title": "once"}).execute()
    assert (caught.value.status_code, caught.value.error_details[0]["reason"]) == (409, "fileIdInUse")
    with pytest.raises(HttpError) as caught:
        v2.files().insert(body={"id": "mine", "title": "once"}).execute()
    assert caught.value.status_code == 400
    assert len(server.find("once")) == 1
    v2.files().insert(body={"id": ids[1], "title": "folder", "mimeType": FOLDER}).execute()


def test_googleapiclient_cannot_create_a_document_with_a_generated_id(server: DriveServer, v2: Any) -> None:
    ids = v2.files().generateIds(maxResults=2).execute()["ids"]
    error = ask_json(server, V2, "POST", {"id": ids[1], "title": "new", "mimeType": DOCUMENT})
    assert (error["status"], error["reason"]) == (400, "generatedIdNotSupported")
    document = server.document("doc", "text")
    error = ask_json(server, f"{V2}/{document}/copy", "POST", {"id": ids[1], "title": "copy"})
    assert (error["status"], error["reason"]) == (400, "generatedIdNotSupported")
    assert server.find("new") == server.find("copy") == []
    v2.files().copy(fileId=document, body={"title": "copy"}).execute()
    assert len(server.find("copy")) == 1


def test_googleapiclient_v3_reads_everything(server: DriveServer, v3: Any) -> None:
    from googleapiclient.errors import HttpError

    document, drive_id = server.document("doc", "text"), server.share_drive("team")
    item = v3.files().get(fileId=server.put("f", b"x"), fields="*").execute()
    assert (item["name"], item["size"], item["trashed"]) == ("f", "1", False)
    assert item["parents"] == [server.item("root")["id"]]
    assert v3.files().get(fileId=item["id"]).execute().keys() == {"kind", "id", "name", "mimeType"}
    assert v3.files().export(fileId=document, mimeType="text/html").execute() == b"text"
    assert v3.drives().list().execute()["drives"] == [{"kind": "drive#drive", "id": drive_id, "name": "team"}]
    assert v3.drives().get(driveId=drive_id).execute()["name"] == "team"
    assert v3.teamdrives().list().execute()["teamDrives"][0]["name"] == "team"
    assert len(v3.files().generateIds(count=2).execute()["ids"]) == 2
    assert v3.about().get(fields="user").execute()["user"]["displayName"] == "Sim User"
    with pytest.raises(HttpError, match="'fields' parameter is required"):
        v3.about().get().execute()
    v3.files().delete(fileId=item["id"]).execute()
    assert server.find("f") == []


def test_googleapiclient_v3_lists_the_fields_of_files_and_of_changes(server: DriveServer, v3: Any) -> None:
    drive_id, both = (
        server.share_drive("team"),
        {"supportsAllDrives": True, "includeItemsFromAllDrives": True},
    )
    first = v3.changes().getStartPageToken().execute()["startPageToken"]
    target = server.put("d/f", b"xyz")
    server.edit(target, capabilities={"canDownload": False})
    shortcut, theirs = server.shortcut("s", target), server.put("t", b"", parent=drive_id)
    server.trash(theirs)
    fields = "id,parents,trashed,size,shortcutDetails,capabilities/canDownload,driveId"
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
    assert v3.files().list(fields=f"files({fields})", **both).execute() == {"files": expected}
    page = v3.changes().list(pageToken=first, fields=f"changes(removed,file({fields}))", **both).execute()
    assert [row["removed"] for row in page["changes"]] == [False] * 4
    assert sorted((row["file"] for row in page["changes"]), key=str) == sorted(expected, key=str)
    for item in expected:
        assert v3.files().get(fileId=item["id"], fields=fields, supportsAllDrives=True).execute() == item


def test_googleapiclient_v3_keeps_the_given_modification_time(server: DriveServer, v3: Any) -> None:
    from googleapiclient.http import MediaIoBaseUpload

    def media(data: bytes, resumable: bool = False) -> Any:
        return MediaIoBaseUpload(io.BytesIO(data), "x/y", resumable=resumable)

    def at(year: int) -> dict[str, str]:
        return {"modifiedTime": f"{year}-02-03T04:05:06.789Z"}

    files, shown = v3.files(), {"fields": "id,modifiedTime"}
    made = files.create(body={"name": "f", **at(2001)}, media_body=media(b"1"), **shown).execute()
    item_id = made.pop("id")
    found = [made]
    for year, more in [
        (2002, {}),
        (2003, {"media_body": media(b"2")}),
        (2004, {"media_body": media(b"3", True)}),
    ]:
        found.append(files.update(fileId=item_id, body=at(year), **more, **shown).execute())
        assert found[-1].pop("id") == item_id
    assert found == [at(year) for year in (2001, 2002, 2003, 2004)]
    assert files.update(fileId=item_id, body={"name": "g"}, **shown).execute()["modifiedTime"] > "2020"
    assert (
        files.copy(fileId=item_id, body=at(2005), **shown).execute()["modifiedTime"]
        == at(2005)["modifiedTime"]
    )


def test_v3_reads_ranges_of_a_revision(server: DriveServer) -> None:
    drive_id = server.share_drive("team")  # the method has no parameter supportsAllDrives, and needs none
    item_id = server.put("f", b"0123456789", parent=drive_id)
    old = server.item(item_id)["headRevisionId"]
    server.put("f", b"other", parent=drive_id)
    at = f"{V3}/{item_id}/revisions/{old}"
    status, headers, data = ask(server, f"{at}?alt=media", range="bytes=2-4")
    assert (status, headers["Content-Range"], data) == (206, "bytes 2-4/10", b"234")
    assert ask(server, f"{at}?alt=media", range="bytes=10-")[0] == 416
    assert server.count("media", item_id) == 2
    assert ask_json(server, f"{V3}/{item_id}/revisions/x", alt="media")["location"] == "revisionId"
    assert ask_json(server, at, fields="id,size,md5Checksum,modifiedTime").keys() == {
        "id", "size", "md5Checksum", "modifiedTime",
    }  # fmt: skip
    server.quota(Quota(file_bytes=5.0))
    ask(server, f"{at}?alt=media", range="bytes=0-4")
    assert ask_json(server, at, alt="media")["reason"] == "downloadQuotaExceeded"
    server.edit(item_id, capabilities={"canDownload": False})
    assert ask_json(server, at, alt="media")["reason"] == "cannotDownloadFile"


def test_googleapiclient_sends_long_queries_as_a_form(server: DriveServer, v2: Any) -> None:
    server.put("f", b"x")
    q = " or ".join(["title='f'", *(f"title='{'x' * 90}{i}'" for i in range(30))])
    assert [row["title"] for row in v2.files().list(q=q).execute()["items"]] == ["f"]
    [entry] = server.requests
    assert (entry.method, entry.kind) == ("POST", "list")


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_googleapiclient_sends_batches_that_count_as_their_calls(server: DriveServer, version: str) -> None:
    server.require_token("t")
    ids = [server.put(f"f{i}", b"x") for i in range(3)]
    title, replies = "name" if version == "v3" else "title", dict[str, Any]()
    with build(server, version) as service:
        service._http.token = "t"
        change = service.files().update if version == "v3" else service.files().patch
        batch = service.new_batch_http_request(
            lambda name, reply, error: replies.update({name: error or reply})
        )
        for item_id in [*ids, "nothing"]:
            batch.add(service.files().get(fileId=item_id), request_id=item_id)
        batch.add(change(fileId=ids[0], body={title: "ü"}), request_id="change")
        batch.execute()
    assert [replies[item_id][title] for item_id in ids] == ["f0", "f1", "f2"]
    assert (replies["nothing"].status_code, replies["change"][title]) == (404, "ü")
    [entry] = server.requests
    assert (entry.path, entry.kind, entry.units) == (f"/batch/drive/{version}", "batch", 4 * 5 + 50)


def test_a_batch_has_at_most_100_calls_and_no_media() -> None:
    def batch(*targets: str) -> tuple[int, bytes]:
        parts = "".join(
            f"--b\r\nContent-Type: application/http\r\n\r\nGET {t} HTTP/1.1\r\n\r\n\r\n" for t in targets
        )
        kind, body = "multipart/mixed; boundary=b", f"{parts}--b--".encode()
        return ask(server, "/batch/drive/v2", "POST", body, content_type=kind, accept_encoding="gzip")[::2]

    quota = Quota(units_per_user=1000, units_per_project=1e6)
    with DriveServer(quota=quota, time_scale=1e-6) as server:  # the quota is not refilled meanwhile
        at = f"{V2}/{server.put('f', b'x')}"
        status, text = batch(*[at] * 100)  # 40 of them within the quota
        assert (status, text.count(b"HTTP/1.1 200 OK"), text.count(b"HTTP/1.1 403")) == (200, 40, 60)
        assert text.count(b"userRateLimitExceeded") == 60
        assert batch(*[at] * 101)[0] == batch(f"{at}?alt=media")[0] == batch(f"{at}?{'x' * 8000}")[0] == 400
        assert sum(entry.units for entry in server.requests) == 200
        server.quota("none")
        assert batch(at, f"{at}?alt=media")[0] == 400
        assert server.requests[-1].units == 0  # nothing of it was done


def test_json_is_compressed_for_clients_that_request_gzip_twice(server: DriveServer) -> None:
    at = f"{V2}/{server.put('f', b'x' * 1000)}"
    both = {"accept_encoding": "gzip, deflate", "user_agent": "me (gzip)"}
    for target, status in ((at, 200), (V2, 200), (f"{V2}/nothing", 404)):
        got, headers, text = ask(server, target, **both)
        assert (got, headers["Content-Encoding"]) == (status, "gzip")
        assert json.loads(gzip.decompress(text)) == json.loads(ask(server, target)[2])
    for headers in ({"accept_encoding": "gzip"}, {"user_agent": "me (gzip)"}):
        assert ask(server, at, **headers)[1]["Content-Encoding"] is None
    stored = server.put("j", b"x" * 1000, mimeType="application/json; charset=UTF-8")
    assert ask(server, f"{V2}/{stored}?alt=media", **both)[2] == b"x" * 1000


def test_any_method_may_be_sent_as_a_post(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    as_method = {"content_type": "application/json", "x_http_method_override": "PATCH"}
    assert ask(server, f"{V2}/{item_id}", "POST", b'{"title": "g"}', **as_method)[0] == 200
    assert server.get("g") == b"x"
    assert ask(server, f"{V2}/{item_id}", "POST", b"", x_http_method_override="DELETE")[0] == 204
    assert server.find("g") == []


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


def test_gdrive_fsspec_makes_and_removes(server: DriveServer, gfs: Any) -> None:
    server.put("a", b"a")
    gfs.mkdir("new")
    with gfs.open("new/f", "wb") as f:
        f.write(b"written")
    assert server.get("new/f") == b"written"
    gfs.rm("a")
    assert server.find("a") == []


# Listings with surprises


def test_titles_are_searched_without_regard_to_case(server: DriveServer) -> None:
    server.put("Name", b"1")
    server.put("NAME", b"2")
    server.put("Name.txt", b"3")
    assert titles(server, "title='name' and 'root' in parents") == ["NAME", "Name"]
    assert titles(server, "title != 'NAME'") == ["Name.txt"]
    assert titles(server, "title contains 'nam'") == ["NAME", "Name", "Name.txt"]
    assert titles(server, "title contains 'ame'") == []
    assert ask_json(server, V3, q="name='name'")["files"][0]["name"] == "Name"


def test_names_may_contain_quotes_backslashes_and_slashes(server: DriveServer) -> None:
    for name in ("it's", "a\\b", "a/b", "..", "ü 'x' \\", "line\nbreak"):
        item_id = server.add(name, b"x")
        escaped = name.replace("\\", "\\\\").replace("'", "\\'")
        [found] = ask_json(server, V2, q=f"'root' in parents and title='{escaped}'")["items"]
        assert (found["id"], found["title"]) == (item_id, name)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ("trashed=false", ["d", "f", "g"]),
        ("trashed = true or title = 'g'", ["g", "t"]),
        ("not (title='f' or title='g') and trashed=false", ["d"]),
        ("not trashed = true and mimeType != 'application/vnd.google-apps.folder'", ["f", "g"]),
        ("mimeType contains 'image/'", ["g"]),
        ("mimeType='image/png' and 'root' in parents", ["g"]),
        ("modifiedDate > '2020-01-01T00:00:00' and modifiedDate<='2021-01-01T00:00:00.000Z'", ["f"]),
        ("sharedWithMe", ["theirs"]),
        ("sharedWithMe=true", ["theirs"]),
        ("starred = true", ["g"]),
    ],
)
def test_queries_follow_the_grammar(server: DriveServer, q: str, expected: list[str]) -> None:
    server.folder("d")
    server.put("f", b"", modifiedDate="2020-06-01T00:00:00.000Z")
    server.put("g", b"", mimeType="image/png", labels={"starred": True})
    server.trash(server.put("t", b""))
    if "sharedWithMe" in q:
        server.shared_with_me("theirs", b"")
    assert titles(server, q) == expected


@pytest.mark.parametrize("q", ["title", "title=", "name='x'", "(title='x'", "(title='x' title='y')", "title='x' and", "'x' in owners", "title < 'x'", "x='y'", "title='x' title='y'"])  # fmt: skip
def test_invalid_queries_are_refused(server: DriveServer, q: str) -> None:
    error = ask_json(server, V2, q=q)
    assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "q")
    assert (error["domain"], error["locationType"]) == ("global", "parameter")
    assert server.count("list") == 1


def test_a_missing_folder_is_not_found(server: DriveServer) -> None:
    error = ask_json(server, V2, q="'nothing' in parents")
    assert (error["status"], error["reason"], error["location"]) == (404, "notFound", "fileId")


def test_pages_may_be_short_or_empty(server: DriveServer) -> None:
    folder = server.folder("d")
    server.fill(folder, 5)
    server.short_pages(2)
    sizes, token = [], ""
    while True:
        query = {"pageToken": token} if token else {}
        page = ask_json(server, V2, q=f"'{folder}' in parents", **query)
        sizes.append(len(page["items"]))
        token = page.get("nextPageToken", "")
        if not token:
            break
    assert sizes == [0, 2, 0, 2, 0, 1]


def test_a_rejected_page_token_is_a_bad_request(server: DriveServer) -> None:
    folder = server.folder("d")
    server.fill(folder, 5)
    q = f"'{folder}' in parents"
    token = ask_json(server, V2, q=q, maxResults=2)["nextPageToken"]
    pages = [ask_json(server, V2, q=q, maxResults=2, pageToken=token)["items"] for _ in range(2)]
    assert pages[0] == pages[1]
    for wrong in ({"q": q, "pageToken": "x"}, {"q": "trashed=false", "pageToken": token}):
        assert ask_json(server, V2, **wrong)["location"] == "pageToken"
    server.expire_pages()
    error = ask_json(server, V2, q=q, pageToken=token)
    assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "pageToken")


def test_an_item_deleted_between_two_pages_is_not_on_the_second(server: DriveServer) -> None:
    ids = [server.put(f"f{i}", b"") for i in range(4)]
    page = ask_json(server, V2, q="'root' in parents", maxResults=2)
    server.remove(ids[2])
    rest = ask_json(server, V2, q="'root' in parents", maxResults=2, pageToken=page["nextPageToken"])
    assert [item["id"] for item in rest["items"]] == [ids[3]]


def test_a_query_for_several_folders_may_omit_items(server: DriveServer) -> None:
    server.put("a/f", b"")
    server.put("b/g", b"")
    q = " or ".join(f"'{server.folder(name)}' in parents" for name in "ab")
    assert titles(server, q) == ["f", "g"]
    server.drop_parents(1)
    reply = ask_json(server, V2, q=f"({q}) and trashed=false")
    assert ([item["title"] for item in reply["items"]], reply["incompleteSearch"]) == (["f"], False)


def test_listings_are_ordered_on_request(server: DriveServer) -> None:
    for name in ("b", "A", "c"):
        server.put(name, b"")
    server.folder("z")

    def order(by: str) -> list[str]:
        return [item["title"] for item in ask_json(server, V2, q="'root' in parents", orderBy=by)["items"]]

    assert order("title") == ["A", "b", "c", "z"]
    assert order("folder,title desc") == ["z", "c", "b", "A"]
    assert order("modifiedDate desc") == ["z", "c", "A", "b"]
    assert ask_json(server, V2, orderBy="name")["location"] == "orderBy"


def test_a_page_has_100_items_by_default_and_at_most_1000(server: DriveServer) -> None:
    folder = server.folder("d")
    server.fill(folder, 1200, prefix="x", size=3)
    q = f"'{folder}' in parents"
    assert len(ask_json(server, V2, q=q)["items"]) == 100
    assert len(ask_json(server, V3, q=q, pageSize=5000)["files"]) == 1000
    assert ask_json(server, V2, q=q, maxResults=0)["status"] == 400
    assert server.get("d/x001199") == b"x00"


# Fields


def test_fields_are_those_of_the_discovery_documents() -> None:
    documents = Path(discovery.__file__).parent / "discovery_cache" / "documents"
    for version, names in (("v2", V2_FIELDS), ("v3", V3_FIELDS)):
        schema = json.loads((documents / f"drive.{version}.json").read_text())["schemas"]["File"]
        assert set(names) == schema["properties"].keys()


def test_a_fields_mask_keeps_what_it_names(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    got = ask_json(
        server, f"{V2}/{item_id}", fields="id,labels/trashed,parents(id),capabilities(canDownload,canEdit)"
    )
    root = server.item("root")["id"]
    assert got == {
        "id": item_id,
        "labels": {"trashed": False},
        "parents": [{"id": root}],
        "capabilities": {"canDownload": True, "canEdit": True},
    }
    assert ask_json(server, V2, fields="items/id,items(title)") == {"items": [{"id": item_id, "title": "f"}]}
    assert ask_json(server, V2, fields="kind") == {"kind": "drive#fileList"}
    assert ask_json(server, V3, fields="files(id)") == {"files": [{"id": item_id}]}
    assert ask_json(server, V2, fields="*")["items"][0]["md5Checksum"]
    for wrong in ("items(name)", "items(id", "items(", "id)"):
        error = ask_json(server, V2, fields=wrong)
        assert (error["status"], error["reason"]) == (400, "invalidParameter")


def test_masks_and_queries_are_values() -> None:
    mask = parse_mask("a/b,a(c,d/e),f")
    assert mask == {"a": {"b": {}, "c": {}, "d": {"e": {}}}, "f": {}}
    assert project({"a": [{"b": 1, "d": {"e": 2, "x": 3}}], "g": 4}, mask) == {"a": [{"b": 1, "d": {"e": 2}}]}
    assert parse_mask("a,a/b") == {"a": {}}
    fields = frozenset(("title", "trashed"))
    query = parse_query("('a' in parents or 'b' in parents) and title='T' and trashed=false", fields)
    assert (query.parents(), query.title()) == (["a", "b"], "t")
    assert parse_query("not 'a' in parents or title='x'", fields).parents() is None


# Items


def test_folders_shortcuts_and_documents_have_no_content(server: DriveServer) -> None:
    target = server.put("f", b"x", mimeType="text/x")
    server.edit(target, resourceKey="rk")
    shortcut, dangling = server.shortcut("s", target), server.shortcut("dangling", "nowhere")
    details = {"targetId": target, "targetMimeType": "text/x", "targetResourceKey": "rk"}
    assert server.item(shortcut)["shortcutDetails"] == details
    assert server.item(dangling)["shortcutDetails"] == {"targetId": "nowhere"}
    document = server.document("doc", "text")
    assert "text/plain" in server.item(document)["exportLinks"]
    for item_id in (shortcut, document, server.folder("d")):
        lacking = {"fileSize", "md5Checksum", "downloadUrl", "headRevisionId"}
        assert not lacking & server.item(item_id).keys()
        error = ask_json(server, f"{V2}/{item_id}", alt="media")
        assert (error["status"], error["reason"]) == (403, "fileNotDownloadable")


def test_an_export_ignores_ranges_and_has_a_limit(server: DriveServer) -> None:
    document = server.document("doc", "text")
    at = f"{V2}/{document}/export?mimeType="
    status, headers, body = ask(server, at + "text/html", range="bytes=0-1")
    assert (status, body, headers["Content-Type"]) == (200, b"text", "text/html")
    assert ask_json(server, f"{V2}/{document}/export", mimeType="image/png")["status"] == 400
    big = server.document("big", "x" * (10 << 20) + "x")
    assert (
        ask_json(server, f"{V2}/{big}/export", mimeType="text/plain")["reason"] == "exportSizeLimitExceeded"
    )
    blob = server.put("f", b"x")
    assert ask_json(server, f"{V2}/{blob}/export", mimeType="text/plain")["reason"] == "fileNotExportable"


def test_a_rename_bumps_the_version_but_not_the_revision(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    before = server.item(item_id)
    ask_json(server, f"{V2}/{item_id}", "PATCH", {"title": "g"})
    after = server.item(item_id)
    assert int(after["version"]) > int(before["version"])
    assert after["modifiedDate"] > before["modifiedDate"]
    assert after["headRevisionId"] == before["headRevisionId"]
    date = "2001-02-03T04:05:06.789Z"
    assert ask_json(server, f"{V2}/{item_id}", "PUT", {"modifiedDate": date})["modifiedDate"] > date
    ask_json(server, f"{V2}/{item_id}?setModifiedDate=true", "PUT", {"modifiedDate": date})
    assert server.item(item_id)["modifiedDate"] == date
    kept = ask_json(server, f"{V2}/{item_id}?modifiedDateBehavior=noChange", "PATCH", {"title": "h"})
    assert kept["modifiedDate"] == date


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
    ask_json(server, f"{V2}/{folder}/trash", "POST")
    item = server.item(item_id)
    assert (item["labels"]["trashed"], item["explicitlyTrashed"]) == (True, False)
    assert titles(server, "trashed=false") == []
    assert titles(server, "trashed=true") == ["d", "f", "sub"]
    assert server.find("d/sub/f") == []
    ask_json(server, f"{V2}/{folder}/untrash", "POST")
    assert server.get("d/sub/f") == b"x"
    assert ask(server, f"{V2}/{folder}", "DELETE")[0] == 204
    assert ask_json(server, f"{V2}/{item_id}")["status"] == 404


def test_an_item_may_be_in_two_folders(server: DriveServer) -> None:
    a, b = server.folder("a"), server.folder("b")
    item_id = server.put("a/f", b"x")
    server.edit(item_id, parents=[a, b])
    assert (server.get("a/f"), server.get("b/f")) == (b"x", b"x")
    assert titles(server, f"'{a}' in parents or '{b}' in parents") == ["f"]
    server.trash(a)
    assert server.item(item_id)["labels"]["trashed"] is False
    server.remove(a)
    assert [ref["id"] for ref in server.item(item_id)["parents"]] == [b]


def test_a_folder_cannot_be_moved_into_itself(server: DriveServer) -> None:
    a, b = server.folder("a"), server.folder("a/b")
    assert ask_json(server, f"{V2}/{a}?addParents={b}", "PATCH", {})["status"] == 400
    assert ask_json(server, f"{V2}/root", "DELETE")["status"] == 403


def test_items_of_a_shared_drive_are_visible_only_on_request(server: DriveServer) -> None:
    drive_id = server.share_drive("team")
    item_id = server.put("d/f", b"x", parent=drive_id)
    folder = server.folder("d", parent=drive_id)
    assert server.item(item_id)["driveId"] == server.item(item_id)["teamDriveId"] == drive_id
    assert server.get("d/f", parent=drive_id) == b"x"
    both = {"supportsAllDrives": "true", "includeItemsFromAllDrives": "true"}
    assert titles(server, "trashed=false") == []
    assert titles(server, "trashed=false", **both) == ["d", "f"]
    assert titles(server, f"'{folder}' in parents", **both, corpora="drive", driveId=drive_id) == ["f"]
    assert ask_json(server, V2, q=f"'{folder}' in parents")["status"] == 404
    assert ask_json(server, V2, corpora="drive", driveId=drive_id)["status"] == 400
    assert ask_json(server, V2, corpora="drive", driveId="x", **both)["status"] == 404
    for query in ({}, {"alt": "media"}):
        assert ask_json(server, f"{V2}/{item_id}", **query)["reason"] == "notFound"
        assert ask(server, f"{V2}/{item_id}?{urlencode({**query, 'supportsAllDrives': 'true'})}")[0] == 200
    token = "/drive/v2/changes"
    assert ask_json(server, token)["items"] == []
    rows = ask_json(server, token, **both, driveId=drive_id)["items"]
    assert {row["fileId"] for row in rows} == {item_id, folder}


def test_a_non_member_sees_shared_items_of_a_shared_drive_only(
    server: DriveServer,
) -> None:
    drive_id = server.share_drive("theirs", member=False)
    item_id = server.put("shared/f", b"x", parent=drive_id)
    hidden = server.put("hidden", b"y", parent=drive_id)
    folder = server.folder("shared", parent=drive_id)
    both = {"supportsAllDrives": "true", "includeItemsFromAllDrives": "true"}
    assert ask_json(server, f"{V2}/{folder}", **both)["reason"] == "notFound"
    server.share(folder)
    shown = ask_json(server, f"{V2}/{folder}", **both)
    assert (shown["driveId"], shown["parents"]) == (drive_id, [])
    assert ask_json(server, f"{V2}/{item_id}", **both)["parents"][0]["id"] == folder
    for id in (hidden, drive_id):
        assert ask_json(server, f"{V2}/{id}", **both)["reason"] == "notFound"
    assert titles(server, "trashed=false", **both) == ["f", "shared"]
    assert titles(server, "sharedWithMe=true", **both) == ["shared"]
    assert titles(server, f"'{folder}' in parents", **both) == ["f"]
    assert ask_json(server, "/drive/v2/drives")["items"] == []
    for address in (V2, "/drive/v2/changes"):
        refused = ask_json(server, address, **both, corpora="drive", driveId=drive_id)
        assert (refused["status"], refused["reason"], refused["location"]) == (404, "notFound", "driveId")
    changed = ask_json(server, "/drive/v2/changes", **both)["items"]
    assert {row["fileId"] for row in changed} == {item_id, folder}


def test_a_folder_moved_into_a_shared_drive_takes_its_children_along(server: DriveServer) -> None:
    drive_id, item_id = server.share_drive("team"), server.put("d/f", b"x")
    server.edit(server.folder("d"), parents=[drive_id])
    assert server.item(item_id)["driveId"] == drive_id


def test_a_resource_key_gives_access_to_an_item(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    server.edit(item_id, resourceKey="rk")
    for key, status in (("", 404), (f"{item_id}/no", 404), (f"a/b,{item_id}/rk", 200)):
        assert ask(server, f"{V2}/{item_id}?alt=media", x_goog_drive_resource_keys=key)[0] == status
    assert ask_json(server, V2)["items"][0]["resourceKey"] == "rk"


@pytest.mark.parametrize("revision", [False, True])
@pytest.mark.parametrize("files", [V2, V3])
def test_abuse_must_be_acknowledged_for_flagged_files_and_for_no_others(
    server: DriveServer, files: str, revision: bool
) -> None:
    item_id = server.put("f", b"x")
    at, query = f"{files}/{item_id}", {"alt": "media"}
    if revision:
        head = server.item(item_id)["headRevisionId"]
        at, query = (f"{at}/revisions/{head}", query) if files == V3 else (at, {**query, "revisionId": head})

    def refusal(**more: str) -> tuple[str, str | None]:
        error = ask_json(server, at, **query, **more)
        assert error["status"] == 403
        return error["reason"], error.get("location")

    acknowledged, where = {"acknowledgeAbuse": "true"}, "acknowledgeAbuse"
    assert refusal(**acknowledged) == ("invalidAbuseAcknowledgment", where)
    assert ask(server, f"{at}?{urlencode({**query, 'acknowledgeAbuse': 'false'})}")[2] == b"x"
    server.edit(item_id, abusive=True)
    assert refusal() == ("cannotDownloadAbusiveFile", None)
    assert ask(server, f"{at}?{urlencode(query | acknowledged)}")[2] == b"x"
    server.share(item_id)  # now it is somebody else's
    assert refusal(**acknowledged) == ("cannotDownloadAbusiveFile", where)


def test_abuse_is_acknowledged_only_in_downloads(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    server.edit(item_id, abusive=True)
    error = ask_json(server, f"{V3}/{item_id}", acknowledgeAbuse="true")
    assert (error["status"], error["reason"]) == (403, "invalidAbuseAcknowledgment")


def test_capabilities_are_enforced(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    revision = server.item(item_id)["headRevisionId"]
    names = ("canDownload", "canReadRevisions", "canEdit", "canDelete", "canCopy")
    server.edit(item_id, capabilities=dict.fromkeys(names, False))
    at = f"{V2}/{item_id}"
    assert ask_json(server, at, alt="media")["reason"] == "cannotDownloadFile"
    assert ask_json(server, at, alt="media", revisionId=revision)["status"] == 403
    assert ask_json(server, at + "/revisions")["status"] == 403
    assert ask_json(server, at, "PATCH", {"title": "g"})["reason"] == "insufficientFilePermissions"
    assert ask_json(server, at, "DELETE")["status"] == 403
    assert ask_json(server, at + "/copy", "POST", {})["reason"] == "cannotCopyFile"
    assert server.item(item_id)["capabilities"]["canShare"] is True


def test_edit_removes_a_field_set_to_none(server: DriveServer) -> None:
    item_id = server.put("f", b"x")
    server.edit(item_id, sha1Checksum=None, description="d", title="g")
    item = server.item(item_id)
    assert (item.get("sha1Checksum"), item["description"], item["title"]) == (None, "d", "g")
    assert server.get("g") == b"x"


def test_items_shared_by_others_are_in_no_folder(server: DriveServer) -> None:
    item_id, folder = server.shared_with_me("f", b"x"), server.shared_with_me("d")
    server.put("in", b"y", parent=folder)
    item = server.item(item_id)
    assert (item["parents"], item["ownedByMe"], item["shared"]) == ([], False, True)
    assert titles(server, "'root' in parents") == []
    assert titles(server, f"'{folder}' in parents") == ["in"]
    assert ask(server, f"{V2}/{item_id}?alt=media")[2] == b"x"


# Bytes


@pytest.mark.parametrize(
    ("given", "status", "body", "content_range"),
    [
        (None, 200, b"0123456789", None),
        ("bytes=2-5", 206, b"2345", "bytes 2-5/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
    ],
)
def test_ranges(server: DriveServer, given: Any, status: int, body: Any, content_range: Any) -> None:
    item_id = server.put("f", b"0123456789", mimeType="text/x")
    headers = {"range": given} if given else {}
    got, reply, data = ask(server, f"{V2}/{item_id}?alt=media", **headers)
    assert (got, reply["Content-Range"]) == (status, content_range)
    if body is None:
        assert json.loads(data)["error"]["errors"][0]["reason"] == "requestedRangeNotSatisfiable"
    else:
        assert (data, reply["Content-Type"]) == (body, "text/x")
    [entry] = server.requests
    assert (entry.kind, entry.key, entry.status) == ("media", item_id, status)


def test_every_range_of_an_empty_file_is_refused(server: DriveServer) -> None:
    item_id = server.put("f", b"")
    for given in ("bytes=0-104857599", "bytes=0-", "bytes=-1"):
        status, headers, _ = ask(server, f"{V2}/{item_id}?alt=media", range=given)
        assert (status, headers["Content-Range"]) == (416, "bytes */0")
    assert ask(server, f"{V2}/{item_id}?alt=media")[::2] == (200, b"")


def test_a_reply_is_of_the_revision_at_its_start() -> None:
    with DriveServer(Profile(stream_rate=1e6), time_scale=20) as server:
        item_id = server.put("f", b"a" * 300_000)
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=60)
        connection.request("GET", f"{V2}/{item_id}?alt=media")
        reply = connection.getresponse()
        first = reply.read(10)
        server.put("f", b"b" * 300_000)
        assert set(first + reply.read()) == {ord("a")}
        connection.close()
        assert ask(server, f"{V2}/{item_id}?alt=media", range="bytes=0-0")[2] == b"b"


def test_a_download_link_works(server: DriveServer) -> None:
    item_id = server.put("f", b"x", parent=server.share_drive("team"))
    item = ask_json(server, f"{V2}/{item_id}", supportsAllDrives="true")
    assert ask(server, item["downloadUrl"].removeprefix(server.endpoint_url))[2] == b"x"


# Resumable uploads


def begin(server: DriveServer, body: Any, item_id: str = "") -> str:
    """Return the path of a new resumable upload."""
    at = f"/upload/drive/v2/files{'/' if item_id else ''}{item_id}?uploadType=resumable"
    data = json.dumps(body).encode()
    status, headers, _ = ask(server, at, "PUT" if item_id else "POST", data, x_upload_content_type="x/y")
    assert status == 200
    return str(headers["Location"]).removeprefix(server.endpoint_url)


def test_a_resumable_upload_reports_the_bytes_received(server: DriveServer) -> None:
    at, data = begin(server, {"title": "f"}), os.urandom(2 * CHUNK + 10)
    size = len(data)
    assert ask(server, at, "PUT", b"", content_range=f"bytes */{size}")[:1] == (308,)
    first = f"bytes 0-{CHUNK - 1}/{size}"
    status, headers, _ = ask(server, at, "PUT", data[:CHUNK], content_range=first)
    assert (status, headers["Range"]) == (308, f"bytes=0-{CHUNK - 1}")
    odd = f"bytes {CHUNK}-{CHUNK + 9}/{size}"
    assert ask(server, at, "PUT", data[CHUNK : CHUNK + 10], content_range=odd)[0] == 400
    gap = f"bytes {2 * CHUNK}-{size - 1}/{size}"
    assert ask(server, at, "PUT", data[2 * CHUNK :], content_range=gap)[1]["Range"] == headers["Range"]
    server.accept_only(100)
    rest = f"bytes {CHUNK}-{size - 1}/{size}"
    status, headers, _ = ask(server, at, "PUT", data[CHUNK:], content_range=rest)
    assert (status, headers["Range"]) == (308, f"bytes=0-{CHUNK + 99}")
    assert server.find("f") == []
    left = f"bytes {CHUNK + 100}-{size - 1}/{size}"
    status, _, text = ask(server, at, "PUT", data[CHUNK + 100 :], content_range=left)
    made = json.loads(text)
    assert (status, made["fileSize"], made["mimeType"]) == (200, str(size), "x/y")
    assert server.get("f") == data
    again = ask(server, at, "PUT", b"", content_range=f"bytes */{size}")
    assert (again[0], json.loads(again[2])["id"]) == (200, made["id"])
    assert server.count("upload", made["id"]) == len(server.requests)


def test_an_expired_or_cancelled_upload_is_not_found(server: DriveServer) -> None:
    at, other = begin(server, {"title": "f"}), begin(server, {"title": "g"})
    assert ask(server, other, "DELETE")[0] == 499
    assert ask(server, other, "PUT", b"x")[0] == 404
    server.expire_uploads()
    assert ask(server, at, "PUT", b"x")[0] == 404
    assert server.find("f") == []


def test_an_upload_replaces_the_content_and_keeps_the_id(server: DriveServer) -> None:
    item_id = server.put("f", b"old", mimeType="text/x")
    before = server.item(item_id)
    ask(server, begin(server, {}, item_id), "PUT", b"new")
    after = server.item(item_id)
    assert (server.get("f"), after["md5Checksum"]) == (b"new", "22af645d1859cb5ca6da0c484f1f37ea")
    assert after["headRevisionId"] != before["headRevisionId"]
    assert server.find("f")[0]["id"] == item_id
    status, _, _ = ask(server, f"/upload/drive/v2/files/{item_id}?uploadType=media", "PUT", b"media")
    assert (status, server.get("f")) == (200, b"media")


# Budgets, errors, tokens


def test_a_rate_limit_allows_its_rate_and_no_more() -> None:
    meter = Meter(Quota(creates_per_s=3.0))
    assert [meter.create("u", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [meter.create("u", at) for at in (0.4, 0.4, 0.7)] == [True, False, True]
    assert [meter.create("u", 100.0) for _ in range(4)] == [True, True, True, False]
    assert meter.create("another", 100.0)
    assert all(Meter(Quota()).create("u", 0.0) for _ in range(1000))


def test_a_quota_in_units_is_per_user_and_per_project() -> None:
    meter = Meter(QUOTAS["units"])  # 5,416 units a second for a user, 16,666 for a project

    def downloads(user: str, at: float) -> int:
        return sum(meter.charge(user, "p", 200, at) is None for _ in range(100))

    assert [downloads(user, 0.0) for user in "abcd"] == [27, 27, 27, 2]
    assert meter.charge("a", "p", 5, 0.0) is None  # 16 units are left
    assert meter.charge("a", "p", 20, 0.0) == "user"
    assert meter.charge("d", "p", 200, 0.0) == "project"
    assert meter.charge("d", "another", 200, 0.0) is None
    assert 26 <= downloads("a", 1.0) <= 27


def test_a_quota_in_requests_is_per_user_and_per_project() -> None:
    meter = Meter(QUOTAS["requests"])  # 200 a second
    assert [meter.charge("a", "p", 200, 0.0) for _ in range(201)] == [None] * 200 + ["user"]
    assert meter.charge("b", "p", 5, 0.0) == "project"
    assert [meter.charge("b", "p", 5, 0.5) for _ in range(101)] == [None] * 100 + ["project"]
    assert Meter(Quota(requests_per_user=60, burst_s=60)).charge("a", "p", 5, 0.0) is None


def test_profiles_have_the_published_quotas() -> None:
    assert PROFILES["drive-typical"].quota == QUOTAS["requests"]
    assert PROFILES["drive-bad"].quota == QUOTAS["units"]
    assert PROFILES["gcs-region"].quota == PROFILES["off"].quota == Quota()
    with pytest.raises(ValueError, match="known: none, units, requests"):
        DriveServer(quota="old")


def test_the_log_contains_the_cost_of_each_request(server: DriveServer) -> None:
    item_id, document = server.put("f", b"x"), server.document("d", "text")
    at, costs = f"{V2}/{item_id}", list[int]()
    begun = begin(server, {"title": "up"})
    for method, target, body in [
        ("GET", at, None), ("GET", V2, None), ("GET", f"{at}?alt=media", None),
        ("GET", f"{V2}/{document}/export?mimeType=text/html", None), ("PATCH", at, b"{}"), ("PUT", begun, b"x"),
        ("GET", "/drive/v2/changes", None), ("GET", "/drive/v2/changes/startPageToken", None),
        ("POST", f"{at}/copy", b"{}"), ("GET", "/drive/v2/about", None), ("GET", f"{V2}/nothing", None),
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
        at = f"{V2}/{server.put('f', b'x')}?alt=media"
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
        assert {ask(server, V2)[0] for _ in range(5)} == {200}


def test_too_many_creates_are_refused_and_create_nothing() -> None:
    with DriveServer(quota=Quota(creates_per_s=1e-6)) as server:
        body = {"title": "d", "mimeType": FOLDER}
        replies = [ask_json(server, V2, "POST", body) for _ in range(3)]
        assert [reply.get("reason") for reply in replies] == [None, *["userRateLimitExceeded"] * 2]
        assert len(server.find("d")) == 1
        at = "/upload/drive/v2/files?uploadType=resumable"
        assert ask(server, at, "POST", b"{}")[0] == 403
        item_id = server.put("f", b"x")
        assert ask_json(server, f"{V2}/{item_id}/copy", "POST", {})["status"] == 403
        assert ask_json(server, f"{V2}/{item_id}", "PATCH", {"title": "g"})["title"] == "g"


def test_requested_and_not_sent_bytes_count_for_the_quota_of_a_file() -> None:
    with DriveServer(quota=Quota(file_bytes=100.0)) as server:
        ids = [server.put(name, b"x" * 60) for name in "abc"]

        def get(item_id: str, given: str = "", at: str = V2) -> Any:
            headers = {"range": given} if given else {}
            status, _, text = ask(server, f"{at}/{item_id}?alt=media", **headers)
            return status if status < 400 else json.loads(text)["error"]["errors"][0]

        assert [get(ids[0], "bytes=59-"), get(ids[0], "bytes=0-39")] == [206, 206]  # 60 and 40
        error = get(ids[0], "bytes=0-0")
        assert (error["reason"], error["location"]) == ("quotaExceeded", "quota.download")
        assert get(ids[0], at=V3)["reason"] == "downloadQuotaExceeded"
        assert [get(ids[1]), get(ids[1], "bytes=-1"), get(ids[1], "bytes=0-38")] == [200, 206, 206]
        assert [get(ids[2]), get(ids[2], "bytes=0-")["reason"], get(ids[2], "bytes=0-9")] == [
            200,
            "quotaExceeded",
            206,
        ]


def test_errors_of_the_profile_are_those_of_drive() -> None:
    with DriveServer(Profile(error_rate=1.0)) as server:
        at = f"{V2}/{server.put('f', b'x')}"
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
        at = f"{V2}/{server.put('f', b'x')}?alt=media"
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
    assert ask_json(server, f"{V2}/{item_id}")["reason"] == "insufficientFilePermissions"
    server.forbid(item_id, False)
    assert ask(server, f"{V2}/{item_id}")[0] == 200


def test_tokens_are_issued_expire_and_are_refused(server: DriveServer) -> None:
    from google.auth.exceptions import RefreshError
    from google.auth.transport.requests import Request
    from google.oauth2.credentials import Credentials as UserCredentials

    server.require_token("listed")
    assert ask(server, V2, authorization="Bearer other")[0] == 401
    assert ask(server, V2, authorization="Bearer listed")[0] == 200
    uri = server.endpoint_url + "/token"
    credentials = UserCredentials(None, refresh_token="r", token_uri=uri, client_id="i", client_secret="s")
    credentials.refresh(Request())
    issued = {"authorization": f"Bearer {credentials.token}"}
    assert ask(server, V2, **issued)[0] == 200
    server.expire_tokens()
    status, headers, text = ask(server, V2, **issued)
    assert (status, headers["WWW-Authenticate"][:6]) == (401, "Bearer")
    error = json.loads(text)["error"]["errors"][0]
    assert (error["reason"], error["location"]) == ("authError", "Authorization")
    credentials.refresh(Request())
    assert ask(server, V2, authorization=f"Bearer {credentials.token}")[0] == 200
    server.refuse_tokens()
    with pytest.raises(RefreshError, match="invalid_grant"):
        credentials.refresh(Request())
    assert server.count("token") == 3
    assert ask(server, "/token", "POST", b"grant_type=x")[0] == 400


def test_a_token_expires_in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(Network, "now", lambda _: now[0])
    with DriveServer() as server:
        server.require_token()
        server.token_life(3600)
        form = b"grant_type=refresh_token&refresh_token=r"
        token = json.loads(ask(server, "/token", "POST", form)[2])["access_token"]
        for seconds, status in ((3599, 200), (3601, 401)):
            now[0] = seconds
            assert ask(server, V2, authorization=f"Bearer {token}")[0] == status


def test_a_service_account_gets_a_token(server: DriveServer) -> None:
    form = urlencode({"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": "a.b.c"})
    status, _, text = ask(server, "/token", "POST", form.encode())
    reply = json.loads(text)
    assert (status, reply["token_type"], reply["expires_in"]) == (200, "Bearer", 3599)
    server.require_token()
    assert ask(server, V2, authorization=f"Bearer {reply['access_token']}")[0] == 200


def test_a_listing_costs_its_base_and_its_items() -> None:
    with DriveServer(Profile(listing=Delay(1.0), list_item_s=0.5), time_scale=100) as server:
        server.fill("root", 3)
        ask(server, V2)
        [entry] = server.requests
        assert entry.ended_s is not None
        assert entry.ended_s - entry.started_s >= 2.5


def test_unknown_addresses_are_not_found(server: DriveServer) -> None:
    for path in ("/drive/v4/files", "/drive/v2/nothing", "/other", "/upload/drive/v2/about?uploadType=media"):
        assert ask(server, path, "POST", b"")[0] == 404
    assert ask(server, "/upload/drive/v2/files?uploadType=odd", "POST", b"")[0] == 400
    assert ask(server, V2, "POST", b"{")[0] == 400


def test_operations_that_drive_does_not_allow_are_refused(server: DriveServer) -> None:
    a, b, item_id = server.folder("a"), server.folder("b"), server.put("f", b"x")
    drive_id, both = server.share_drive("team"), {"parents": [{"id": a}, {"id": b}]}
    assert ask_json(server, V2, "POST", both)["location"] == "parents"
    assert ask_json(server, f"{V2}/{item_id}", "PATCH", both)["reason"] == "multipleParentsNotAllowed"
    server.edit(a, capabilities={"canAddChildren": False})
    inside = {"parents": [{"id": a}]}
    assert ask_json(server, V2, "POST", inside)["reason"] == "insufficientFilePermissions"
    assert ask_json(server, f"{V2}/root/trash", "POST")["status"] == 403
    assert ask_json(server, f"{V2}/{b}/copy", "POST", {})["reason"] == "cannotCopyFile"
    at = f"/upload/drive/v2/files/{b}?uploadType=media"
    assert ask(server, at, "PUT", b"x")[0] == 403
    at = f"{V2}/{item_id}"
    assert ask_json(server, at, alt="media", revisionId="x")["location"] == "revisionId"
    status, headers, _ = ask(server, at + "/copy", "PUT", b"{}")
    assert (status, headers["Content-Type"]) == (404, "text/html; charset=UTF-8")  # no address of the API
    assert ask_json(server, V2 + "/generateIds", maxResults=1001)["status"] == 400
    assert ask_json(server, "/drive/v2/drives/x")["location"] == "driveId"
    assert ask_json(server, f"/drive/v2/drives/{drive_id}")["name"] == "team"
    at = begin(server, {"title": "up"})
    for given in ("bytes x", "bytes 0-5/3", "bytes 0-1/2"):
        assert ask(server, at, "PUT", b"abc", content_range=given)[0] == 400
    assert server.find("up") == []


# Ways to run


def test_a_folder_on_disk_is_served_as_my_drive(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f.txt").write_bytes(b"from disk")
    with DriveServer(folder=tmp_path) as server:
        [item] = server.find("d/f.txt")
        assert (item["mimeType"], item["fileSize"]) == ("text/plain", "9")
        assert item["md5Checksum"] == "a7974a806f69abbefd10af6fedcef207"
        assert ask(server, f"{V2}/{item['id']}?alt=media", range="bytes=5-6")[2] == b"di"
        assert server.put("d/f.txt", b"changed") == item["id"]
        assert server.get("d/f.txt") == b"changed"
        old = ask(server, f"{V2}/{item['id']}?alt=media&revisionId={item['headRevisionId']}")
        assert old[2] == b"from disk"
    assert (tmp_path / "d" / "f.txt").read_bytes() == b"from disk"


def test_a_child_process_serves_and_accepts_commands(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"disk")
    with DriveServer("drive-typical", seed=3, time_scale=100, folder=tmp_path, process=True) as server:
        assert server.get("f") == b"disk"
        name = "ü/'\n"
        item_id = server.add(name, b"\x00\xff")
        assert ask(server, f"{V2}/{item_id}?alt=media")[2] == b"\x00\xff"
        assert [entry.key for entry in server.requests] == [item_id]
        server.put("a/b", b"")
        assert (server.get("a/b"), len(server.find("a/b"))) == (b"", 1)
        server.edit(item_id, labels={"trashed": True})
        server.fill(server.folder("d"), 3)
        assert server.item(item_id)["labels"]["trashed"] is True
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
        connection.request("GET", V2 + "?q=" + quote("title='f'"))
        assert json.load(connection.getresponse())["items"][0]["fileSize"] == "4"
        connection.close()
        process.terminate()
        assert process.wait(120) == 0
