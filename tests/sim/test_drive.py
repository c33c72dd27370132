"""The simulated Google Drive, used by PyDrive2 and the Google API client."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from cachedfs.demo.jobs import Redirected
from cachedfs.sim import DriveServer, Quota
from cachedfs.sim.drive.api import DriveApi
from cachedfs.sim.drive.fields import FIELDS
from cachedfs.sim.messages import Call, Response, Route
from tests.sim.browser import ask
from tests.sim.discovery import problems_of_reply

discovery = pytest.importorskip("googleapiclient.discovery")
httplib2 = pytest.importorskip("httplib2")

FOLDER = "application/vnd.google-apps.folder"
CHUNK = 256 << 10
V3 = "/drive/v3/files"
UPLOAD, CHANGES = "/upload/drive/v3/files", "/drive/v3/changes"
BOTH = {"supportsAllDrives": "true", "includeItemsFromAllDrives": "true"}


@pytest.fixture(autouse=True)
def documented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every reply in this file is one that the discovery documents describe."""
    answer, problems = DriveApi.answer, list[str]()

    def checked(service: DriveApi, call: Call, route: Route) -> Response:
        reply = answer(service, call, route)
        kind = reply.headers.get("Content-Type", "")
        target = f"{call.path}?{urlencode(call.query)}"
        problems.extend(problems_of_reply(call.method, target, reply.status, kind, bytes(reply.body[:])))
        return reply

    monkeypatch.setattr(DriveApi, "answer", checked)
    yield
    assert problems == []


@pytest.fixture
def server() -> Iterator[DriveServer]:
    with DriveServer() as running:
        yield running


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


class Credentials(Redirected):
    """The credentials that PyDrive2 needs; their http objects send requests to the simulation."""

    def __init__(self, server: DriveServer) -> None:
        super().__init__(server.endpoint_url)
        self._made: list[Any] = []

    def authorize(self, _: Any) -> Any:
        http = httplib2.Http()
        self._made.append(http)
        http.redirect_codes = http.redirect_codes - {308}  # a 308 is not a redirect in this API
        return super().authorize(http)

    def close(self) -> None:
        """Close what PyDrive2 leaves open."""
        for made in self._made:
            made.close()


@pytest.fixture
def v3(server: DriveServer) -> Any:
    http = Credentials(server).authorize(None)
    with discovery.build("drive", "v3", http=http, static_discovery=True) as service:
        yield service


@pytest.fixture
def pyfs(server: DriveServer) -> Any:
    """PyDrive2's own filesystem, rooted in My Drive."""
    pydrive2 = pytest.importorskip("pydrive2.auth")
    config = dict.fromkeys(pydrive2.GoogleAuth.CLIENT_CONFIGS_LIST, "x")
    auth = pydrive2.GoogleAuth(settings={"client_config_backend": "settings", "client_config": config})
    auth.credentials = Credentials(server)
    spec = pytest.importorskip("pydrive2.fs.spec")
    yield spec.GDriveFileSystem("root", google_auth=auth, skip_instance_cache=True)
    auth.credentials.close()


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


@pytest.mark.parametrize("size", [0, 2 * CHUNK + 5])
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


def test_a_later_page_has_only_what_still_matches(server: DriveServer) -> None:
    folder = server.folder("d")
    ids = [server.put(f"d/{name}", b"") for name in "abc"]
    query = {"q": f"'{folder}' in parents and trashed=false", "orderBy": "name", "pageSize": 1}
    page = ask_json(server, V3, **query)
    server.trash(ids[1])
    later = []
    while token := page.get("nextPageToken"):
        page = ask_json(server, V3, **query, pageToken=token)
        later += page["files"]
    assert [item["id"] for item in later] == [ids[2]]


def changes(server: DriveServer, token: str, **query: Any) -> Any:
    return ask_json(server, CHANGES, pageToken=token, **query)


def test_changes_are_listed_once_each_in_pages(server: DriveServer) -> None:
    first = ask_json(server, f"{CHANGES}/startPageToken")["startPageToken"]
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
    assert changes(server, after)["changes"] == []
    page = changes(server, first, fields="newStartPageToken,changes(fileId,removed)")
    assert page["changes"] == [{"fileId": kept, "removed": False}, {"fileId": gone, "removed": True}]
    assert page["newStartPageToken"] == after


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ("trashed=false", ["d", "f", "g", "theirs"]),
        ("trashed = true or name = 'g'", ["g", "t"]),
        ("not (name='f' or name='g') and trashed=false", ["d", "theirs"]),
        ("not trashed = true and not 'root' in parents", ["theirs"]),
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


@pytest.mark.parametrize(
    "q", ["name=", "title='x'", "(name='x'", "name='x' name='y'", 'name="x"', "trashed=True"]
)
def test_invalid_queries_are_refused(server: DriveServer, q: str) -> None:
    error = ask_json(server, V3, q=q)
    assert (error["status"], error["reason"], error["location"]) == (400, "invalid", "q")
    assert (error["domain"], error["locationType"]) == ("global", "parameter")
    assert server.count("list") == 1


@pytest.mark.parametrize(
    ("target", "status", "reason"),
    [
        ("/drive/v3/about", 400, "required"),
        (CHANGES, 400, "required"),
        (f"{V3}?orderBy=folder", 400, "invalid"),
        (f"{V3}?fields=files(nothing)", 400, "invalidParameter"),
        (f"{V3}?fields=files(", 400, "invalidParameter"),
    ],
)
def test_what_google_refuses_is_refused(server: DriveServer, target: str, status: int, reason: str) -> None:
    error = ask_json(server, target)
    assert (error["status"], error["reason"]) == (status, reason)


def test_fields_are_those_of_the_discovery_document() -> None:
    documents = Path(discovery.__file__).parent / "discovery_cache" / "documents"
    schema = json.loads((documents / "drive.v3.json").read_text())["schemas"]["File"]
    assert set(FIELDS) == schema["properties"].keys()


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


def test_an_api_key_sees_what_is_public(server: DriveServer) -> None:
    server.require_token("t")
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
    revisions = f"{V3}/{below}/revisions"
    for target in (revisions, f"{revisions}/{server.item(below)['headRevisionId']}?alt=media"):
        assert ask(server, target, x_goog_api_key=key)[0] == 403
    assert "permissions" not in ask_json(server, f"{V3}/{below}", fields="*", key=key)
    for headers in ({}, {"x_goog_api_key": key}):  # only an account may write
        assert ask(server, f"{V3}/{below}", "PATCH", b"{}", **headers)[0] == 401
    server.publish(public, False)
    assert ask_json(server, f"{V3}/{below}", key=key)["reason"] == "notFound"


def test_a_resumable_upload_reports_the_bytes_received(server: DriveServer) -> None:
    status, headers, _ = ask(
        server, f"{UPLOAD}?uploadType=resumable", "POST", b'{"name": "f"}', x_upload_content_type="x/y"
    )
    at, data = str(headers["Location"]).removeprefix(server.endpoint_url), os.urandom(2 * CHUNK + 10)
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


def test_too_many_creates_are_refused_and_create_nothing() -> None:
    with DriveServer(quota=Quota(creates_per_s=1e-6)) as server:
        body = {"name": "d", "mimeType": FOLDER}
        replies = [ask_json(server, V3, "POST", body) for _ in range(3)]
        assert [reply.get("reason") for reply in replies] == [None, *["userRateLimitExceeded"] * 2]
        assert len(server.find("d")) == 1
        assert ask(server, f"{UPLOAD}?uploadType=resumable", "POST", b"{}")[0] == 403
        item_id = server.put("f", b"x")
        assert ask_json(server, f"{V3}/{item_id}/copy", "POST", {})["status"] == 403
        assert ask_json(server, f"{V3}/{item_id}", "PATCH", {"name": "g"})["name"] == "g"


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
